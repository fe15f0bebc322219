"""A tail slot for each running request of a quantized format, through admissions, ends and preemptions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.manager import KVCacheManager
from engine.kv.tails import TailSlots
from engine.request import PUBLIC_NAMESPACE


@given(st.lists(st.integers(0, 7)))
@settings(max_examples=100, deadline=None)
def test_every_table_has_a_slot_of_its_own(requests: list[int]) -> None:
    manager = KVCacheManager(20, 4, tails=TailSlots(8))
    running: set[str] = set()
    for number in requests:
        request_id = str(number)
        if request_id in running:
            manager.free(request_id)
            running.remove(request_id)
        else:
            manager.admit(request_id, PUBLIC_NAMESPACE, manager.match_prefix(PUBLIC_NAMESPACE, (1, 2, 3)))
            running.add(request_id)
        manager.check_integrity()
        slots = [manager.tail_slot(request_id) for request_id in running]
        assert len(set(slots)) == len(slots)
        assert all(slot is not None and 0 <= slot < 8 for slot in slots)


def test_float_formats_have_none() -> None:
    manager = KVCacheManager(4, 4)
    manager.admit("a", PUBLIC_NAMESPACE, manager.match_prefix(PUBLIC_NAMESPACE, (1, 2)))
    assert manager.tail_slot("a") is None


def test_more_requests_than_slots_is_our_own_bug() -> None:
    slots = TailSlots(1)
    slots.take("a")
    with pytest.raises(AssertionError, match="1 tail slots"):
        slots.take("b")
    with pytest.raises(AssertionError, match="has a tail slot already"):
        slots.take("a")
    slots.give_back("a")
    slots.take("b")
    assert slots.slot("b") == 0

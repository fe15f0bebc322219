"""Pins: protected from eviction, out of what can be had, never in the way of the longest request, gone in time."""

from __future__ import annotations

import pytest

from engine.control import CacheControl, NotResident, Pinned, PinPrefix, Refused, Unpin, Unpinned
from engine.kv.manager import KVCacheManager
from engine.kv.pins import PinLimits
from engine.request import Namespace
from tests.factories import can_admit
from tests.kv.test_manager import NS, start

PROMPT = [*range(8)]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(num_blocks: int = 10, *, budget: int = 6, longest: int = 4) -> tuple[KVCacheManager, CacheControl, Clock]:
    clock = Clock()
    limits = PinLimits(num_blocks, budget, longest)
    manager = KVCacheManager(num_blocks, 2, pin_limits=limits, clock=clock)
    return manager, CacheControl(manager), clock


def cache(manager: KVCacheManager, tokens: list[int]) -> None:
    start(manager, "once", tokens)
    manager.free("once")


def pin(control: CacheControl, pin_id: str, tokens: list[int], seconds: float = 60.0) -> object:
    return control.apply(PinPrefix(pin_id, NS, tuple(tokens), 0, seconds))


def test_pinned_blocks_survive_what_evicts_all_others() -> None:
    manager, control, _ = make()
    cache(manager, PROMPT)
    cache(manager, [*range(20, 24)])
    assert isinstance(pin(control, "p", PROMPT), Pinned)
    assert (manager.num_pinned_blocks, manager.num_cached_blocks, manager.num_available_blocks) == (4, 6, 6)
    start(manager, "big", [*range(50, 62)])
    assert manager.num_available_blocks == 0
    assert not manager.allocate("big", 13), "a pinned block is not taken for anything"
    assert manager.match_prefix(NS, [*PROMPT, 9]).num_tokens == 8
    assert manager.match_prefix(NS, [*range(20, 24), 9]).num_tokens == 0
    manager.free("big")
    manager.check_integrity()


def test_a_match_of_pinned_blocks_takes_nothing_from_what_can_be_had() -> None:
    manager, control, _ = make()
    cache(manager, PROMPT)
    pin(control, "p", PROMPT)
    tokens = [*PROMPT, *range(30, 42)]
    match = manager.match_prefix(NS, tokens)
    assert can_admit(manager, match, 20, num_reserved=0)
    assert not can_admit(manager, match, 20, num_reserved=1)
    manager.admit("a", NS, match)
    assert manager.allocate("a", 20)
    assert not manager.allocate("a", 21)
    manager.check_integrity()
    assert (manager.num_referenced_blocks, manager.num_pinned_blocks) == (10, 4)
    manager.commit("a", tokens, 20)
    manager.free("a")
    manager.check_integrity()
    assert (manager.num_referenced_blocks, manager.num_available_blocks) == (0, 6)


def test_a_pin_ends_by_itself_and_its_blocks_can_be_had_again() -> None:
    manager, control, clock = make()
    cache(manager, PROMPT)
    pin(control, "short", PROMPT, seconds=5)
    pin(control, "long", PROMPT[:4], seconds=50)
    assert control.seconds_to_expiry == 5
    assert not control.expire()
    clock.now += 5
    assert control.expire()
    assert (manager.num_pinned_blocks, control.seconds_to_expiry) == (2, 45)
    start(manager, "big", [*range(50, 66)])
    assert manager.match_prefix(NS, [*PROMPT, 9]).num_tokens == 4
    clock.now += 45
    assert control.expire()
    assert (manager.num_pinned_blocks, control.seconds_to_expiry) == (0, None)
    manager.check_integrity()


def test_a_block_under_two_pins_takes_its_room_once_and_stays_until_both_are_gone() -> None:
    manager, control, _ = make(budget=4)
    cache(manager, PROMPT)
    assert isinstance(pin(control, "a", PROMPT), Pinned)
    assert isinstance(pin(control, "b", PROMPT[:6]), Pinned), "the budget is full, but this needs no room"
    assert manager.num_pinned_blocks == 4
    unpinned = control.apply(Unpin("a"))
    assert isinstance(unpinned, Unpinned)
    assert unpinned.pin is not None
    assert unpinned.pin.num_blocks == 4
    assert manager.num_pinned_blocks == 3
    assert control.apply(Unpin("a")) == Unpinned(None)
    control.apply(Unpin("b"))
    assert (manager.num_pinned_blocks, manager.num_available_blocks) == (0, 10)
    manager.check_integrity()


@pytest.mark.parametrize(
    ("budget", "longest", "words"),
    [
        (3, 4, "4 blocks (0 do now); the pin budget is 3 blocks"),
        (10, 7, "longest request needs 7 of the cache's 10 blocks, which leaves 3 for pins"),
    ],
)
def test_too_large_a_pin_is_refused_with_the_numbers_before_anything_is_computed(budget, longest, words) -> None:
    manager, control, _ = make(budget=budget, longest=longest)
    refused = pin(control, "p", PROMPT)  # nothing of it is resident yet
    assert isinstance(refused, Refused)
    assert words in refused.message
    cache(manager, PROMPT)
    assert pin(control, "p", PROMPT) == refused
    assert manager.num_pinned_blocks == 0


def test_only_whole_resident_blocks_are_pinned() -> None:
    manager, control, _ = make()
    assert pin(control, "p", PROMPT) == NotResident(0)
    cache(manager, PROMPT[:5])
    assert pin(control, "p", PROMPT) == NotResident(4)
    cache(manager, PROMPT)
    pinned = pin(control, "p", [*PROMPT, 9])
    assert isinstance(pinned, Pinned)
    assert (pinned.pin.num_tokens, pinned.pin.num_blocks, pinned.pin.seconds_left) == (8, 4, 60.0)


def test_without_limits_nothing_can_be_pinned() -> None:
    manager = KVCacheManager(10, 2)
    cache(manager, PROMPT)
    assert isinstance(pin(CacheControl(manager), "p", PROMPT), Refused)


def test_a_pin_of_a_tenants_prompt_holds_its_public_blocks_too() -> None:
    manager, control, _ = make()
    tenant = Namespace(salt="t")
    match = manager.match_prefix(tenant, PROMPT, 4)
    manager.admit("a", tenant, match)
    assert manager.allocate("a", 8)
    manager.commit("a", PROMPT, 8)
    manager.free("a")
    assert isinstance(control.apply(PinPrefix("p", tenant, tuple(PROMPT), 4, 60.0)), Pinned)
    start(manager, "big", [*range(50, 62)])
    assert manager.match_prefix(NS, [*PROMPT[:4], 9]).num_tokens == 4
    assert manager.match_prefix(tenant, [*PROMPT, 9], 4).num_tokens == 8

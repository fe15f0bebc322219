"""What admissions and step counts say about sharing, against plain recounts, under random load in a small cache that an operator
pins, drops and resets."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.control import CacheControl, Command, DropPrefix, PinPrefix, ResetCache, Unpin
from engine.kv.pins import PinLimits
from engine.request import Namespace
from engine.stats import CacheStats
from tests.factories import expected_tokens, make_core, make_request, make_scheduler
from tests.sched.test_scheduler_tiers import make_setup


def check_recount(scheduler: object, cache: CacheStats) -> None:
    """References and filled slots, counted one by one over the running requests."""
    running = scheduler._running.values()  # type: ignore[attr-defined]
    tables = {r.request_id: scheduler.manager.block_table(r.request_id) for r in running}  # type: ignore[attr-defined]
    slots = {
        (tables[request.request_id][position // 4], position % 4)
        for request in running
        for position in range(request.num_computed_tokens)
    }
    assert cache.num_filled_slots == len(slots)
    assert cache.num_block_references == sum(len(table) for table in tables.values())
    distinct = len({block for table in tables.values() for block in table})
    assert cache.num_referenced_blocks == distinct
    assert cache.sharing_factor == (cache.num_block_references / distinct if distinct else 1)
    assert 0 <= cache.internal_waste < 1
    assert cache.device_bytes == (cache.num_blocks - cache.num_free_blocks) * cache.block_bytes


def random_command(rng: random.Random, pin_id: str, stem: list[int]) -> Command:
    namespace, tokens = Namespace(salt=rng.choice("ab")), tuple(stem[: rng.randint(1, 20)])
    if rng.random() < 0.5:
        return PinPrefix(pin_id, namespace, tokens, 0, 60.0)
    return rng.choice((DropPrefix(namespace, tokens, 0), ResetCache(), Unpin(str(rng.randrange(40)))))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_labels_sum_to_the_prompt_and_stats_are_a_plain_recount(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=12, budget=16, pin_limits=PinLimits(12, budget_blocks=4, longest_blocks=8))
    core, _ = make_core(scheduler)  # its runner finds out when a block is read that was dropped
    control = CacheControl(scheduler.manager)
    stems = [[rng.randrange(9) for _ in range(20)] for _ in range(2)]
    lengths: dict[str, int] = {}
    admitted: list[str] = []
    num_merged = num_evicted = num_reused = num_idled = 0
    for index in range(40):
        if rng.random() < 0.6:
            prompt = rng.choice(stems)[: rng.randint(1, 20)] + [rng.randrange(9) for _ in range(rng.randint(0, 3))]
            lengths[str(index)] = len(prompt)
            core.add(make_request(str(index), prompt, max_tokens=rng.randint(1, 6), salt=rng.choice("ab")))
        if lengths and rng.random() < 0.1:
            core.abort(rng.choice(list(lengths)))
        if rng.random() < 0.4:
            control.apply(random_command(rng, str(index), rng.choice(stems)))
            scheduler.manager.check_integrity()
        if not core.has_work:
            continue
        output = core.step()
        for admission in output.admissions:
            sources = admission.sources
            assert sources.num_tokens == admission.num_prompt_tokens == lengths[admission.request_id]
            assert sources.num_cached_tokens == admission.num_cached_tokens
            assert (sources.evicted_seconds is not None) == (sources.evicted > 0)
            admitted.append(admission.request_id)
        check_recount(scheduler, output.stats.cache)
        scheduler.manager.check_integrity()
        num_merged += output.stats.num_merged_blocks
        num_evicted += output.stats.num_evicted_blocks
        num_reused += sum(count for _, count in output.stats.reuse_gaps)
        num_idled += sum(count for _, count in output.stats.evict_idles)
    assert len(set(admitted)) == len(admitted), "a request is labelled once, however often it is preempted"
    assert num_idled == num_evicted == scheduler.manager.num_evicted_blocks
    assert num_merged == scheduler.manager.num_merged_blocks
    assert num_reused <= sum(lengths.values())
    for _ in range(500):
        if core.has_work:
            core.step()
    assert not core.has_work, "pins leave room for the longest request, so all come to their end"
    assert scheduler.manager.num_referenced_blocks == 0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_drops_and_resets_beside_moving_tiers_change_no_token_and_leave_nothing(seed: int) -> None:
    rng = random.Random(seed)
    setup = make_setup(num_blocks=12, num_slots=6, max_files=8)
    control = CacheControl(setup.core.scheduler.manager)
    stems = [[rng.randrange(9) for _ in range(20)] for _ in range(2)]
    prompts: dict[str, list[int]] = {}
    for index in range(50):
        if rng.random() < 0.5:
            prompt = prompts[str(index)] = [*rng.choice(stems)[: rng.randint(1, 20)], rng.randrange(9)]
            setup.core.add(make_request(str(index), prompt, max_tokens=rng.randint(1, 6), salt=rng.choice("ab")))
        if rng.random() < 0.3:
            control.apply(random_command(rng, str(index), rng.choice(stems)))
            setup.core.scheduler.manager.check_integrity()
        setup.disk.work(rng.randrange(4))
        if setup.core.has_work:
            setup.step()
        else:
            setup.core.poll_disk()
    setup.run()
    for request_id, prompt in prompts.items():
        tokens = setup.tokens[request_id]
        assert tokens == expected_tokens(prompt, len(tokens))
    control.apply(ResetCache())
    setup.settle()
    assert setup.core.scheduler.manager.num_free_blocks == 12
    assert setup.core.scheduler.manager.tiers.is_empty
    assert not setup.disk.files

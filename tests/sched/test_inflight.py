"""Requests that share a prefix compute it once, also when none of it was cached and they arrive together."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.kv.manager import KVCacheManager
from engine.kv.match import PrefixMatch
from engine.request import Namespace, Request
from engine.sched.inflight import InFlight, common_prefix_len
from engine.sched.plan import SampledToken, SampledTokens, StepPlan
from engine.sched.scheduler import Scheduler
from engine.stats import Admission
from tests.factories import EOS, RecordingRunner, expected_tokens, make_core, make_request, make_scheduler

PROMPT = [*range(50, 80)]


def run(core: EngineCore, *requests: Request) -> list[Admission]:
    """Add all at once, and step until nothing is left; every answer must be the right one."""
    admissions: list[Admission] = []
    for request in requests:
        core.add(request)
    while core.has_work:
        admissions += core.step().admissions
        core.scheduler.manager.check_integrity()
    for request in requests:
        output = request.token_ids[request.num_prompt_tokens :]
        assert output == expected_tokens(request.prompt_token_ids, len(output))
    return admissions


def test_requests_that_arrive_in_one_step_compute_their_prefix_once() -> None:
    core, runner = make_core(make_scheduler())
    admissions = run(core, *(make_request(name, PROMPT, max_tokens=1) for name in "abc"))
    assert [(a.num_cached_tokens, a.sources.in_flight) for a in admissions] == [(0, 0), (29, 29), (29, 29)]
    assert runner.num_computed == 30 + 1 + 1


def test_what_was_resident_before_is_not_counted_as_in_flight() -> None:
    core, runner = make_core(make_scheduler())
    run(core, make_request("0", PROMPT[:10], max_tokens=1))
    admissions = run(core, make_request("a", PROMPT, max_tokens=1), make_request("b", [*PROMPT[:25], 1, 2], max_tokens=1))
    assert [(a.num_cached_tokens, a.sources.in_flight) for a in admissions] == [(10, 0), (25, 15)]
    assert runner.num_computed == 10 + 20 + 2


def test_those_behind_a_held_request_are_not_held_up() -> None:
    scheduler = make_scheduler(budget=12)
    core, _ = make_core(scheduler)
    for request in (make_request("a", PROMPT), make_request("b", PROMPT), make_request("c", [1, 2, 3])):
        core.add(request)
    running = []
    for _ in range(4):
        core.step()
        running.append(list(scheduler._running))
    assert running == [["a"], ["a"], ["a", "c"], ["a", "c", "b"]]


def test_less_than_a_block_is_not_worth_waiting_for() -> None:
    scheduler = make_scheduler()
    for request in (make_request("a", [1, 2, 3, 4]), make_request("b", [1, 2, 3, 4]), make_request("c", [1, 2, 3, 9, 9])):
        scheduler.add(request)
    scheduler.schedule()
    assert scheduler.num_running == 3


@pytest.mark.parametrize("is_preempted", [False, True])
def test_when_the_leader_is_gone_the_next_takes_over_where_it_was(is_preempted: bool) -> None:
    scheduler = make_scheduler(budget=10)
    core, runner = make_core(scheduler)
    requests = [make_request(name, PROMPT, max_tokens=2) for name in "abc"]
    for request in requests:
        core.add(request)
    core.step()
    assert list(scheduler._running) == ["a"]
    if is_preempted:
        scheduler._preempt(requests[0])
    else:
        core.abort("a")
    core.step()
    assert list(scheduler._running) == (["a"] if is_preempted else ["b"])
    assert scheduler.num_waiting == (2 if is_preempted else 1)
    run(core)
    for request in requests[0 if is_preempted else 1 :]:
        assert request.token_ids[30:] == expected_tokens(PROMPT, 2)
    num_followers = 2 if is_preempted else 1
    assert runner.num_computed == 30 + num_followers + (num_followers + 1), "the prompt once, a token each, and the second ones"


def test_a_hold_ends_with_its_leader_and_another_can_follow() -> None:
    in_flight = InFlight(4, allow_partial=True)
    leader, other, request = (make_request(name, PROMPT) for name in ("l", "o", "r"))
    leader.num_computed_tokens = 10
    assert in_flight.hold_back(request, PrefixMatch((), 10), {"l": leader})
    assert in_flight.is_held("r", {"l": leader, "o": other})
    assert not in_flight.is_held("r", {"o": other}), "the leader does not run any more"
    other.num_computed_tokens = 14
    assert in_flight.hold_back(request, PrefixMatch((), 14), {"o": other})
    other.num_computed_tokens = 28
    assert in_flight.is_held("r", {"o": other})
    other.num_computed_tokens = 29
    assert not in_flight.is_held("r", {"o": other}), "all is there that is shared"
    assert in_flight.forget("r") == 10
    assert in_flight.forget("r") is None


def test_the_leader_that_shares_most_is_waited_for() -> None:
    in_flight = InFlight(4, allow_partial=True)
    leaders = {name: make_request(name, [*PROMPT[:length], 1, 2, 3]) for name, length in (("a", 12), ("b", 20), ("c", 16))}
    assert in_flight.hold_back(make_request("r", PROMPT), PrefixMatch((), 0), leaders)
    assert in_flight._holds["r"].leader_id == "b"
    assert not in_flight.hold_back(make_request("s", PROMPT), PrefixMatch((), 17), leaders), "less than a block more"


def test_an_aborted_follower_is_forgotten() -> None:
    scheduler = make_scheduler()
    core, _ = make_core(scheduler)
    core.add(make_request("a", PROMPT))
    core.add(make_request("b", PROMPT))
    core.step()
    assert list(scheduler._in_flight._holds) == ["b"]
    assert core.abort("b") is not None
    assert not scheduler._in_flight._holds
    run(core)


def test_eight_samples_hold_their_prompt_once_from_the_start() -> None:
    scheduler = make_scheduler(num_blocks=200, block_size=16, budget=2048)
    core, runner = make_core(scheduler)
    prompt = [i % 97 for i in range(1000)]
    for index in range(8):
        core.add(make_request(str(index), prompt, max_tokens=30))
    most = 0
    while scheduler.num_waiting:
        output = core.step()
        most = max(most, output.stats.cache.num_referenced_blocks)
    assert (scheduler.num_running, most) == (8, 62 + 8)
    assert output.stats.num_copied_blocks == 7
    assert runner.num_computed == 1000 + 7 + 1, "the leader is one token ahead"


def test_salts_do_not_wait_for_each_other_but_for_public_blocks() -> None:
    x, y = Namespace("x"), Namespace("y")
    leader = make_request("l", PROMPT, salt="x")
    nothing = PrefixMatch((), 0)
    in_flight = InFlight(4, allow_partial=True)

    def held_until(namespace: Namespace, num_public: int, leader_public: int = 0) -> int | None:
        leader.num_public_tokens = leader_public
        request = make_request("r", PROMPT)
        request.namespace, request.num_public_tokens = namespace, num_public
        is_held = in_flight.hold_back(request, nothing, {"l": leader})
        return in_flight._holds["r"].num_tokens if is_held else None

    assert held_until(x, 0) == 29
    assert held_until(y, 0) is None
    assert held_until(y, 13, 14) == 12
    assert held_until(Namespace(), 0, 14) == 12
    assert held_until(x, 14, 14) == 29
    assert held_until(x, 8, 14) == 8
    assert held_until(Namespace("y", rope_class=1), 13, 14) is None


def test_whole_blocks_only_where_a_format_cannot_share_in_part() -> None:
    core, runner = make_core(make_scheduler(allow_partial=False))
    admissions = run(core, *(make_request(name, PROMPT, max_tokens=1) for name in "ab"))
    assert [a.num_cached_tokens for a in admissions] == [0, 28]
    assert runner.num_computed == 30 + 2
    assert runner.num_copies == 0


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([1, 3, 4, 8]), budget=st.sampled_from([5, 16, 200]))
def test_nothing_is_computed_twice_but_ends_shorter_than_a_block(seed: int, block_size: int, budget: int) -> None:
    """In a pool that evicts nothing: every distinct prefix once, and less than a block for each request on top."""
    rng = random.Random(seed)
    stems = [[rng.randrange(3) for _ in range(40)] for _ in range(2)]
    core, runner = make_core(make_scheduler(num_blocks=2000, block_size=block_size, budget=budget))
    prompts = [
        rng.choice(stems)[: rng.randrange(0, 40)] + [rng.randrange(3) for _ in range(rng.randrange(1, 6))] for _ in range(20)
    ]
    requests = [make_request(str(i), prompt, max_tokens=rng.randrange(1, 6)) for i, prompt in enumerate(prompts)]
    for request in requests[:10]:
        core.add(request)
    core.step()
    core.step()
    run(core, *requests[10:])
    distinct = {tuple(r.token_ids[:n]) for r in requests for n in range(1, r.num_computed_tokens + 1)}
    assert len(distinct) <= runner.num_computed <= len(distinct) + block_size * len(requests)
    for request in requests:
        assert request.token_ids[request.num_prompt_tokens :] == expected_tokens(
            request.prompt_token_ids, request.num_output_tokens
        )


class CountingManager(KVCacheManager):
    num_matches = 0

    def match_prefix(self, namespace: Namespace, token_ids: Sequence[int], num_public_tokens: int = 0) -> PrefixMatch:
        self.num_matches += 1
        return super().match_prefix(namespace, token_ids, num_public_tokens)


class ZeroRunner:
    def execute(self, plan: StepPlan) -> SampledTokens:
        return SampledTokens(tuple(SampledToken(0) if s.sample is not None else None for s in plan.sequences))


def test_a_thousand_requests_that_wait_for_one_long_prefix_cost_little() -> None:
    manager = CountingManager(num_blocks=2000, block_size=16)
    scheduler = Scheduler(manager, max_num_seqs=64, max_num_batched_tokens=512, eos_token_ids=(EOS,), clock=time.monotonic)
    core = EngineCore(scheduler, ZeroRunner(), block_bytes=64, clock=time.monotonic)
    prefix = [i % 50_000 for i in range(12_000)]
    for index in range(1000):
        core.add(make_request(str(index), [*prefix, index, 1, 2], max_tokens=2))
    core.step()
    assert manager.num_matches == 1, "the first takes the whole step"
    num_matches = 1
    while core.has_work:
        core.step()
        assert manager.num_matches - num_matches <= 64, "as many as can run at most"
        num_matches = manager.num_matches
    assert manager.num_matches <= 2 * 1000, "once when it comes, and once when the prefix is there"


@given(a=st.lists(st.integers(0, 2)), b=st.lists(st.integers(0, 2)), shared=st.lists(st.integers(0, 2), max_size=600))
def test_common_prefix_len_is_what_a_plain_loop_says(a: list[int], b: list[int], shared: list[int]) -> None:
    a, b = shared + a, shared + b
    for limit in {0, min(len(a), len(b)), min(len(a), len(b)) // 2}:
        expected = 0
        while expected < limit and a[expected] == b[expected]:
            expected += 1
        assert common_prefix_len(a, b, limit) == expected


def test_the_runner_of_these_tests_sees_a_block_that_was_reused() -> None:
    """The watcher itself: without it the tests above would trust what an evicted block still holds."""
    scheduler = make_scheduler()
    core, runner = make_core(scheduler)
    assert isinstance(runner, RecordingRunner)
    core.add(make_request("a", PROMPT))
    core.step()
    assert runner.pool is not None
    runner.pool.emptied.add(scheduler.manager.block_table("a")[0])
    with pytest.raises(KeyError):
        core.step()

"""Requests that start in a small RoPE class and move up: each of their tokens is read in the class that the request is in."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.request import FinishReason, Request
from engine.sched.plan import SampledTokens, StepPlan
from tests.factories import RecordingRunner, expected_tokens, make_request, make_scheduler

LIMITS = (8, 20, 48, 160)


class ClassRunner(RecordingRunner):
    """Knows in which class each slot was rotated, and that a sequence reads its own class alone."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.classes: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> SampledTokens:
        for copy in plan.copies:
            pairs = zip(self._block_slots(copy.source), self._block_slots(copy.target), strict=True)
            for source, target in list(pairs)[: copy.num_tokens]:
                self.classes[target] = self.classes[source]
        for sequence in plan.sequences:
            for position in range(sequence.start, sequence.seq_len):
                self.classes[self._slot(sequence, position)] = sequence.rope_class
        for sequence in plan.sequences:
            slots = (self._slot(sequence, position) for position in range(sequence.seq_len))
            assert {self.classes[slot] for slot in slots} == {sequence.rope_class}
        return super().execute(plan)


def growing(request: Request) -> Request:
    request.rope_limits = LIMITS
    first = next(index for index, limit in enumerate(LIMITS) if request.num_prompt_tokens + 1 <= limit)
    request.namespace = request.namespace._replace(rope_class=first)
    return request


def test_it_is_computed_again_once_for_each_class_that_it_outgrows() -> None:
    scheduler = make_scheduler()
    core = EngineCore(scheduler, ClassRunner(4), block_bytes=64, clock=lambda: 0.0)
    request = growing(make_request("a", range(5), max_tokens=50))
    core.add(request)
    classes, tokens, regrown = [], [], 0
    while core.has_work:
        output = core.step()
        classes.append(request.namespace.rope_class)
        tokens += [event.token_id for event in output.events]
        regrown += output.stats.num_regrown_tokens
        assert (output.stats.num_recomputed_tokens, output.stats.num_preemptions) == (0, 0)
    assert tokens == expected_tokens(range(5), 50)
    assert request.namespace.rope_class == 3
    assert [after - before for before, after in pairwise(classes)].count(1) == 3
    assert regrown == sum(limit - 1 for limit in LIMITS[:3]), "all but the newest token, three times"
    assert request.num_preemptions == 0


def test_one_that_ends_at_the_limit_does_not_move_up() -> None:
    scheduler = make_scheduler()
    core = EngineCore(scheduler, ClassRunner(4), block_bytes=64, clock=lambda: 0.0)
    request = growing(make_request("a", range(5), max_tokens=3))
    core.add(request)
    while core.has_work:
        assert core.step().stats.num_regrown_tokens == 0
    assert (request.num_tokens, request.namespace.rope_class) == (8, 0)


def test_what_is_cached_in_the_next_class_is_not_computed_again() -> None:
    scheduler = make_scheduler()
    core = EngineCore(scheduler, ClassRunner(4), block_bytes=64, clock=lambda: 0.0)
    tokens = [*range(5), *expected_tokens(range(5), 15)]
    known = make_request("known", tokens[:12], max_tokens=2)
    known.namespace = known.namespace._replace(rope_class=1)
    core.add(known)
    while core.has_work:
        core.step()
    core.add(growing(make_request("a", range(5), max_tokens=10)))
    assert sum(core.step().stats.num_regrown_tokens for _ in range(12) if core.has_work) == 0


def test_nobody_waits_for_one_that_has_moved_up() -> None:
    """What it computes again is of another class."""
    scheduler = make_scheduler(num_blocks=100, budget=8, max_num_seqs=2)
    core = EngineCore(scheduler, ClassRunner(4), block_bytes=64, clock=lambda: 0.0)
    leader = make_request("leader", range(60), max_tokens=60)
    leader.rope_limits = (64, 400)
    follower = make_request("follower", [*range(60), 900, 901], max_tokens=4)
    other = make_request("other", range(500, 520), max_tokens=4)
    for request in (leader, follower, other):
        core.add(request)
    while other.finish_reason is None:
        core.step()
    assert leader.namespace.rope_class == 1
    assert leader.is_regrowing
    assert 0 < leader.num_computed_tokens < 60, "it is still at what the follower has no use for"
    assert not scheduler._in_flight.is_held("follower", scheduler._running)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), budget=st.sampled_from((3, 16, 64)), block_size=st.sampled_from((2, 4)))
def test_whatever_comes_every_request_gets_its_own_tokens(seed: int, budget: int, block_size: int) -> None:
    """With shared prefixes, preemptions, aborts, and requests that keep the class of their longest length."""
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=40, block_size=block_size, budget=budget)
    core = EngineCore(scheduler, ClassRunner(block_size), block_bytes=64, clock=lambda: 0.0)
    waiting = [random_request(rng, str(i), 40 * block_size) for i in range(40)]
    requests = {request.request_id: request for request in waiting}
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    while waiting or core.has_work:
        for _ in range(min(len(waiting), rng.randrange(4))):
            assert core.add(waiting.pop()) is None
        events = list(core.step().events) if core.has_work else []
        if rng.random() < 0.05 and (event := core.abort(rng.choice(list(requests)))):
            events.append(event)
        scheduler.manager.check_integrity()
        for event in events:
            if event.token_id is not None:
                tokens[event.request_id].append(event.token_id)
    for name, request in requests.items():
        assert tokens[name] == expected_tokens(request.prompt_token_ids, len(tokens[name]))
        assert request.num_tokens <= LIMITS[request.namespace.rope_class]
        assert request.finish_reason is FinishReason.ABORT or len(tokens[name]) == request.sampling.max_tokens
    assert scheduler.manager.num_referenced_blocks == 0


def random_request(rng: random.Random, name: str, most: int) -> Request:
    prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
    request = growing(make_request(name, prompt, max_tokens=rng.randrange(1, min(60, most - len(prompt) + 1))))
    if rng.random() < 0.3:
        request.rope_limits = ()
        longest = next(index for index, limit in enumerate(LIMITS) if request.max_num_tokens <= limit)
        request.namespace = request.namespace._replace(rope_class=longest)
    return request


@pytest.mark.parametrize("limits", [(), (100,)])
def test_with_one_class_nothing_is_ever_outgrown(limits: tuple[int, ...]) -> None:
    request = make_request("a", range(5))
    request.rope_limits = limits
    assert not request.has_outgrown

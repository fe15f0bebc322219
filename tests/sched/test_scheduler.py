from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import FinishReason, Request, RequestStatus
from engine.sched.plan import SampledToken, SampledTokens
from tests.factories import EOS, expected_tokens, make_core, make_request, make_scheduler


def scheduled(plan: object) -> dict[str, int]:
    return {s.request_id: len(s.token_ids) for s in plan.sequences}  # type: ignore[attr-defined]


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    scheduler = make_scheduler(budget=8)
    core, _ = make_core(scheduler)
    core.add(make_request("a", range(4)))
    core.step()
    core.add(make_request("b", range(100, 120)))
    sizes = []
    for _ in range(3):
        plan = scheduler.schedule()
        sizes.append(scheduled(plan))
        scheduler.update(plan, SampledTokens(tuple(SampledToken(1) if s.sample else None for s in plan.sequences)))
    assert sizes == [{"a": 1, "b": 7}, {"a": 1, "b": 7}, {"a": 1, "b": 6}]


def test_no_more_requests_run_than_allowed() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, [1, 2, 3]))
    assert list(scheduled(scheduler.schedule())) == ["a", "b"]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_a_prefix_hit_skips_what_is_cached_and_is_counted_once() -> None:
    core, runner = make_core(make_scheduler())
    core.add(make_request("a", range(10), max_tokens=1))
    core.step()
    core.add(make_request("b", [*range(10), 50], max_tokens=1))
    output = core.step()
    assert output.admissions[0].num_cached_tokens == 10
    assert output.events[0].num_cached_tokens == 10
    assert output.stats.num_prompt_tokens == 11
    assert runner.num_computed == 10 + 1


def test_where_source_and_copy_do_not_both_fit_the_part_is_computed() -> None:
    core, runner = make_core(make_scheduler(num_blocks=3, block_size=2))
    for name, prompt in (("a", [1, 2, 3, 4]), ("b", [1, 2, 3, 9, 9])):
        core.add(make_request(name, prompt, max_tokens=1))
        output = core.step()
        assert [event.token_id for event in output.events] == expected_tokens(prompt, 1)
    assert output.admissions[0].num_cached_tokens == 2
    assert runner.num_copies == 0


def test_the_newest_is_preempted_and_resumes_through_the_prefix_tree() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=2)
    core, _ = make_core(scheduler)
    requests = [make_request("a", [1, 2, 3, 4], max_tokens=8), make_request("b", [5, 6, 7, 8], max_tokens=8)]
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    preempted = recomputed = 0
    for request in requests:
        core.add(request)
    while core.has_work:
        output = core.step()
        scheduler.manager.check_integrity()
        preempted += output.stats.num_preemptions
        recomputed += output.stats.num_recomputed_tokens
        for event in output.events:
            assert event.token_id is not None
            tokens[event.request_id].append(event.token_id)
    assert tokens == {r.request_id: expected_tokens(r.prompt_token_ids, 8) for r in requests}
    assert (requests[0].num_preemptions, requests[1].num_preemptions) == (0, preempted)
    assert preempted >= 1
    assert recomputed >= 1


def test_abort_frees_at_once_waiting_and_running() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    core, _ = make_core(scheduler)
    core.add(make_request("a", range(10)))
    core.add(make_request("b", range(10)))
    core.step()
    for name in ("b", "a"):
        event = core.abort(name)
        assert event is not None
        assert event.finish_reason is FinishReason.ABORT
    assert core.abort("a") is None
    assert core.abort("never seen") is None
    stats = core.idle_stats()
    assert (stats.num_running, stats.num_waiting, stats.cache.num_referenced_blocks) == (0, 0, 0)


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason", "count"),
    [
        ({}, [5, EOS, 5], FinishReason.STOP, 2),
        ({"ignore_eos": True}, [5, EOS, 5], FinishReason.LENGTH, 3),
        ({"stop_token_ids": (7,)}, [5, 7, 5], FinishReason.STOP, 2),
        ({"min_tokens": 3}, [5, EOS, EOS], FinishReason.STOP, 3),
        ({}, [5, 5, 5], FinishReason.LENGTH, 3),
    ],
)
def test_how_a_request_ends(sampling: dict[str, object], tokens: list[int], reason: FinishReason, count: int) -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1], max_tokens=3, **sampling)
    scheduler.add(request)
    for token in tokens:
        if not scheduler.has_work:
            break
        scheduler.update(scheduler.schedule(), SampledTokens((SampledToken(token),)))
    assert (request.finish_reason, request.num_output_tokens, request.status) == (reason, count, RequestStatus.FINISHED)
    assert scheduler.manager.num_referenced_blocks == 0


def test_min_tokens_bans_end_tokens_until_they_are_allowed() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1], max_tokens=3, min_tokens=1, stop_token_ids=(7,)))
    plan = scheduler.schedule()
    assert plan.sequences[0].sample is not None
    assert plan.sequences[0].sample.banned_token_ids == (EOS, 7)
    scheduler.update(plan, SampledTokens((SampledToken(5),)))
    sample = scheduler.schedule().sequences[0].sample
    assert sample is not None
    assert sample.banned_token_ids == ()


def test_min_tokens_leaves_the_end_token_alone_where_it_is_ignored() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1], max_tokens=3, min_tokens=1, stop_token_ids=(7,), ignore_eos=True))
    sample = scheduler.schedule().sequences[0].sample
    assert sample is not None
    assert sample.banned_token_ids == (7,)


def test_no_more_requests_run_than_the_budget_lets_advance() -> None:
    scheduler = make_scheduler(max_num_seqs=8, budget=3)
    core, _ = make_core(scheduler)
    for name in "abcde":
        core.add(make_request(name, [1], max_tokens=4))
    core.step()
    assert scheduler.num_running == 3
    assert list(scheduled(scheduler.schedule())) == ["a", "b", "c"], "every running request advances at every step"


def test_a_request_that_fails_leaves_its_neighbour_alone() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(make_request(name, [1, 2]))
    events = scheduler.update(scheduler.schedule(), SampledTokens((SampledToken(None, "not finite"), SampledToken(3))))
    assert [(e.request_id, e.finish_reason, e.error) for e in events] == [
        ("a", FinishReason.ERROR, "not finite"),
        ("b", None, None),
    ]
    assert scheduler.num_running == 1


def random_load(seed: int, count: int, max_len: int) -> list[Request]:
    rng = random.Random(seed)
    shared = [[rng.randrange(50) for _ in range(rng.randrange(1, 40))] for _ in range(4)]
    requests = []
    for index in range(count):
        prompt = rng.choice(shared)[: rng.randrange(1, 40)] + [rng.randrange(50) for _ in range(rng.randrange(1, 20))]
        max_tokens = rng.randrange(1, max_len - len(prompt))
        requests.append(make_request(str(index), prompt, max_tokens=max_tokens, salt=rng.choice(["", "", "x"])))
    return requests


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**32), budget=st.sampled_from([1, 7, 64]), block_size=st.sampled_from([1, 3, 4]))
def test_200_requests_with_aborts_in_a_small_pool_end_once_and_leak_nothing(seed: int, budget: int, block_size: int) -> None:
    """Every request ends exactly once with the tokens that its own context gives, whatever was shared, evicted or preempted."""
    rng = random.Random(seed)
    num_blocks = 40
    scheduler = make_scheduler(num_blocks=num_blocks, block_size=block_size, budget=budget)
    core, _ = make_core(scheduler)
    waiting = short_load(seed) if block_size == 1 else random_load(seed, 200, max_len=min(100, num_blocks * block_size))
    live: dict[str, Request] = {}
    tokens: dict[str, list[int]] = {}
    ended: dict[str, FinishReason] = {}
    while waiting or core.has_work:
        for _ in range(min(len(waiting), rng.randrange(4))):
            request = waiting.pop()
            live[request.request_id] = request
            core.add(request)
        events = list(core.step().events) if core.has_work else []
        if live and rng.random() < 0.05 and (event := core.abort(rng.choice(list(live)))):
            events.append(event)
        scheduler.manager.check_integrity()
        for event in events:
            assert event.request_id not in ended
            if event.token_id is not None:
                tokens.setdefault(event.request_id, []).append(event.token_id)
            if event.finish_reason is not None:
                ended[event.request_id] = event.finish_reason
                request = live.pop(event.request_id)
                expected = expected_tokens(request.prompt_token_ids, len(tokens.get(event.request_id, [])))
                assert tokens.get(event.request_id, []) == expected
    manager = scheduler.manager
    assert len(ended) == 200
    assert manager.num_referenced_blocks == 0
    assert manager.num_free_blocks + manager.num_cached_blocks == num_blocks


def short_load(seed: int) -> list[Request]:
    """For the pool of 40 one-token blocks: prompts of 1 to 12 tokens, totals of at most 40."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3) for _ in range(rng.randrange(1, 13))] for _ in range(200)]
    return [make_request(str(i), prompt, max_tokens=rng.randrange(1, 28)) for i, prompt in enumerate(prompts)]

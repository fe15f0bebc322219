"""More requests than blocks: who may join, who must go, who is next. Each rule beside a plain twin, over random loads."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.evaluate.loads import Job, Lengths, Shape, make_jobs
from engine.evaluate.pressure import WAYS, Engine
from engine.kv.pins import PinLimits
from engine.request import FinishReason, Request, RequestStatus
from engine.sched import victim as victims
from engine.sched.draft import is_prefill
from engine.sched.lengths import HORIZON, OutputLengths
from engine.sched.pressure import recompute_newest
from engine.sched.scheduler import Scheduler
from engine.sched.victim import CheapestVictim, is_protected
from tests.factories import RecordingRunner, expected_tokens, make_core, make_request, make_scheduler

SEEDS = st.integers(0, 2**32)


def random_requests(rng: random.Random, count: int, max_len: int, *, num_priorities: int = 3) -> list[Request]:
    """Some share beginnings, some have tenants of their own."""
    stems = [[rng.randrange(50) for _ in range(max_len)] for _ in range(2)]
    requests = []
    for index in range(count):
        prompt = [*rng.choice(stems)[: rng.randrange(max_len // 2)], *(rng.randrange(50) for _ in range(rng.randrange(1, 6)))]
        max_tokens = rng.randrange(1, max_len - len(prompt) + 1)
        priority, salt = rng.randrange(num_priorities), rng.choice(("", "", "x"))
        requests.append(make_request(str(index), prompt, max_tokens=max_tokens, priority=priority, salt=salt))
    return requests


# Victims


def brute_force(running: Sequence[Request], num_blocks: int, tables: dict[str, list[int]]) -> Request:
    """The least important class; of it, who loses least, and has enough; else who has most. Of equals the newest."""
    holders = Counter(block for table in tables.values() for block in table)
    best: tuple[float, float, int] | None = None
    for index, request in enumerate(running):
        if request.num_preemptions >= victims.MAX_PREEMPTIONS:
            continue
        if any(r.priority > request.priority and r.num_preemptions < victims.MAX_PREEMPTIONS for r in running):
            continue
        alone = sum(holders[block] == 1 for block in tables[request.request_id])
        rank = (0, alone, -index) if alone >= num_blocks else (1, -alone, -index)
        best = rank if best is None or rank < best else best
    assert best is not None
    return running[-best[2]]


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS)
def test_the_victim_is_the_one_that_brute_force_finds(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=60, block_size=2, budget=40, pressure=recompute_newest())
    core, _ = make_core(scheduler)
    for request in random_requests(rng, 12, 30):
        core.add(request)
    for _ in range(12):
        if not core.has_work:
            return
        core.step()
        running = list(scheduler._running.values())
        for request in running:
            request.num_preemptions = rng.choice((0, 1, victims.MAX_PREEMPTIONS))
        if all(is_protected(request) for request in running):
            continue
        tables = {request.request_id: scheduler.manager.block_table(request.request_id) for request in running}
        for num_blocks in (1, rng.randrange(1, 20)):
            assert CheapestVictim().choose(running, num_blocks, scheduler.manager) is brute_force(running, num_blocks, tables)


def test_only_as_many_tail_blocks_as_needed_are_lost() -> None:
    scheduler = make_scheduler(num_blocks=12, block_size=2, pressure=recompute_newest())
    core, _ = make_core(scheduler)
    core.add(make_request("a", range(8), max_tokens=6))
    core.add(make_request("b", range(100, 112), max_tokens=6))
    recomputed = 0
    while core.has_work:
        output = core.step()
        recomputed += output.stats.num_recomputed_tokens
    assert 0 < recomputed <= 8, "b had 12 tokens and more; a needed three blocks beyond those that were free"


# Whatever comes, it ends


@settings(deadline=None, max_examples=40)
@given(
    seed=SEEDS, most=st.sampled_from((0, 1, 8)), num_blocks=st.sampled_from((10, 16, 30)), num_pinnable=st.sampled_from((0, 3))
)
def test_no_load_is_stuck_and_nobody_is_preempted_once_protected(
    seed: int, most: int, num_blocks: int, num_pinnable: int
) -> None:
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(victims, "MAX_PREEMPTIONS", most)
        longest = num_blocks - num_pinnable
        limits = PinLimits(num_blocks, num_pinnable, longest)
        scheduler = make_scheduler(num_blocks=num_blocks, block_size=2, budget=rng.choice((3, 16)), pin_limits=limits)
        core, _ = make_core(scheduler)
        times: Counter[str] = Counter()
        preempt = scheduler._preempt

        def counted(victim: Request) -> None:
            times[victim.request_id] += 1
            preempt(victim)

        patch.setattr(scheduler, "_preempt", counted)
        requests = random_requests(rng, 25, 2 * longest)
        if most == 0:  # all are protected from the start
            assert all(is_protected(request) for request in requests)
        waiting = list(requests)
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        most_steps = len(requests) + (most + 1) * sum(request.max_num_tokens for request in requests)
        for step in range(most_steps):
            for _ in range(min(len(waiting), rng.randrange(5))):
                assert core.add(waiting.pop()) is None
            if not core.has_work:
                if not waiting:
                    break
                continue
            for event in core.step().events:
                assert event.token_id is not None
                tokens[event.request_id].append(event.token_id)
            assert all(request.num_preemptions == times[request.request_id] <= most for request in requests), f"in step {step}"
            scheduler.manager.check_integrity()
        for request in requests:
            assert request.status is RequestStatus.FINISHED, "it did not come to its end"
            assert tokens[request.request_id] == expected_tokens(request.prompt_token_ids, request.sampling.max_tokens)


def test_what_can_never_fit_ends_at_once_with_the_numbers() -> None:
    scheduler = make_scheduler(num_blocks=10, block_size=2, pin_limits=PinLimits(10, budget_blocks=2, longest_blocks=8))
    request = make_request("a", range(10), max_tokens=7)
    event = scheduler.add(request)
    assert event is not None
    assert (event.finish_reason, request.status, scheduler.has_work) == (FinishReason.ERROR, RequestStatus.FINISHED, False)
    assert event.error == "17 tokens of prompt and max_tokens take 9 blocks; the KV cache has 8"
    assert scheduler.abort("a") is None
    assert scheduler.add(make_request("b", range(10), max_tokens=6)) is None


# Turns


@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, num_blocks=st.sampled_from((12, 30, 100)))
def test_a_less_important_request_never_goes_first(seed: int, num_blocks: int) -> None:
    """No two share anything here. One that waits for what a running one computes, or for the disk, needs no place: it is passed by."""
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=num_blocks, block_size=2, budget=16, max_num_seqs=4)
    core, _ = make_core(scheduler)
    requests = random_requests(rng, 30, 20)
    for index, request in enumerate(requests):
        request.namespace = request.namespace._replace(salt=str(index))
    waiting = list(requests)
    while waiting or core.has_work:
        for _ in range(min(len(waiting), rng.randrange(4))):
            core.add(waiting.pop())
        if not core.has_work:
            continue
        before = {request.request_id: request.status for request in requests}
        queued = {request.request_id for request in scheduler._waiting}
        core.step()
        admitted = [
            r for r in requests if r.request_id in queued and r.request_id not in {w.request_id for w in scheduler._waiting}
        ]
        left = [request for request in scheduler._waiting if request.request_id in queued]
        if admitted and left:
            assert max(r.priority for r in admitted) <= min(r.priority for r in left), before


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_two_tenants_under_constant_load_are_served_alike(seed: int) -> None:
    """Whatever they ask for and however many: apart by no more than what each may have under way, while both wait.

    There is room for all that run: without it, small requests may overtake large ones, whoever's they are.
    """
    rng = random.Random(seed)
    num_seqs, longest = 3, 24
    scheduler = make_scheduler(num_blocks=40, block_size=2, budget=12, max_num_seqs=num_seqs)
    core, _ = make_core(scheduler)
    requests: dict[str, Request] = {}
    served = Counter({"x": 0, "y": 0})
    bound = 2 * num_seqs * longest
    depth = {"x": num_seqs + 1, "y": 20}  # both have more in the queue than a step can admit, y has more
    length = {"x": (rng.randrange(1, 12), rng.randrange(1, 12)), "y": (rng.randrange(1, 12), rng.randrange(1, 12))}
    for _ in range(400):
        for tenant, count in depth.items():
            while sum(request.tenant == tenant for request in scheduler._waiting) < count:
                prompt = [rng.randrange(1000) for _ in range(length[tenant][0])]
                request = make_request(str(len(requests)), prompt, max_tokens=length[tenant][1], salt=tenant)
                requests[request.request_id] = request
                core.add(request)
        output = core.step()
        for admission in output.admissions:
            tenant = requests[admission.request_id].tenant
            served[tenant] += admission.num_prompt_tokens - admission.num_cached_tokens
        for event in output.events:
            served[requests[event.request_id].tenant] += 1
        assert abs(served["x"] - served["y"]) <= bound
    assert min(served.values()) > 2 * bound, "the bound would say nothing"


def test_absence_is_not_saved_up() -> None:
    scheduler = make_scheduler(num_blocks=100, max_num_seqs=1)
    core, _ = make_core(scheduler)
    for index in range(8):
        core.add(make_request(f"y{index}", [index, 1, 2, 3], max_tokens=4, salt="y"))
    for _ in range(16):
        core.step()
    for index in range(8):
        core.add(make_request(f"x{index}", [index, 1, 2, 3], max_tokens=4, salt="x"))
    order = []
    while core.has_work:
        order.extend(a.request_id[0] for a in core.step().admissions)
    assert "xxx" not in "".join(order[:8]), order


# Lengths of answers


@given(
    ended=st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=20),
    done=st.integers(0, 50),
    limit=st.integers(51, 90),
    ignore_eos=st.booleans(),
)
def test_who_is_still_at_it_is_a_share_of_those_that_got_so_far(
    ended: list[tuple[int, bool]], done: int, limit: int, ignore_eos: bool
) -> None:
    lengths = OutputLengths()
    for length, was_cut in ended:
        request = make_request("e", [1], max_tokens=length + (not was_cut))
        request.token_ids += [1] * length
        request.finish_reason = FinishReason.LENGTH if was_cut else FinishReason.STOP
        lengths.note(request)
    request = make_request("r", [1], max_tokens=limit, ignore_eos=ignore_eos)
    request.token_ids += [1] * done
    got_so_far = [length if not was_cut else 10**9 for length, was_cut in ended if was_cut or length > done]
    for steps, alive in zip(HORIZON, lengths.alive([request])[0], strict=True):
        if done + steps >= limit:
            assert alive == 0
        elif ignore_eos or not got_so_far:
            assert alive == 1
        else:
            assert np.isclose(alive, sum(length > done + steps for length in got_so_far) / len(got_so_far))


# A long prompt beside decodes


def step_sizes(scheduler: Scheduler, runner: RecordingRunner) -> dict[str, tuple[int, int]]:
    """Where each request was before the step, and how many of its tokens the step computed."""
    plan = scheduler.schedule()
    scheduler.update(plan, runner.execute(plan))
    return {sequence.request_id: (sequence.start, len(sequence.token_ids)) for sequence in plan.sequences}


def test_a_long_prompt_takes_what_it_may_beside_decodes_and_everything_alone() -> None:
    scheduler = make_scheduler(num_blocks=200, block_size=4, budget=64, max_prefill_beside_decodes=8)
    core, runner = make_core(scheduler)
    core.add(make_request("long", range(150), max_tokens=1))
    assert step_sizes(scheduler, runner) == {"long": (0, 64)}, "nothing decodes"
    core.add(make_request("a", [900, 901], max_tokens=6))
    assert step_sizes(scheduler, runner) == {"long": (64, 64)}
    core.abort("a")
    core.add(make_request("b", [910, 911], max_tokens=6))
    assert step_sizes(scheduler, runner) == {"long": (128, 22), "b": (0, 2)}
    core.add(make_request("other", range(300, 350), max_tokens=1))
    sizes = [step_sizes(scheduler, runner) for _ in range(5)]
    assert [size["b"] for size in sizes] == [(2 + i, 1) for i in range(5)]
    assert [size["other"] for size in sizes] == [(8 * i, 8) for i in range(5)]
    assert step_sizes(scheduler, runner) == {"other": (40, 10)}, "b has ended"


@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, most=st.sampled_from((1, 4, 7, 12)), block_size=st.sampled_from((1, 4)))
def test_decodes_advance_at_every_step_whatever_arrives(seed: int, most: int, block_size: int) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=400, block_size=block_size, budget=24, max_prefill_beside_decodes=most)
    core, runner = make_core(scheduler)
    waiting = random_requests(rng, 20, 60)
    while waiting or core.has_work:
        for _ in range(min(len(waiting), rng.randrange(3))):
            core.add(waiting.pop())
        if not core.has_work:
            continue
        decodes = {r.request_id for r in scheduler._running.values() if not is_prefill(r)}
        sizes = step_sizes(scheduler, runner)
        assert decodes <= sizes.keys()
        if decodes:
            assert sum(count for name, (_, count) in sizes.items() if name not in decodes and count > 1) <= most


@pytest.mark.parametrize(("max_prefill", "expected"), [(8, [0, 8, 16, 24]), (9, [0, 8, 16, 24]), (7, [0, 7, 14, 20])])
def test_chunks_end_at_the_edge_of_a_block_where_that_costs_little(max_prefill: int, expected: list[int]) -> None:
    scheduler = make_scheduler(num_blocks=200, block_size=4, budget=64, max_prefill_beside_decodes=max_prefill)
    core, runner = make_core(scheduler)
    core.add(make_request("a", [900], max_tokens=20))
    core.step()
    core.add(make_request("b", range(60), max_tokens=1))
    assert [step_sizes(scheduler, runner)["b"][0] for _ in range(4)] == expected


# What it is good for

SMALL = Shape(Lengths(40, 0.7, 8, 120), Lengths(60, 0.8, 4, 160))


def small_load(seed: int, count: int = 120) -> list[Job]:
    return make_jobs(random.Random(seed), count, (SMALL,))


def test_half_as_much_is_computed_twice_and_hardly_anything_with_a_host_tier() -> None:
    engine = Engine(num_blocks=100, max_num_seqs=32, max_num_batched_tokens=128)
    newest, cheapest, tiered = (engine.run(small_load(1), way, lambda: None) for way in WAYS.values())
    assert newest.recompute_share > 0.05, "no pressure"
    assert cheapest.recompute_share < newest.recompute_share / 2
    assert tiered.recompute_share < 0.05
    assert cheapest.num_steps < 1.15 * newest.num_steps, "in so small a load, what is not known yet of answers costs more"


def test_equal_loads_are_served_equally() -> None:
    engine = Engine(num_blocks=60, max_num_seqs=16, max_num_batched_tokens=64)
    way = WAYS["cheapest to bring back"]
    assert engine.run(small_load(3, 25), way, lambda: None) == engine.run(small_load(3, 25), way, lambda: None)

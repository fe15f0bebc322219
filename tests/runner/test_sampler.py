"""The sampler against slow twins in float64 and against statistics with fixed seeds."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.runner.sampler import TOP_P_CANDIDATES, draw, sample, uniform
from engine.sched.plan import SampledToken, SampleSpec

CHI2_LIMIT = {9: 27.9, 15: 37.7, 63: 103.4}  # degrees of freedom -> exceeded by chance once in 1000


def kept(logits: list[float], params: SamplingParams) -> list[tuple[int, float]]:
    """(token, probability) of all that may be drawn, in the order in which the distribution is inverted."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    if params.top_k:
        order = order[: params.top_k]
    weights = [math.exp((logits[i] - logits[order[0]]) / params.temperature) for i in order]
    total = sum(weights)
    probs = [weight / total for weight in weights]
    nucleus = []
    before = 0.0
    for token, prob in zip(order, probs, strict=True):
        if params.top_p == 1.0 or before < params.top_p:
            nucleus.append((token, prob))
        before += prob
    left = [(token, prob) for token, prob in nucleus if prob >= params.min_p * probs[0]]
    is_filtered = params.top_k or params.top_p < 1.0 or params.min_p
    return left if is_filtered else sorted(left)


def assume_far_from_the_limits(logits: list[float], params: SamplingParams) -> None:
    """Where a probability lies on a limit, float32 may decide the other way."""
    loose = kept(logits, replace(params, top_p=1.0, min_p=0.0))
    probs = sorted((prob for _, prob in loose), reverse=True)
    assume(all(abs(before - params.top_p) > 1e-5 for before in accumulate(probs[:-1])))
    assume(all(abs(prob - params.min_p * probs[0]) > 1e-6 for prob in probs[1:]))


def slow_draw(logits: list[float], params: SamplingParams, u: float) -> int:
    left = kept(logits, params)
    target, cumulated = u * sum(prob for _, prob in left), 0.0
    for token, prob in left:
        cumulated += prob
        assume(abs(cumulated - target) > 1e-5)
        if cumulated > target:
            return token
    raise AssertionError("u is below 1")


def random_logits(seed: int, size: int, scale: float) -> list[float]:
    rng = random.Random(seed)
    return torch.tensor([rng.gauss(0, scale) for _ in range(size)]).tolist()  # rounded to float32 once, for both


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([5, 40, TOP_P_CANDIDATES, TOP_P_CANDIDATES + 1, 1500]),
    scale=st.sampled_from([0.1, 1.0, 4.0]),
    temperature=st.floats(0.2, 2.0),
    top_k=st.sampled_from([0, 2, 7, 5000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    u=st.floats(0.0, 1.0, exclude_max=True),
)
def test_draw_is_its_slow_twin(seed, size, scale, temperature, top_k, top_p, min_p, u) -> None:
    logits = random_logits(seed, size, scale)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assume_far_from_the_limits(logits, params)
    assert draw(torch.tensor(logits), params, u) == slow_draw(logits, params, u)


@pytest.mark.parametrize("scale", [4.0, 0.1])  # a few candidates hold top_p, or they do not and all are sorted
def test_top_p_over_a_large_vocabulary_never_leaves_the_nucleus(scale) -> None:
    logits = random_logits(1, 5000, scale)
    params = SamplingParams(top_p=0.9)
    nucleus = {token for token, _ in kept(logits, params)}
    assert (len(nucleus) < TOP_P_CANDIDATES) == (scale == 4.0)
    drawn = {draw(torch.tensor(logits), params, u / 400) for u in range(400)} | {draw(torch.tensor(logits), params, 1 - 2**-53)}
    assert drawn <= nucleus
    assert len(drawn) > min(len(nucleus), 300) // 3


def chi2(counts: list[int], probs: list[float]) -> float:
    total = sum(counts)
    return sum((count - total * prob) ** 2 / (total * prob) for count, prob in zip(counts, probs, strict=True))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_draws_are_distributed_as_the_softmax(temperature) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 0.2, 1.5, -2.0, 0.9])
    params = SamplingParams(temperature=temperature)
    counts = [0] * 10
    for position in range(6000):
        counts[draw(logits, params, uniform(1234, position))] += 1
    probs = torch.softmax(logits.double() / temperature, -1).tolist()
    assert chi2(counts, probs) < CHI2_LIMIT[9]


@pytest.mark.parametrize("numbers", ["positions", "seeds", "pairs"])
def test_uniform_is_uniform(numbers) -> None:
    """Over the positions of one seed, over neighbouring seeds, and a draw says nothing of the next."""
    values = [uniform(99, i) if numbers != "seeds" else uniform(i - 5000, 3) for i in range(12_000)]
    assert all(0.0 <= value < 1.0 for value in values)
    bins, cells = [0] * 64, [int(value * 8) for value in values]
    for i, value in enumerate(values):
        bins[int(value * 64) if numbers != "pairs" else cells[i] * 8 + cells[i - 1]] += 1
    assert chi2(bins, [1 / 64] * 64) < CHI2_LIMIT[63]


PINNED = [0.28176129772258496, 0.6524484863740322, 0.2668471864940366, 0.30339313226534526, 0.6091065730088483]


def test_uniform_is_pinned_so_that_a_seed_means_the_same_text_in_every_version() -> None:
    assert [uniform(s, p) for s, p in ((0, 0), (0, 1), (1, 0), (-1, 0), (2**63 - 1, 2**31))] == PINNED
    assert uniform(0, 1) == uniform(0, 1)


@pytest.mark.parametrize("temperature", [1e-3, 1e-9, 1e-39, 1e-50, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature) -> None:
    logits = torch.tensor([1.0, 30.0, -5.0, 29.0])
    for extra in ({}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
        params = SamplingParams(temperature=temperature, **extra)
        assert {draw(logits, params, u) for u in (0.0, 0.5, 1 - 2**-53)} == {1}


@pytest.mark.parametrize("limits", [{"top_p": 5e-324}, {"top_p": 1e-40}, {"min_p": 1.0}, {"top_p": 1e-300, "min_p": 1e-300}])
@pytest.mark.parametrize("size", [4, 1000])
def test_the_likeliest_token_is_always_left(limits, size) -> None:
    logits = torch.arange(size) / size
    for u in (0.0, 0.5, 1 - 2**-53):
        assert draw(logits, SamplingParams(**limits), u) == size - 1


@pytest.mark.parametrize("magnitude", [3e38, 1e-30])
def test_logits_of_any_finite_size_are_drawn_from(magnitude) -> None:
    logits = torch.tensor([-1.0, 1.0, -1.0]) * magnitude
    for extra in ({}, {"top_p": 0.5}, {"min_p": 0.5}):
        drawn = {draw(logits, SamplingParams(temperature=0.5, **extra), u / 10) for u in range(10)}
        assert drawn <= {0, 1, 2}
        assert magnitude < 1 or drawn == {1}


def spec(seed: int = 0, position: int = 0, banned: tuple[int, ...] = (), **params: object) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), seed, position, banned)  # type: ignore[arg-type]


@pytest.mark.parametrize("greedy", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}])
def test_greedy_takes_the_likeliest_and_the_first_of_equals(greedy) -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0]])
    assert sample(logits, (spec(**greedy),)) == (SampledToken(1),)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}])
def test_banned_tokens_are_never_drawn(params) -> None:
    logits = torch.tensor([[9.0, 8.0, 0.0, 0.1]])
    for position in range(50):
        (token,) = sample(logits.clone(), (spec(7, position, banned=(0, 1, 1), **params),))
        assert token.token_id in (2, 3)


@pytest.mark.parametrize("damage", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_fails_alone(damage) -> None:
    good = torch.tensor(random_logits(3, 50, 2.0))
    bad = good.clone()
    bad[7:] = damage
    if damage == float("-inf"):
        bad[:] = damage
    specs = (spec(5, 1), spec(5, 1), spec(temperature=0.0), spec(5, 1, top_p=0.8))
    alone = sample(torch.stack([good, good, good, good]), specs)
    mixed = sample(torch.stack([good, bad, good, good]), specs)
    assert mixed[1].token_id is None
    assert "finite" in (mixed[1].error or "")
    assert (mixed[0], *mixed[2:]) == (alone[0], *alone[2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_draw_depends_on_its_own_row_alone(dtype) -> None:
    rows = torch.tensor([random_logits(i, 300, 2.0) for i in range(6)]).to(dtype)
    specs = tuple(spec(i, 4, banned=(i,), temperature=0.5 + i / 4, top_p=0.5 + i / 12) for i in range(6))
    together = sample(rows.clone(), specs)
    backwards = sample(rows.flip(0).clone(), specs[::-1])
    alone = tuple(sample(rows[i : i + 1].clone(), specs[i : i + 1])[0] for i in range(6))
    assert together == backwards[::-1] == alone

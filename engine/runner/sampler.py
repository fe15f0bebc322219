"""From logits to tokens. Each row is drawn by itself, from numbers that depend on its seed and position alone."""

from __future__ import annotations

import torch

from engine.request import SamplingParams
from engine.sched.plan import SampledToken, SampleSpec

TOP_P_CANDIDATES = 256  # enough for nearly every nucleus; more are sorted only when these do not reach top_p
MIN_TEMPERATURE = 1e-30  # float32 logits that differ at all are infinitely far apart by then; less would divide by zero

_MASK = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position alone: splitmix64 (Steele, Lea and Flood, 2014), two rounds."""
    state = _mix((seed & _MASK) ^ 0x9E3779B97F4A7C15)
    return (_mix((state + position * 0x9E3779B97F4A7C15) & _MASK) >> 11) / 2**53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def sample(logits: torch.Tensor, specs: tuple[SampleSpec, ...]) -> tuple[SampledToken, ...]:
    """logits [samples, vocab_size], any float type. A row that is not finite fails alone."""
    logits = logits.float()
    for row, spec in enumerate(specs):
        if spec.banned_token_ids:
            logits[row, list(spec.banned_token_ids)] = float("-inf")
    best, best_ids = logits.max(dim=-1)
    likeliest = best_ids.tolist()
    usable = torch.isfinite(best).tolist()
    return tuple(_draw(logits[row], spec, likeliest[row], usable[row]) for row, spec in enumerate(specs))


def _draw(logits: torch.Tensor, spec: SampleSpec, likeliest: int, is_usable: bool) -> SampledToken:
    if not is_usable:
        return SampledToken(None, "the model gave no finite logits for this request; its weights or its input are damaged")
    if spec.params.is_greedy:
        return SampledToken(likeliest)
    return SampledToken(draw(logits, spec.params, uniform(spec.seed, spec.position)))


def draw(logits: torch.Tensor, params: SamplingParams, u: float) -> int:
    """One token from float32 logits [vocab_size], by inverting the distribution function at ``u``.

    In this order, as vLLM and transformers do: temperature, top_k, top_p on what top_k left, min_p against the likeliest token.
    """
    logits = (logits - logits.max()) / max(params.temperature, MIN_TEMPERATURE)
    if params.min_p == 0.0 and params.top_k == 0 and params.top_p == 1.0:
        return _invert(torch.softmax(logits, dim=-1), u)
    values, ids = _candidates(logits, params)
    probs = torch.softmax(values, dim=-1)
    if params.top_p < 1.0:
        is_kept = probs.cumsum(-1) - probs < params.top_p
        is_kept[0] = True  # also for a top_p that float32 takes for 0
        probs = torch.where(is_kept, probs, 0.0)
    if params.min_p > 0.0:
        probs = torch.where(probs >= params.min_p * probs[0], probs, 0.0)
    return int(ids[_invert(probs, u)])


def _candidates(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """All logits that top_k leaves, largest first, with their ids; fewer when a few provably hold all that top_p leaves."""
    if 0 < params.top_k < len(logits):
        values, ids = logits.topk(params.top_k)
        return values, ids
    if params.top_p < 1.0 and len(logits) > TOP_P_CANDIDATES:
        values, ids = logits.topk(TOP_P_CANDIDATES)
        mass = (values - logits.logsumexp(-1)).exp().sum()
        if mass > params.top_p + 1e-3:
            return _with_rest(values, ids, logits)
    values, ids = logits.sort(descending=True)
    return values, ids


def _with_rest(values: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The candidates and one last entry that stands for the mass of all others, so that the softmax is that of the whole row."""
    rest = torch.ones_like(logits, dtype=torch.bool)
    rest[ids] = False
    tail = torch.logsumexp(logits[rest], dim=-1)
    return torch.cat((values, tail[None])), torch.cat((ids, ids[-1:]))


def _invert(weights: torch.Tensor, u: float) -> int:
    """The first index at which the cumulated weights pass the share ``u`` of their sum."""
    cumulated = weights.double().cumsum(-1)
    target = cumulated[-1:] * u
    index = int(torch.searchsorted(cumulated, target, right=True))
    if index < len(weights):
        return index
    return int(weights.nonzero()[-1])  # u * sum was rounded up to the sum itself

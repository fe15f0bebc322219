"""Loads for scheduling without a model: prompts as random token ids, and the output length that each request will turn out to have.

Equal seeds make equal loads. Lengths are log-normal, as those of real chats are; the scheduler knows max_tokens only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from engine.request import Request, SamplingParams

VOCAB_SIZE = 50_000


@dataclass(frozen=True, slots=True)
class Job:
    """A request, and after how many tokens it ends by itself."""

    request: Request
    output_len: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution, cut off at both ends."""

    median: int
    sigma: float
    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return int(min(self.high, max(self.low, self.median * rng.lognormvariate(0.0, self.sigma))))


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of request. ``knows_length``: it asks for exactly as many tokens as it gets; else for the longest there may be."""

    prompt: Lengths
    output: Lengths
    num_prefixes: int = 0
    prefix_len: int = 0
    knows_length: bool = False


CHAT = Shape(Lengths(150, 0.7, 16, 800), Lengths(150, 0.8, 4, 500))
LONG = Shape(Lengths(1500, 0.4, 500, 3000), Lengths(150, 0.6, 8, 400))
SHARED = Shape(Lengths(80, 0.7, 8, 400), Lengths(200, 0.6, 8, 500), num_prefixes=4, prefix_len=1000)
FIXED = Shape(Lengths(150, 0.7, 16, 800), Lengths(150, 0.8, 4, 500), knows_length=True)

LOADS: dict[str, tuple[int, tuple[Shape, ...]]] = {
    "short chats": (400, (CHAT,)),
    "long prompts": (150, (LONG,)),
    "shared prefixes": (400, (SHARED,)),
    "mixed": (400, (CHAT, CHAT, LONG, SHARED)),
    "known lengths": (400, (FIXED,)),
}
"""By name: how many requests, and the shapes that each of them is drawn from."""


def make_load(name: str, seed: int) -> list[Job]:
    """The requests in order of arrival, all at once."""
    return make_jobs(random.Random(f"{name} {seed}"), *LOADS[name])


def make_jobs(rng: random.Random, count: int, shapes: Sequence[Shape]) -> list[Job]:
    prefixes = {shape: [_tokens(rng, shape.prefix_len) for _ in range(shape.num_prefixes)] for shape in shapes}
    return [_job(rng, index, shape := rng.choice(shapes), prefixes[shape]) for index in range(count)]


def _job(rng: random.Random, index: int, shape: Shape, prefixes: list[tuple[int, ...]]) -> Job:
    prefix = rng.choice(prefixes) if prefixes else ()
    prompt, output_len = (*prefix, *_tokens(rng, shape.prompt.draw(rng))), shape.output.draw(rng)
    max_tokens = output_len if shape.knows_length else shape.output.high
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=shape.knows_length)
    return Job(Request(str(index), prompt, sampling, seed=0, arrival_time=float(index)), output_len)


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(VOCAB_SIZE), k=count))

"""One repetition of a scenario: send it, time it, and say what spoils it.

A repetition with a failed request, a wrong token count or an unwanted cache hit has problems and counts nowhere; one during
which other processes kept the machine busy is disturbed. Knows no command line and writes no files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median

from loadtest.client import CompletionRequest, Endpoint, complete
from loadtest.proc import CpuLoad, load_between, take_sample
from loadtest.stream import CompletionRecord, StreamError
from loadtest.workload import Scenario, Workload

MAX_FOREIGN_CORES = 0.15
MAX_COLD_CACHED_SHARE = 0.02
"""Two random prompts may begin with the same token; more than this is a cache that knows the prompts."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds and tokens a second, as the client saw them.

    ``total_s``: from before the first request is sent to the end of the last. ``output_tok_s`` and ``total_tok_s``: output
    tokens, or prompt and output tokens, over ``total_s``. ``ttft_*``, ``tpot_mean_s``: over requests. ``itl_*``: over the gaps
    between chunks of all requests together. For scenarios of one request: ``decode_tok_s`` is 1 / TPOT, ``prefill_tok_s`` the
    prompt's tokens over TTFT. None where there is nothing to count.
    """

    total_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    output_tok_s: float
    total_tok_s: float
    ttft_mean_s: float
    ttft_max_s: float
    itl_p50_s: float | None
    itl_p99_s: float | None
    tpot_mean_s: float | None
    decode_tok_s: float | None
    prefill_tok_s: float | None


@dataclass(frozen=True, slots=True)
class Repetition:
    """``figures`` exist iff there are no ``problems``. ``load`` is None where the server's process is not known."""

    index: int
    figures: Figures | None
    load: CpuLoad | None
    problems: tuple[str, ...]

    @property
    def is_disturbed(self) -> bool:
        return self.load is not None and self.load.foreign > MAX_FOREIGN_CORES


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over the quiet repetitions, or over the disturbed ones if none was quiet; ``is_disturbed`` then says so."""

    figures: dict[str, float] | None
    num_counted: int
    num_disturbed: int
    num_invalid: int

    @property
    def is_disturbed(self) -> bool:
        return self.num_counted > 0 and self.num_counted == self.num_disturbed


Outcome = CompletionRecord | StreamError


async def attempt(endpoint: Endpoint, request: CompletionRequest) -> Outcome:
    """A failed request is an outcome like any other, never an absence."""
    try:
        return await complete(endpoint, request)
    except StreamError as exc:
        return exc


async def repeat_once(
    endpoint: Endpoint, scenario: Scenario, workload: Workload, index: int, server_pid: int | None
) -> Repetition:
    """Send the primers in turn, then all requests at once, and judge what came back."""
    primed = [await attempt(endpoint, primer) for primer in workload.primers]
    before = take_sample(server_pid) if server_pid is not None else None
    start = time.perf_counter()
    outcomes = await asyncio.gather(*(attempt(endpoint, request) for request in workload.requests))
    load = load_between(before, take_sample(server_pid)) if before is not None and server_pid is not None else None
    problems = (*find_problems(primed, workload.primers), *find_problems(outcomes, workload.requests))
    records = [outcome for outcome in outcomes if isinstance(outcome, CompletionRecord)]
    if not problems:
        problems = cold_cache_problems(scenario, records)
    return Repetition(index, None if problems else figures_of(records, start), load, problems)


def find_problems(outcomes: Sequence[Outcome], requests: Sequence[CompletionRequest]) -> tuple[str, ...]:
    """One line for each request that failed or whose token counts are not those asked for."""
    found = [_problem(outcome, request) for outcome, request in zip(outcomes, requests, strict=True)]
    return tuple(f"request {index}: {problem}" for index, problem in enumerate(found) if problem)


def _problem(outcome: Outcome, request: CompletionRequest) -> str | None:
    if isinstance(outcome, StreamError):
        return str(outcome)
    usage = outcome.usage
    if usage.completion_tokens != request.max_tokens:
        return f"{usage.completion_tokens} output tokens instead of {request.max_tokens} ({outcome.finish_reason})"
    if usage.prompt_tokens != len(request.prompt):
        return f"{usage.prompt_tokens} prompt tokens counted, {len(request.prompt)} sent"
    return None


def cold_cache_problems(scenario: Scenario, records: Sequence[CompletionRecord]) -> tuple[str, ...]:
    """A prompt that the server already knows makes a cold repetition worthless."""
    cached = sum(record.usage.cached_tokens or 0 for record in records)
    prompt = sum(record.usage.prompt_tokens for record in records)
    if scenario.shares_prefix or cached <= MAX_COLD_CACHED_SHARE * prompt:
        return ()
    return (f"{cached} of {prompt} prompt tokens were cached in a scenario that shares nothing",)


def figures_of(records: Sequence[CompletionRecord], start: float) -> Figures:
    """``records``: at least one; ``start``: when sending began."""
    total_s = max(record.ended_at for record in records) - start
    prompt = sum(record.usage.prompt_tokens for record in records)
    output = sum(record.usage.completion_tokens for record in records)
    cached = [record.usage.cached_tokens for record in records if record.usage.cached_tokens is not None]
    ttft = [record.ttft for record in records]
    gaps = [gap for record in records for gap in record.itl]
    tpot = [record.tpot for record in records if record.tpot is not None]
    alone = len(records) == 1
    return Figures(
        total_s=total_s,
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=sum(cached) if cached else None,
        output_tok_s=output / total_s,
        total_tok_s=(prompt + output) / total_s,
        ttft_mean_s=mean(ttft),
        ttft_max_s=max(ttft),
        itl_p50_s=percentile(gaps, 0.5) if gaps else None,
        itl_p99_s=percentile(gaps, 0.99) if gaps else None,
        tpot_mean_s=mean(tpot) if tpot else None,
        decode_tok_s=1 / tpot[0] if alone and tpot else None,
        prefill_tok_s=prompt / ttft[0] if alone else None,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between neighbours, as numpy's default. ``values``: at least one, in any order; ``share`` in [0, 1]."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(repetitions: Sequence[Repetition]) -> Summary:
    valid = [repetition for repetition in repetitions if repetition.figures is not None]
    quiet = [repetition for repetition in valid if not repetition.is_disturbed]
    counted = [asdict(repetition.figures) for repetition in quiet or valid if repetition.figures is not None]
    return Summary(
        figures=_medians(counted) if counted else None,
        num_counted=len(counted),
        num_disturbed=len(valid) - len(quiet),
        num_invalid=len(repetitions) - len(valid),
    )


def _medians(rows: Sequence[dict[str, float | None]]) -> dict[str, float]:
    """For each figure that every repetition has."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {name: median(v for v in values if v is not None) for name, values in columns.items() if None not in values}

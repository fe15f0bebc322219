"""What a repetition counts, and what keeps it from counting."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, repeat

import pytest
from fake_openai import FakeServer, running

from loadtest.client import Endpoint
from loadtest.measure import Figures, Repetition, figures_of, percentile, repeat_once, summarize
from loadtest.proc import CpuLoad
from loadtest.stream import CompletionRecord, Usage
from loadtest.workload import SCENARIOS, Scenario, WorkloadSource

SMALL = Scenario("small", 3, (16, 32), (2, 4))
SOURCE = WorkloadSource(1000, 1, 1)
QUIET, BUSY = CpuLoad(1.0, 0.1, 0.1), CpuLoad(1.0, 0.1, 0.2)


async def repetition(fake: FakeServer, scenario: Scenario = SMALL) -> Repetition:
    async with running(fake) as url:
        return await repeat_once(Endpoint(url, "fake"), scenario, SOURCE.build(scenario, 0), 0, None)


def test_figures_of_one_request() -> None:
    record = CompletionRecord(1.0, (1.5, 2.0, 2.5), 3.0, Usage(100, 5, 10), "length", "")
    figures = figures_of([record], start=1.0)
    assert figures == Figures(
        total_s=2.0,
        prompt_tokens=100,
        output_tokens=5,
        cached_tokens=10,
        output_tok_s=2.5,
        total_tok_s=52.5,
        ttft_mean_s=0.5,
        ttft_max_s=0.5,
        itl_p50_s=0.5,
        itl_p99_s=0.5,
        tpot_mean_s=0.25,
        decode_tok_s=4.0,
        prefill_tok_s=200.0,
    )


def test_figures_of_several_requests_pool_their_gaps() -> None:
    first = CompletionRecord(0.0, (1.0, 2.0), 2.0, Usage(10, 2, None), "length", "")
    second = CompletionRecord(0.0, (2.0, 5.0), 5.0, Usage(10, 2, None), "length", "")
    figures = figures_of([first, second], start=0.0)
    assert (figures.total_s, figures.output_tok_s, figures.total_tok_s) == (5.0, 0.8, 4.8)
    assert (figures.ttft_mean_s, figures.ttft_max_s, figures.tpot_mean_s) == (1.5, 2.0, 2.0)
    assert (figures.itl_p50_s, figures.itl_p99_s) == (2.0, pytest.approx(2.98))
    assert figures.cached_tokens is None, "what a server does not report is not 0"
    assert figures.decode_tok_s is None, "one request's figure"
    assert figures.prefill_tok_s is None


def test_percentile_lies_between_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert [percentile([7.0, 5.0], share) for share in (0.0, 0.25, 1.0)] == [5.0, 5.5, 7.0]


async def test_a_whole_repetition_counts() -> None:
    result = await repetition(FakeServer(ttft=0.2))
    assert result.problems == ()
    assert result.figures is not None
    assert 0.2 <= result.figures.ttft_mean_s <= result.figures.ttft_max_s <= result.figures.total_s < 0.5, "all at once"


async def test_a_wrong_number_of_tokens_invalidates() -> None:
    result = await repetition(FakeServer(fault="short"))
    assert result.figures is None
    assert len(result.problems) == SMALL.num_requests
    assert "output tokens instead of" in result.problems[0]


async def test_failures_invalidate_and_are_all_listed() -> None:
    result = await repetition(FakeServer(fault="cut"))
    assert result.figures is None
    assert [problem.split(":")[0] for problem in result.problems] == ["request 0", "request 1", "request 2"]
    assert all("cut:" in problem for problem in result.problems)


async def test_a_prompt_that_the_server_counts_otherwise_invalidates() -> None:
    result = await repetition(FakeServer(fault="miscount"))
    assert result.figures is None
    assert "prompt tokens counted" in result.problems[0]


async def test_a_primer_that_failed_invalidates() -> None:
    result = await repetition(FakeServer(next_faults=chain(["cut"], repeat(""))), SCENARIOS["prefix16_warm"])
    assert result.figures is None
    assert len(result.problems) == 1


async def test_a_cold_scenario_must_not_hit_the_cache() -> None:
    assert (await repetition(FakeServer(cached_tokens=12))).problems == (
        f"36 of {prompt_tokens(SMALL)} prompt tokens were cached in a scenario that shares nothing",
    )
    shared = await repetition(FakeServer(cached_tokens=12), SCENARIOS["prefix16"])
    assert shared.figures is not None
    assert shared.figures.cached_tokens == 16 * 12


def prompt_tokens(scenario: Scenario) -> int:
    return sum(len(request.prompt) for request in SOURCE.build(scenario, 0).requests)


async def test_the_primer_is_sent_before_the_requests() -> None:
    fake, warm = FakeServer(), SCENARIOS["prefix16_warm"]
    result = await repetition(fake, warm)
    assert result.figures is not None
    assert result.figures.output_tokens == 16 * 32, "the primer is not counted"
    assert tuple(fake.bodies[0]["prompt"]) == SOURCE.build(warm, 0).primers[0].prompt
    assert len(fake.bodies) == 17


def test_the_median_is_over_quiet_valid_repetitions() -> None:
    figures = figures_of([CompletionRecord(0.0, (1.0,), 1.0, Usage(8, 1, None), "length", "")], 0.0)
    valid = [Repetition(i, replace(figures, total_s=total), QUIET, ()) for i, total in enumerate((1.0, 2.0, 9.0))]
    busy = Repetition(3, replace(figures, total_s=100.0), BUSY, ())
    invalid = Repetition(4, None, QUIET, ("request 0: cut",))
    summary = summarize([*valid, busy, invalid])
    assert summary.figures is not None
    assert summary.figures["total_s"] == 2.0
    assert "itl_p50_s" not in summary.figures
    assert (summary.num_counted, summary.num_disturbed, summary.num_invalid) == (3, 1, 1)
    assert not summary.is_disturbed


def test_disturbed_repetitions_count_only_if_there_is_no_other_and_it_shows() -> None:
    figures = figures_of([CompletionRecord(0.0, (1.0,), 1.0, Usage(8, 1, None), "length", "")], 0.0)
    summary = summarize([Repetition(0, figures, BUSY, ())])
    assert summary.is_disturbed
    assert summary.num_counted == 1
    assert summarize([Repetition(0, None, BUSY, ("x",))]).figures is None

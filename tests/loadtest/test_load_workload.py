"""Workloads: the same from the same seed, unknown to any cache, and of the lengths that the scenarios promise."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from loadtest.workload import SCENARIOS, Scenario, Workload, WorkloadSource

SOURCE = WorkloadSource(vocab_size=1000, seed=7, salt=11)
ALL = pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return [(len(request.prompt), request.max_tokens) for request in workload.requests]


@ALL
def test_equal_sources_make_equal_workloads(scenario: Scenario) -> None:
    assert SOURCE.build(scenario, 2) == replace(SOURCE).build(scenario, 2)


@ALL
def test_repetitions_and_salts_change_every_prompt_but_no_length(scenario: Scenario) -> None:
    base = SOURCE.build(scenario, 0)
    for other in (SOURCE.build(scenario, 1), replace(SOURCE, salt=12).build(scenario, 0)):
        assert lengths(other) == lengths(base)
        assert all(a.prompt[:8] != b.prompt[:8] for a in base.requests for b in other.requests)


def test_the_seed_changes_lengths() -> None:
    batch = SCENARIOS["batch16"]
    assert lengths(SOURCE.build(batch, 0)) != lengths(replace(SOURCE, seed=8).build(batch, 0))


@ALL
def test_lengths_and_ids_are_within_bounds(scenario: Scenario) -> None:
    workload = SOURCE.build(scenario, 0)
    assert len(workload.requests) == scenario.num_requests
    for request in workload.requests:
        assert scenario.own_len[0] <= len(request.prompt) - scenario.prefix_len <= scenario.own_len[1]
        assert scenario.output_len[0] <= request.max_tokens <= scenario.output_len[1]
        assert all(0 <= token < SOURCE.vocab_size for token in request.prompt)


def test_the_scenarios_are_those_of_the_issue() -> None:
    assert {name: lengths(SOURCE.build(SCENARIOS[name], 0)) for name in ("single", "prefill2048")} == {
        "single": [(128, 128)],
        "prefill2048": [(2048, 1)],
    }
    assert [len(SOURCE.build(SCENARIOS[name], 0).requests) for name in ("batch8", "batch16", "prefix16")] == [8, 16, 16]
    assert lengths(SOURCE.build(SCENARIOS["prefix16"], 0)) == [(1056, 32)] * 16


@pytest.mark.parametrize("name", ["prefix16", "prefix16_warm"])
def test_requests_share_the_prefix_and_nothing_more(name: str) -> None:
    workload = SOURCE.build(SCENARIOS[name], 0)
    requests = (*workload.primers, *workload.requests)
    assert len({request.prompt[:1024] for request in requests}) == 1
    assert all(a.prompt[1024:1028] != b.prompt[1024:1028] for a, b in combinations(requests, 2))
    assert len(workload.primers) == (1 if name == "prefix16_warm" else 0)

from __future__ import annotations

import pytest

from loadtest.metrics import Metrics
from loadtest.soak import Traffic
from loadtest.soak_checks import Memory, Tally, counter_checks, memory_check, table
from loadtest.stream import Usage

SOURCES = ("device", "host", "disk", "in_flight", "evicted", "other_namespace", "unseen")


def tally(num_answered: int, num_begun: int = 0, num_doubtful: int = 0) -> Tally:
    result = Tally()
    for _ in range(num_answered + num_begun + num_doubtful):
        result.sent(20)
    for _ in range(num_answered):
        result.answered(Usage(20, 3, 8), 3, 0.5)
    for number in range(num_begun + num_doubtful):
        result.hung_up(has_begun=number < num_begun)
    return result


def server(num_length: int, num_abort: int) -> dict[str, float]:
    """What a server says that took so many requests of 20 tokens, of which it found 8, and gave 3 tokens to each."""
    count = num_length + num_abort
    values: dict[str, float] = {f'octavo_prompt_tokens_by_source_total{{source="{name}"}}': 0 for name in SOURCES}
    for reason, number in {"stop": 0, "length": num_length, "abort": num_abort, "error": 0}.items():
        values[f'octavo_requests_total{{finish_reason="{reason}"}}'] = number
    for state, number in {"referenced": 0, "cached": 30, "free": 70}.items():
        values[f'octavo_kv_cache_blocks{{state="{state}"}}'] = number
        values[f'octavo_kv_cache_bytes{{state="{state}"}}'] = number * 1000
    return values | {
        'octavo_prompt_tokens_by_source_total{source="device"}': 8 * count,
        'octavo_prompt_tokens_by_source_total{source="unseen"}': 12 * count,
        "octavo_prompt_tokens_total": 20 * count,
        "octavo_prefix_cache_query_tokens_total": 20 * count,
        "octavo_prefix_cache_hit_tokens_total": 8 * count,
        "octavo_generation_tokens_total": 3 * count,
        "octavo_time_to_first_token_seconds_count": count,
        "octavo_inter_token_latency_seconds_count": 2 * count,
        "octavo_request_duration_seconds_count": count,
        "octavo_request_queue_seconds_count": count,
        "octavo_requests_running": 0,
        "octavo_requests_waiting": 0,
        "octavo_kv_cache_capacity_bytes": 100_000,
    }


def failed(stormy: dict[str, float], calm: dict[str, float], books: Tally) -> list[str]:
    storm_end, calm_end = Metrics(stormy), Metrics(calm)
    checks = counter_checks(books, storm_end, storm_end, tally(10), calm_end, calm_end)
    return [check.name for check in checks if not check.holds]


@pytest.mark.parametrize("num_taken", [4, 5, 6])
def test_counters_that_agree_hold_whether_the_doubtful_came_or_not(num_taken: int) -> None:
    assert failed(server(20, num_taken), server(10, 0), tally(20, num_begun=4, num_doubtful=2)) == []


def test_an_answer_that_was_ready_when_the_client_hung_up_is_no_abort() -> None:
    assert failed(server(22, 2), server(10, 0), tally(20, num_begun=4)) == []


FREE = {f'octavo_kv_cache_blocks{{state="{state}"}}' for state in ("cached", "free")}  # any number will do: bytes are summed


@pytest.mark.parametrize("name", sorted(server(20, 5).keys() - FREE))
def test_one_counter_that_is_off_is_found(name: str) -> None:
    stormy, calm, books = server(20, 5), server(10, 0), tally(20, num_begun=4, num_doubtful=2)
    assert failed(stormy, calm | {name: calm[name] + 1}, books)
    if name != "octavo_request_queue_seconds_count":  # who hangs up early may never have been admitted
        assert failed(stormy | {name: stormy[name] + 1000}, calm, books)


def test_a_lost_request_is_found() -> None:
    assert failed(server(20, 3), server(10, 0), tally(20, num_begun=4, num_doubtful=2)) != []
    assert failed(server(19, 6), server(10, 0), tally(20, num_begun=4, num_doubtful=2)) != []


def test_a_failure_and_a_wrong_length_are_found() -> None:
    books = tally(20, num_begun=4, num_doubtful=2)
    books.answered(Usage(20, 2, 0), 3, 0.5)
    assert failed(server(20, 5), server(10, 0), books)[0] == "requests that failed"


MIB = 1 << 20


@pytest.mark.parametrize(("growth", "holds"), [(0, True), (15, True), (40, False)])
def test_memory_may_not_grow_past_the_warm_up(growth: int, holds: bool) -> None:
    samples = [(number, (500 if number < 200 else 700 + growth * number // 1000) * MIB) for number in range(1000)]
    assert memory_check(Memory("engine", samples), 1000).holds is holds


def test_too_few_samples_are_no_proof() -> None:
    assert not memory_check(Memory("engine", [(1000, MIB)]), 1000).holds


def test_metrics_are_read_with_their_labels() -> None:
    metrics = Metrics.parse('# HELP a b\n# TYPE a counter\na{x="1"} 2.0\na{x="2"} 3\nb 1e3\nc_bucket{le="+Inf",x="1"} 4\n')
    assert metrics.by_label("a", "x") == {"1": 2.0, "2": 3.0}
    assert metrics["b"] == 1000
    assert metrics.since(Metrics({"b": 400.0}))["b"] == 600


def test_traffic_is_short_shares_beginnings_and_hangs_up_as_often_as_wanted() -> None:
    traffic, books = Traffic(0, 0.3), Tally()
    asks = []
    for _ in range(2000):
        asks.append(traffic.next(books))
        books.sent(1)
        if asks[-1].hang_up_s is None:
            books.answered(Usage(1, 1, 0), 1, 0.2)
        else:
            books.hung_up(has_begun=False)
    assert 0.28 < books.num_hung_up / 2000 < 0.32
    assert {len(ask.request.prompt) for ask in asks} == set(range(8, 41))
    assert {ask.request.max_tokens for ask in asks} == set(range(1, 7))
    assert len({ask.request.prompt[:4] for ask in asks}) == 8
    assert 0.4 < sum(ask.is_streaming for ask in asks) / 2000 < 0.6


def test_the_table_says_what_does_not_hold() -> None:
    checks = counter_checks(*([tally(1), Metrics(server(2, 0)), Metrics(server(1, 0))] * 2))
    assert "| errors | 0 | 0 | yes |" in table(checks)
    assert "| NO |" in table(checks)

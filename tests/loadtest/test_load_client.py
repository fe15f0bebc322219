"""The client against a server whose times are known and whose faults are chosen."""

from __future__ import annotations

import asyncio

import pytest
from fake_openai import FakeServer, running

from loadtest.client import CompletionRequest, Endpoint, complete
from loadtest.stream import CompletionRecord, FailureKind, StreamError

REQUEST = CompletionRequest((1, 2, 3), 4)
SLACK = 0.2
"""Seconds that a busy machine may add; the exact definitions are tested without a clock in test_load_stream.py."""


async def answer(fake: FakeServer, timeout_s: float = 5.0) -> CompletionRecord:
    async with running(fake) as url:
        return await complete(Endpoint(url, "fake", timeout_s=timeout_s), REQUEST)


async def test_times_are_the_servers() -> None:
    record = await answer(FakeServer(ttft=0.25, itl=0.04))
    assert 0.25 <= record.ttft < 0.25 + SLACK
    assert len(record.itl) == 3
    assert 0.02 < sorted(record.itl)[1] < 0.04 + SLACK / 4
    assert record.tpot == pytest.approx(sum(record.itl) / 3)
    assert 0.25 + 3 * 0.04 <= record.e2e < 0.25 + 3 * 0.04 + 2 * SLACK
    assert record.text == "xxxx"


async def test_tokens_are_counted_by_the_server_not_by_chunks() -> None:
    record = await answer(FakeServer(tokens_per_chunk=2, cached_tokens=2))
    assert len(record.arrivals) == 2
    assert (record.usage.prompt_tokens, record.usage.completion_tokens, record.usage.cached_tokens) == (3, 4, 2)


async def test_a_body_that_ends_with_the_connection_is_read_as_well() -> None:
    assert (await answer(FakeServer(framing="close"))).usage.completion_tokens == 4


async def test_what_is_asked_for() -> None:
    fake = FakeServer()
    async with running(fake) as url:
        await complete(Endpoint(url + "/base/", "m", api_key="secret"), REQUEST)
    assert fake.bodies == [
        {
            "model": "m",
            "prompt": [1, 2, 3],
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    assert fake.heads[0].startswith("POST /base/v1/completions HTTP/1.1\r\n")
    assert "\r\nAuthorization: Bearer secret\r\n" in fake.heads[0]


FAULTS = {
    "http_500": (FailureKind.HTTP_STATUS, "500.*out of paper"),
    "no_answer": (FailureKind.CONNECT, "without an answer"),
    "not_http": (FailureKind.MALFORMED, "status line"),
    "cut_before_first": (FailureKind.CUT, "inside the answer"),
    "cut": (FailureKind.CUT, "inside the answer"),
    "hang": (FailureKind.TIMEOUT, "not finished after 0.3 s"),
    "error_event": (FailureKind.ERROR_EVENT, "the engine died"),
    "bad_json": (FailureKind.MALFORMED, "choices"),
    "not_an_object": (FailureKind.MALFORMED, "no object"),
    "no_done": (FailureKind.NO_DONE, "after 4 chunks"),
    "empty": (FailureKind.EMPTY, "no choice"),
    "no_finish": (FailureKind.NO_FINISH, "finish reason"),
    "no_usage": (FailureKind.NO_USAGE, "usage"),
    "half_usage": (FailureKind.MALFORMED, "completion_tokens"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_failure_has_a_name(fault: str) -> None:
    kind, message = FAULTS[fault]
    with pytest.raises(StreamError, match=message) as caught:
        await answer(FakeServer(fault=fault), timeout_s=0.3 if fault == "hang" else 5.0)
    assert caught.value.kind is kind


async def test_a_cut_without_framing_shows_as_a_missing_done() -> None:
    with pytest.raises(StreamError) as caught:
        await answer(FakeServer(fault="cut", framing="close"))
    assert caught.value.kind is FailureKind.NO_DONE


async def test_a_body_shorter_than_its_content_length_is_cut() -> None:
    with pytest.raises(StreamError) as caught:
        await answer(FakeServer(framing="too_long"))
    assert caught.value.kind is FailureKind.CUT


async def test_nobody_listens() -> None:
    async with running(FakeServer()) as url:
        pass
    with pytest.raises(StreamError, match="cannot connect") as caught:
        await complete(Endpoint(url, "fake"), REQUEST)
    assert caught.value.kind is FailureKind.CONNECT


def test_every_kind_of_failure_is_tried() -> None:
    assert {kind for kind, _ in FAULTS.values()} == set(FailureKind)


async def test_a_failed_request_leaves_no_connection_open() -> None:
    async with running(FakeServer(fault="error_event")) as url:
        with pytest.raises(StreamError):
            await complete(Endpoint(url, "fake"), REQUEST)
        await asyncio.sleep(0.01)
        assert not [task for task in asyncio.all_tasks() if "handle" in str(task.get_coro())]

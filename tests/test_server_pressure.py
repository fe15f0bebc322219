"""The real server with more requests than places: order by priority, a full queue, what can never fit. Over a tiny random model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import pytest

from tests.real_server import URL, RealServer, serving, until
from tests.test_server_real import LONG, TOKEN_BYTES
from tests.tiny_folder import make_folder

MAX_QUEUE = 6
FLAGS = (
    *("--block-size", "4", "--kv-cache-memory", str(4000 * TOKEN_BYTES), "--max-num-seqs", "1", "--max-queue", str(MAX_QUEUE)),
    *("--served-model-name", "tiny"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("tiny")
    make_folder(folder)
    with serving(folder, *FLAGS) as server:
        yield server
        until(server.is_idle)
        assert "Traceback" not in server.stderr


class Stream:
    """A stream that is read in a thread of its own until it ends or ``stop`` is called."""

    def __init__(self, server: RealServer, pool: ThreadPoolExecutor, **fields: Any) -> None:
        self.num_events = 0
        self._stopping = threading.Event()
        self._http = httpx.Client(base_url=server.base_url, timeout=60)
        self.reading = pool.submit(self._read, fields)

    def _read(self, fields: dict[str, Any]) -> None:
        with closing(self._http), self._http.stream("POST", URL, json={"stream": True} | fields) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                self.num_events += bool(line)
                if self._stopping.is_set():
                    return

    def stop(self) -> None:
        self._stopping.set()
        self.reading.result(timeout=10)


def num_waiting(server: RealServer) -> float:
    return server.metrics()["octavo_requests_waiting"]


def test_a_burst_is_served_by_priority_then_in_order_of_arrival(server: RealServer) -> None:
    order: list[str] = []

    def ask(name: str, priority: int) -> None:
        answer = httpx.post(
            f"{server.base_url}{URL}", json={"prompt": [5, 6, 7], "max_tokens": 40, "priority": priority}, timeout=60
        )
        assert answer.status_code == 200
        order.append(name)

    with ThreadPoolExecutor(8) as pool:
        running = Stream(server, pool, prompt=[9] * 5, **LONG)
        until(lambda: running.num_events > 3)
        asked = []
        for count, (name, priority) in enumerate((("c1", 5), ("b1", 0), ("a1", -5), ("c2", 5), ("b2", 0), ("a2", -5)), start=1):
            asked.append(pool.submit(ask, name, priority))
            until(lambda count=count: num_waiting(server) == count)  # type: ignore[misc]
        assert order == []
        running.stop()
        for each in asked:
            each.result(timeout=60)
    assert order == ["a1", "a2", "b1", "b2", "c1", "c2"]


def test_a_full_queue_is_a_429_while_streams_go_on_and_a_hang_up_frees_its_place(server: RealServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        running = Stream(server, pool, prompt=[9] * 5, **LONG)
        until(lambda: running.num_events > 3)
        hanging = pool.submit(httpx.post, f"{server.base_url}{URL}", json={"prompt": [5], "n": MAX_QUEUE - 2}, timeout=60)
        until(lambda: num_waiting(server) == MAX_QUEUE - 2)
        for stream in (False, True):
            answer = server.post(prompt=[[5], [6]], stream=stream, n=2)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            error = answer.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["code"] == "queue_full"
            assert f"{MAX_QUEUE - 2} requests wait already and {MAX_QUEUE} may" in error["message"]
        with pytest.raises(httpx.ReadTimeout):  # takes the last two places, and hangs up
            httpx.post(f"{server.base_url}{URL}", json={"prompt": [[5], [6]], "max_tokens": 2}, timeout=0.4)
        until(lambda: num_waiting(server) == MAX_QUEUE - 2)
        seen = running.num_events
        again = pool.submit(httpx.post, f"{server.base_url}{URL}", json={"prompt": [[5], [6]], "max_tokens": 2}, timeout=60)
        until(lambda: num_waiting(server) == MAX_QUEUE)
        until(lambda: running.num_events > seen + 10)
        running.stop()
        assert [hanging.result(60).status_code, again.result(60).status_code] == [200, 200]
    assert server.metrics()["octavo_requests_waiting"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_cache_can_never_hold_is_a_400_with_the_numbers(server: RealServer, stream: bool) -> None:
    answer = server.post(prompt=[5] * 100, max_tokens=4000, stream=stream)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "the request asks for 4100 (100 of prompt and max_tokens 4000)" in error["message"]

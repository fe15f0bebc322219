"""The life of the server as a process: start, announcement, signals, drain, exit status. Over a FakeEngine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import pytest

URL = "/v1/completions"


class Server:
    """A running fake_serve. ``lines`` is what it has printed on stdout so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""

    async def ready(self) -> Server:
        assert self.process.stdout is not None
        while not self.lines or not self.lines[-1].startswith("curl"):
            line = await asyncio.wait_for(self.process.stdout.readline(), 15)
            assert line, await self.errors()
            self.lines.append(line.decode().rstrip("\n"))
        self.url = re.search(r"http://[^/]+", self.lines[-1]).group()  # type: ignore[union-attr]
        return self

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def status(self, seconds: float = 10) -> int:
        return await asyncio.wait_for(self.process.wait(), seconds)

    async def errors(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()


@asynccontextmanager
async def serving(**plan: Any) -> AsyncIterator[Server]:
    command = (sys.executable, "-m", "tests.server.fake_serve", json.dumps(plan))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=os.environ | {"COLUMNS": "200"})
    try:
        yield Server(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_it_says_what_it_serves_and_its_curl_line_works() -> None:
    async with serving(settings={"served_model_name": "it's mine"}) as server:
        await server.ready()
        note, summary, curl = server.lines
        assert note == "a note with the number 7"
        assert "1.2 MiB = 40 blocks of 16 tokens, 2.0 KiB per token (float32); context 512 tokens" in summary
        command, url, _, header, _, data = shlex.split(curl)  # as a shell would, for machines without curl
        assert command == "curl"
        async with httpx.AsyncClient() as http:
            body = (await http.post(url, content=data, headers=dict([header.split(": ")]))).json()
        assert body["model"] == "it's mine"
        assert body["choices"][0]["text"] == "si ecnarF fo la"
        server.signal()
        assert await server.status() == 0
        assert "making a fake engine" in await server.errors()


async def test_sigterm_lets_streams_finish_and_refuses_what_is_new() -> None:
    async with serving(num_words=60, engine={"delay": 0.02}) as server:
        await server.ready()
        async with httpx.AsyncClient(base_url=server.url) as http:
            request = {"prompt": "a", "max_tokens": 60, "stream": True}
            async with http.stream("POST", URL, json=request) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                server.signal()
                await asyncio.sleep(0.15)
                health = await http.get("/health")
                assert (health.status_code, health.json()) == (503, {"status": "draining"})
                assert (await http.post(URL, json={"prompt": "a"})).status_code == 503
                rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "stop"
        assert await server.status(3) == 0


async def test_what_outlasts_the_shutdown_timeout_ends_with_an_error_event() -> None:
    async with serving(num_words=400, engine={"delay": 0.05}, settings={"shutdown_timeout": 0.5}) as server:
        await server.ready()
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as http:
            whole = asyncio.create_task(http.post(URL, json={"prompt": "a", "max_tokens": 400}))
            async with http.stream("POST", URL, json={"prompt": "a", "max_tokens": 400, "stream": True}) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                server.signal(signal.SIGINT)
                rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "server_unavailable"
            assert (await whole).status_code == 503
        assert await server.status(4) == 0


async def test_a_second_signal_ends_at_once() -> None:
    async with serving(num_words=400, engine={"delay": 0.05}) as server:
        await server.ready()
        async with (
            httpx.AsyncClient(base_url=server.url) as http,
            http.stream("POST", URL, json={"prompt": "a", "max_tokens": 400, "stream": True}) as stream,
        ):
            lines = stream.aiter_lines()
            await anext(lines)
            server.signal()
            await asyncio.sleep(0.2)
            began = time.monotonic()
            server.signal()
            rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
        assert await server.status(4) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 3


async def test_the_engine_gets_the_rest_of_the_shutdown_timeout_to_keep_its_cache() -> None:
    async with serving(engine={"flush_takes": 20.0}, settings={"shutdown_timeout": 0.5}) as server:
        await server.ready()
        began = time.monotonic()
        server.signal()
        assert await server.status(4) == 0
        assert 0.4 < time.monotonic() - began < 3


async def test_a_second_signal_cuts_that_short() -> None:
    async with serving(engine={"flush_takes": 20.0}) as server:
        await server.ready()
        server.signal()
        await asyncio.sleep(0.5)
        began = time.monotonic()
        server.signal()
        assert await server.status(4) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 2


@pytest.mark.parametrize("plan", [{"make_seconds": 60}, {"engine": {"start_seconds": 60}}])
async def test_while_it_starts_it_answers_503_and_a_signal_ends_it(plan) -> None:
    async with serving(**plan, settings={"host": "127.0.0.1"}) as server:
        assert server.process.stderr is not None
        await asyncio.wait_for(server.process.stderr.readline(), 15)  # the first progress line
        port = await listening_port(server.process.pid)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            health = await http.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "starting"})
            assert (await http.post(URL, json={"prompt": "a"})).status_code == 503
            assert (await http.get("/v1/models")).status_code == 503
            assert "octavo_requests_running 0.0" in (await http.get("/metrics")).text
        server.signal()
        assert await server.status(5) == 0


async def test_a_start_that_fails_is_one_line_and_status_2() -> None:
    async with serving(start_error="no model at\n/nowhere") as server:
        assert await server.status(15) == 2
        *_, last = (await server.errors()).splitlines()
        assert last == "octavo: error: no model at /nowhere"
        assert server.lines == []


async def test_the_key_is_not_printed() -> None:
    async with serving(settings={"api_key": "hush-hush"}) as server:
        await server.ready()
        assert "hush-hush" not in "".join(server.lines)
        assert "$OCTAVO_API_KEY" in shlex.split(server.lines[-1])[5]


async def listening_port(pid: int) -> int:
    async with asyncio.timeout(10):
        while True:
            ports = [c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            if ports:
                return int(ports[0])
            await asyncio.sleep(0.02)

"""A client that hangs up: its requests are closed in the engine at once, streaming or not. Over real connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from server.drain import Drain
from tests.fakes import FakeEngine

LONG = ["word "] * 10_000


def request_bytes(**fields: Any) -> bytes:
    body = json.dumps({"prompt": "a", "max_tokens": 400} | fields).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
@pytest.mark.parametrize("delay", [0.01, 60.0])  # while tokens come, and while none does
@pytest.mark.parametrize("n", [1, 3])
async def test_hanging_up_closes_every_generator(live, stream, prompt, delay, n) -> None:
    engine = FakeEngine(pieces=lambda _: LONG, delay=delay)
    num = n * len(prompt)
    drain = Drain()
    async with live(engine, drain) as address:
        _, writer = await asyncio.open_connection(*address)
        writer.write(request_bytes(prompt=prompt, stream=stream, n=n))
        await until(lambda: engine.num_running == num)
        await asyncio.sleep(0.03)
        assert drain.num_active == 1
        writer.close()
        await until(lambda: engine.num_running == 0, 1.0)
        assert engine.num_aborted == num
        await until(lambda: drain.num_active == 0, 1.0)


async def test_resetting_the_connection_in_mid_stream_is_a_hang_up(live) -> None:
    engine = FakeEngine(pieces=lambda _: LONG, delay=0.005)
    async with live(engine) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request_bytes(stream=True))
        await reader.readuntil(b"word")
        writer.transport.abort()
        await until(lambda: engine.num_aborted == 1, 1.0)


async def test_a_body_that_never_comes_leaves_nothing_behind(live) -> None:
    engine, drain = FakeEngine(), Drain()
    async with live(engine, drain) as address:
        _, writer = await asyncio.open_connection(*address)
        writer.write(request_bytes()[:-10])
        await until(lambda: drain.num_active == 1)
        writer.close()
        await until(lambda: drain.num_active == 0)
    assert engine.requests == []


async def test_many_impatient_clients_then_one_that_waits(live) -> None:
    engine = FakeEngine(pieces=lambda prompt: LONG if prompt == "a" else ["done"], delay=0.01)
    async with live(engine) as address:
        writers = []
        for index in range(60):
            _, writer = await asyncio.open_connection(*address)
            writer.write(request_bytes(stream=index % 2 == 0))
            writers.append(writer)
        await until(lambda: engine.num_running == 60)
        for writer in writers:
            writer.close()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request_bytes(prompt="b"))
        assert b'"done"' in await asyncio.wait_for(reader.readuntil(b"}}"), 2.0)
        writer.close()
        await until(lambda: engine.num_running == 0, 1.0)
        assert engine.num_aborted == 60


async def test_a_slow_reader_gets_every_piece_in_the_end(live) -> None:
    text = "x" * 20_000
    engine = FakeEngine(pieces=lambda _: [text] * 300)
    async with live(engine) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request_bytes(stream=True))
        await asyncio.sleep(0.2)
        received = b""
        while b"[DONE]" not in received[-200:]:
            received += await asyncio.wait_for(reader.read(2**16), 10.0)
        assert received.count(b"x") >= 300 * len(text)
        writer.close()

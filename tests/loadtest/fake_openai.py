"""A completion server with a known TTFT and ITL, and with every way of failing. Raw asyncio: it can break HTTP itself.

python tests/loadtest/fake_openai.py --port N [--fault NAME] [--ttft S] [--itl S]
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

FRAMINGS = {"chunked": b"Transfer-Encoding: chunked", "close": b"X-Framing: none", "too_long": b"Content-Length: 1000000"}


@dataclass
class FakeServer:
    """``tokens_per_chunk`` tokens arrive together. ``fault`` names what goes wrong (see ``_events`` and ``_answer``);
    ``next_faults`` gives each request another one, for clients that send one request at a time."""

    ttft: float = 0.0
    itl: float = 0.0
    tokens_per_chunk: int = 1
    fault: str = ""
    cached_tokens: int = 0
    framing: str = "chunked"
    next_faults: Iterator[str] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                (int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")), 0
            )
            await self._answer(head, await reader.readexactly(length), writer)
        except ConnectionError:
            return  # the client has seen enough
        finally:
            writer.close()

    async def _answer(self, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if head.startswith("GET /health"):
            writer.write(_plain(200, {}))
        elif head.startswith("GET /v1/models"):
            writer.write(_plain(200, {"data": [{"id": "fake"}]}))
        else:
            self.heads.append(head)
            self.bodies.append(json.loads(body))
            await self._complete(writer)
        await writer.drain()

    async def _complete(self, writer: asyncio.StreamWriter) -> None:
        if self.next_faults is not None:
            self.fault = next(self.next_faults)
        if self.fault == "http_500":
            writer.write(_plain(500, {"error": {"message": "out of paper"}}))
        elif self.fault == "not_http":
            writer.write(b"220 mail.example\r\n\r\n")
        elif self.fault != "no_answer":
            await self._stream(self.bodies[-1], writer)

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        chunked = self.framing == "chunked"
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n")
        writer.write(FRAMINGS[self.framing] + b"\r\n\r\n")
        await writer.drain()
        async for data in self._events(body):
            event = b"data: " + data + b"\n\n"
            writer.write(b"%x\r\n%s\r\n" % (len(event), event) if chunked else event)
            await writer.drain()
        if chunked and self.fault != "cut":
            writer.write(b"0\r\n\r\n")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        num_tokens = body["max_tokens"] - (1 if self.fault == "short" else 0)
        await asyncio.sleep(self.ttft)
        if self.fault == "cut_before_first":
            raise ConnectionResetError
        if self.fault != "empty":
            for start in range(0, num_tokens, self.tokens_per_chunk):
                if start:
                    await asyncio.sleep(self.itl)
                if start and self.fault in ("cut", "hang", "error_event", "bad_json", "not_an_object"):
                    break
                yield _chunk("x" * min(self.tokens_per_chunk, num_tokens - start), None)
        if self.fault == "hang":
            await asyncio.sleep(60)
        if self.fault == "error_event":
            yield b'{"error":{"message":"the engine died","code":500}}'
        if self.fault == "bad_json":
            yield b'{"choices":['
        if self.fault == "not_an_object":
            yield b"[1]"
        if self.fault == "cut":
            return
        if self.fault not in ("no_finish", "empty"):
            yield _chunk("", "length")
        if self.fault != "no_usage":
            yield self._usage(body, num_tokens)
        if self.fault != "no_done":
            yield b"[DONE]"

    def _usage(self, body: dict[str, Any], num_tokens: int) -> bytes:
        details = {"cached_tokens": self.cached_tokens}
        usage = {
            "prompt_tokens": len(body["prompt"]) + (self.fault == "miscount"),
            "completion_tokens": num_tokens,
            "prompt_tokens_details": details,
        }
        if self.fault == "half_usage":
            del usage["completion_tokens"]
        return json.dumps({"choices": [], "usage": usage}).encode()


def _chunk(text: str, finish_reason: str | None) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], "usage": None}).encode()


def _plain(status: int, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return f"HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


@asynccontextmanager
async def running(fake: FakeServer) -> AsyncIterator[str]:
    """The URL of the fake while it runs in this event loop."""
    server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--fault", default="")
    parser.add_argument("--ttft", type=float, default=0.0)
    parser.add_argument("--itl", type=float, default=0.0)
    options = parser.parse_args()
    fake = FakeServer(options.ttft, options.itl, fault=options.fault)
    server = await asyncio.start_server(fake.handle, "127.0.0.1", options.port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())

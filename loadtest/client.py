"""An asyncio client that streams one completion from an OpenAI-compatible server and times its chunks.

Plain HTTP/1.1 over asyncio streams, one connection for each request: on a machine that client and server share, the
client must cost next to nothing. Knows nothing of workloads or of figures over several requests.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from loadtest.stream import CompletionRecord, FailureKind, StreamError, StreamFold

_MAX_LINE = 1 << 20
_READ_SIZE = 1 << 16


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to send requests. ``url`` is the server's root, ``timeout_s`` the patience for one whole request."""

    url: str
    model: str
    api_key: str | None = None
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A prompt as token ids, to be answered greedily with exactly ``max_tokens`` tokens."""

    prompt: tuple[int, ...]
    max_tokens: int


async def complete(endpoint: Endpoint, request: CompletionRequest) -> CompletionRecord:
    """Stream one completion to its end. Raises StreamError for whatever is not a whole, well-formed answer."""
    fold = StreamFold(time.perf_counter())
    try:
        async with asyncio.timeout(endpoint.timeout_s):
            async with aclosing(post(endpoint, completion_body(endpoint.model, request))) as pieces:
                async for piece in pieces:
                    fold.feed(piece, time.perf_counter())
    except TimeoutError as exc:
        raise StreamError(FailureKind.TIMEOUT, f"not finished after {endpoint.timeout_s:g} s") from exc
    except (ConnectionError, asyncio.IncompleteReadError) as exc:
        raise StreamError(FailureKind.CUT, f"the connection ended inside the answer ({exc})") from exc
    return fold.finish(time.perf_counter())


def completion_body(model: str, request: CompletionRequest) -> dict[str, Any]:
    """The JSON body. ``ignore_eos`` is an extension that servers share; without it output lengths could not be fixed."""
    return {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def post(endpoint: Endpoint, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
    """The body of the 200 answer, piece by piece as it arrives. Closing it early hangs up."""
    reader, writer = await _connect(endpoint.url)
    try:
        writer.write(_request_bytes(endpoint, json.dumps(body, separators=(",", ":")).encode()))
        await writer.drain()
        status, headers = await _read_head(reader)
        if status != 200:
            raise StreamError(FailureKind.HTTP_STATUS, f"HTTP {status}: {(await _read_start(reader, headers))[:400]!r}")
        async for piece in _body(reader, headers):
            yield piece
    finally:
        writer.close()


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    try:
        return await asyncio.open_connection(
            parts.hostname, parts.port or (443 if secure else 80), ssl=secure or None, limit=_MAX_LINE
        )
    except OSError as exc:
        raise StreamError(FailureKind.CONNECT, f"cannot connect to {url}: {exc}") from exc


def _request_bytes(endpoint: Endpoint, body: bytes) -> bytes:
    parts = urlsplit(endpoint.url)
    lines = [
        f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        "Connection: close",
        f"Content-Length: {len(body)}",
    ]
    if endpoint.api_key is not None:
        lines.append(f"Authorization: Bearer {endpoint.api_key}")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (ConnectionError, asyncio.IncompleteReadError) as exc:
        raise StreamError(FailureKind.CONNECT, "the server closed the connection without an answer") from exc
    except asyncio.LimitOverrunError as exc:
        raise StreamError(FailureKind.MALFORMED, f"no end of the HTTP head within {_MAX_LINE} bytes") from exc
    status_line, *lines = head.decode("latin1").split("\r\n")
    try:
        status = int(status_line.split()[1])
    except (IndexError, ValueError) as exc:
        raise StreamError(FailureKind.MALFORMED, f"no HTTP status line: {status_line[:200]!r}") from exc
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    return status, headers


async def _read_start(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    """What a failed answer says, as far as it comes."""
    text = b""
    try:
        async for piece in _body(reader, headers):
            text += piece
    except (ConnectionError, asyncio.IncompleteReadError):
        text += b" (cut)"
    return text


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Decodes the three framings of HTTP/1.1. Raises IncompleteReadError where the framing shows that something is missing."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := await _chunk_size(reader):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        missing = int(headers["content-length"])
        while missing:
            piece = await reader.read(min(missing, _READ_SIZE))
            if not piece:
                raise asyncio.IncompleteReadError(b"", missing)
            missing -= len(piece)
            yield piece
    else:
        while piece := await reader.read(_READ_SIZE):
            yield piece


async def _chunk_size(reader: asyncio.StreamReader) -> int:
    line = await reader.readuntil(b"\r\n")
    try:
        return int(line.split(b";")[0], 16)
    except ValueError as exc:
        raise StreamError(FailureKind.MALFORMED, f"not a chunk size: {line[:100]!r}") from exc

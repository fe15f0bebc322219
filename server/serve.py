"""The life of the server: socket, signals, HTTP from the first moment, engine start, drain, exit.

Knows uvicorn and signals; knows nothing of models, flags or how an engine is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shlex
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from engine.errors import ConfigError
from engine.stats import EngineInfo
from server.app import create_app
from server.drain import Drain
from server.engine_client import PendingEngine, RunnableEngine
from server.metrics import Metrics
from server.settings import Settings
from server.units import format_bytes

logger = logging.getLogger("octavo.server")

# What is left after the drain: time for error events to reach their clients, and for the engine to leave.
_LAST_EVENTS_SECONDS = 2
_ENGINE_STOP_SECONDS = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

MakeEngine = Callable[[Metrics], Awaitable[RunnableEngine]]
Announce = Callable[[str], None]


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError of one line: in use, not ours to take, no such address."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as exc:
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Two sockets may be bound to one port as long as neither listens: listen now, to be refused now.
        sock.listen(2048)
    except OSError as exc:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from None
    return sock


class HttpServer(uvicorn.Server):
    """uvicorn, but the signals are ours: uvicorn would close the door at the first one, and die of it in the end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class StopSignals:
    """The first SIGTERM or SIGINT asks for a drain, the second for an end at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.exit_status = 0
        self._loop = loop
        self._first_time: float | None = None
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self.first.is_set():
            self.exit_status = 128 + number
            self.second.set()
        else:
            self._first_time = self._loop.time()
        self.first.set()

    def seconds_left(self, timeout: float) -> float:
        """What is left of the time since the first signal; nothing before it, and nothing after the second."""
        if self._first_time is None or self.second.is_set():
            return 0.0
        return max(0.0, self._first_time + timeout - self._loop.time())


async def serve(settings: Settings, sock: socket.socket, make_engine: MakeEngine, announce: Announce) -> int:
    """Serve until a signal; the exit status is 0 after a drain, 128 + signal after a second signal.

    Raises:
        StartupError: the engine cannot start; the HTTP server has been closed by then.
    """
    signals = StopSignals(asyncio.get_running_loop())
    engine, metrics, drain = PendingEngine(), Metrics(CollectorRegistry()), Drain()
    app = create_app(engine, metrics, settings, drain)
    async with _http_running(app, sock, signals), _engine_running(engine, metrics, make_engine, settings, signals) as started:
        await _first_of(started, signals.first.wait())
        if started.done():
            for line in announcement(started.result(), settings, sock):
                announce(line)
            await signals.first.wait()
        await _drain(drain, settings.shutdown_timeout, signals)
    return signals.exit_status


@asynccontextmanager
async def _http_running(app: FastAPI, sock: socket.socket, signals: StopSignals) -> AsyncIterator[None]:
    """HTTP answers inside the context. Should uvicorn end by itself, that counts as a signal, and its error is raised."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_EVENTS_SECONDS,
    )
    server = HttpServer(config)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    serving.add_done_callback(lambda _: signals.first.set())
    try:
        yield
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def _engine_running(
    place: PendingEngine, metrics: Metrics, make_engine: MakeEngine, settings: Settings, signals: StopSignals
) -> AsyncIterator[asyncio.Task[EngineInfo]]:
    """A task that ends when the engine is ready. On the way out the engine is stopped, however far it came.

    What the drain left of the shutdown timeout is the engine's, to keep its cache on the disk.
    """
    made: list[RunnableEngine] = []

    async def start() -> EngineInfo:
        engine = await make_engine(metrics)
        made.append(engine)
        place.attach(engine)
        await engine.start()
        assert engine.info is not None, "the engine is ready but says nothing of itself"
        return engine.info

    task = asyncio.create_task(start())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for engine in made:
            await _stop(engine, signals.seconds_left(settings.shutdown_timeout), signals)


async def _stop(engine: RunnableEngine, flush_seconds: float, signals: StopSignals) -> None:
    """End the engine. A second signal cuts the flush short: the engine ends with this process then."""
    stopping = asyncio.ensure_future(engine.stop(flush_seconds))
    cuts = [signals.second.wait()] if flush_seconds else []
    await _first_of(stopping, *cuts, timeout=flush_seconds + _ENGINE_STOP_SECONDS)
    if stopping.done():
        stopping.result()
        return
    stopping.cancel()
    if not signals.second.is_set():
        logger.error("the engine did not stop within %.0f s", flush_seconds + _ENGINE_STOP_SECONDS)


async def _drain(drain: Drain, timeout: float, signals: StopSignals) -> None:
    """Refuse what is new, let what runs finish, cut what takes longer than ``timeout`` seconds or a second signal allows."""
    drain.begin()
    await _first_of(drain.wait_idle(), signals.second.wait(), timeout=timeout)
    drain.cut()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(drain.wait_idle(), _LAST_EVENTS_SECONDS)


async def _first_of(*things: Awaitable[object], timeout: float | None = None) -> None:
    """Return when one of them is done. Coroutines are cancelled then; tasks belong to their owner and go on."""
    futures = [asyncio.ensure_future(thing) for thing in things]
    try:
        await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future, thing in zip(futures, things, strict=True):
            if future is not thing:
                future.cancel()


def announcement(info: EngineInfo, settings: Settings, sock: socket.socket) -> list[str]:
    """What the operator reads when the server is ready: the engine's notes, one line of numbers, one line to paste."""
    summary = (
        f"{info.model_name}: {info.architecture}, {info.num_parameters / 1e6:.1f}M parameters, {info.dtype} on {info.device}; "
        f"KV cache {format_bytes(info.cache_bytes)} = {info.num_blocks} blocks of {info.block_size} tokens, "
        f"{format_bytes(info.bytes_per_token)} per token ({info.kv_dtype}); context {info.max_model_len} tokens"
    )
    return [*info.notes, summary, curl_line(info, settings, sock)]


def curl_line(info: EngineInfo, settings: Settings, sock: socket.socket) -> str:
    """Works when pasted. A key is not printed: the line takes it from the reader's OCTAVO_API_KEY."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    name = settings.served_model_name or info.model_name
    body = {"model": name, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
    key = ' -H "Authorization: Bearer $OCTAVO_API_KEY"' if settings.all_keys else ""
    return (
        f"curl http://{host}:{port}/v1/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"
    )

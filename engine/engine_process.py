"""One life of the engine process, seen from the API side: spawn, handshake, messages, death."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from engine import errors
from engine.config import EngineConfig
from engine.errors import StartupError
from engine.kernel_cache import kernel_cache_folder
from engine.messages import Failed, FromEngine, Progress, Ready, Stop, ToEngine, decoder_from_engine, encode
from engine.process import ProcessArguments
from engine.stats import EngineInfo

STOP_SECONDS = 5.0
LAST_WORDS_SECONDS = 0.1  # messages that a dying process has sent may still be on their way


class EngineProcess:
    """A spawned engine with its two sockets. Started once; for another life, make another."""

    def __init__(self, process: asyncio.subprocess.Process, folder: tempfile.TemporaryDirectory[str]) -> None:
        self._process = process
        self._folder = folder
        context = zmq.asyncio.Context.instance()
        self._to_engine = _bind(context, zmq.PUSH, _address(folder, "in"))
        self._from_engine = _bind(context, zmq.PULL, _address(folder, "out"))
        self._decoder = decoder_from_engine()
        self._exit = asyncio.create_task(process.wait())
        self._is_ready = False

    @classmethod
    async def spawn(cls, config: EngineConfig) -> EngineProcess:
        folder = tempfile.TemporaryDirectory(prefix="octavo-")
        arguments = ProcessArguments(config, _address(folder, "in"), _address(folder, "out"))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "engine.process",
            msgspec.json.encode(arguments).decode(),
            stdin=asyncio.subprocess.PIPE,  # closes when we die, which ends the engine
            stdout=sys.stderr,
            env=_environment(),
        )
        return cls(process, folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_ready(self, on_progress: Callable[[str, float | None], None]) -> EngineInfo:
        """Follow the start until the engine is ready.

        Raises:
            StartupError: the engine said why it cannot start, or died without a word.
        """
        while True:
            message = await self.receive()
            if isinstance(message, Progress):
                on_progress(message.stage, message.share)
            elif isinstance(message, Ready):
                self._is_ready = True
                self._forget_addresses()
                return message.info
            elif isinstance(message, Failed):
                await self._exit
                raise _startup_error(message)
            else:
                code = await self._exit
                raise StartupError(f"the engine process ended with status {code} while it started; its last words are above")

    def _forget_addresses(self) -> None:
        """Both ends are connected and will not connect again: nothing of the sockets need lie about, should all of us be killed."""
        events = self._to_engine.get(zmq.EVENTS)
        assert isinstance(events, int)
        if events & zmq.POLLOUT:  # a peer is there
            self._folder.cleanup()

    async def receive(self) -> FromEngine | None:
        """The next message; None once the process is dead and everything it said has been read."""
        incoming = asyncio.ensure_future(self._from_engine.recv())
        await asyncio.wait((incoming, self._exit), return_when=asyncio.FIRST_COMPLETED)
        if not incoming.done():
            await asyncio.wait((incoming,), timeout=LAST_WORDS_SECONDS)
        if not incoming.done():
            incoming.cancel()
            return None
        return self._decoder.decode(await incoming)

    def send(self, message: ToEngine) -> None:
        """Queue a message; what is sent to a dead process is lost, and the death is reported by ``receive``."""
        self._to_engine.send(encode(message))

    async def stop(self, flush_seconds: float = 0.0) -> None:
        """End the process: gently, but while it starts it would not listen. Safe to call twice, and on a dead process.

        It may take ``flush_seconds`` longer to keep what is cached on the disk.
        """
        if self._process.returncode is None and not self._is_ready:
            self._process.kill()
        elif self._process.returncode is None:
            self.send(Stop(flush_seconds))
            try:
                await asyncio.wait_for(asyncio.shield(self._exit), STOP_SECONDS + flush_seconds)
            except TimeoutError:
                self._process.kill()
        await self._exit
        self._to_engine.close(linger=0)
        self._from_engine.close(linger=0)
        self._folder.cleanup()


def _address(folder: tempfile.TemporaryDirectory[str], name: str) -> str:
    return f"ipc://{Path(folder.name) / name}"


def _bind(context: zmq.asyncio.Context, kind: int, address: str) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.bind(address)
    return socket


def _environment() -> dict[str, str]:
    """The engine's environment: large pages for large tensors, and a place for compiled kernels, unless the user says otherwise."""
    defaults = {"THP_MEM_ALLOC_ENABLE": "1", "NUMBA_CACHE_DIR": str(kernel_cache_folder())}
    return {**defaults, **os.environ}


def _startup_error(message: Failed) -> StartupError:
    kind = getattr(errors, message.error, StartupError)
    return kind(message.message) if issubclass(kind, StartupError) else StartupError(message.message)

"""A server started for a measurement: its command, how long it took to be ready, its end.

Knows ``--port``, ``GET /health`` and SIGTERM, which ``octavo serve``, ``vllm serve`` and ``llama-server`` share.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

POLL_S = 0.05
STOP_S = 30.0


class ServerError(Exception):
    """The server did not start. One message with what it last printed."""


@dataclass(frozen=True, slots=True)
class ServerUnderTest:
    """``pid`` is None where only a URL is known: then memory and CPU load cannot be. ``ready_in_s``: from the start of the
    process to the first 200 of /health, None for a server that someone else started."""

    url: str
    pid: int | None
    ready_in_s: float | None


@contextmanager
def serving(command: str, ready_timeout_s: float) -> Iterator[ServerUnderTest]:
    """Run ``command --port N`` on a free port until the block ends; ready when the block is entered. Raises ServerError."""
    port = _free_port()
    with tempfile.TemporaryFile() as log, _exit_on_sigterm():
        start = time.perf_counter()
        process = _start([*shlex.split(command), "--port", str(port)], log)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, url, start + ready_timeout_s, log)
            yield ServerUnderTest(url, process.pid, time.perf_counter() - start)
        finally:
            _stop(process)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends this process as an exception, so that it does not leave the server behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _start(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    except OSError as exc:
        raise ServerError(f"cannot run {command[0]!r}: {exc.strerror}") from exc


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, deadline: float, log: IO[bytes]) -> None:
    while not is_healthy(url):
        if process.poll() is not None:
            raise ServerError(
                f"the server ended with status {process.returncode} before it was ready; it printed:\n{_tail(log)}"
            )
        if time.perf_counter() > deadline:
            raise ServerError(f"the server was not ready in time; it printed:\n{_tail(log)}")
        time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM and patience; then SIGKILL for the whole session, which is the server's own."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: IO[bytes], num_lines: int = 15) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-num_lines:])


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])

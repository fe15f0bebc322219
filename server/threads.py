"""Slow blocking work beside an event loop, which must neither freeze the loop nor keep the process from ending."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_GRACE_SECONDS = 2.0


class CancelledWork(Exception):
    """Raised inside the work at its next ``check`` after its reader has gone."""


class CancelToken:
    """How work in a thread learns that it should end."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def check(self) -> None:
        """Raise CancelledWork if the work is no longer wanted."""
        if self._cancelled.is_set():
            raise CancelledWork


async def run_in_thread(work: Callable[[CancelToken], T]) -> T:
    """The result of ``work``, run in a daemon thread: unlike an executor's, the interpreter does not wait for it at exit.

    When cancelled, the work gets a moment to reach a ``check`` and to clean up behind itself.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    token = CancelToken()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not future.done():
            set_outcome()

    def run() -> None:
        try:
            result = work(token)
        except BaseException as exc:
            error = exc
            report: Callable[[], None] = lambda: future.set_exception(error)  # noqa: E731
        else:
            report = lambda: future.set_result(result)  # noqa: E731
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            loop.call_soon_threadsafe(settle, report)

    threading.Thread(target=run, name="octavo-work", daemon=True).start()
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        token.cancel()
        await asyncio.wait((future,), timeout=_GRACE_SECONDS)
        future.cancel()
        if not future.cancelled():
            future.exception()
        raise

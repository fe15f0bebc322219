"""Counts the requests inside, refuses new ones once draining has begun, and cuts short what takes too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Drain:
    """Lives on one event loop. ``begin`` and ``cut`` may be called again without effect."""

    def __init__(self) -> None:
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._on_cut: set[Callable[[], None]] = set()
        self._is_cut = False
        self.is_draining = False

    @property
    def num_active(self) -> int:
        return self._num_active

    @contextmanager
    def active(self) -> Iterator[None]:
        """A request is inside, from its head to the last byte of its answer."""
        self._num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_active -= 1
            if self._num_active == 0:
                self._idle.set()

    @contextmanager
    def on_cut(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call ``stop`` when the rest is to be cut short; at once if that has happened already."""
        self._on_cut.add(stop)
        if self._is_cut:
            stop()
        try:
            yield
        finally:
            self._on_cut.discard(stop)

    def begin(self) -> None:
        self.is_draining = True

    def cut(self) -> None:
        self._is_cut = True
        for stop in tuple(self._on_cut):
            stop()

    async def wait_idle(self) -> None:
        await self._idle.wait()

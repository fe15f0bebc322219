"""Shows what start-up is doing, on stderr: a bar on a terminal, plain lines elsewhere (logs, pipes, containers)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class ProgressView(Protocol):
    """May be called from any thread."""

    def update(self, stage: str, fraction: float | None) -> None:
        """``stage`` is under way; ``fraction`` of it is done (0 to 1), or nobody knows how much."""


class LineProgress:
    """A line when a stage begins, and one for each tenth of it, but never more than one a second within a stage."""

    _MIN_SECONDS = 1.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._stage: str | None = None
        self._tenths = 0
        self._last_time = 0.0

    def update(self, stage: str, fraction: float | None) -> None:
        tenths = int((fraction or 0.0) * 10)
        now = time.monotonic()
        if stage != self._stage:
            self._write(stage)
        elif tenths > self._tenths and (now - self._last_time >= self._MIN_SECONDS or tenths == 10):
            self._write(f"{stage}: {tenths * 10}%")
        else:
            return
        self._stage, self._tenths, self._last_time = stage, tenths, now

    def _write(self, line: str) -> None:
        print(f"octavo: {line}", file=self._stream, flush=True)


class BarProgress:
    """One bar for each stage, on a terminal."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._stage: str | None = None
        self._task: TaskID | None = None

    def update(self, stage: str, fraction: float | None) -> None:
        if stage != self._stage or self._task is None:
            self._finish_stage()
            self._task = self._bars.add_task(stage, total=None if fraction is None else 1.0)
            self._stage = stage
        if fraction is not None:
            self._bars.update(self._task, total=1.0, completed=fraction)

    def _finish_stage(self) -> None:
        if self._task is not None:
            self._bars.update(self._task, total=1.0, completed=1.0)


@contextmanager
def open_progress(stream: TextIO = sys.stderr) -> Iterator[ProgressView]:
    """A view for as long as the context lasts; on a terminal, the bars stop moving at its end."""
    if not stream.isatty():
        yield LineProgress(stream)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=stream)) as bars:
        yield BarProgress(bars)

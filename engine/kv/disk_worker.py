"""The thread that reads and writes block files, so that no step waits for a disk.

Jobs go in from the engine's thread, what became of them comes out by ``poll``. The worker knows files and the host rows they
are read into and written from; it does not know why. Its log lines are the only word on a file that could not be used.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.kv.block_file import BlockFolder, UnusableFileError
from engine.kv.tiers import PREFIX_BYTES, BlockKey, StoredBlock

logger = logging.getLogger("octavo.cache")

PAUSE_SECONDS = 60.0
RESCAN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ReadDone:
    """``ok``: the host slot holds the block. Otherwise the file is of no use, and what the slot holds neither."""

    key: BlockKey
    slot: int
    ok: bool


@dataclass(frozen=True, slots=True)
class WriteDone:
    """``stored`` is None when the block is not on the disk after all."""

    key: BlockKey
    slot: int
    stored: StoredBlock | None


@dataclass(frozen=True, slots=True)
class DeleteDone:
    """Not ``ok``: the file could not be deleted and may still be there."""

    key: BlockKey
    ok: bool = True


@dataclass(frozen=True, slots=True)
class ScanDone:
    """What lies in the folder, the least recently used first; None when that could not be found out. ``was_asked``: this answers
    a ``rescan``."""

    found: tuple[StoredBlock, ...] | None
    was_asked: bool = False


Done = ReadDone | WriteDone | DeleteDone | ScanDone


class DiskIO(Protocol):
    """What the tiers need of the disk. Reads go before writes; each job is answered by exactly one ``Done``, in any order."""

    @property
    def model(self) -> bytes:
        """The part of every key that says whose blocks are read and written here."""

    def read(self, key: BlockKey, slot: int) -> None: ...

    def write(self, key: BlockKey, slot: int) -> None: ...

    def delete(self, key: BlockKey) -> None: ...

    def rescan(self) -> None:
        """Look through the folder, once what is to be deleted by now is gone."""

    def poll(self) -> Sequence[Done]:
        """What is done since the last call. A ScanDone may be among it that was not asked for."""

    def wait(self, seconds: float) -> None:
        """Return when something is done, or after that time."""


class DiskWorker:
    """A thread over a BlockFolder. ``rows[slot]`` are the bytes of a host slot.

    When a write fails (the disk is full, the folder read-only), storing pauses for PAUSE_SECONDS, with one log line; reading
    goes on. The folder is looked through again every RESCAN_SECONDS while there is something to do, since other servers may use it.
    """

    def __init__(self, folder: BlockFolder, rows: Sequence[memoryview], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._rows = rows
        self._clock = clock
        self._reads: deque[tuple[BlockKey, int]] = deque()
        self._deletes: deque[BlockKey] = deque()
        self._num_rescans = 0
        self._writes: deque[tuple[BlockKey, int]] = deque()
        self._used: list[BlockKey] = []  # the thread's own: read, but not marked as used yet
        self._done: list[Done] = []
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._is_closing = False
        self._paused_until: float | None = None
        self._last_scan = clock()
        self._thread = threading.Thread(target=self._run, name="disk-cache", daemon=True)
        self._thread.start()

    @property
    def model(self) -> bytes:
        return self._folder.model

    def read(self, key: BlockKey, slot: int) -> None:
        with self._changed:
            self._reads.append((key, slot))
            self._changed.notify_all()

    def write(self, key: BlockKey, slot: int) -> None:
        with self._changed:
            self._writes.append((key, slot))
            self._changed.notify_all()

    def delete(self, key: BlockKey) -> None:
        with self._changed:
            self._deletes.append(key)
            self._changed.notify_all()

    def rescan(self) -> None:
        with self._changed:
            self._num_rescans += 1
            self._changed.notify_all()

    def poll(self) -> Sequence[Done]:
        if not self._done and self._failure is None:
            return ()
        with self._changed:
            done, self._done = self._done, []
        if self._failure is not None:
            raise RuntimeError("the disk cache's thread failed; its error is above") from self._failure
        return done

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._failure is not None, seconds)

    def close(self) -> None:
        """Drop what has not begun, end the thread. The job at hand is finished first. Safe to call twice."""
        with self._changed:
            self._is_closing = True
            self._reads.clear()
            self._deletes.clear()
            self._num_rescans = 0
            self._writes.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                done = job()
                with self._changed:
                    self._done.extend(done)
                    self._changed.notify_all()
        except BaseException as error:
            logger.exception("the disk cache's thread failed")
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _next_job(self) -> Callable[[], list[Done]] | None:
        """Wait for work, and take the most urgent piece: a request waits for a read, a bound for a delete, nobody for a write."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closing or self._reads or self._used or self._deletes or self._num_rescans or self._writes
            )
            if self._is_closing:
                return None
            if self._reads:
                key, slot = self._reads.popleft()
                return lambda: [self._read(key, slot)]
            if self._used:
                return self._mark_used
            if self._deletes:
                deleted = self._deletes.popleft()
                return lambda: [self._delete(deleted)]
            if self._num_rescans:
                self._num_rescans -= 1
                return lambda: [self._scan(was_asked=True)]
            written, source = self._writes.popleft()
            return lambda: [self._write(written, source), *self._rescan()]

    def _read(self, key: BlockKey, slot: int) -> ReadDone:
        try:
            self._folder.read_into(key, self._rows[slot])
        except UnusableFileError as error:
            logger.warning("disk cache: %s: %s; the block will be computed", self._folder.path(key).name, error)
            if not error.is_gone:
                self._delete(key)
            return ReadDone(key, slot, ok=False)
        self._used.append(key)
        return ReadDone(key, slot, ok=True)

    def _mark_used(self) -> list[Done]:
        """A chain is read from its beginning; the beginning is what must be deleted last."""
        used, self._used = self._used, []
        try:
            self._folder.mark_used(reversed(used))
        except OSError as error:
            logger.warning("disk cache: cannot mark files in %s as used: %s", self._folder.root, error.strerror or error)
        return []

    def _write(self, key: BlockKey, slot: int) -> WriteDone:
        if self._paused_until is not None and self._clock() < self._paused_until:
            return WriteDone(key, slot, None)
        try:
            stored = self._folder.write(key, self._rows[slot])
        except IsADirectoryError as error:  # a matter of this name, not of the disk
            logger.warning("disk cache: cannot store %s: %s", self._folder.path(key).name, error.strerror)
            return WriteDone(key, slot, None)
        except OSError as error:
            if self._paused_until is None:
                logger.warning(
                    "disk cache: cannot store in %s (%s); storing nothing, next try in %.0f s",
                    self._folder.root,
                    error.strerror or error,
                    PAUSE_SECONDS,
                )
            self._paused_until = self._clock() + PAUSE_SECONDS
            return WriteDone(key, slot, None)
        if self._paused_until is not None:
            logger.warning("disk cache: storing in %s again", self._folder.root)
            self._paused_until = None
        return WriteDone(key, slot, stored)

    def _delete(self, key: BlockKey) -> DeleteDone:
        try:
            self._folder.delete(key)
        except OSError as error:
            logger.warning("disk cache: cannot delete %s: %s", self._folder.path(key).name, error.strerror or error)
            return DeleteDone(key, ok=False)
        return DeleteDone(key)

    def _rescan(self) -> list[Done]:
        """Another server may have written and deleted: without a look its files would not be found, nor count against the bound."""
        if self._clock() - self._last_scan < RESCAN_SECONDS:
            return []
        return [self._scan(was_asked=False)]

    def _scan(self, *, was_asked: bool) -> ScanDone:
        try:
            return ScanDone(tuple(self._folder.scan()), was_asked)
        except OSError as error:
            logger.warning("disk cache: cannot look through %s: %s", self._folder.root, error.strerror or error)
            return ScanDone(None, was_asked)
        finally:
            self._last_scan = self._clock()


class NoDisk(DiskIO):
    """Where no disk cache was asked for: nothing is ever found there, so nothing is asked of it."""

    @property
    def model(self) -> bytes:
        return bytes(PREFIX_BYTES)

    def read(self, key: BlockKey, slot: int) -> None:
        raise AssertionError("there is no disk cache to read from")

    def write(self, key: BlockKey, slot: int) -> None:
        raise AssertionError("there is no disk cache to write to")

    def delete(self, key: BlockKey) -> None:
        raise AssertionError("there is no disk cache to delete from")

    def rescan(self) -> None:
        raise AssertionError("there is no disk cache to look through")

    def poll(self) -> Sequence[Done]:
        return ()

    def wait(self, seconds: float) -> None:
        raise AssertionError("there is no disk cache to wait for")

"""A disk for the tests of the tiers: does nothing until told to, and can be full or spoilt."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from engine.kv.disk_worker import DeleteDone, Done, ReadDone, ScanDone, WriteDone
from engine.kv.tiers import BlockKey, StoredBlock

FILE = 10  # bytes, in these tests


class FakeDisk:
    """A DiskIO over a dictionary: what a host slot holds goes to "files" and back, when the test says so. Files may be spoilt."""

    def __init__(self, slots: MutableMapping[int, Any]) -> None:
        self.slots = slots
        self.files: dict[BlockKey, Any] = {}
        self.jobs: list[tuple[str, BlockKey | None, int | None]] = []
        self.stuck: set[BlockKey] = set()  # cannot be deleted
        self.done: list[Done] = []
        self.is_full = False
        self.num_writes = 0

    @property
    def model(self) -> bytes:
        return b"m" * 8

    def read(self, key: BlockKey, slot: int) -> None:
        self.jobs.append(("read", key, slot))

    def write(self, key: BlockKey, slot: int) -> None:
        self.jobs.append(("write", key, slot))

    def delete(self, key: BlockKey) -> None:
        self.jobs.append(("delete", key, None))

    def rescan(self) -> None:
        self.jobs.append(("rescan", None, None))

    def poll(self) -> Sequence[Done]:
        done, self.done = self.done, []
        return done

    def wait(self, seconds: float) -> None:
        self.work(len(self.jobs))

    def work(self, count: int) -> None:
        for _ in range(min(count, len(self.jobs))):
            kind, key, slot = self.jobs.pop(0)
            if kind == "rescan":
                self.done.append(ScanDone(self._found(), was_asked=True))
                continue
            assert key is not None
            if kind == "delete":
                if key not in self.stuck:
                    self.files.pop(key, None)
                self.done.append(DeleteDone(key, ok=key not in self.stuck))
            elif kind == "read":
                assert slot is not None
                self.slots[slot] = self.files.get(key, "nothing")
                ok = self.slots[slot] not in ("nothing", "damaged")
                if not ok:
                    self.files.pop(key, None)
                self.done.append(ReadDone(key, slot, ok))
            else:
                assert slot is not None
                self.num_writes += 1
                if not self.is_full:
                    self.files[key] = self.slots[slot]
                self.done.append(WriteDone(key, slot, None if self.is_full else StoredBlock(key, FILE)))

    def scan(self) -> None:
        self.done.append(ScanDone(self._found()))

    def _found(self) -> tuple[StoredBlock, ...]:
        return tuple(StoredBlock(key, FILE) for key in self.files)

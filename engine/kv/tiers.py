"""What lies in host memory and on the disk, by digest: two indexes with a bound and an order of use each.

Knows digests, slots and sizes. Does not know bytes, tensors, files' contents, threads or requests; each index has one writer,
the engine's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from engine.kv.block import Tokens


class Tier(Enum):
    """Where a block was found below the device."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class TierHit:
    """A full block of a prompt that lies in a tier. A finding only: nothing is held by it.

    ``above`` and ``branch`` as in ``Link``. ``is_ready``: in host memory, can be loaded in the coming step; otherwise it has to be, or is being, read from the disk.
    """

    digest: bytes
    above: bytes
    tokens: Tokens
    tier: Tier
    is_ready: bool
    branch: bytes = b""


@dataclass(slots=True, eq=False)
class HostEntry:
    """A block in host memory. ``is_ready`` is False while a disk read fills it.

    ``pins`` counts who relies on the slot: a copy of this step, a disk read, a request that waits. ``is_saved_now``: a disk write
    relies on it, too, but that is no use of the block: it keeps its place in the order. ``is_from_disk`` holds from a disk read to the first load onto the device: whoever asked for it hit the disk, not the host. ``is_orphan``:
    the tier has forgotten it while it was pinned; the slot is free at the last unpin.
    """

    digest: bytes
    above: bytes
    slot: int
    is_ready: bool = True
    branch: bytes = b""
    is_from_disk: bool = False
    is_orphan: bool = False
    is_saved_now: bool = False
    pins: int = 0

    @property
    def is_held(self) -> bool:
        return self.pins > 0 or self.is_saved_now


class HostTier:
    """Host slots by digest. An entry that nobody relies on may be evicted, the one that was used longest ago first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._entries: dict[bytes, HostEntry] = {}
        self._idle: OrderedDict[bytes, HostEntry] = OrderedDict()  # unpinned, least recently used first
        self._orphans: list[HostEntry] = []

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def __iter__(self) -> Iterator[HostEntry]:
        return iter(self._entries.values())

    def by_use(self) -> list[HostEntry]:
        """The entries, those that somebody relies on first, then the most recently used first."""
        return [*(entry for entry in self if entry.pins), *reversed(self._idle.values())]

    def find(self, digest: bytes) -> HostEntry | None:
        return self._entries.get(digest)

    def add(self, digest: bytes, above: bytes, branch: bytes = b"", *, is_ready: bool = True) -> HostEntry:
        """Give the digest a free slot; there must be one. The entry is the most recently used one."""
        assert digest not in self._entries, "a block has two host slots"
        entry = HostEntry(digest, above, self._free.pop(), is_ready, branch)
        self._entries[digest] = entry
        self._idle[digest] = entry
        return entry

    def evict(self) -> HostEntry | None:
        """Forget the least recently used entry that nobody relies on, which frees its slot; None when there is none."""
        entry = next((entry for entry in self._idle.values() if not entry.is_saved_now), None)
        if entry is not None:
            self.forget(entry)
        return entry

    def forget(self, entry: HostEntry) -> None:
        """The digest is not found any more. The slot is free now, or when the last of those who rely on it lets it go."""
        assert not entry.is_orphan
        del self._entries[entry.digest]
        self._idle.pop(entry.digest, None)
        entry.is_orphan = True
        if entry.is_held:
            self._orphans.append(entry)
        else:
            self._free.append(entry.slot)

    def touch(self, entry: HostEntry) -> None:
        if entry.pins == 0:
            self._idle.move_to_end(entry.digest)

    def pin(self, entry: HostEntry) -> None:
        assert not entry.is_orphan
        entry.pins += 1
        self._idle.pop(entry.digest, None)

    def unpin(self, entry: HostEntry) -> None:
        """Drop a pin; after the last one the entry is the most recently used one."""
        assert entry.pins > 0, "a host slot was unpinned more often than it was pinned"
        entry.pins -= 1
        if entry.pins == 0 and not entry.is_orphan:
            self._idle[entry.digest] = entry
        self._free_orphan(entry)

    def start_saving(self, entry: HostEntry) -> None:
        """A disk write begins to read the slot."""
        assert not entry.is_orphan
        assert not entry.is_saved_now
        entry.is_saved_now = True

    def end_saving(self, entry: HostEntry) -> None:
        entry.is_saved_now = False
        self._free_orphan(entry)

    def _free_orphan(self, entry: HostEntry) -> None:
        if entry.is_orphan and not entry.is_held:
            self._orphans.remove(entry)
            self._free.append(entry.slot)

    def check_integrity(self) -> None:
        slots = [entry.slot for entry in (*self._entries.values(), *self._orphans)] + self._free
        assert sorted(slots) == [*range(self.num_slots)], "host slots were lost or given twice"
        for digest, entry in self._entries.items():
            assert entry.digest == digest
            assert not entry.is_orphan
            assert (entry.pins == 0) == (digest in self._idle), "pins and the eviction order disagree"
        assert all(entry.is_orphan and entry.is_held for entry in self._orphans)
        assert len(self._idle) == sum(entry.pins == 0 for entry in self._entries.values())


PREFIX_BYTES = 8  # of digests where they only have to be told apart, such as in file names


class BlockKey(NamedTuple):
    """Which file holds a block. ``model``, ``above`` and ``branch``: the first bytes of the fingerprint and of the two in ``Link``."""

    model: bytes
    digest: bytes
    above: bytes
    branch: bytes = b""

    @classmethod
    def of(cls, model: bytes, digest: bytes, above: bytes, branch: bytes) -> BlockKey:
        """``above`` and ``branch`` are whole digests, or the beginnings of such."""
        return cls(model, digest, above[:PREFIX_BYTES], branch[:PREFIX_BYTES])


class StoredBlock(NamedTuple):
    """A file that is there: its key and its size in bytes, headers included."""

    key: BlockKey
    num_bytes: int


class DiskTier:
    """The files of a folder by digest, other models' files included, within a bound of bytes.

    Whoever deletes files follows ``overflow``; between the two the bound may be exceeded by what is being written.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._blocks: OrderedDict[bytes, StoredBlock] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[StoredBlock]:
        return iter(self._blocks.values())

    def get(self, digest: bytes) -> StoredBlock | None:
        return self._blocks.get(digest)

    def find(self, digest: bytes) -> BlockKey | None:
        block = self._blocks.get(digest)
        return block.key if block is not None else None

    def add(self, block: StoredBlock) -> None:
        """The file is there and was used just now."""
        self.remove(block.key.digest)
        self._blocks[block.key.digest] = block
        self.num_bytes += block.num_bytes

    def remove(self, digest: bytes) -> None:
        """The file is gone, or will be; unknown digests are nothing to remove."""
        block = self._blocks.pop(digest, None)
        if block is not None:
            self.num_bytes -= block.num_bytes

    def touch(self, digest: bytes) -> None:
        if digest in self._blocks:
            self._blocks.move_to_end(digest)

    def overflow(self) -> list[BlockKey]:
        """Forget the least recently used files until the rest is within the bound; returns what is to be deleted."""
        victims: list[BlockKey] = []
        while self.num_bytes > self.max_bytes:
            key = next(iter(self._blocks.values())).key
            self.remove(key.digest)
            victims.append(key)
        return victims

    def reconcile(self, found: Iterable[StoredBlock], unwanted: Collection[bytes]) -> None:
        """Take over what a look into the folder found: another server may have written or deleted files.

        ``found`` is ordered by use, oldest first. Files that we know keep their place; new ones count as older than ours. Those in
        ``unwanted`` are not seen: they are about to go.
        """
        there = {block.key.digest: block for block in found if block.key.digest not in unwanted}
        for digest in [digest for digest in self._blocks if digest not in there]:
            self.remove(digest)
        for block in reversed(there.values()):
            if block.key.digest not in self._blocks:
                self.add(block)
                self._blocks.move_to_end(block.key.digest, last=False)

    def check_integrity(self) -> None:
        assert self.num_bytes == sum(block.num_bytes for block in self._blocks.values())
        assert all(block.key.digest == digest for digest, block in self._blocks.items())

"""The tiers below the device: evicted blocks go to host memory, from there to the disk, and come back when a prompt matches.

Knows digests, host slots and which copies a step has to make. Does not know requests, the tree's structure or bytes. Blocks are
kept in both places: a block that was loaded stays in host memory, one that was stored on the disk too, until its place is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.kv.block import PrefixNode, Tokens
from engine.kv.digest import Digester, Link
from engine.kv.disk_worker import DeleteDone, DiskIO, Done, NoDisk, ReadDone, ScanDone, WriteDone
from engine.kv.moves import BlockLoad, BlockStore
from engine.kv.tier_drop import DropScope, Place, Sweep, TierDropCounts, own_places
from engine.kv.tiers import BlockKey, DiskTier, HostEntry, HostTier, Tier, TierHit
from engine.request import Namespace

_MAX_WRITES = 8  # under way at a time; each keeps a host slot


@dataclass(slots=True, eq=False)
class Promotion:
    """Disk blocks on their way to host memory, and the host blocks that they continue. All are held until it is done."""

    entries: tuple[HostEntry, ...]

    @property
    def is_done(self) -> bool:
        """Every block is there, or has turned out to be unusable."""
        return all(entry.is_ready or entry.is_orphan for entry in self.entries)


@dataclass(slots=True)
class _Step:
    """What the step in the making copies. One store for each slot: of two, only the later content is wanted."""

    stores: dict[int, tuple[BlockStore, HostEntry]] = field(default_factory=dict)
    loads: list[tuple[BlockLoad, HostEntry]] = field(default_factory=list)


class TierCache:
    """Host and disk tier as the manager sees them. Within a step, in this order: any of match, reserve, load and offload; then
    stores and loads, which the runner executes; then end_step. ``poll`` takes in what the disk has done, between steps.
    """

    def __init__(self, digester: Digester, host: HostTier, disk: DiskTier, io: DiskIO) -> None:
        self.host = host
        self.disk = disk
        self._digester = digester
        self._io = io
        self._step = _Step()
        self._unwritten: dict[bytes, HostEntry] = {}  # oldest first
        self._writing: dict[bytes, HostEntry] = {}
        self._reading: dict[bytes, HostEntry] = {}
        self._deleting: dict[bytes, BlockKey] = {}
        self._undeleted: set[bytes] = set()
        self._sweeps: list[Sweep] = []  # each waits for a look into the folder, in this order
        self._overdue: list[Sweep] = []  # that look failed: the next one will do
        self._promotions: list[Promotion] = []

    @property
    def is_busy(self) -> bool:
        """Whether ``poll`` has something to wait for."""
        return bool(self._unwritten or self._writing or self._reading or self._deleting or self._sweeps or self._promotions)

    @property
    def is_empty(self) -> bool:
        return not self.host.num_used and not len(self.disk)

    @property
    def unwritten(self) -> list[HostEntry]:
        """Host blocks that are not on the disk, the most recently used first."""
        return [entry for entry in self.host.by_use() if entry.is_ready and self.disk.find(entry.digest) is None]

    def digest(self, node: PrefixNode) -> bytes:
        """What the tiers know the node's full block by."""
        return self._digester.of(node)

    def scope(self, namespace: Namespace, token_ids: Sequence[int], num_public_blocks: int, block_size: int) -> DropScope:
        """What a drop of these tokens means in the tiers; the first ``num_public_blocks`` blocks belong to no salt."""
        return DropScope.of(self._digester, namespace, token_ids, num_public_blocks, block_size)

    def match(
        self,
        namespace: Namespace,
        nodes: Sequence[PrefixNode],
        token_ids: Sequence[int],
        num_public_blocks: int,
        block_size: int,
    ) -> tuple[TierHit, ...]:
        """Which full blocks of the prompt follow in the tiers on ``nodes``, the full blocks that the device has.

        The first ``num_public_blocks`` belong to no salt. As everywhere, one token at least is left to compute.
        """
        if not self.host.num_slots:
            return ()
        hits: list[TierHit] = []
        for link in self._digester.links(namespace, token_ids[:-1], num_public_blocks, block_size, nodes):
            start = (len(nodes) + len(hits)) * block_size
            hit = self._hit(link, tuple(token_ids[start : start + block_size]))
            if hit is None:
                break
            hits.append(hit)
        return tuple(hits)

    def _hit(self, link: Link, tokens: Tokens) -> TierHit | None:
        entry = self.host.find(link.digest)
        if entry is not None:
            tier = Tier.DISK if entry.is_from_disk else Tier.HOST
            return TierHit(link.digest, link.above, tokens, tier, entry.is_ready, link.branch)
        if self.disk.find(link.digest) is not None:
            return TierHit(link.digest, link.above, tokens, Tier.DISK, is_ready=False, branch=link.branch)
        return None

    def offload(self, node: PrefixNode) -> None:
        """The device is about to forget the node's full block: keep it in host memory, if there is a slot to be had.

        To be called while the node still hangs in the tree, and for no block that was loaded in this very step.
        """
        if not self.host.num_slots:
            return
        assert node.block is not None
        block_id = node.block.block_id
        assert all(load.block_id != block_id for load, _ in self._step.loads), "a block was evicted before it was loaded"
        link = self._digester.link(node)
        known = self.host.find(link.digest)
        if known is not None:
            self.host.touch(known)
            self.disk.touch(link.digest)
            return
        if not self._make_room():
            return
        entry = self.host.add(*link)
        self._step.stores[entry.slot] = (BlockStore(block_id, entry.slot), entry)

    def _make_room(self) -> bool:
        """See to a free host slot. What is lost with the old content, if it is not on the disk, has to be computed again."""
        if self.host.num_free:
            return True
        evicted = self.host.evict()
        if evicted is None:
            return False
        self._unwritten.pop(evicted.digest, None)
        self._step.stores.pop(evicted.slot, None)
        return True

    def reserve(self, hits: Sequence[TierHit]) -> tuple[HostEntry, ...]:
        """Hold the leading ready hits, so that making room for them does not evict them. Each must be loaded in this step."""
        entries: list[HostEntry] = []
        for hit in hits:
            entry = self.host.find(hit.digest)
            if entry is None or not entry.is_ready:
                break
            self.host.pin(entry)
            entries.append(entry)
        return tuple(entries)

    def load(self, entry: HostEntry, block_id: int) -> None:
        """Copy a reserved entry's bytes to the device block in this step."""
        self._step.loads.append((BlockLoad(entry.slot, block_id), entry))

    @property
    def stores(self) -> tuple[BlockStore, ...]:
        """The step's copies to host memory."""
        return tuple(store for store, _ in self._step.stores.values())

    @property
    def loads(self) -> tuple[BlockLoad, ...]:
        """The step's copies to the device, after the stores."""
        return tuple(load for load, _ in self._step.loads)

    def end_step(self) -> None:
        """The copies have been made: what was stored may go on to the disk."""
        step, self._step = self._step, _Step()
        for _, entry in reversed(step.loads):  # the deepest block is then the least recently used of its chain
            entry.is_from_disk = False
            self.host.unpin(entry)
        for _, entry in step.stores.values():
            if not entry.is_orphan and self.disk.max_bytes and self.disk.find(entry.digest) is None:
                self._unwritten[entry.digest] = entry
        self._start_writes()

    def _start_writes(self) -> None:
        limit = max(1, min(_MAX_WRITES, self.host.num_slots // 2))
        for digest in [*self._unwritten]:
            if len(self._writing) >= limit:
                return
            if digest in self._writing or digest in self._deleting:
                continue  # an older write or a deletion of the same name comes first
            entry = self._unwritten.pop(digest)
            self.host.start_saving(entry)
            self._writing[digest] = entry
            self._io.write(self._key(entry), entry.slot)

    def _key(self, entry: HostEntry) -> BlockKey:
        return BlockKey.of(self._io.model, entry.digest, entry.above, entry.branch)

    def promote(self, hits: Sequence[TierHit]) -> Promotion:
        """Start reading the hits' disk blocks into host memory, as far as slots can be had; the rest stays where it is."""
        entries: list[HostEntry] = []
        for hit in hits:
            entry = self.host.find(hit.digest)
            if entry is not None:
                self.host.pin(entry)
            else:
                entry = self._start_read(hit)
                if entry is None:
                    break
            entries.append(entry)
        for entry in reversed(entries):  # of a chain, the beginning must be deleted last
            self.disk.touch(entry.digest)
        promotion = Promotion(tuple(entries))
        self._promotions.append(promotion)
        return promotion

    def _start_read(self, hit: TierHit) -> HostEntry | None:
        key = self.disk.find(hit.digest)
        if key is None or key.digest in self._reading or not self._make_room():
            return None
        entry = self.host.add(hit.digest, hit.above, hit.branch, is_ready=False)
        entry.is_from_disk = True
        self.host.pin(entry)  # for the promotion
        self.host.pin(entry)  # for the read
        self._reading[entry.digest] = entry
        self._io.read(key, entry.slot)
        return entry

    def poll(self) -> None:
        """Take in what the disk has done. Not between a step's schedule and its end_step."""
        assert not self._step.loads
        for done in self._io.poll():
            self._take_in(done)
        for promotion in [promotion for promotion in self._promotions if promotion.is_done]:
            self._promotions.remove(promotion)
            for entry in reversed(promotion.entries):
                self.host.unpin(entry)
        self._start_writes()

    def wait(self, seconds: float) -> None:
        """Return when the disk has done something, or after that time."""
        self._io.wait(seconds)

    def _take_in(self, done: Done) -> None:
        if isinstance(done, ReadDone):
            self._end_read(done)
        elif isinstance(done, WriteDone):
            self._end_write(done)
        elif isinstance(done, DeleteDone):
            self._deleting.pop(done.key.digest, None)
            if not done.ok:
                self._undeleted.add(done.key.digest)
        elif isinstance(done, ScanDone):
            self._end_scan(done)

    def _end_read(self, done: ReadDone) -> None:
        entry = self._reading.pop(done.key.digest)
        if done.ok:
            entry.is_ready = True
        else:
            self.disk.remove(done.key.digest)
            if not entry.is_orphan:
                self.host.forget(entry)
        self.host.unpin(entry)

    def _end_scan(self, done: ScanDone) -> None:
        """What another server has written is ours too, unless it was dropped before we knew of it."""
        if done.found is None:
            self._overdue += [self._sweeps.pop(0)] if done.was_asked else []
            return
        unknown = [block for block in done.found if not self._is_known(block.key.digest)]
        places = own_places(unknown, self._io.model)
        condemned = {digest for sweep in (*self._sweeps, *self._overdue) for digest in sweep.condemned(places)}
        self.disk.reconcile(done.found, self.unwanted | condemned)
        self._delete([*(block.key for block in unknown if block.key.digest in condemned), *self.disk.overflow()])
        self._overdue.clear()
        if done.was_asked:
            self._sweeps.pop(0)

    def _is_known(self, digest: bytes) -> bool:
        return digest in self._deleting or digest in self._undeleted or self.disk.find(digest) is not None

    def _end_write(self, done: WriteDone) -> None:
        entry = self._writing.pop(done.key.digest)
        was_dropped = entry.is_orphan
        self.host.end_saving(entry)
        if done.stored is None:
            return
        if was_dropped:
            self._delete([done.key])
            return
        self._undeleted.discard(done.key.digest)
        self.disk.add(done.stored)
        self._delete(self.disk.overflow())

    def _delete(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._deleting[key.digest] = key
            self._io.delete(key)

    @property
    def num_deleting(self) -> int:
        """Disk jobs that a drop waits for: files that are to go, or to be written before they can, and looks for others' files."""
        num_dropped_writes = sum(entry.is_orphan for entry in self._writing.values())
        return len(self._deleting) + num_dropped_writes + len(self._sweeps)

    @property
    def num_undeleted(self) -> int:
        """Files that could not be deleted, and failed looks for others' files. What is there nevertheless is not found any more,
        unless the server is started anew."""
        return len(self._undeleted) + len(self._overdue)

    @property
    def deleting(self) -> list[BlockKey]:
        return list(self._deleting.values())

    @property
    def unwanted(self) -> set[bytes]:
        """Digests of files that are to go, or should have gone."""
        return {*self._deleting, *self._undeleted}

    def num_continued(self, scope: DropScope, known: Sequence[bytes]) -> int:
        """How many of the scope's own blocks, from the first, are continued by blocks of the tiers that the drop does not mean.

        ``known`` are blocks of the device that it means: the tiers may lack some of them and have what continues these.
        """
        places = self._places()
        return scope.num_continued(places, scope.below(places, known))

    def drop(self, scope: DropScope, num_kept: int, known: Sequence[bytes] = ()) -> TierDropCounts:
        """Forget what the scope means, but for its first ``num_kept`` own blocks. Between steps only. ``known``: as above.

        What continues a block is found as far as no block between is missing everywhere.
        """
        kept, doomed = scope.own[:num_kept], scope.below(self._places(), (*scope.own[num_kept:], *known))
        counts = self._forget(doomed, Sweep(scope, frozenset(doomed)))
        return replace(
            counts,
            num_continued_host_blocks=sum(self.host.find(digest) is not None for digest in kept),
            num_continued_disk_blocks=sum(self.disk.find(digest) is not None for digest in kept),
        )

    def reset(self) -> TierDropCounts:
        """Forget everything of this model and format, in host memory and on the disk. Between steps only."""
        return self._forget({place.digest for place in self._places()}, Sweep())

    def _places(self) -> list[Place]:
        """Of every block of this model in the tiers; one that is in both, twice."""
        return [*(Place.of_entry(entry) for entry in self.host), *own_places(self.disk, self._io.model)]

    def _forget(self, digests: set[bytes], sweep: Sweep) -> TierDropCounts:
        entries = [entry for digest in digests if (entry := self.host.find(digest)) is not None]
        blocks = [block for digest in digests if (block := self.disk.get(digest)) is not None]
        for entry in entries:
            self._unwritten.pop(entry.digest, None)
            self._step.stores.pop(entry.slot, None)
            self.host.forget(entry)
        for block in blocks:
            self.disk.remove(block.key.digest)
        self._delete([block.key for block in blocks])
        if self.disk.max_bytes:
            self._sweeps.append(sweep)
            self._io.rescan()
        return TierDropCounts(
            num_host_blocks=len(entries),
            num_held_host_blocks=sum(entry.is_held for entry in entries),
            num_disk_blocks=len(blocks),
            num_disk_bytes=sum(block.num_bytes for block in blocks),
        )

    def check_integrity(self) -> None:
        """Assert that indexes, jobs and pins agree. For tests, between steps."""
        self.host.check_integrity()
        self.disk.check_integrity()
        pins: dict[HostEntry, int] = {}
        for holder in (self._reading.values(), *(p.entries for p in self._promotions)):
            for entry in holder:
                pins[entry] = pins.get(entry, 0) + 1
        for _, entry in self._step.loads:
            pins[entry] = pins.get(entry, 0) + 1
        for entry in (*self.host, *self._writing.values()):
            assert entry.is_saved_now == (self._writing.get(entry.digest) is entry), "a write holds a slot, or lacks it"
        for entry in (*self.host, *pins):
            assert entry.pins == pins.get(entry, 0), "a host slot is pinned by nobody, or not by one who relies on it"
            assert entry.is_ready or entry.is_orphan or entry.digest in self._reading
        for digest, entry in self._unwritten.items():
            assert self.host.find(digest) is entry, "a block waits to be written that is no longer there"


def no_tiers() -> TierCache:
    """A tier cache that holds nothing."""
    return TierCache(Digester(bytes(32)), HostTier(0), DiskTier(0), NoDisk())

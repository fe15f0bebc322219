"""The way to the disk at a stop: what lies on the device and in host memory is written, the most useful first, until time is up.

Runs on the engine's thread once no step will follow and the disk thread has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from engine.kv.block import PrefixNode
from engine.kv.block_file import HEADER_BYTES, BlockFolder
from engine.kv.digest import Digester
from engine.kv.tier_cache import TierCache
from engine.kv.tiers import BlockKey

logger = logging.getLogger("octavo.cache")


@dataclass(frozen=True, slots=True)
class FlushResult:
    """Blocks written, and blocks that were left: no time, no room, or an error."""

    num_written: int
    num_left: int


@dataclass(frozen=True, slots=True)
class _Item:
    key: BlockKey
    payload: Callable[[], memoryview]


class Flush:
    """``rows`` are the host slots' bytes, ``read_block`` gives a device block's."""

    def __init__(
        self,
        tiers: TierCache,
        digester: Digester,
        folder: BlockFolder,
        rows: list[memoryview],
        read_block: Callable[[int], memoryview],
    ) -> None:
        self._tiers = tiers
        self._digester = digester
        self._folder = folder
        self._rows = rows
        self._read_block = read_block

    def run(self, nodes: Iterable[PrefixNode], is_late: Callable[[], bool]) -> FlushResult:
        """Write the full blocks of ``nodes`` and the host blocks that are not on the disk yet. Never raises for the disk's sake."""
        self._look()
        items = list(self._items(nodes))
        budget = self._tiers.disk.max_bytes
        written: list[BlockKey] = []
        for item in items:
            payload = item.payload()
            budget -= HEADER_BYTES + payload.nbytes
            if is_late() or budget < 0:
                break
            try:
                self._tiers.disk.add(self._folder.write(item.key, payload))
                self._delete_overflow()
            except IsADirectoryError as error:  # a matter of this name, not of the disk
                logger.warning("disk cache: cannot store %s: %s", self._folder.path(item.key).name, error.strerror)
                continue
            except OSError as error:
                logger.warning("disk cache: cannot store in %s (%s)", self._folder.root, error.strerror or error)
                break
            written.append(item.key)
        self._folder.mark_used(reversed(written))  # what came first is to be deleted last
        return FlushResult(len(written), len(items) - len(written))

    def _look(self) -> None:
        """Other servers' files count against the bound too."""
        try:
            self._tiers.disk.reconcile(self._folder.scan(), self._tiers.unwanted)
            self._delete_overflow()
        except OSError as error:
            logger.warning("disk cache: cannot look through %s: %s", self._folder.root, error.strerror or error)

    def _delete_overflow(self) -> None:
        for victim in self._tiers.disk.overflow():
            self._folder.delete(victim)

    def _items(self, nodes: Iterable[PrefixNode]) -> Iterator[_Item]:
        """What is not on the disk yet: of two blocks the more recently used one first, and a block before those that continue it."""
        seen: set[bytes] = set()
        for node in sorted(nodes, key=lambda node: (-node.last_used, node.depth)):
            assert node.block is not None
            link, block_id = self._digester.link(node), node.block.block_id
            digest = link.digest
            seen.add(digest)
            if self._tiers.disk.find(digest) is None:
                key = BlockKey.of(self._folder.model, *link)
                yield _Item(key, lambda block_id=block_id: self._read_block(block_id))  # type: ignore[misc]
        for entry in self._tiers.unwritten:
            if entry.digest not in seen:
                key = BlockKey.of(self._folder.model, entry.digest, entry.above, entry.branch)
                yield _Item(key, lambda slot=entry.slot: self._rows[slot])  # type: ignore[misc]

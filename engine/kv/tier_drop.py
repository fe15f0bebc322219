"""Which blocks of host memory and disk a drop means. Below the device blocks are known by digests alone.

Chooses, by where blocks stand; the tier cache forgets. Knows no tokens of what lies in the tiers: where the dropped tokens end
inside a block, all that continues their full blocks in the same namespace is meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.kv.digest import Digester
from engine.kv.tiers import PREFIX_BYTES, HostEntry, StoredBlock
from engine.request import Namespace


@dataclass(frozen=True, slots=True)
class TierDropCounts:
    """What was forgotten: nothing of it is found any more. Of ``num_host_blocks``, ``num_held_host_blocks`` keep their place in
    memory until a disk job or a request that waits lets go of them. ``num_disk_bytes``: files, with headers.

    ``num_continued_*`` stayed: something that was not meant continues them.
    """

    num_host_blocks: int
    num_held_host_blocks: int
    num_disk_blocks: int
    num_disk_bytes: int
    num_continued_host_blocks: int = 0
    num_continued_disk_blocks: int = 0


class Place(NamedTuple):
    """Where a block of a tier stands: as ``Link``, of ``above`` and ``branch`` the first bytes."""

    digest: bytes
    above: bytes
    branch: bytes

    @classmethod
    def of_entry(cls, entry: HostEntry) -> Place:
        return cls(entry.digest, entry.above[:PREFIX_BYTES], entry.branch[:PREFIX_BYTES])


def own_places(blocks: Iterable[StoredBlock], model: bytes) -> list[Place]:
    """Of the files of this model."""
    return [Place(*block.key[1:]) for block in blocks if block.key.model == model]


@dataclass(frozen=True, slots=True)
class DropScope:
    """A prefix to be dropped. ``own`` are the digests of its full blocks behind the public ones, from the first.

    Meant is what continues ``top``, the last full block or the root: with ``branch``, of the blocks directly behind it only those
    of this branch (empty: those of none).
    """

    own: tuple[bytes, ...]
    top: bytes
    branch: bytes | None = None

    @classmethod
    def of(
        cls, digester: Digester, namespace: Namespace, token_ids: Sequence[int], num_public_blocks: int, block_size: int
    ) -> DropScope:
        digests = tuple(link.digest for link in digester.links(namespace, token_ids, num_public_blocks, block_size))
        top = digests[-1] if digests else digester.of_root(namespace)
        branch: bytes | None = None
        if digests and len(digests) <= num_public_blocks:
            branch = digester.of_root(namespace, top)[:PREFIX_BYTES]
        elif digests and not namespace.salt and len(token_ids) % block_size:
            branch = b""
        return cls(digests[num_public_blocks:], top, branch)

    def below(self, places: Iterable[Place], also: Iterable[bytes] = ()) -> set[bytes]:
        """The digests of what is meant behind ``top``, and of ``also`` and all that continues these."""
        following: dict[bytes, list[Place]] = {}
        for place in places:
            following.setdefault(place.above, []).append(place)
        first = [p.digest for p in following.get(self.top[:PREFIX_BYTES], ()) if self.branch in (None, p.branch)]
        doomed = {*also, *first}
        stack = [*doomed.difference(self.own)]
        while stack:
            for place in following.get(stack.pop()[:PREFIX_BYTES], ()):
                if place.digest not in doomed:
                    doomed.add(place.digest)
                    stack.append(place.digest)
        return doomed

    def num_continued(self, places: Iterable[Place], doomed: set[bytes]) -> int:
        """How many own blocks, from the first, lead to a place that is neither an own block nor doomed."""
        number = {digest[:PREFIX_BYTES]: index for index, digest in enumerate(self.own, start=1)}
        meant = doomed.union(self.own)
        others = (place for place in places if place.digest not in meant)
        return max((number.get(place.above, 0) for place in others), default=0)


@dataclass(frozen=True, slots=True)
class Sweep:
    """A drop that is to reach files which another server has written and this one has not seen yet.

    ``doomed`` is what it has forgotten; without a scope, everything is meant.
    """

    scope: DropScope | None = None
    doomed: frozenset[bytes] = frozenset()

    def condemned(self, places: Sequence[Place]) -> set[bytes]:
        """The digests of those of the places that are meant."""
        found = {place.digest for place in places}
        return found if self.scope is None else found & self.scope.below(places, self.doomed)

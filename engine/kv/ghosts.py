"""What the prefix cache has held before, and what it holds for others: why a prompt's tokens were not found.

Works with chain keys: a hash over all tokens up to a block's end, once with the namespace and once without. Nothing is ever
served by these keys, they only label counts; a collision would mislabel a block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.kv.block import PrefixNode
from engine.request import Namespace


class ChainKey(NamedTuple):
    """``own`` stands for the namespace and the tokens from the start to a block's end, ``shared`` for the tokens alone."""

    own: int
    shared: int

    def child(self, tokens: tuple[int, ...]) -> ChainKey:
        block = hash(tokens)
        return ChainKey(hash((self.own, block)), hash((self.shared, block)))

    def branch(self, namespace: Namespace) -> ChainKey:
        return ChainKey(hash((self.own, namespace)), self.shared)


def root_key(namespace: Namespace) -> ChainKey:
    return ChainKey(hash(namespace), 0)


class GhostIndex:
    """Full blocks by chain key: those that are resident, and the last ``capacity`` of those that are not any more."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._resident: dict[PrefixNode, ChainKey] = {}
        self._own: set[int] = set()
        self._num_sharing: Counter[int] = Counter()
        self._gone: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        """How many blocks are remembered that are not resident."""
        return len(self._gone)

    def publish(self, node: PrefixNode) -> None:
        """A full block became findable below its parent."""
        assert node.parent is not None
        key = self.key_of(node.parent).child(node.tokens)
        self._resident[node] = key
        self._own.add(key.own)
        self._num_sharing[key.shared] += 1
        self._gone.pop(key.own, None)

    def forget(self, node: PrefixNode, now: float) -> None:
        """The block is not findable any more, from ``now`` on."""
        key = self._resident.pop(node)
        self._own.discard(key.own)
        self._num_sharing[key.shared] -= 1
        if not self._num_sharing[key.shared]:
            del self._num_sharing[key.shared]
        self._gone[key.own] = now
        self._gone.move_to_end(key.own)
        while len(self._gone) > self._capacity:
            self._gone.popitem(last=False)

    def gone_since(self, key: ChainKey) -> float | None:
        """When the block was forgotten; None when it is resident, was never seen, or was forgotten too long ago."""
        return self._gone.get(key.own)

    def is_elsewhere(self, key: ChainKey) -> bool:
        """Whether another namespace than the key's own holds a block of these tokens."""
        return self._num_sharing.get(key.shared, 0) > (key.own in self._own)

    def key_of(self, node: PrefixNode) -> ChainKey:
        """Of a resident full node, a branch or a root."""
        if node.block is not None:
            return self._resident[node]
        assert node.namespace is not None
        return root_key(node.namespace) if node.parent is None else self.key_of(node.parent).branch(node.namespace)

    def check_integrity(self, nodes: Sequence[PrefixNode]) -> None:
        """``nodes`` are all full nodes of the tree."""
        assert set(self._resident) == set(nodes), "the index and the tree know other blocks"
        assert self._own == {key.own for key in self._resident.values()}
        assert self._num_sharing == Counter(key.shared for key in self._resident.values())
        assert not self._own & self._gone.keys(), "a block is resident and gone"
        assert len(self._gone) <= self._capacity


@dataclass(frozen=True, slots=True)
class Chain:
    """The way of a request through the tree: its first ``num_public_blocks`` blocks are public, the others its namespace's."""

    namespace: Namespace
    top_namespace: Namespace
    num_public_blocks: int
    block_size: int

    def keys(self, token_ids: Sequence[int], num_blocks: int, key: ChainKey | None) -> Iterator[ChainKey]:
        """The keys of the full blocks of the request's tokens behind the first ``num_blocks``, whose last has the ``key``."""
        key = key if key is not None else root_key(self.top_namespace)
        size = self.block_size
        for index in range(num_blocks, len(token_ids) // size):
            if index and index == self.num_public_blocks:
                key = key.branch(self.namespace)
            key = key.child(tuple(token_ids[index * size : (index + 1) * size]))
            yield key

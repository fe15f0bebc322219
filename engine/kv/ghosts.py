"""What the prefix cache has held before, and what it holds for others: why a prompt's tokens were not found.

Works with chain keys: a hash over all tokens up to a block's end, once with the namespace and once without. Nothing is ever
served by these keys, they only label counts; a collision would mislabel a block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.kv.block import PrefixNode
from engine.request import Namespace


@dataclass(frozen=True, slots=True)
class ChainKey:
    """``own`` stands for the namespace and the tokens from the start to a block's end, ``shared`` for the tokens alone."""

    own: int
    shared: int

    def child(self, tokens: tuple[int, ...]) -> ChainKey:
        return ChainKey(hash((self.own, tokens)), hash((self.shared, tokens)))

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
        key = self._key_of(node.parent).child(node.tokens)
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

    def _key_of(self, node: PrefixNode) -> ChainKey:
        if node.block is not None:
            return self._resident[node]
        assert node.namespace is not None
        return root_key(node.namespace) if node.parent is None else self._key_of(node.parent).branch(node.namespace)

    def check_integrity(self, nodes: Sequence[PrefixNode]) -> None:
        """``nodes`` are all full nodes of the tree."""
        assert set(self._resident) == set(nodes), "the index and the tree know other blocks"
        assert self._own == {key.own for key in self._resident.values()}
        assert self._num_sharing == Counter(key.shared for key in self._resident.values())
        assert not self._own & self._gone.keys(), "a block is resident and gone"
        assert len(self._gone) <= self._capacity


def chain_keys(
    namespace: Namespace, public_namespace: Namespace, token_ids: Sequence[int], block_size: int, num_public_blocks: int
) -> Iterator[ChainKey]:
    """The keys of a prompt's full blocks, as the tree would have them: the first ``num_public_blocks`` are public."""
    key = root_key(public_namespace if num_public_blocks else namespace)
    for index in range(len(token_ids) // block_size):
        if index == num_public_blocks and index:
            key = key.branch(namespace)
        key = key.child(tuple(token_ids[index * block_size : (index + 1) * block_size]))
        yield key

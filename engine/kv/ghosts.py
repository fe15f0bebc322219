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

ChainKey = tuple[int, int]
"""First, what stands for the namespace and the tokens from the start to a block's end; second, for the tokens alone."""


def root_key(namespace: Namespace) -> ChainKey:
    return hash(namespace), 0


def child_key(key: ChainKey, tokens: tuple[int, ...]) -> ChainKey:
    block = hash(tokens)
    return hash((key[0], block)), hash((key[1], block))


def branch_key(key: ChainKey, namespace: Namespace) -> ChainKey:
    return hash((key[0], namespace)), key[1]


class GhostIndex:
    """Full blocks by chain key: those that are resident, and the last ``capacity`` of those that are not any more.

    The one writer of nodes' ``chain_key``. ``_holders`` maps the key of tokens to the own keys of those who hold them, one or several.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._holders: dict[int, int | list[int]] = {}
        self._gone: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        """How many blocks are remembered that are not resident."""
        return len(self._gone)

    def publish(self, node: PrefixNode) -> None:
        """A full block became findable below its parent."""
        assert node.parent is not None
        above, tokens = node.parent.chain_key or self.key_of(node.parent), hash(node.tokens)
        own, shared = node.chain_key = hash((above[0], tokens)), hash((above[1], tokens))  # child_key, without the call
        if (others := self._holders.setdefault(shared, own)) is not own:
            self._holders[shared] = [*others, own] if isinstance(others, list) else [others, own]
        if own in self._gone:
            del self._gone[own]

    def forget(self, node: PrefixNode, now: float) -> None:
        """The block is not findable any more, from ``now`` on."""
        assert node.chain_key is not None
        own, shared = node.chain_key
        holders = self._holders[shared]
        if isinstance(holders, list):
            holders.remove(own)
            self._holders[shared] = holders if len(holders) > 1 else holders[0]
        else:
            del self._holders[shared]
        self._gone[own] = now
        if len(self._gone) > self._capacity:
            self._gone.popitem(last=False)

    def gone_since(self, key: ChainKey) -> float | None:
        """When the block was forgotten; None when it is resident, was never seen, or was forgotten too long ago."""
        return self._gone.get(key[0])

    def is_elsewhere(self, key: ChainKey) -> bool:
        """Whether another namespace than the key's own holds a block of these tokens."""
        holders = self._holders.get(key[1])
        return any(own != key[0] for own in holders) if isinstance(holders, list) else holders not in (None, key[0])

    def key_of(self, node: PrefixNode) -> ChainKey:
        """Of a full node, a branch or a root. Not recursive: it may be thousands of nodes deep."""
        unknown: list[PrefixNode] = []
        above: PrefixNode | None = node
        while above is not None and above.chain_key is None:
            unknown.append(above)
            above = above.parent
        key = above.chain_key if above is not None else None
        for each in reversed(unknown):
            if key is None:
                assert each.namespace is not None
                key = root_key(each.namespace)
            else:
                key = branch_key(key, each.namespace) if each.namespace is not None else child_key(key, each.tokens)
            each.chain_key = key
        assert key is not None
        return key

    def check_integrity(self, nodes: Sequence[PrefixNode]) -> None:
        """``nodes`` are all full nodes of the tree that have a block."""
        keys = Counter(node.chain_key for node in nodes)
        held = ((shared, own if isinstance(own, list) else [own]) for shared, own in self._holders.items())
        assert keys == Counter((own, shared) for shared, owns in held for own in owns), (
            "the index and the tree know other blocks"
        )
        assert not {own for own, _ in filter(None, keys)} & self._gone.keys(), "a block is resident and gone"
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
                key = branch_key(key, self.namespace)
            key = child_key(key, tuple(token_ids[index * size : (index + 1) * size]))
            yield key

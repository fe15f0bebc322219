"""A block's book-keeping, and the prefix-tree node that makes it findable."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import Namespace

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Block:
    """One block of the pool. Free: ref_count 0 and no node. Cached: ref_count 0 with a node. Referenced: ref_count > 0."""

    block_id: int
    ref_count: int = 0
    node: PrefixNode | None = None


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One full block of exact tokens under its parent. A namespace's root has neither parent nor block, but the namespace.

    A referenced block's ancestors are all referenced, so unreferenced nodes hang together at the bottom of the tree.
    """

    tokens: Tokens
    parent: PrefixNode | None
    block: Block | None
    depth: int
    last_used: int = 0
    namespace: Namespace | None = None
    children: dict[Tokens, PrefixNode] = field(default_factory=dict)

    @property
    def is_evictable(self) -> bool:
        return self.block is not None and self.block.ref_count == 0 and not self.children

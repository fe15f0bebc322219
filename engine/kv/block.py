"""A block's book-keeping, the prefix-tree node that makes it findable, and the copies between blocks that sharing needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import Namespace

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Block:
    """One block of the pool. Free: ref_count 0 and no node. Cached: ref_count 0 with a node. Referenced: ref_count > 0.

    ``ref_count`` counts requests, ``num_pins`` an operator's pins: a pinned block has a node, and keeps it.
    """

    block_id: int
    ref_count: int = 0
    num_pins: int = 0
    node: PrefixNode | None = None

    @property
    def is_reclaimable(self) -> bool:
        """Cached, or free, and not pinned: it can be had once what hangs below it is gone."""
        return self.ref_count == 0 and self.num_pins == 0


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The first ``num_tokens`` tokens of block ``source`` go to block ``target``, all layers, before the step computes anything.

    Copies are made in the order in which they are listed: a source may be the target of an earlier one.
    """

    source: int
    target: int
    num_tokens: int


@dataclass(slots=True, eq=False)
class OpenBlock:
    """The block that a running request fills, hung up at the node of the one before it, so that others can copy from it.

    ``tokens`` are those whose K and V it holds by now: fewer than a block. ``block`` is None exactly while there are none.
    """

    block: Block | None = None
    tokens: Tokens = ()


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One block of exact tokens under its parent.

    A full node may have children, branches and open blocks. A partial one (fewer tokens than a block: where a request
    ended) has none of them, and is no prefix of a sibling. A root has neither parent nor block, a branch no block: it stands
    below a public node and holds what a namespace of its own continues it with. Both carry their namespace.

    ``digest`` names its content beyond this process; None until somebody asked (see engine.kv.digest).
    A referenced block's ancestors are all referenced, so unreferenced nodes hang together at the bottom of the tree.
    A pinned block's ancestors are all pinned, too. (Neither holds in a tree with gaps, where a full node may lack its block, see
    PrefixTree.) ``sorted_children`` are the keys of ``children`` in order, None until a
    prompt diverges here: most nodes have one child, which is found by its key. ``used_at`` (seconds), ``num_hits`` and ``chain_key``
    (see engine.kv.ghosts) are the history's, not the eviction's.
    """

    tokens: Tokens
    parent: PrefixNode | None = field(repr=False)
    block: Block | None
    depth: int
    last_used: int = 0
    used_at: float = 0.0
    num_hits: int = 0
    namespace: Namespace | None = None
    digest: bytes | None = None
    chain_key: tuple[int, int] | None = None
    children: dict[Tokens, PrefixNode] = field(default_factory=dict, repr=False)
    sorted_children: list[Tokens] | None = field(default=None, repr=False)
    open_blocks: tuple[OpenBlock, ...] = ()
    branches: dict[Namespace, PrefixNode] | None = field(default=None, repr=False)

    def in_order(self) -> list[Tokens]:
        """The children's tokens, sorted: the longest common prefix with any is that with a neighbour. Read only."""
        if self.sorted_children is None:
            self.sorted_children = sorted(self.children)
        return self.sorted_children

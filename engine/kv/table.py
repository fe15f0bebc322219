"""A running request's blocks, in token order, and how far they are in the prefix tree."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.kv.block import Block, OpenBlock, PrefixNode, Tokens
from engine.kv.prefix import PrefixTree
from engine.request import Namespace


@dataclass(slots=True, eq=False)
class BlockTable:
    """The first ``num_committed`` blocks are in the tree; ``tip`` is the node of the last of them.

    ``blocks`` are those behind the first ``num_released``, which lie behind the request's window (see Retention) and are not held.
    While there is none, and below the last public block, the tip is a root or a branch. ``open`` hangs at the tip.
    ``num_tokens`` are computed by now, or will be copied.
    """

    namespace: Namespace
    num_public_blocks: int
    tip: PrefixNode
    blocks: list[Block]
    block_ids: list[int]
    num_committed: int
    num_tokens: int
    num_released: int = 0
    open: OpenBlock = field(default_factory=OpenBlock)

    @property
    def num_blocks(self) -> int:
        """Up to the last one, the released ones included."""
        return self.num_released + len(self.blocks)

    def block(self, index: int) -> Block:
        return self.blocks[index - self.num_released]

    def append(self, block: Block) -> None:
        self.blocks.append(block)
        self.block_ids.append(block.block_id)

    def replace(self, index: int, block: Block) -> None:
        self.blocks[index - self.num_released] = block
        self.block_ids[index - self.num_released] = block.block_id

    def release(self, num_behind: int) -> list[Block]:
        """Let go of those of the first ``num_behind`` blocks that are held yet; returns them."""
        count = max(0, num_behind - self.num_released)
        released = self.blocks[:count]
        del self.blocks[:count], self.block_ids[:count]
        self.num_released += count
        return released

    def note_open(self, tokens: Tokens) -> None:
        """The block behind the committed ones holds these tokens by now."""
        self.open.tokens = tokens
        self.open.block = self.block(self.num_committed) if tokens else None

    def advance(self, node: PrefixNode, tree: PrefixTree) -> PrefixNode:
        """One more of the blocks is in the tree, as ``node``; returns where the next one will hang, to be given to ``move_tip``."""
        self.num_committed += 1
        return node if self.num_committed != self.num_public_blocks else tree.branch(node, self.namespace)

    def move_tip(self, tip: PrefixNode, tree: PrefixTree) -> None:
        if tip is not self.tip:
            tree.hang(tip, self.open)
            tree.unhang(self.tip, self.open)
            self.tip = tip

    def check_integrity(self, tree: PrefixTree) -> None:
        assert self.block_ids == [block.block_id for block in self.blocks]
        assert self.num_released <= self.num_committed <= self.num_blocks
        num_held = self.num_committed - self.num_released
        for index, block in enumerate(self.blocks):
            assert (block.node is not None) == (index < num_held), "only committed blocks are in the tree"
        path = full_nodes_above(self.tip)
        assert len(path) == self.num_committed
        assert all(len(node.tokens) == tree.block_size for node in path)
        assert [node.block for node in path[self.num_released :]] == self.blocks[:num_held]
        assert self.tip is tree.tip(self.namespace, path, self.num_public_blocks)
        assert self.open in self.tip.open_blocks
        assert len(self.open.tokens) < tree.block_size
        assert (self.open.block is None) == (not self.open.tokens)
        if self.open.block is not None:
            assert tree.allow_partial
            assert self.open.block is self.block(self.num_committed)


def full_nodes_above(tip: PrefixNode) -> list[PrefixNode]:
    """The nodes from the root to ``tip``, without root and branches."""
    path: list[PrefixNode] = []
    node: PrefixNode | None = tip
    while node is not None:
        path += [node] if node.namespace is None else []
        node = node.parent
    return path[::-1]

"""The device's blocks as tables use them: taken, published under their tokens, given back. Knows pool and tree, no request."""

from __future__ import annotations

from collections.abc import Iterable

from engine.kv.block import Block, PrefixNode, Tokens
from engine.kv.history import CacheHistory
from engine.kv.pool import BlockPool
from engine.kv.prefix import PrefixTree
from engine.kv.tier_cache import TierCache


class DeviceBlocks:
    """Keeps pool and tree in step, and tells history and tiers. ``now`` counts admissions, ends and what windows leave: the order of use."""

    def __init__(self, pool: BlockPool, tree: PrefixTree, tiers: TierCache, history: CacheHistory) -> None:
        self.num_evicted = 0
        self.now = 0
        self._pool = pool
        self._tree = tree
        self._tiers = tiers
        self._history = history

    def tick(self) -> None:
        """A request comes or goes, or goes on and leaves blocks."""
        self.now += 1
        self._history.tick()

    def take(self) -> Block:
        """A block with one reference and no content: a free one, else that of the policy's victim. There must be one."""
        if self._pool.num_free == 0:
            self._evict()
        return self._pool.allocate()

    def _evict(self) -> None:
        victim = self._tree.pop_victim()
        assert victim is not None, "every cached block must be reachable by evicting leaves"
        self.num_evicted += 1
        self._history.on_evict(victim)
        if len(victim.tokens) == self._tree.block_size:
            self._tiers.offload(victim)
        self.forget(victim)

    def share(self, node: PrefixNode) -> Block:
        """One more reference to the node's block, which is used now."""
        assert node.block is not None
        self._pool.retain(node.block)
        self._tree.touch(node, self.now)
        return node.block

    def take_over(self, node: PrefixNode) -> Block:
        """The block of a partial node, with a reference, to be filled further: it is not found any more until it is published."""
        assert node.block is not None
        self._pool.retain(node.block)
        return self._tree.remove(node)

    def hold(self, block: Block) -> None:
        """A reference to a block that is only read: published, or another request's open one."""
        if block.node is not None:
            self.share(block.node)
        else:
            self._pool.retain(block)

    def release(self, block: Block) -> None:
        """Drop a reference. After the last one the block is free, or cached if it is published."""
        self._pool.release(block)
        node = block.node
        if node is not None and block.ref_count == 0:
            self._history.on_release(node)
            self._tree.offer(node, self.now)

    def keep(self, nodes: Iterable[PrefixNode]) -> None:
        """Let them be evicted after all that is cached now."""
        self.now += 1
        for node in nodes:
            self._tree.offer(node, self.now)

    def publish(self, parent: PrefixNode, tokens: Tokens, block: Block) -> PrefixNode:
        """Insert the block, and free the partial one that it makes useless. (In this order: a parent without children may go.)

        Returns the node that stands for these tokens: it may be an older one, with another block.
        """
        useless = self._tree.superseded(parent, tokens) if parent.children else None
        node = self._tree.insert(parent, tokens, block)
        if node.block is block:
            self._history.on_publish(node)
        if useless is not None:
            self.forget(useless)
        return node

    def forget(self, node: PrefixNode) -> None:
        """Unpublish a block; it is free now unless somebody holds it."""
        block = self._tree.remove(node)
        if block.ref_count == 0:
            self._pool.reclaim(block)

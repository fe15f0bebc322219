"""The blocks: which are free, and how many hold references. Knows nothing of tokens."""

from __future__ import annotations

from engine.kv.block import Block


class BlockPool:
    """All blocks and the free list. The most recently freed block is used first: its bytes are likeliest to be near."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.blocks = tuple(Block(block_id) for block_id in range(num_blocks))
        self._free = list(reversed(self.blocks))
        self._num_referenced = 0
        self._num_pinned = 0
        self._num_pinned_cached = 0

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_referenced(self) -> int:
        return self._num_referenced

    @property
    def num_cached(self) -> int:
        return self.num_blocks - self.num_free - self.num_referenced

    @property
    def num_pinned(self) -> int:
        """Blocks under at least one pin, referenced or cached."""
        return self._num_pinned

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free ones, and cached ones that are not pinned."""
        return self.num_free + self.num_cached - self._num_pinned_cached

    def allocate(self) -> Block:
        """Take a free block, with one reference. There must be one."""
        block = self._free.pop()
        assert block.ref_count == 0
        assert block.node is None
        block.ref_count = 1
        self._num_referenced += 1
        return block

    def retain(self, block: Block) -> None:
        """Add a reference to a cached or referenced block."""
        assert block.ref_count > 0 or block.node is not None, f"block {block.block_id} is free and cannot be shared"
        if block.ref_count == 0:
            self._num_referenced += 1
            self._num_pinned_cached -= block.num_pins > 0
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """Drop a reference. The last one frees the block, or leaves it cached when the tree knows it."""
        assert block.ref_count > 0, f"block {block.block_id} was released more often than it was taken"
        block.ref_count -= 1
        if block.ref_count == 0:
            self._num_referenced -= 1
            self._num_pinned_cached += block.num_pins > 0
            if block.node is None:
                self._free.append(block)

    def reclaim(self, block: Block) -> None:
        """Free a cached block that the tree has just forgotten."""
        assert block.ref_count == block.num_pins == 0
        assert block.node is None
        self._free.append(block)

    def pin(self, block: Block) -> None:
        """Protect a published block, once more if it is pinned already."""
        assert block.node is not None, f"block {block.block_id} is not published and cannot be pinned"
        if block.num_pins == 0:
            self._num_pinned += 1
            self._num_pinned_cached += block.ref_count == 0
        block.num_pins += 1

    def unpin(self, block: Block) -> None:
        assert block.num_pins > 0, f"block {block.block_id} was unpinned more often than it was pinned"
        block.num_pins -= 1
        if block.num_pins == 0:
            self._num_pinned -= 1
            self._num_pinned_cached -= block.ref_count == 0

    def check_integrity(self) -> None:
        free = {block.block_id for block in self._free}
        assert len(free) == len(self._free), "a block is in the free list twice"
        for block in self.blocks:
            assert block.ref_count >= 0
            is_free = block.ref_count == 0 and block.node is None
            assert is_free == (block.block_id in free), f"block {block.block_id} and the free list disagree"
            assert not block.num_pins or block.node is not None, f"block {block.block_id} is pinned and cannot be found"
        assert sum(block.ref_count > 0 for block in self.blocks) == self._num_referenced
        assert sum(block.num_pins > 0 for block in self.blocks) == self._num_pinned
        assert sum(block.num_pins > 0 and block.ref_count == 0 for block in self.blocks) == self._num_pinned_cached

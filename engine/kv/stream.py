"""Endless requests: the first tokens of a text (attention sinks) and a window of the last ones, in a number of blocks that never grows.

    text       | sinks |    tokens that have left    |        window        |
    cache      | sinks |        window        |  places 0, 1, 2, ... without a gap

A key is rotated by its place in the cache, not in the text (StreamingLLM, arXiv 2309.17453). When all places are taken, the oldest
blocks of the window leave together, and the keys behind them are turned back by as many places. The request's blocks are its own:
never in the prefix tree. Knows positions and blocks; no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.kv.block import Block

TURNS = 8
"""A window leaves in so many parts: so often at most is a key turned back before it leaves."""


@dataclass(frozen=True, slots=True)
class StreamShape:
    """Which tokens are in the cache depends on the position alone: not on steps, chunks or neighbours."""

    block_size: int
    num_sink_blocks: int
    num_window_blocks: int

    def __post_init__(self) -> None:
        assert self.num_sink_blocks >= 0
        assert self.num_window_blocks >= 2

    @property
    def max_blocks(self) -> int:
        return self.num_sink_blocks + self.num_window_blocks

    @property
    def max_tokens(self) -> int:
        """Places; a request of more tokens is a stream."""
        return self.max_blocks * self.block_size

    @property
    def num_leaving(self) -> int:
        """Blocks that leave together."""
        return max(1, self.num_window_blocks // TURNS)

    def num_left(self, position: int) -> int:
        """How many blocks have left when the token at ``position`` is computed."""
        over, stride = position - self.max_tokens, self.num_leaving * self.block_size
        return 0 if over < 0 else (over // stride + 1) * self.num_leaving

    def num_to_go(self, position: int) -> int:
        """How many tokens from ``position`` on can be computed before blocks leave: a step goes no further."""
        return self.max_tokens + (self.num_left(position) * self.block_size) - position


@dataclass(frozen=True, slots=True)
class BlockTurn:
    """The keys of these blocks, all layers, are turned back by ``distance`` places before the step computes anything."""

    block_ids: tuple[int, ...]
    distance: int


@dataclass(slots=True, eq=False)
class StreamTable:
    """The blocks of a running stream, sinks first. ``num_released`` have left from between; ``num_tokens`` are computed by now.

    ``turns`` are to be made before the next step.
    """

    shape: StreamShape
    blocks: list[Block] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_released: int = 0
    num_tokens: int = 0
    turns: list[BlockTurn] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """Those that have left included."""
        return self.num_released + len(self.blocks)

    @property
    def num_committed(self) -> int:
        """None of the blocks that are held is in the tree."""
        return self.num_released

    def append(self, block: Block) -> None:
        self.blocks.append(block)
        self.block_ids.append(block.block_id)

    def advance(self, num_computed_tokens: int) -> list[Block]:
        """So many tokens are computed. Returns the blocks that leave."""
        self.num_tokens = num_computed_tokens
        count = self.shape.num_left(num_computed_tokens) - self.num_released
        if count == 0:
            return []
        span = slice(self.shape.num_sink_blocks, self.shape.num_sink_blocks + count)
        leaving = self.blocks[span]
        del self.blocks[span], self.block_ids[span]
        self.num_released += count
        kept = self.block_ids[self.shape.num_sink_blocks :]
        self.turns.append(BlockTurn(tuple(kept), count * self.shape.block_size))
        return leaving

    def check_integrity(self) -> None:
        assert self.block_ids == [block.block_id for block in self.blocks]
        assert all(block.ref_count == 1 and block.node is None for block in self.blocks), "a stream's block is shared"
        assert len(self.blocks) <= self.shape.max_blocks
        assert self.num_released == self.shape.num_left(self.num_tokens)

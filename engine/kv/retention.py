"""Which blocks of a request its queries yet to come read: all so far, those of a sliding window, or a stream's sinks and window.

A query at position p sees the keys at p - window + 1 .. p. Blocks that lie wholly before that for every query to come are *behind*:
their request lets go of them while it runs. Knows counts and positions; not who holds what.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv.block import Block, PrefixNode
from engine.kv.stream import StreamShape


@dataclass(frozen=True, slots=True)
class Retention:
    """``window`` in tokens, None without one. ``max_step_tokens``: the most that a step computes of a request; only a window asks.
    ``stream``: requests of more tokens than it has places are streams (see engine.kv.stream); None: there are none.

    The prefix tree of a windowed cache has gaps: a block can be evicted from above others, and a prefix is found if what lies
    within the window of its next token is there.
    """

    block_size: int
    window: int | None = None
    max_step_tokens: int = 0
    stream: StreamShape | None = None

    def __post_init__(self) -> None:
        assert self.window is None or self.stream is None

    def is_stream(self, num_tokens: int) -> bool:
        """Whether a request that may come to so many tokens is a stream."""
        return self.stream is not None and num_tokens > self.stream.max_tokens

    @property
    def has_gaps(self) -> bool:
        return self.window is not None

    def num_behind(self, position: int) -> int:
        """How many of a request's first blocks no query at ``position`` or later reads."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size

    @property
    def max_blocks(self) -> int:
        """The most blocks that a request holds at a time, however long it gets: a window, a step's tokens and a part of a block;
        or a stream's places."""
        if self.stream is not None:
            return self.stream.max_blocks
        if self.window is None:
            return sys.maxsize
        return (self.window + self.max_step_tokens + self.block_size - 3) // self.block_size + 1

    def num_blocks_for(self, num_tokens: int, num_released: int = 0) -> int:
        """The most blocks that a request holds until it has ``num_tokens`` tokens, if it has let go of the first ``num_released``."""
        return min(-(-num_tokens // self.block_size) - num_released, self.max_blocks)

    def num_usable(self, path: Sequence[PrefixNode]) -> int:
        """The longest prefix of these full blocks, from the root on, that a request can start behind: with no gap in its window."""
        if self.window is None:
            return len(path)
        num_usable = num_resident = 0
        for number, node in enumerate(path, 1):
            num_resident = num_resident + 1 if node.block is not None else 0
            if num_resident >= number - self.num_behind(number * self.block_size):
                num_usable = number
        return num_usable

    def num_own(self, blocks: Sequence[Block]) -> int:
        """How many blocks of a table could be had if its request were freed.

        Without a window they are the table's tail, as who shares a block shares all before it.
        """
        if self.window is None:
            return len(blocks) - bisect_left(blocks, True, key=_is_own)
        return sum(map(_is_own, blocks))


def _is_own(block: Block) -> bool:
    return block.ref_count == 1 and not block.num_pins

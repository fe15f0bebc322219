"""The work list of a step: which query rows read which blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkItem:
    """Query rows [query_start, query_start + num_queries) read the tokens at positions [start, end) of a run of blocks.

    Row ``i`` of the item stands at position ``first_position + i`` and sees the tokens up to and including its own: all of them,
    or the last ``window``. ``block_ids[0]`` begins with position ``start``, a multiple of the block size. No (query, token) pair is
    in two items. ``tail_slot``: see ScheduledSequence.
    """

    query_start: int
    num_queries: int
    first_position: int
    block_ids: tuple[int, ...]
    start: int
    end: int
    tail_slot: int | None = None
    window: int | None = None

    def first_seen(self, position: int) -> int:
        """The first token that the query at this position sees."""
        return self.start if self.window is None else max(self.start, position - self.window + 1)

    def __post_init__(self) -> None:
        assert self.num_queries > 0
        assert self.start < self.end
        assert self.first_position + self.num_queries >= self.end


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """All items of a step, and where its new tokens' K and V go: row i to slot ``slots[i]`` (block id * block size + offset)."""

    items: tuple[WorkItem, ...]
    slots: tuple[int, ...]
    block_size: int

    @property
    def num_rows(self) -> int:
        return len(self.slots)

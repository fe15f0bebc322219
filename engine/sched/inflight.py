"""Waiting requests that are held back because a running one is about to compute what they share with it.

Knows requests and their tokens. Does not know blocks, the queue's order or the budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.kv.match import PrefixMatch
from engine.kv.prefix import public_namespace
from engine.request import Request

_CHUNK = 256


@dataclass(frozen=True, slots=True)
class _Hold:
    """Wait until the leader has computed ``num_tokens``, as long as it does so in ``rope_class``. ``num_resident`` were there
    already when the request was first held."""

    leader_id: str
    rope_class: int
    num_tokens: int
    num_resident: int


class InFlight:
    """Who waits for whom. A request waits for a leader at most until that one has computed the tokens or no longer runs.

    What is remembered makes a held request cheap to pass by: its tokens are compared once for each leader it is given.
    A format that cannot share blocks in part (``allow_partial`` False) gains by whole blocks only.
    """

    def __init__(self, block_size: int, *, allow_partial: bool) -> None:
        self.block_size = block_size
        self.allow_partial = allow_partial
        self._holds: dict[str, _Hold] = {}

    def is_held(self, request_id: str, running: Mapping[str, Request]) -> bool:
        hold = self._holds.get(request_id)
        leader = running.get(hold.leader_id) if hold is not None else None
        if hold is None or leader is None or leader.namespace.rope_class != hold.rope_class:
            return False
        return leader.num_computed_tokens < hold.num_tokens

    def hold_back(self, request: Request, match: PrefixMatch, running: Mapping[str, Request]) -> bool:
        """Hold the request if a running one is to compute at least a block more of its tokens than ``match`` found."""
        best: tuple[int, str] | None = None
        for leader in running.values():
            num_shared = self._num_shared(request, match.num_tokens, leader)
            if num_shared >= match.num_tokens + self.block_size and (best is None or num_shared > best[0]):
                best = (num_shared, leader.request_id)
        if best is None:
            return False
        earlier = self._holds.get(request.request_id)
        num_resident = earlier.num_resident if earlier is not None else match.num_tokens
        self._holds[request.request_id] = _Hold(best[1], request.namespace.rope_class, best[0], num_resident)
        return True

    def forget(self, request_id: str) -> int | None:
        """The request is admitted, or gone. Returns how much of it was resident when it was first held; None if it never was."""
        hold = self._holds.pop(request_id, None)
        return hold.num_resident if hold is not None else None

    def _num_shared(self, request: Request, num_matched: int, leader: Request) -> int:
        """How many of the request's tokens will be had from the leader; 0 where that is less than a block beyond the match."""
        if leader.num_uncomputed_tokens < self.block_size or request.is_stream or leader.is_stream:
            return 0
        needed = num_matched + self.block_size
        limit = min(request.num_tokens - 1, leader.num_tokens, self._num_visible(request, leader))
        if limit < needed or request.token_ids[num_matched:needed] != leader.token_ids[num_matched:needed]:
            return 0
        num_shared = common_prefix_len(request.token_ids, leader.token_ids, limit)
        num_shared = num_shared if self.allow_partial else num_shared // self.block_size * self.block_size
        return num_shared if leader.num_computed_tokens < num_shared else 0  # computed, and gone again: a window does that

    def _num_visible(self, request: Request, leader: Request) -> int:
        """How far both stand in one tree: they part where the first of them leaves the public blocks."""
        edges = [self._public_edge(request), self._public_edge(leader)]
        if request.namespace == leader.namespace and edges[0] == edges[1]:
            return request.num_tokens
        if public_namespace(request.namespace) != public_namespace(leader.namespace):
            return 0
        return min(edges)

    def _public_edge(self, request: Request) -> int:
        """Where the request's public blocks end. Without a salt all of them are."""
        return request.num_public_tokens // self.block_size * self.block_size if request.namespace.salt else request.num_tokens


def common_prefix_len(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """How many of the first ``limit`` tokens are equal from the start. Both have as many. Compares slices: that is done in C."""
    start = 0
    while start < limit:
        end = min(start + _CHUNK, limit)
        if a[start:end] != b[start:end]:
            return next(index for index in range(start, end) if a[index] != b[index])
        start = end
    return limit

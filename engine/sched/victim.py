"""Whom to preempt when blocks run out. Looks at block counts; takes nothing and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.kv.manager import KVCacheManager
from engine.request import Request

MAX_PREEMPTIONS = 8
"""So many times at most is a request preempted. Few need that many: it bounds the worst wait, and is not meant to be met often."""


def is_protected(request: Request) -> bool:
    """Whether the request is not to be preempted: it has been often enough, or it is a stream, which would start all over.

    It is let in only with room for all that it may become.
    """
    return request.num_preemptions >= MAX_PREEMPTIONS or request.is_stream


class VictimPolicy(Protocol):
    def choose(self, running: Sequence[Request], num_blocks: int, manager: KVCacheManager) -> Request:
        """One of ``running`` (oldest admission first) to preempt, as ``num_blocks`` more blocks are needed than can be had.

        It may be the request that needs them. Asked again when its blocks are not enough.
        """


class NewestVictim:
    """The request that was admitted last, whoever it is: the oldest always advances, so there is progress."""

    def choose(self, running: Sequence[Request], num_blocks: int, manager: KVCacheManager) -> Request:
        return running[-1]


class CheapestVictim:
    """Of the least important priority, the request with the fewest blocks of its own that are still enough.

    Blocks that running requests share stay where they are and cost nothing to bring back. Its own ones stay cached as well and are
    taken from the tail, one by one as they are needed: what it can lose at most is what it has alone. When no request has
    enough, the one with most goes first. Protected requests are never chosen; who lets them in has seen to it that they need not be.
    """

    def choose(self, running: Sequence[Request], num_blocks: int, manager: KVCacheManager) -> Request:
        unprotected = [request for request in running if not is_protected(request)]
        assert unprotected, "protected requests have outgrown the cache"
        last_class = max(request.priority for request in unprotected)

        def cost(index: int) -> tuple[bool, int, int]:
            own = manager.num_own_blocks(unprotected[index].request_id)
            return own < num_blocks, own if own >= num_blocks else -own, -index

        candidates = [index for index, request in enumerate(unprotected) if request.priority == last_class]
        return unprotected[min(candidates, key=cost)]

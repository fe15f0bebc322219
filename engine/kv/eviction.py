"""Which cached block is forgotten first. A policy sees only the unreferenced leaves of the prefix tree."""

from __future__ import annotations

import heapq
from typing import Protocol

from engine.kv.block import PrefixNode


class EvictionPolicy(Protocol):
    """A set of evictable nodes that can name its next victim."""

    def add(self, node: PrefixNode) -> None:
        """The node became evictable."""

    def discard(self, node: PrefixNode) -> None:
        """The node is no longer evictable: it is referenced again, or has a child."""

    def pop(self) -> PrefixNode | None:
        """Take the victim out of the set; None when the set is empty."""

    def __len__(self) -> int: ...

    def __contains__(self, node: PrefixNode) -> bool: ...


class LRUPolicy:
    """The leaf that was used longest ago; of those used at the same time, the deepest.

    A heap with lazy deletion: an entry counts only while it is the node's current one.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, PrefixNode]] = []
        self._current: dict[PrefixNode, int] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, node: PrefixNode) -> bool:
        return node in self._current

    def add(self, node: PrefixNode) -> None:
        number = self._num_added = self._num_added + 1
        self._current[node] = number
        heapq.heappush(self._heap, (node.last_used, -node.depth, number, node))
        if len(self._heap) > 2 * len(self._current) + 64:
            self._compact()

    def discard(self, node: PrefixNode) -> None:
        self._current.pop(node, None)

    def pop(self) -> PrefixNode | None:
        heap, current = self._heap, self._current
        while heap:
            _, _, number, node = heapq.heappop(heap)
            if current.get(node) == number:
                del current[node]
                return node
        return None

    def _compact(self) -> None:
        self._heap = [item for item in self._heap if self._current.get(item[3]) == item[2]]
        heapq.heapify(self._heap)

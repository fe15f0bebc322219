"""What the cache remembers beyond what it holds: when blocks were last used, and why a prompt's tokens were not found.

Told by the manager what happens to published blocks; decides nothing. Durations in seconds, by the clock that is handed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.kv.block import PrefixNode
from engine.kv.ghosts import Chain, GhostIndex
from engine.stats import Ages, PromptSources

GHOSTS_PER_BLOCK = 4


@dataclass(frozen=True, slots=True)
class FoundTokens:
    """How many of a prompt's first tokens were found, and where. Together they are its first ``num_tokens`` tokens; in which order
    the places follow each other is not said: what was in flight may have gone to host memory in part by now."""

    device: int = 0
    host: int = 0
    disk: int = 0
    in_flight: int = 0

    @property
    def num_tokens(self) -> int:
        return self.device + self.host + self.disk + self.in_flight


class CacheHistory:
    """Keeps ``used_at`` and ``num_hits`` of every node, their ages at the end of each rest, and ghosts of full ones that are gone.

    All that is told between two calls of ``tick`` happens at one time.
    """

    def __init__(self, num_blocks: int, block_size: int, clock: Callable[[], float]) -> None:
        self.ghosts = GhostIndex(GHOSTS_PER_BLOCK * num_blocks)
        self._block_size = block_size
        self._clock = clock
        self._now = clock()
        self._reuse_gaps: Counter[float] = Counter()
        self._evict_idles: dict[float, int] = {}

    def tick(self) -> None:
        """Something is about to happen: look at the clock."""
        self._now = self._clock()

    def on_publish(self, node: PrefixNode) -> None:
        node.used_at = self._now
        if len(node.tokens) == self._block_size:
            self.ghosts.publish(node)

    def on_hit(self, nodes: Iterable[PrefixNode]) -> None:
        """A request is about to take these nodes: called before it holds references."""
        now = self._now
        for node in nodes:
            assert node.block is not None
            if node.block.ref_count == 0:
                self._reuse_gaps[now - node.used_at] += 1
            node.num_hits += 1
            node.used_at = now

    def on_release(self, node: PrefixNode) -> None:
        """The last request that used the node is gone."""
        node.used_at = self._now

    def on_evict(self, node: PrefixNode) -> None:
        idle = self._now - node.used_at
        self._evict_idles[idle] = self._evict_idles.get(idle, 0) + 1
        self.on_drop(node)

    def on_drop(self, node: PrefixNode) -> None:
        """The node was forgotten by order, not for want of room."""
        if len(node.tokens) == self._block_size:
            self.ghosts.forget(node, self._now)

    def take_reuse_gaps(self) -> Ages:
        """Since the last call: how long cached blocks had lain unused when a request found them again."""
        gaps, self._reuse_gaps = self._reuse_gaps, Counter()
        return tuple(gaps.items())

    def take_evict_idles(self) -> Ages:
        """Since the last call: how long evicted blocks had lain unused."""
        idles, self._evict_idles = self._evict_idles, {}
        return tuple(idles.items())

    def label(self, prompt: Sequence[int], found: FoundTokens, nodes: Sequence[PrefixNode], chain: Chain) -> PromptSources:
        """Each token of a prompt under one label. ``nodes`` are the full blocks that it starts with and that it found on the device.

        All that follow are looked up alike: how long it takes says nothing about what others have.
        """
        evicted = elsewhere = 0
        first_gone: float | None = None
        keys = chain.keys(prompt, len(nodes), self.ghosts.key_of(nodes[-1]) if nodes else None)
        for number, key in enumerate(keys, start=len(nodes) + 1):
            gone, is_elsewhere = self.ghosts.gone_since(key), self.ghosts.is_elsewhere(key)
            num_missing = max(0, min(self._block_size, number * self._block_size - found.num_tokens))
            if gone is not None:
                evicted += num_missing
                first_gone = first_gone if first_gone is not None or not num_missing else gone
            elif is_elsewhere:
                elsewhere += num_missing
        return PromptSources(
            device=found.device,
            host=found.host,
            disk=found.disk,
            in_flight=found.in_flight,
            evicted=evicted,
            other_namespace=elsewhere,
            unseen=len(prompt) - found.num_tokens - evicted - elsewhere,
            evicted_seconds=None if first_gone is None else self._clock() - first_gone,
        )

"""What an operator does to the cache between two steps: look at it, pin, drop, reset. Works on the same tree, pool and tiers as the manager.

Knows blocks and tokens; not who may ask, nor how the question came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv.block import PrefixNode
from engine.kv.dropping import DropCounts, continuations, descendants, drop
from engine.kv.history import CacheHistory
from engine.kv.match import PrefixMatch
from engine.kv.pins import Pins
from engine.kv.pool import BlockPool
from engine.kv.prefix import PrefixTree
from engine.kv.survey import Survey, survey
from engine.kv.tier_cache import TierCache
from engine.kv.tier_drop import TierDropCounts
from engine.request import Namespace


@dataclass(frozen=True, slots=True)
class DropResult:
    """What went and what stayed, by tier."""

    device: DropCounts
    tiers: TierDropCounts


class CacheOperator:
    """Never touches what a running request holds."""

    def __init__(self, pool: BlockPool, tree: PrefixTree, tiers: TierCache, pins: Pins, history: CacheHistory) -> None:
        self.pins = pins
        self._pool = pool
        self._tree = tree
        self._tiers = tiers
        self._history = history

    def match(self, namespace: Namespace, token_ids: Sequence[int], num_public_tokens: int) -> PrefixMatch:
        """What a prompt that goes on behind these tokens would find of them on the device."""
        num_public_blocks = self._tree.num_public_blocks(namespace, num_public_tokens)
        return self._tree.match(namespace, (*token_ids, 0), num_public_blocks)  # a match leaves out the last token

    def drop(self, namespace: Namespace, token_ids: Sequence[int], num_public_tokens: int) -> DropResult:
        """Forget what continues these tokens, and of their own blocks those that nothing else continues, on any tier.

        Looks where a prompt of exactly these tokens would stand. In a salted namespace public blocks stay; without a salt,
        what continues public ones in any namespace is meant too.
        """
        self._history.tick()
        size, num_public = self._tree.block_size, self._tree.num_public_blocks(namespace, num_public_tokens)
        nodes = self._tree.path(namespace, token_ids, num_public)
        own, below = nodes[num_public:], self._below(namespace, token_ids, nodes, num_public)
        known = [self._tiers.digest(node) for node in below if len(node.tokens) == size]
        scope = self._tiers.scope(namespace, token_ids, num_public, size)
        num_kept = self._tiers.num_continued(scope, known)
        num_continued = num_public + num_kept if num_kept else 0
        counts = drop(below, self._forget, num_continued, with_gaps=self._tree.has_gaps)
        device = drop(reversed(own), self._forget, num_continued, counts=counts)
        stayed = [number for number, node in enumerate(own, 1) if node.block is not None and node.block.is_reclaimable]
        return DropResult(device, self._tiers.drop(scope, max([num_kept, *stayed[-1:]]), known))

    def _below(
        self, namespace: Namespace, token_ids: Sequence[int], nodes: Sequence[PrefixNode], num_public_blocks: int
    ) -> list[PrefixNode]:
        """What continues the tokens on the device, leaves first; ``nodes`` are the full blocks of theirs that are known there."""
        size = self._tree.block_size
        position = self._tree.position(namespace, nodes, num_public_blocks)
        if position is None or len(nodes) < len(token_ids) // size:
            return []
        return descendants(continuations(position, token_ids[len(nodes) * size :], with_branches=not namespace.salt))

    def reset(self) -> DropResult:
        """Forget all that is neither in use nor pinned, and all that the tiers below hold of this model."""
        self._history.tick()
        return DropResult(
            drop(descendants(self._tree.roots()), self._forget, with_gaps=self._tree.has_gaps), self._tiers.reset()
        )

    def survey(self, num_prefixes: int, num_token_ids: int) -> Survey:
        """See ``Survey``; at most ``num_prefixes`` in each ranking, with the first ``num_token_ids`` tokens of each."""
        tops = [node for node in self._tree.all_nodes() if node.namespace is not None]
        return survey(tops, num_prefixes, num_token_ids)

    def _forget(self, node: PrefixNode) -> None:
        self._history.on_drop(node)
        self._pool.reclaim(self._tree.remove(node))

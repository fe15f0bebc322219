"""What an operator does to the cache between two steps: look at it, pin, drop, reset. Works on the same tree, pool and tiers as the manager.

Knows blocks and tokens; not who may ask, nor how the question came.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv.block import PrefixNode
from engine.kv.dropping import DropCounts, continuations, descendants, drop
from engine.kv.history import CacheHistory
from engine.kv.pins import Pins
from engine.kv.pool import BlockPool
from engine.kv.prefix import PrefixTree
from engine.kv.survey import Survey, survey
from engine.kv.tier_cache import Dropped, TierCache
from engine.request import Namespace


class CacheOperator:
    """Never touches what a running request holds."""

    def __init__(self, pool: BlockPool, tree: PrefixTree, tiers: TierCache, pins: Pins, history: CacheHistory) -> None:
        self.pins = pins
        self._pool = pool
        self._tree = tree
        self._tiers = tiers
        self._history = history

    def resident_nodes(self, namespace: Namespace, token_ids: Sequence[int], num_public_tokens: int) -> tuple[PrefixNode, ...]:
        """The full blocks of these tokens that are on the device, from the start to the first gap."""
        num_public_blocks = self._tree.num_public_blocks(namespace, num_public_tokens)
        return self._tree.match(namespace, (*token_ids, 0), num_public_blocks).nodes  # a match leaves out the last token

    def drop(self, namespace: Namespace, token_ids: Sequence[int], num_public_tokens: int) -> DropCounts:
        """Forget what continues these tokens, in every tier, and of their own blocks those that nothing else continues.

        Looks where a prompt of exactly these tokens would stand. In a salted namespace public blocks stay; without a salt,
        what continues public ones in any namespace is meant too.
        """
        size = self._tree.block_size
        num_full, num_public = len(token_ids) // size, self._tree.num_public_blocks(namespace, num_public_tokens)
        nodes = self.resident_nodes(namespace, token_ids, num_public_tokens)
        position = self._tree.position(namespace, nodes, num_public)
        first_below: list[PrefixNode] = []
        if position is not None and len(nodes) == num_full:
            first_below = continuations(position, token_ids[num_full * size :], with_branches=not namespace.salt)
        is_whole = len(token_ids) == num_full * size and num_full > num_public
        below = descendants(first_below)
        digests = self._digests(below)  # of all: the tiers may lack some that others there continue
        counts = drop((*below, *reversed(nodes[num_public:])), self._forget)
        counts.is_exact_below = is_whole or self._tiers.is_empty
        if is_whole:
            *before, last = self._tiers.digests_of(namespace, token_ids, num_public, size)[num_public:]
            self._count_below(counts, self._tiers.drop(last, *digests, before=reversed(before)))
        else:
            self._count_below(counts, self._tiers.drop(*digests))
        return counts

    def reset(self) -> DropCounts:
        """Forget all that is neither in use nor pinned, and all that the tiers below hold of this model."""
        counts = drop(descendants(self._tree.roots()), self._forget)
        self._count_below(counts, self._tiers.reset())
        return counts

    def _digests(self, nodes: Sequence[PrefixNode]) -> list[bytes]:
        return [self._tiers.digest(node) for node in nodes if len(node.tokens) == self._tree.block_size]

    def _count_below(self, counts: DropCounts, dropped: Dropped) -> None:
        counts.num_host += dropped.num_host_blocks
        counts.num_disk += dropped.num_disk_blocks

    def survey(self, num_prefixes: int, num_token_ids: int) -> Survey:
        """See ``Survey``; at most ``num_prefixes`` in each ranking, with the first ``num_token_ids`` tokens of each."""
        tops = [node for node in self._tree.all_nodes() if node.block is None]
        return survey(tops, num_prefixes, num_token_ids)

    def _forget(self, node: PrefixNode) -> None:
        self._history.on_drop(node)
        self._pool.reclaim(self._tree.remove(node))

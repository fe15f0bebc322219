"""What an operator does to the cache between two steps: look at it, pin, drop, reset. Works on the same tree and pool as the manager.

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
from engine.request import Namespace


class CacheOperator:
    """Never touches what a running request holds."""

    def __init__(self, pool: BlockPool, tree: PrefixTree, pins: Pins, history: CacheHistory) -> None:
        self.pins = pins
        self._pool = pool
        self._tree = tree
        self._history = history

    def resident_nodes(self, namespace: Namespace, token_ids: Sequence[int], num_public_tokens: int) -> tuple[PrefixNode, ...]:
        """The full blocks of these tokens that are on the device, from the start to the first gap."""
        num_public_blocks = self._tree.num_public_blocks(namespace, num_public_tokens)
        return self._tree.match(namespace, (*token_ids, 0), num_public_blocks).nodes  # a match leaves out the last token

    def drop(self, namespace: Namespace, token_ids: Sequence[int], num_public_tokens: int) -> DropCounts:
        """Forget what continues these tokens, and of their own blocks those that nothing else continues.

        Looks where a prompt of exactly these tokens would stand. In a salted namespace public blocks stay; without a salt,
        what continues public ones in any namespace is meant too.
        """
        nodes = self.resident_nodes(namespace, token_ids, num_public_tokens)
        num_public_blocks = self._tree.num_public_blocks(namespace, num_public_tokens)
        position = self._tree.position(namespace, nodes, num_public_blocks)
        below: list[PrefixNode] = []
        if position is not None and len(nodes) == len(token_ids) // self._tree.block_size:
            rest = token_ids[len(nodes) * self._tree.block_size :]
            below = descendants(continuations(position, rest, with_branches=not namespace.salt))
        return drop((*below, *reversed(nodes[num_public_blocks:])), self._forget)

    def reset(self) -> DropCounts:
        """Forget all that is neither in use nor pinned."""
        return drop(descendants(self._tree.roots()), self._forget)

    def survey(self, num_prefixes: int, num_token_ids: int) -> Survey:
        """See ``Survey``; at most ``num_prefixes`` in each ranking, with the first ``num_token_ids`` tokens of each."""
        tops = [node for node in self._tree.all_nodes() if node.block is None]
        return survey(tops, num_prefixes, num_token_ids)

    def _forget(self, node: PrefixNode) -> None:
        self._history.on_drop(node)
        self._pool.reclaim(self._tree.remove(node))

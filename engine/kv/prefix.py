"""The prefix tree: full blocks found by their exact tokens, within a namespace. No hashes, so no collisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.kv.block import Block, PrefixNode
from engine.kv.eviction import EvictionPolicy
from engine.request import Namespace


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest run of resident blocks that a prompt starts with. A finding only: nothing is held by it."""

    nodes: tuple[PrefixNode, ...]
    num_tokens: int

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(node.block for node in self.nodes if node.block is not None)


class PrefixTree:
    """One root for each namespace. Writes nodes and their blocks' ``node``; reference counts are the pool's."""

    def __init__(self, block_size: int, policy: EvictionPolicy) -> None:
        self.block_size = block_size
        self._policy = policy
        self._roots: dict[Namespace, PrefixNode] = {}

    def match(self, namespace: Namespace, token_ids: Sequence[int]) -> PrefixMatch:
        """Follow the tokens down. At least one token is left to compute: a full hit would give no logits."""
        node = self._roots.get(namespace)
        nodes: list[PrefixNode] = []
        size = self.block_size
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            if node is None:
                break
            node = node.children.get(tuple(token_ids[start : start + size]))
            if node is not None:
                nodes.append(node)
        return PrefixMatch(tuple(nodes), len(nodes) * size)

    def insert(self, namespace: Namespace, parent: PrefixNode | None, tokens: tuple[int, ...], block: Block) -> PrefixNode:
        """Publish a full block below ``parent`` (None: as the first of its namespace).

        Returns the node that stands for these tokens: an older one with another block, if there is one.
        """
        assert len(tokens) == self.block_size
        parent = parent if parent is not None else self._root(namespace)
        known = parent.children.get(tokens)
        if known is not None:
            return known
        assert block.node is None, f"block {block.block_id} is published already"
        self._policy.discard(parent)
        node = PrefixNode(tokens, parent, block, parent.depth + 1)
        parent.children[tokens] = node
        block.node = node
        return node

    def _root(self, namespace: Namespace) -> PrefixNode:
        if namespace not in self._roots:
            self._roots[namespace] = PrefixNode((), None, None, 0, namespace=namespace)
        return self._roots[namespace]

    def touch(self, node: PrefixNode, now: int) -> None:
        """The node is in use: protect it from eviction."""
        node.last_used = now
        self._policy.discard(node)

    def offer(self, node: PrefixNode, now: int) -> None:
        """The node's last reference is gone: it may be evicted once it is a leaf."""
        node.last_used = now
        if node.is_evictable:
            self._policy.add(node)

    def evict(self) -> Block | None:
        """Forget the policy's victim and return its block; None when nothing is evictable."""
        node = self._policy.pop()
        if node is None:
            return None
        block, parent = node.block, node.parent
        assert block is not None
        assert parent is not None
        del parent.children[node.tokens]
        block.node = None
        node.block = None
        if parent.is_evictable:
            self._policy.add(parent)
        elif parent.namespace is not None and not parent.children:
            del self._roots[parent.namespace]
        return block

    def nodes(self) -> Iterator[PrefixNode]:
        """Every node that holds a block."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.block is not None:
                yield node

    def check_integrity(self) -> None:
        assert all(root.children for root in self._roots.values()), "a namespace without blocks was kept"
        count = 0
        for node in self.nodes():
            count += 1
            block, parent = node.block, node.parent
            assert block is not None
            assert parent is not None
            assert block.node is node, f"block {block.block_id} does not point back to its node"
            assert parent.children.get(node.tokens) is node
            assert node.depth == parent.depth + 1
            if block.ref_count > 0 and parent.block is not None:
                assert parent.block.ref_count > 0, "a referenced block hangs below an unreferenced one"
            assert node.is_evictable == (node in self._policy), f"block {block.block_id}: evictable and policy disagree"
        assert len(self._policy) <= count

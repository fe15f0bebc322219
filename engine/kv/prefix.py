"""The prefix tree: blocks found by their exact tokens, within a namespace. No hashes, so no collisions."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

from engine.kv.block import Block, OpenBlock, PrefixNode, Tokens
from engine.kv.eviction import EvictionPolicy
from engine.kv.tiers import Tier, TierHit
from engine.request import Namespace


@dataclass(frozen=True, slots=True)
class PartialMatch:
    """A block that starts with ``tokens``, the prompt's next ones; what else it holds differs, or is not wanted."""

    source: Block
    tokens: Tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def can_be_taken_over(self) -> bool:
        """The prompt goes on where the block ends, and nobody writes to it: it needs no copy, its new owner fills it further."""
        node = self.source.node
        return node is not None and len(node.tokens) == len(self.tokens)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest run of resident tokens that a prompt starts with. A finding only: nothing is held by it.

    ``nodes`` are full blocks, shared as they are; ``partial`` follows on them, to be copied from. The first
    ``num_public_blocks`` blocks of the request belong to the public tree, resident or not. ``below`` are the blocks that follow
    on ``nodes`` in the tiers: the leading ready ones are counted as resident and stand before any partial.
    """

    nodes: tuple[PrefixNode, ...]
    num_tokens: int
    partial: PartialMatch | None = None
    num_public_blocks: int = 0
    below: tuple[TierHit, ...] = ()

    @property
    def ready(self) -> tuple[TierHit, ...]:
        """The blocks that a step can load at once."""
        return tuple(takewhile(lambda hit: hit.is_ready, self.below))

    def num_tier_tokens(self, tier: Tier) -> int:
        """Tokens of the ready blocks that this tier is to be thanked for."""
        return sum(len(hit.tokens) for hit in self.ready if hit.tier is tier)

    def continued(self, below: tuple[TierHit, ...]) -> PrefixMatch:
        match = replace(self, below=below)
        ready = match.ready
        if not ready:
            return match
        match = match.without_partial()
        return replace(match, num_tokens=match.num_tokens + sum(len(hit.tokens) for hit in ready))

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(node.block for node in self.nodes if node.block is not None)

    @property
    def num_revived_blocks(self) -> int:
        """How many cached blocks cannot be had any more once the match is taken, beside those that the request is to fill."""
        num_revived = sum(block.is_reclaimable for block in self.blocks)
        is_source = self.partial is not None and self.partial.source.is_reclaimable and not self.partial.can_be_taken_over
        return num_revived + is_source

    @property
    def found_nodes(self) -> tuple[PrefixNode, ...]:
        """All nodes that the match uses, be it in part; an open block has none."""
        last = self.partial.source.node if self.partial is not None else None
        return self.nodes if last is None else (*self.nodes, last)

    def without_partial(self) -> PrefixMatch:
        num_partial = self.partial.num_tokens if self.partial is not None else 0
        return replace(self, num_tokens=self.num_tokens - num_partial, partial=None)


def public_namespace(namespace: Namespace) -> Namespace:
    """Where the public blocks of this namespace's requests stand: without its salt, everything else being equal."""
    return namespace._replace(salt="")


class PrefixTree:
    """One root for each namespace. Writes nodes and their blocks' ``node``; reference counts are the pool's."""

    def __init__(self, block_size: int, policy: EvictionPolicy, *, allow_partial: bool) -> None:
        self.block_size = block_size
        self.allow_partial = allow_partial
        self._policy = policy
        self._roots: dict[Namespace, PrefixNode] = {}

    def num_public_blocks(self, namespace: Namespace, num_public_tokens: int) -> int:
        """How many blocks of a prompt that begins with so many public tokens are public; for those without a salt, all are."""
        return num_public_tokens // self.block_size if namespace.salt else 0

    def match(self, namespace: Namespace, token_ids: Sequence[int], num_public_blocks: int = 0) -> PrefixMatch:
        """Follow the tokens down. At least one token is left to compute: a full hit would give no logits."""
        limit = len(token_ids) - 1
        nodes: list[PrefixNode] = []
        node = self._roots.get(public_namespace(namespace) if num_public_blocks else namespace)
        if num_public_blocks:
            node = self._descend(node, token_ids, min(limit, num_public_blocks * self.block_size), nodes)
            if len(nodes) == num_public_blocks:
                node = (nodes[-1].branches or {}).get(namespace)
        if len(nodes) == num_public_blocks:
            node = self._descend(node, token_ids, limit, nodes)
        num_tokens = len(nodes) * self.block_size
        partial = self._match_partial(node, token_ids[num_tokens : min(limit, num_tokens + self.block_size)])
        num_partial = partial.num_tokens if partial is not None else 0
        return PrefixMatch(tuple(nodes), num_tokens + num_partial, partial, num_public_blocks)

    def _descend(
        self, node: PrefixNode | None, token_ids: Sequence[int], limit: int, nodes: list[PrefixNode]
    ) -> PrefixNode | None:
        """Append the full nodes that hold the tokens from len(nodes) blocks on to ``limit``; returns the last one reached."""
        size = self.block_size
        for start in range(len(nodes) * size, limit - size + 1, size):
            child = node.children.get(tuple(token_ids[start : start + size])) if node is not None else None
            if child is None:
                break
            nodes.append(child)
            node = child
        return node

    def _match_partial(self, node: PrefixNode | None, wanted: Sequence[int]) -> PartialMatch | None:
        """The block below the node, published or open, that has the longest common prefix with ``wanted``."""
        if node is None or not self.allow_partial or not wanted:
            return None
        tokens = tuple(wanted)
        source, longest = None, 0
        ordered = node.in_order()
        position = bisect_left(ordered, tokens)
        for key in ordered[max(0, position - 1) : position + 1]:
            if (length := _common_len(key, tokens)) > longest:
                source, longest = node.children[key].block, length
        for other in node.open_blocks:
            if (length := _common_len(other.tokens, tokens)) > longest:
                source, longest = other.block, length
        return PartialMatch(source, tokens[:longest]) if source is not None else None

    def tip(self, namespace: Namespace, nodes: Sequence[PrefixNode], num_public_blocks: int) -> PrefixNode:
        """The node that a request's next block will hang below, made if need be. Hang something up there, or it is forgotten."""
        if len(nodes) == num_public_blocks and nodes:
            return self.branch(nodes[-1], namespace)
        if nodes:
            return nodes[-1]
        top = public_namespace(namespace) if num_public_blocks else namespace
        if top not in self._roots:
            self._roots[top] = PrefixNode((), None, None, 0, namespace=top)
        return self._roots[top]

    def branch(self, node: PrefixNode, namespace: Namespace) -> PrefixNode:
        """Where the namespace's own blocks continue a public node."""
        if node.branches is None:
            node.branches = {}
        if namespace not in node.branches:
            self._policy.discard(node)
            node.branches[namespace] = PrefixNode((), node, None, node.depth, namespace=namespace)
        return node.branches[namespace]

    def hang(self, node: PrefixNode, open_block: OpenBlock) -> None:
        """Let the open block be found below the node, and keep the node."""
        node.open_blocks = (*node.open_blocks, open_block)

    def unhang(self, node: PrefixNode, open_block: OpenBlock) -> None:
        assert open_block in node.open_blocks
        node.open_blocks = tuple(other for other in node.open_blocks if other is not open_block)
        self._settle(node)

    def insert(self, parent: PrefixNode, tokens: Tokens, block: Block) -> PrefixNode:
        """Publish a block below ``parent``. Returns the node that stands for these tokens: an older one, if there is one.

        A partial sibling that these tokens begin with is to be removed next (``superseded`` names it beforehand).
        """
        children = parent.children
        if children and (known := children.get(tokens)) is not None:
            return known
        assert block.node is None, f"block {block.block_id} is published already"
        if parent.block is not None and parent.block.ref_count == 0:
            self._policy.discard(parent)
        node = children[tokens] = PrefixNode(tokens, parent, block, parent.depth + 1)
        if parent.sorted_children is not None:
            insort(parent.sorted_children, tokens)
        block.node = node
        return node

    def superseded(self, parent: PrefixNode, tokens: Tokens) -> PrefixNode | None:
        """The partial child that a sibling with these tokens would make useless. One at most: none is a prefix of another."""
        ordered = parent.in_order()
        position = bisect_left(ordered, tokens)
        key = ordered[position - 1] if position else ()
        return parent.children[key] if key and key == tokens[: len(key)] else None

    def covers(self, parent: PrefixNode, tokens: Tokens) -> bool:
        """Whether some block below the parent, published or open, holds these tokens and perhaps more."""
        ordered = parent.in_order()
        position = bisect_left(ordered, tokens)
        following = ordered[position : position + 1]
        candidates = (*following, *(other.tokens for other in parent.open_blocks))
        return any(candidate[: len(tokens)] == tokens for candidate in candidates)

    def remove(self, node: PrefixNode) -> Block:
        """Forget a node without children and return its block, which nobody can find now."""
        block, parent = node.block, node.parent
        assert block is not None
        assert parent is not None
        assert not node.children
        assert not node.branches
        self._policy.discard(node)
        del parent.children[node.tokens]
        if parent.sorted_children is not None:
            del parent.sorted_children[bisect_left(parent.sorted_children, node.tokens)]
        block.node = None
        node.block = None
        self._settle(parent)
        return block

    def _settle(self, node: PrefixNode) -> None:
        """Something below the node has gone: it may be evictable now or, without a block of its own, not needed any more."""
        if node.block is not None:
            if node.is_evictable:
                self._policy.add(node)
            return
        if node.children or node.open_blocks:
            return
        assert node.namespace is not None
        if node.parent is None:
            del self._roots[node.namespace]
        else:
            assert node.parent.branches is not None
            del node.parent.branches[node.namespace]
            self._settle(node.parent)

    def touch(self, node: PrefixNode, now: int) -> None:
        """The node is in use: protect it from eviction."""
        node.last_used = now
        self._policy.discard(node)

    def offer(self, node: PrefixNode, now: int) -> None:
        """The node's last reference is gone: it may be evicted once it is a leaf."""
        node.last_used = now
        if not node.children and node.is_evictable:  # most have children: asked first, it is cheap
            self._policy.add(node)

    def pop_victim(self) -> PrefixNode | None:
        """The policy's choice among the evictable nodes, to be removed now; None when there is none."""
        return self._policy.pop()

    def protect(self, node: PrefixNode) -> None:
        """The node was pinned."""
        self._policy.discard(node)

    def unprotect(self, node: PrefixNode) -> None:
        """The node was unpinned: as old as it was before, it may be evicted again."""
        if node.is_evictable:
            self._policy.add(node)

    def position(self, namespace: Namespace, nodes: Sequence[PrefixNode], num_public_blocks: int) -> PrefixNode | None:
        """Where what continues these nodes would hang; None when the namespace has nothing there."""
        if not nodes:
            return self._roots.get(public_namespace(namespace) if num_public_blocks else namespace)
        return nodes[-1] if len(nodes) != num_public_blocks else (nodes[-1].branches or {}).get(namespace)

    def roots(self) -> tuple[PrefixNode, ...]:
        return tuple(self._roots.values())

    def nodes(self) -> Iterator[PrefixNode]:
        """Every node that holds a block."""
        return (node for node in self.all_nodes() if node.block is not None)

    def all_nodes(self) -> Iterator[PrefixNode]:
        """Roots and branches too."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            stack.extend((node.branches or {}).values())
            yield node

    def check_integrity(self) -> list[PrefixNode]:
        """Assert that the tree is sound; returns all nodes, roots and branches too."""
        nodes = list(self.all_nodes())
        for node in nodes:
            assert node.sorted_children is None or node.sorted_children == sorted(node.children)
            for key, following in pairwise(sorted(node.children)):
                assert following[: len(key)] != key, "a partial node was kept beside one that holds its tokens and more"
            if node.block is None:
                self._check_top(node)
            else:
                self._check_node(node, node.block)
        assert len(self._policy) <= len(nodes)
        return nodes

    def _check_top(self, node: PrefixNode) -> None:
        assert node.children or node.open_blocks, "a namespace without blocks was kept"
        assert node.namespace is not None
        assert not node.tokens
        assert not node.branches, "a branch stands below a block"
        siblings = self._roots if node.parent is None else node.parent.branches
        assert siblings is not None
        assert siblings[node.namespace] is node
        if node.parent is not None:
            assert node.parent.block is not None
            assert node.depth == node.parent.depth

    def _check_node(self, node: PrefixNode, block: Block) -> None:
        parent = node.parent
        assert parent is not None
        assert block.node is node, f"block {block.block_id} does not point back to its node"
        assert parent.children.get(node.tokens) is node
        assert node.depth == parent.depth + 1
        assert node.namespace is None
        if len(node.tokens) != self.block_size:
            assert self.allow_partial
            assert 0 < len(node.tokens) < self.block_size
            assert not node.children
            assert not node.open_blocks
            assert not node.branches
        above = parent if parent.block is not None else parent.parent
        if block.ref_count > 0 and above is not None:
            assert above.block is not None
            assert above.block.ref_count > 0, "a referenced block hangs below an unreferenced one"
        if node.children or node.branches:
            assert node not in self._policy, f"block {block.block_id} may be evicted from above others"
        if block.num_pins > 0:
            assert len(node.tokens) == self.block_size
            assert above is None or above.block is None or above.block.num_pins > 0, (
                "a pinned block hangs below one that is not"
            )
        assert node.is_evictable == (node in self._policy), f"block {block.block_id}: evictable and policy disagree"


def _common_len(a: Tokens, b: Tokens) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length

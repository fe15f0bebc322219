"""The prefix tree: blocks found by their exact tokens, within a namespace. No hashes, so no collisions."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import pairwise

from engine.kv.block import Block, OpenBlock, PrefixNode, Tokens
from engine.kv.eviction import EvictionPolicy
from engine.kv.match import PartialMatch, PrefixMatch
from engine.kv.retention import Retention
from engine.request import Namespace


def public_namespace(namespace: Namespace) -> Namespace:
    """Where the public blocks of this namespace's requests stand: without its salt, everything else being equal."""
    return namespace._replace(salt="")


class PrefixTree:
    """One root for each namespace. Writes nodes and their blocks' ``node``; reference counts are the pool's.

    Where the ``retention`` has gaps, any block may be evicted; its node stays, without a block, as long as something is below it.
    Elsewhere only leaves may, and every full node has its block.
    """

    def __init__(self, retention: Retention, policy: EvictionPolicy, *, allow_partial: bool) -> None:
        self.block_size = retention.block_size
        self.allow_partial = allow_partial
        self._retention = retention
        self._policy = policy
        self._roots: dict[Namespace, PrefixNode] = {}

    @property
    def has_gaps(self) -> bool:
        return self._retention.has_gaps

    def num_public_blocks(self, namespace: Namespace, num_public_tokens: int) -> int:
        """How many blocks of a prompt that begins with so many public tokens are public; for those without a salt, all are."""
        return num_public_tokens // self.block_size if namespace.salt else 0

    def match(self, namespace: Namespace, token_ids: Sequence[int], num_public_blocks: int = 0) -> PrefixMatch:
        """Follow the tokens down. At least one token is left to compute: a full hit would give no logits."""
        limit = len(token_ids) - 1
        path = self.path(namespace, token_ids[:limit], num_public_blocks)
        path = path[: self._retention.num_usable(path)]
        node, num_tokens = self.position(namespace, path, num_public_blocks), len(path) * self.block_size
        partial = self._match_partial(node, token_ids[num_tokens : min(limit, num_tokens + self.block_size)])
        num_partial = partial.num_tokens if partial is not None else 0
        num_behind = self._retention.num_behind(num_tokens)
        return PrefixMatch(tuple(path), num_tokens + num_partial, partial, num_public_blocks, num_behind=num_behind)

    def path(self, namespace: Namespace, token_ids: Sequence[int], num_public_blocks: int) -> list[PrefixNode]:
        """The full nodes that these tokens lead along, those without a block too."""
        nodes: list[PrefixNode] = []
        if num_public_blocks:
            top = self._roots.get(public_namespace(namespace))
            self._descend(top, token_ids, min(len(token_ids), num_public_blocks * self.block_size), nodes)
        if len(nodes) == num_public_blocks:
            self._descend(self.position(namespace, nodes, num_public_blocks), token_ids, len(token_ids), nodes)
        return nodes

    def _descend(self, node: PrefixNode | None, token_ids: Sequence[int], limit: int, nodes: list[PrefixNode]) -> None:
        """Append the full nodes below ``node`` that hold the tokens from len(nodes) blocks on to ``limit``."""
        size = self.block_size
        for start in range(len(nodes) * size, limit - size + 1, size):
            child = node.children.get(tuple(token_ids[start : start + size])) if node is not None else None
            if child is None:
                break
            nodes.append(child)
            node = child

    def _match_partial(self, node: PrefixNode | None, wanted: Sequence[int]) -> PartialMatch | None:
        """The block below the node, published or open, that has the longest common prefix with ``wanted``."""
        if node is None or not self.allow_partial or not wanted:
            return None
        tokens = tuple(wanted)
        source, longest = None, 0
        ordered = node.in_order()
        position = bisect_left(ordered, tokens)
        for key in (_resident(node, range(position - 1, -1, -1)), _resident(node, range(position, len(ordered)))):
            if key is not None and (length := _common_len(key, tokens)) > longest:
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
            node.branches[namespace] = PrefixNode((), node, None, node.depth, namespace=namespace)
            self._protect_inner(node)
        return node.branches[namespace]

    def pave(self, parent: PrefixNode, tokens: Tokens) -> PrefixNode:
        """The full node of these tokens below ``parent``, without a block if it is new. Hang something below it, or it stays."""
        assert self._retention.has_gaps
        if tokens not in parent.children:
            self._link(parent, tokens, None)
        return parent.children[tokens]

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
            if known.block is None:
                known.block, block.node = block, known
            return known
        assert block.node is None, f"block {block.block_id} is published already"
        node = block.node = self._link(parent, tokens, block)
        return node

    def _link(self, parent: PrefixNode, tokens: Tokens, block: Block | None) -> PrefixNode:
        node = parent.children[tokens] = PrefixNode(tokens, parent, block, parent.depth + 1)
        if parent.sorted_children is not None:
            insort(parent.sorted_children, tokens)
        self._protect_inner(parent)
        return node

    def _protect_inner(self, node: PrefixNode) -> None:
        """Something hangs below the node now: without gaps it cannot be evicted before that."""
        if node.block is not None and node.block.ref_count == 0 and not self.is_evictable(node):
            self._policy.discard(node)

    def is_evictable(self, node: PrefixNode) -> bool:
        block = node.block
        if block is None or block.ref_count or block.num_pins:
            return False
        return self._retention.has_gaps or not (node.children or node.branches)

    def superseded(self, parent: PrefixNode, tokens: Tokens) -> PrefixNode | None:
        """The partial child that a sibling with these tokens would make useless. One at most: none is a prefix of another."""
        key = _resident(parent, range(bisect_left(parent.in_order(), tokens) - 1, -1, -1))
        return parent.children[key] if key is not None and key == tokens[: len(key)] else None

    def covers(self, parent: PrefixNode, tokens: Tokens) -> bool:
        """Whether some block below the parent, published or open, holds these tokens and perhaps more."""
        ordered = parent.in_order()
        following = _resident(parent, range(bisect_left(ordered, tokens), len(ordered)))
        candidates = (following or (), *(other.tokens for other in parent.open_blocks))
        return any(candidate[: len(tokens)] == tokens for candidate in candidates)

    def remove(self, node: PrefixNode) -> Block:
        """Forget a node's block and return it: nobody can find it now. The node goes too, unless something is below it."""
        block = node.block
        assert block is not None
        assert self._retention.has_gaps or not (node.children or node.branches)
        self._policy.discard(node)
        block.node = None
        node.block = None
        self._settle(node)
        return block

    def _settle(self, node: PrefixNode) -> None:
        """Something below the node, or its block, has gone: it may be evictable now or, without a block, not needed any more."""
        while node.block is None:
            if node.children or node.open_blocks or node.branches:
                return
            parent = node.parent
            if parent is None:
                assert node.namespace is not None
                del self._roots[node.namespace]
                return
            self._unlink(node, parent)
            node = parent
        if self.is_evictable(node):
            self._policy.add(node)

    def _unlink(self, node: PrefixNode, parent: PrefixNode) -> None:
        if node.namespace is not None:
            assert parent.branches is not None
            del parent.branches[node.namespace]
            return
        del parent.children[node.tokens]
        if parent.sorted_children is not None:
            del parent.sorted_children[bisect_left(parent.sorted_children, node.tokens)]

    def touch(self, node: PrefixNode, now: int) -> None:
        """The node is in use: protect it from eviction."""
        node.last_used = now
        self._policy.discard(node)

    def offer(self, node: PrefixNode, now: int) -> None:
        """The node's last reference is gone: it may be evicted once it is a leaf."""
        node.last_used = now
        if self.is_evictable(node):
            self._policy.add(node)

    def pop_victim(self) -> PrefixNode | None:
        """The policy's choice among the evictable nodes, to be removed now; None when there is none."""
        return self._policy.pop()

    def protect(self, node: PrefixNode) -> None:
        """The node was pinned."""
        self._policy.discard(node)

    def unprotect(self, node: PrefixNode) -> None:
        """The node was unpinned: as old as it was before, it may be evicted again."""
        if self.is_evictable(node):
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
            for key, following in pairwise(sorted(key for key, child in node.children.items() if child.block is not None)):
                assert following[: len(key)] != key, "a partial node was kept beside one that holds its tokens and more"
            if node.namespace is not None:
                self._check_top(node)
            else:
                self._check_node(node)
        assert len(self._policy) <= len(nodes)
        return nodes

    def _check_top(self, node: PrefixNode) -> None:
        assert node.children or node.open_blocks, "a namespace without blocks was kept"
        assert node.namespace is not None
        assert not node.tokens
        assert node.block is None
        assert not node.branches, "a branch stands below a block"
        siblings = self._roots if node.parent is None else node.parent.branches
        assert siblings is not None
        assert siblings[node.namespace] is node
        if node.parent is not None:
            assert node.parent.namespace is None
            assert node.depth == node.parent.depth

    def _check_node(self, node: PrefixNode) -> None:
        parent, block = node.parent, node.block
        assert parent is not None
        assert parent.children.get(node.tokens) is node
        assert node.depth == parent.depth + 1
        if len(node.tokens) != self.block_size:
            assert self.allow_partial
            assert 0 < len(node.tokens) < self.block_size
            assert block is not None
            assert not node.children
            assert not node.open_blocks
            assert not node.branches
        assert self.is_evictable(node) == (node in self._policy), f"{node}: evictable and policy disagree"
        if block is None:
            assert self._retention.has_gaps, "a full node without a block"
            assert node.children or node.open_blocks or node.branches, "a node without a block was kept for nothing"
            return
        assert block.node is node, f"block {block.block_id} does not point back to its node"
        if block.num_pins > 0:
            assert len(node.tokens) == self.block_size
        if not self._retention.has_gaps:
            self._check_chain(node, block, parent if parent.namespace is None else parent.parent)

    def _check_chain(self, node: PrefixNode, block: Block, above: PrefixNode | None) -> None:
        if node.children or node.branches:
            assert node not in self._policy, f"block {block.block_id} may be evicted from above others"
        if above is None:
            return
        assert above.block is not None
        assert not block.ref_count or above.block.ref_count > 0, "a referenced block hangs below an unreferenced one"
        assert not block.num_pins or above.block.num_pins > 0, "a pinned block hangs below one that is not"


def _resident(parent: PrefixNode, places: range) -> Tokens | None:
    """Of the children's ordered keys at these places, the first that has a block."""
    keys = parent.in_order()
    return next((keys[place] for place in places if parent.children[keys[place]].block is not None), None)


def _common_len(a: Tokens, b: Tokens) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length

"""A look at the whole prefix tree for its operator: what each namespace holds, and which prefixes weigh or work most.

Walks every node, so it is for people who ask now and then, not for every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nlargest

from engine.kv.block import PrefixNode
from engine.request import Namespace


@dataclass(frozen=True, slots=True)
class NamespaceView:
    """Blocks under one namespace. Public ones are under the namespace with the empty salt."""

    namespace: Namespace
    num_blocks: int
    num_tokens: int
    num_referenced_blocks: int
    num_pinned_blocks: int


@dataclass(frozen=True, slots=True)
class PrefixView:
    """A run of blocks that were always found together: it ends where the tree branches or the number of hits changes.

    ``token_ids`` are the first of the ``num_tokens`` tokens from the very start to the run's end. ``num_blocks`` are the
    run's own, ``num_blocks_below`` all that continue it in its namespace, ``num_hits`` the requests that found it.
    """

    namespace: Namespace
    token_ids: tuple[int, ...]
    num_tokens: int
    num_blocks: int
    num_blocks_below: int
    num_hits: int
    num_referenced_blocks: int
    num_pinned_blocks: int


@dataclass(frozen=True, slots=True)
class Survey:
    namespaces: tuple[NamespaceView, ...]
    by_bytes: tuple[PrefixView, ...]
    by_hits: tuple[PrefixView, ...]


@dataclass(slots=True)
class _Run:
    namespace: Namespace
    num_hits: int
    nodes: list[PrefixNode] = field(default_factory=list)
    num_blocks_below: int = 0


def survey(tops: Iterable[PrefixNode], num_prefixes: int, num_token_ids: int) -> Survey:
    """``tops`` are roots and branches. Blocks that were evicted from above others (see PrefixTree) are not counted, and end a run. Each ranking has at most ``num_prefixes`` entries."""
    by_top = [(top, list(nodes_below(top))) for top in tops]
    runs = [run for top, nodes in by_top for run in _runs(top, nodes)]
    heaviest = nlargest(num_prefixes, runs, key=lambda run: (len(run.nodes), run.num_hits))
    busiest = nlargest(num_prefixes, (run for run in runs if run.num_hits), key=lambda run: (run.num_hits, len(run.nodes)))
    return Survey(
        namespaces=_namespaces(by_top),
        by_bytes=tuple(_view(run, num_token_ids) for run in heaviest),
        by_hits=tuple(_view(run, num_token_ids) for run in busiest),
    )


def nodes_below(top: PrefixNode) -> Iterator[PrefixNode]:
    """Every node below, parents before children, without what branches off into other namespaces."""
    stack = list(top.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node


def _namespaces(by_top: list[tuple[PrefixNode, list[PrefixNode]]]) -> tuple[NamespaceView, ...]:
    grouped: dict[Namespace, list[PrefixNode]] = {}
    for top, nodes in by_top:
        assert top.namespace is not None
        grouped.setdefault(top.namespace, []).extend(node for node in nodes if node.block is not None)
    views = [
        NamespaceView(namespace, len(nodes), sum(len(node.tokens) for node in nodes), num_referenced(nodes), num_pinned(nodes))
        for namespace, nodes in grouped.items()
        if nodes
    ]
    return tuple(sorted(views, key=lambda view: -view.num_blocks))


def _runs(top: PrefixNode, nodes: list[PrefixNode]) -> list[_Run]:
    assert top.namespace is not None
    run_of: dict[PrefixNode, _Run] = {}
    runs: list[_Run] = []
    for node in nodes:
        parent = node.parent
        assert parent is not None
        if node.block is None:
            continue
        run = run_of.get(parent)
        if run is None or len(parent.children) > 1 or parent.branches or run.num_hits != node.num_hits:
            run = _Run(top.namespace, node.num_hits)
            runs.append(run)
        run.nodes.append(node)
        run_of[node] = run
    below = _num_below(nodes)
    for run in runs:
        run.num_blocks_below = below[run.nodes[-1]]
    return runs


def _num_below(nodes: list[PrefixNode]) -> Counter[PrefixNode]:
    below: Counter[PrefixNode] = Counter()
    for node in reversed(nodes):
        assert node.parent is not None
        below[node.parent] += (node.block is not None) + below[node]
    return below


def _view(run: _Run, num_token_ids: int) -> PrefixView:
    tokens = _path(run.nodes[-1])
    return PrefixView(
        namespace=run.namespace,
        token_ids=tuple(tokens[:num_token_ids]),
        num_tokens=len(tokens),
        num_blocks=len(run.nodes),
        num_blocks_below=run.num_blocks_below,
        num_hits=run.num_hits,
        num_referenced_blocks=num_referenced(run.nodes),
        num_pinned_blocks=num_pinned(run.nodes),
    )


def _path(node: PrefixNode) -> list[int]:
    """All tokens from the root to the node's end, public ones included."""
    parts: list[tuple[int, ...]] = []
    above: PrefixNode | None = node
    while above is not None:
        parts.append(above.tokens)
        above = above.parent
    return [token for part in reversed(parts) for token in part]


def num_referenced(nodes: Iterable[PrefixNode]) -> int:
    return sum(node.block is not None and node.block.ref_count > 0 for node in nodes)


def num_pinned(nodes: Iterable[PrefixNode]) -> int:
    return sum(node.block is not None and node.block.num_pins > 0 for node in nodes)

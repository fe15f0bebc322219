"""Which cached blocks go when an operator drops a prefix or everything: those that nobody uses, pins or continues.

Chooses; the manager forgets. Leaves come before what they hang below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.kv.block import PrefixNode


@dataclass(slots=True)
class DropCounts:
    """What went from the device, and what stayed although it was meant: used by running requests, pinned, or continued by what
    stays, here or below."""

    num_dropped: int = 0
    num_referenced: int = 0
    num_pinned: int = 0
    num_continued: int = 0


def descendants(nodes: Iterable[PrefixNode]) -> list[PrefixNode]:
    """The nodes and all that hangs below them, in every namespace, leaves first; those that hold a block."""
    order: list[PrefixNode] = []
    stack = list(nodes)
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend((*node.children.values(), *(node.branches or {}).values()))
    return [node for node in reversed(order) if node.block is not None]


def continuations(node: PrefixNode, rest: Sequence[int], *, with_branches: bool) -> list[PrefixNode]:
    """What hangs directly below the node and begins with ``rest`` (fewer tokens than a block), or lies within it."""
    rest = tuple(rest)
    found = [child for tokens, child in node.children.items() if tokens[: len(rest)] == rest]
    return found + list((node.branches or {}).values()) if with_branches and not rest else found


def drop(
    nodes: Iterable[PrefixNode],
    forget: Callable[[PrefixNode], None],
    num_kept: int = 0,
    *,
    with_gaps: bool = False,
    counts: DropCounts | None = None,
) -> DropCounts:
    """Forget those of the nodes that can go. Leaves must come first; ``forget`` takes the node out of the tree.

    Those of the first ``num_kept`` blocks of their chain are continued by something that is not in the tree. ``with_gaps``: what
    is continued may go too. The counts are added to ``counts``.
    """
    counts = counts if counts is not None else DropCounts()
    for node in nodes:
        if node.block is None:
            continue  # it was evicted from above others
        if node.block.ref_count > 0:
            counts.num_referenced += 1
        elif node.block.num_pins > 0:
            counts.num_pinned += 1
        elif not with_gaps and (node.children or node.branches or node.depth <= num_kept):
            counts.num_continued += 1
        else:
            forget(node)
            counts.num_dropped += 1
    return counts

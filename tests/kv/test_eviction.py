from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.kv.block import Block, PrefixNode
from engine.kv.eviction import LRUPolicy


def make_node(index: int, last_used: int, depth: int) -> PrefixNode:
    return PrefixNode((index,), None, Block(index), depth, last_used)


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "pop"]), st.integers(0, 9), st.integers(0, 5)), max_size=200))
def test_lru_pops_what_a_plain_sort_would(actions: list[tuple[str, int, int]]) -> None:
    """The heap with lazy deletion against its slow twin: sort everything, each time."""
    policy = LRUPolicy()
    nodes = [make_node(i, 0, depth=i % 3) for i in range(10)]
    twin: list[PrefixNode] = []
    for action, index, last_used in actions:
        node = nodes[index]
        if action == "add" and node not in twin:
            node.last_used = last_used
            policy.add(node)
            twin.append(node)
        elif action == "discard":
            policy.discard(node)
            twin = [other for other in twin if other is not node]
        elif action == "pop":
            expected = min(twin, key=lambda n: (n.last_used, -n.depth), default=None)  # the first added wins a tie
            assert policy.pop() is expected
            twin = [other for other in twin if other is not expected]
        assert len(policy) == len(twin)


def test_the_heap_does_not_grow_with_touches() -> None:
    policy = LRUPolicy()
    node = make_node(0, 0, 0)
    for now in range(10_000):
        node.last_used = now
        policy.add(node)
        policy.discard(node)
    assert len(policy._heap) < 200

from __future__ import annotations

from engine.kv.manager import KVCacheManager
from engine.request import Namespace
from tests.factories import can_admit

NS = Namespace()


def start(
    manager: KVCacheManager, request_id: str, tokens: list[int], *, namespace: Namespace = NS, computed: int | None = None
) -> int:
    """Admit, allocate and commit as a scheduler would; returns the number of matched tokens."""
    match = manager.match_prefix(namespace, tokens)
    manager.admit(request_id, namespace, match)
    assert manager.allocate(request_id, len(tokens))
    manager.check_integrity()
    manager.finish_step()
    manager.commit(request_id, tokens, len(tokens) if computed is None else computed)
    manager.check_integrity()
    return match.num_tokens


def test_a_second_request_shares_the_full_blocks_of_a_common_prefix() -> None:
    manager = KVCacheManager(num_blocks=10, block_size=4)
    assert start(manager, "a", [*range(10)]) == 0
    assert start(manager, "b", [*range(8), 77, 78]) == 8
    assert manager.take_copies() == ()
    assert manager.block_table("b")[:2] == manager.block_table("a")[:2]
    assert manager.block_table("b")[2] != manager.block_table("a")[2]
    assert manager.num_referenced_blocks == 4, "two shared, and an open one each"


def test_one_token_is_always_left_to_compute() -> None:
    manager = KVCacheManager(num_blocks=10, block_size=4)
    start(manager, "a", [*range(8)])
    assert manager.match_prefix(NS, [*range(8)]).num_tokens == 7
    assert manager.match_prefix(NS, [*range(9)]).num_tokens == 8
    assert manager.match_prefix(NS, [0]).num_tokens == 0


def test_only_computed_tokens_are_published() -> None:
    manager = KVCacheManager(num_blocks=10, block_size=4)
    start(manager, "a", [*range(12)], computed=7)
    assert manager.match_prefix(NS, [*range(12)]).num_tokens == 7


def test_namespaces_never_share() -> None:
    manager = KVCacheManager(num_blocks=20, block_size=4)
    start(manager, "a", [*range(9)], namespace=Namespace(salt="x"))
    for other in (Namespace(), Namespace(salt="y"), Namespace(salt="x", rope_class=1)):
        assert manager.match_prefix(other, [*range(9)]).num_tokens == 0


def test_freed_blocks_stay_cached_and_are_found_again() -> None:
    manager = KVCacheManager(num_blocks=10, block_size=4)
    start(manager, "a", [*range(10)])
    manager.free("a")
    manager.check_integrity()
    assert (manager.num_free_blocks, manager.num_cached_blocks, manager.num_referenced_blocks) == (7, 3, 0)
    assert start(manager, "b", [*range(10)]) == 9


def test_eviction_takes_the_least_recently_used_leaf_first() -> None:
    manager = KVCacheManager(num_blocks=4, block_size=2)
    start(manager, "a", [1, 2, 3, 4])
    manager.free("a")
    start(manager, "b", [5, 6, 7, 8])
    manager.free("b")
    start(manager, "c", [9, 10])
    assert manager.num_evicted_blocks == 1
    assert manager.match_prefix(NS, [1, 2, 3, 4, 0]).num_tokens == 2, "the deeper block of the older prefix went first"
    assert manager.match_prefix(NS, [5, 6, 7, 8, 0]).num_tokens == 4


def test_a_match_protects_its_blocks_from_eviction() -> None:
    manager = KVCacheManager(num_blocks=3, block_size=2)
    start(manager, "a", [1, 2, 3, 4])
    manager.free("a")
    match = manager.match_prefix(NS, [1, 2, 3, 4, 5])
    manager.admit("b", NS, match)
    assert manager.allocate("b", 6)
    assert not manager.allocate("b", 7), "its own prefix must not be evicted for it"
    manager.check_integrity()


def test_can_admit_counts_the_cached_blocks_that_a_match_revives() -> None:
    manager = KVCacheManager(num_blocks=3, block_size=2)
    start(manager, "a", [1, 2, 3, 4])
    manager.free("a")
    match = manager.match_prefix(NS, [1, 2, 3, 4, 5, 6, 7])
    assert can_admit(manager, match, 6, num_reserved=0)
    assert not can_admit(manager, match, 7, num_reserved=0)
    assert not can_admit(manager, match, 6, num_reserved=1)


def test_allocate_takes_nothing_when_it_cannot_take_all() -> None:
    manager = KVCacheManager(num_blocks=3, block_size=2)
    start(manager, "a", [1, 2])
    assert not manager.allocate("a", 8)
    assert manager.num_free_blocks == 2
    manager.check_integrity()


def test_two_requests_that_computed_the_same_block_keep_one_copy() -> None:
    manager = KVCacheManager(num_blocks=10, block_size=4)
    tokens = [*range(9)]
    for request_id in ("a", "b"):
        manager.admit(request_id, NS, manager.match_prefix(NS, tokens))
        assert manager.allocate(request_id, len(tokens))
    assert manager.num_referenced_blocks == 6
    manager.commit("a", tokens, 9)
    manager.commit("b", tokens, 9)
    manager.check_integrity()
    assert manager.num_referenced_blocks == 4, "two full blocks shared, two open ones apart"
    assert manager.block_table("a")[:2] == manager.block_table("b")[:2]


def test_empty_namespaces_are_forgotten() -> None:
    manager = KVCacheManager(num_blocks=2, block_size=2)
    for index in range(20):
        start(manager, "a", [1, 2, 3, 4], namespace=Namespace(salt=str(index)))
        manager.free("a")
        manager.check_integrity()  # asserts that no namespace without blocks is kept
    assert manager.num_evicted_blocks == 38

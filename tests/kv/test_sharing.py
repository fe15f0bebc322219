"""Which tokens of a prompt need not be computed: partly equal blocks, open ones of running requests, public prefixes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.block import BlockCopy, PrefixNode
from engine.kv.manager import KVCacheManager
from engine.request import Namespace
from tests.factories import can_admit

NS = Namespace()


def start(
    manager: KVCacheManager,
    request_id: str,
    tokens: list[int],
    *,
    namespace: Namespace = NS,
    computed: int | None = None,
    num_public_tokens: int = 0,
) -> int:
    """Admit and compute as a step does; returns the number of matched tokens."""
    match = manager.match_prefix(namespace, tokens, num_public_tokens)
    manager.admit(request_id, namespace, match)
    assert manager.allocate(request_id, len(tokens))
    manager.check_integrity()
    manager.finish_step()
    manager.commit(request_id, tokens, len(tokens) if computed is None else computed)
    manager.check_integrity()
    return match.num_tokens


def stop(manager: KVCacheManager, *request_ids: str) -> None:
    for request_id in request_ids:
        manager.free(request_id)
        manager.check_integrity()


def counts(manager: KVCacheManager) -> tuple[int, int, int]:
    return manager.num_free_blocks, manager.num_cached_blocks, manager.num_referenced_blocks


def test_a_block_that_matches_in_part_is_copied_up_to_the_last_equal_token() -> None:
    manager = KVCacheManager(10, 4)
    start(manager, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    source = manager.block_table("a")[1]
    stop(manager, "a")
    assert start(manager, "b", [1, 2, 3, 4, 5, 6, 99, 8, 9]) == 6
    assert manager.take_copies() == (BlockCopy(source, manager.block_table("b")[1], 2),)
    assert manager.take_copies() == (), "each is made once"
    assert manager.match_prefix(NS, [1, 2, 3, 4, 5, 6, 7, 0]).num_tokens == 7, "the source is still there"
    assert manager.num_copied_blocks == 1


def test_an_open_block_of_a_running_request_is_copied_from() -> None:
    manager = KVCacheManager(10, 4)
    start(manager, "a", [*range(7)], computed=6)
    assert start(manager, "b", [*range(7)]) == 6
    (copy,) = manager.take_copies()
    assert (copy.source, copy.num_tokens) == (manager.block_table("a")[1], 2)
    assert counts(manager) == (7, 0, 3)
    stop(manager, "a", "b")
    assert counts(manager) == (8, 2, 0), "the block of a is a prefix of that of b: one is kept"


def test_where_a_request_ended_another_goes_on_in_the_same_block() -> None:
    manager = KVCacheManager(10, 4)
    start(manager, "a", [*range(6)])
    table = list(manager.block_table("a"))
    stop(manager, "a")
    assert counts(manager) == (8, 2, 0)
    assert start(manager, "b", [*range(6), 50, 51, 52]) == 6
    assert manager.block_table("b")[:2] == table
    assert manager.take_copies() == (), "nobody else holds it and all of it is wanted: it needs no copy"
    stop(manager, "b")
    assert counts(manager) == (7, 3, 0)


def test_a_block_can_be_copied_from_and_taken_over_in_one_step() -> None:
    manager = KVCacheManager(10, 4)
    start(manager, "a", [*range(6)])
    source = manager.block_table("a")[1]
    stop(manager, "a")
    for request_id, tokens in (("b", [*range(5), 70]), ("c", [*range(6), 70]), ("d", [*range(6), 71])):
        manager.admit(request_id, NS, manager.match_prefix(NS, tokens))
        manager.check_integrity()
    assert manager.block_table("c")[1] == source
    targets = [manager.block_table(name)[1] for name in "bd"]
    assert manager.take_copies() == (BlockCopy(source, targets[0], 1), BlockCopy(source, targets[1], 2))
    manager.finish_step()
    stop(manager, "b", "c", "d")
    assert counts(manager) == (8, 2, 0), "what b and d hold is in the block of c"


def test_a_partial_block_is_freed_when_a_sibling_holds_its_tokens_and_more() -> None:
    manager = KVCacheManager(10, 4)
    for request_id in "ab":  # neither sees the other
        manager.admit(request_id, NS, manager.match_prefix(NS, [*range(7)]))
    for request_id, length in (("a", 6), ("b", 7)):
        assert manager.allocate(request_id, length)
        manager.commit(request_id, [*range(7)], length)
    assert counts(manager) == (7, 0, 3)
    stop(manager, "a")
    assert counts(manager) == (8, 0, 2), "what a holds, b holds too"
    stop(manager, "b")
    start(manager, "c", [0, 1, 2, 3, 4, 5, 60], namespace=NS)
    stop(manager, "c")
    assert counts(manager) == (7, 3, 0), "two partial blocks that differ"
    start(manager, "d", [0, 1, 2, 3, 4, 5, 60, 61, 62])
    stop(manager, "d")
    assert counts(manager) == (6, 4, 0), "one of them became a full block, and one partial block follows it"


def test_a_full_block_supersedes_the_partial_one_that_it_was_copied_beside() -> None:
    manager = KVCacheManager(10, 4)
    start(manager, "a", [1, 2])
    manager.admit("b", NS, manager.match_prefix(NS, [7]))  # sees nothing of a
    stop(manager, "a")
    assert counts(manager) == (9, 1, 0)
    assert manager.allocate("b", 4)
    manager.commit("b", [1, 2, 3, 4], 4)
    manager.check_integrity()
    assert counts(manager) == (9, 0, 1), "the partial block of a is of no use beside the full one"
    assert manager.num_evicted_blocks == 0


def test_a_source_stays_until_the_step_is_over() -> None:
    manager = KVCacheManager(4, 2)
    start(manager, "a", [1, 2, 3, 4])
    stop(manager, "a")
    match = manager.match_prefix(NS, [1, 2, 3, 9, 9, 9])
    assert not can_admit(manager, match, 6, num_reserved=1)
    assert can_admit(manager, match, 6, num_reserved=0)
    manager.admit("b", NS, match)
    assert manager.allocate("b", 6)
    manager.check_integrity()
    assert counts(manager) == (0, 0, 4), "its own three, and the source"
    assert not manager.allocate("b", 7)
    manager.finish_step()
    manager.check_integrity()
    assert counts(manager) == (0, 1, 3)
    assert manager.allocate("b", 7)


def test_without_its_partial_block_a_match_needs_no_room_for_the_source() -> None:
    manager = KVCacheManager(3, 2)
    start(manager, "a", [1, 2, 3, 4])
    stop(manager, "a")
    match = manager.match_prefix(NS, [1, 2, 3, 9, 9, 9])
    assert not can_admit(manager, match, 6, num_reserved=0)
    assert can_admit(manager, match.without_partial(), 6, num_reserved=0)
    assert match.without_partial().num_tokens == 2


def test_formats_that_cannot_share_in_part_keep_full_blocks_only() -> None:
    manager = KVCacheManager(10, 4, allow_partial=False)
    start(manager, "a", [*range(10)])
    assert manager.match_prefix(NS, [*range(10)]).num_tokens == 8
    assert manager.match_prefix(NS, [*range(8)]).num_tokens == 4
    stop(manager, "a")
    assert counts(manager) == (8, 2, 0)
    assert start(manager, "b", [*range(10)]) == 8
    assert manager.take_copies() == ()


def test_eight_samples_of_a_thousand_tokens_hold_the_prompt_once() -> None:
    manager = KVCacheManager(200, 16)
    prompt = [*range(1000)]
    start(manager, "0", prompt)
    for name in "1234567":
        assert start(manager, name, prompt) == 999
    assert manager.num_referenced_blocks == 62 + 8
    assert {copy.num_tokens for copy in manager.take_copies()} == {7}


def test_public_blocks_are_shared_and_what_follows_them_is_not() -> None:
    manager = KVCacheManager(40, 4)
    public = [*range(10)]  # two full blocks, and two tokens that no block of the public part can hold alone
    x, y = Namespace("x"), Namespace("y")
    assert start(manager, "x1", [*public, 77, 78, 79], namespace=x, num_public_tokens=10) == 0
    assert start(manager, "y1", [*public, 77, 78, 79], namespace=y, num_public_tokens=10) == 8
    assert start(manager, "x2", [*public, 77, 78, 99], namespace=x, num_public_tokens=10) == 12
    assert start(manager, "n", [*public, 77], num_public_tokens=10) == 8
    assert manager.block_table("x1")[:2] == manager.block_table("y1")[:2] == manager.block_table("n")[:2]
    assert start(manager, "z", [*public, 77, 78], namespace=Namespace("z")) == 0, "not for a prompt that was not found public"
    assert start(manager, "r", public, namespace=Namespace("x", rope_class=1), num_public_tokens=10) == 0
    stop(manager, "x1", "y1", "n", "r", "z", "x2")
    assert manager.match_prefix(y, [*public, 77, 78, 79, 0], 10).num_tokens == 13
    assert manager.num_referenced_blocks == 0


def test_a_public_block_goes_last_and_empty_branches_are_forgotten() -> None:
    manager = KVCacheManager(4, 2)
    for index in range(20):
        tokens = [1, 2, 3, 4, 100 + index, 5, 6]
        assert start(manager, "a", tokens, namespace=Namespace(str(index)), num_public_tokens=4) == (4 if index else 0)
        stop(manager, "a")  # asserts that no namespace without blocks is kept
    start(manager, "b", [*range(50, 58)])
    assert manager.match_prefix(Namespace("0"), [1, 2, 3, 4], 4).num_tokens == 0
    stop(manager, "b")


def test_a_branch_survives_the_end_of_its_only_block_while_a_request_goes_through_it() -> None:
    manager = KVCacheManager(10, 2)
    x, tokens = Namespace("x"), [1, 2, 7, 8]
    manager.admit("b", x, manager.match_prefix(x, tokens, 2))
    start(manager, "a", tokens[:3], namespace=x, num_public_tokens=2)
    stop(manager, "a")
    assert manager.allocate("b", 4)
    manager.commit("b", tokens, 4)  # its full block makes the partial one of a useless, which was all that the branch held
    manager.check_integrity()
    stop(manager, "b")
    assert manager.match_prefix(x, [*tokens, 9], 2).num_tokens == 4


@dataclass
class Model:
    """What is resident, as plain lists: for each request that ever ran, its namespace, public part and computed tokens.

    All in one namespace share all. With a salt, whole public blocks are shared by all, and what follows them within the salt.
    """

    block_size: int
    runs: dict[str, tuple[Namespace, int, list[int]]] = field(default_factory=dict)

    def longest(self, namespace: Namespace, tokens: list[int], num_public_tokens: int) -> int:
        lengths = (self._visible(run, namespace, tokens, num_public_tokens) for run in self.runs.values())
        return min(max(lengths, default=0), len(tokens) - 1)

    def _visible(self, run: tuple[Namespace, int, list[int]], namespace: Namespace, tokens: list[int], public: int) -> int:
        """Both in one tree from the start: all. Else they part where the first of them leaves the public blocks."""
        length = common_len(run[2], tokens)
        ours, theirs = self._public_len(namespace, public), self._public_len(run[0], run[1])
        return length if run[0] == namespace and ours == theirs else min(length, ours, theirs)

    def _public_len(self, namespace: Namespace, num_public_tokens: int) -> int:
        return num_public_tokens // self.block_size * self.block_size if namespace.salt else 10**9


def common_len(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def resident(manager: KVCacheManager) -> list[tuple[Namespace, int, list[int]]]:
    """All runs of tokens that the tree and the tables hold, read off by walking up from every node and open block."""

    def path(node: PrefixNode, tail: list[int]) -> tuple[Namespace, int, list[int]]:
        public = 0
        while True:
            if node.namespace is None:
                tail = [*node.tokens, *tail]
                assert node.parent is not None
                node = node.parent
            elif node.parent is not None:
                namespace, above = node.namespace, path(node.parent, [])[2]
                return namespace, len(above), above + tail
            else:
                return node.namespace, public, tail

    tree = manager._tree
    runs = [path(node, []) for node in tree.nodes()]
    return runs + [path(n, [*o.tokens]) for n in tree.all_nodes() for o in n.open_blocks]


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([1, 2, 3, 4, 8]),
    num_blocks=st.sampled_from([25, 300]),
    public_len=st.sampled_from([0, 5, 12]),
)
def test_cached_tokens_are_the_longest_common_prefix_with_anything_resident(
    seed: int, block_size: int, num_blocks: int, public_len: int
) -> None:
    """Against a list of token runs: all that were ever computed where nothing is evicted, else those that are left."""
    rng = random.Random(seed)
    manager = KVCacheManager(num_blocks, block_size)
    model = Model(block_size)
    stems = [[rng.randrange(3) for _ in range(30)] for _ in range(2)]
    public = stems[0][:public_len]
    live: dict[str, list[int]] = {}
    for index in range(40):
        action = rng.random()
        if action < 0.5:
            tokens = rng.choice(stems)[: rng.randrange(1, 31)] + [rng.randrange(3) for _ in range(rng.randrange(0, 6))] or [0]
            admit_and_check(manager, model, live, str(index), rng.choice([NS, Namespace("x"), Namespace("y")]), tokens, public)
        elif live and action < 0.85:
            advance(manager, model, live, rng.choice(list(live)), rng)
        elif live:
            request_id = rng.choice(list(live))
            del live[request_id]
            manager.free(request_id)
        manager.check_integrity()
    for request_id in live:
        manager.free(request_id)
        manager.check_integrity()
    assert manager.num_referenced_blocks == 0


def admit_and_check(
    manager: KVCacheManager,
    model: Model,
    live: dict[str, list[int]],
    request_id: str,
    namespace: Namespace,
    tokens: list[int],
    public: list[int],
) -> None:
    num_public = common_len(public, tokens)
    match = manager.match_prefix(namespace, tokens, num_public)
    now = Model(model.block_size, {str(i): run for i, run in enumerate(resident(manager))})
    assert match.num_tokens == now.longest(namespace, tokens, num_public)
    if manager.num_evicted_blocks == 0:
        assert match.num_tokens == model.longest(namespace, tokens, num_public)
    if not can_admit(manager, match, len(tokens), num_reserved=0):
        return
    manager.admit(request_id, namespace, match)
    manager.check_integrity()
    manager.finish_step()
    live[request_id] = tokens
    model.runs[request_id] = (namespace, num_public, tokens[: match.num_tokens])


def advance(manager: KVCacheManager, model: Model, live: dict[str, list[int]], request_id: str, rng: random.Random) -> None:
    """Compute some of the request's known tokens; when there are none left, make one up first, as sampling does."""
    tokens = live[request_id]
    namespace, num_public, computed = model.runs[request_id]
    if len(computed) == len(tokens):
        tokens.append(rng.randrange(3))
    num_computed = rng.randrange(len(computed), len(tokens)) + 1
    if manager.allocate(request_id, num_computed):
        manager.commit(request_id, tokens, num_computed)
        model.runs[request_id] = (namespace, num_public, tokens[:num_computed])


@pytest.mark.parametrize("block_size", [1, 4])
def test_the_model_itself_knows_what_it_says(block_size: int) -> None:
    model = Model(block_size, {"a": (NS, 0, [1, 2, 3, 4, 5, 6]), "b": (Namespace("x"), 5, [1, 2, 3, 4, 5, 6, 7])})
    assert model.longest(NS, [1, 2, 3, 9], 0) == 3
    assert model.longest(NS, [1, 2, 3], 0) == 2
    assert model.longest(Namespace("y"), [1, 2, 3, 4, 5, 6, 7, 8], 0) == 0
    assert model.longest(Namespace("y"), [1, 2, 3, 4, 5, 6, 7, 8], 5) == 5 // block_size * block_size

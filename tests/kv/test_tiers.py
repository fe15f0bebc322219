from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.kv.block import PrefixNode
from engine.kv.digest import Digester, child_digest, root_digest
from engine.kv.tiers import BlockKey, DiskTier, HostTier, StoredBlock
from engine.request import Namespace

PRINT = b"p" * 32


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stored(number: int, size: int = 10) -> StoredBlock:
    return StoredBlock(BlockKey(b"m" * 8, digest(number), bytes(8)), size)


def chain(namespace: Namespace, *blocks: tuple[int, ...]) -> PrefixNode:
    node = PrefixNode((), None, None, 0, namespace=namespace)
    for tokens in blocks:
        node = PrefixNode(tokens, node, None, node.depth + 1)
    return node


def test_a_digest_covers_model_namespace_and_every_token_before() -> None:
    tokens = ((1, 2), (3, 4))
    digests = {
        Digester(fingerprint).of(chain(namespace, *blocks))
        for fingerprint in (PRINT, b"q" * 32)
        for namespace in (Namespace(), Namespace(salt="x"), Namespace(rope_class=1))
        for blocks in (tokens, tokens[1:], ((1, 3), (3, 4)), (*tokens, (5, 6)))
    }
    assert len(digests) == 2 * 3 * 4


def test_a_nodes_digest_is_the_same_by_itself_and_along_a_path() -> None:
    digester = Digester(PRINT)
    node = chain(Namespace(salt="x"), (1, 2), (3, 4))
    by_hand = child_digest(child_digest(digester.of_root(Namespace(salt="x")), (1, 2)), (3, 4))
    assert digester.of(node) == by_hand
    assert node.parent is not None
    assert node.parent.digest == child_digest(digester.of_root(Namespace(salt="x")), (1, 2)), "kept on the way"


def test_a_branch_is_another_place_than_the_root_of_its_namespace() -> None:
    digester = Digester(PRINT)
    public = chain(Namespace(), (1, 2))
    branch = PrefixNode((), public, None, public.depth, namespace=Namespace(salt="x"))
    assert digester.of(branch) == root_digest(PRINT, Namespace(salt="x"), digester.of(public))
    assert digester.of(branch) != digester.of_root(Namespace(salt="x"))


def test_a_very_long_prompt_has_digests() -> None:
    assert len(Digester(PRINT).of(chain(Namespace(), *[(n,) for n in range(20_000)]))) == 32


@given(st.text(max_size=5), st.text(max_size=5), st.lists(st.integers(0, 2**32 - 1), max_size=4))
def test_different_salts_never_have_one_digest(a: str, b: str, tokens: list[int]) -> None:
    one, other = (child_digest(root_digest(PRINT, Namespace(salt=salt)), tokens) for salt in (a, b))
    assert (one == other) == (a == b)


def test_host_evicts_what_was_used_longest_ago_and_never_what_is_pinned() -> None:
    host = HostTier(3)
    a, b, c = (host.add(digest(n), b"") for n in (1, 2, 3))
    host.touch(a)
    host.pin(b)
    assert host.evict() is c
    assert host.evict() is a
    assert host.evict() is None, "what is left is pinned"
    host.unpin(b)
    host.check_integrity()
    assert host.evict() is b


def test_a_pinned_entry_that_is_forgotten_keeps_its_slot_until_the_last_unpin() -> None:
    host = HostTier(1)
    entry = host.add(digest(1), b"")
    host.pin(entry)
    host.forget(entry)
    assert host.find(digest(1)) is None
    assert host.num_free == 0
    host.check_integrity()
    host.unpin(entry)
    assert host.num_free == 1
    host.check_integrity()


def test_disk_forgets_the_least_recently_used_until_the_rest_fits() -> None:
    disk = DiskTier(30)
    for number in (1, 2, 3, 4):
        disk.add(stored(number))
    disk.touch(digest(1))
    assert [key.digest for key in disk.overflow()] == [digest(2)]
    disk.add(stored(5, size=25))
    assert [key.digest for key in disk.overflow()] == [digest(3), digest(4), digest(1)]
    assert disk.num_bytes == 25
    disk.check_integrity()


def test_a_file_larger_than_the_bound_is_deleted_at_once() -> None:
    disk = DiskTier(5)
    disk.add(stored(1))
    assert [key.digest for key in disk.overflow()] == [digest(1)]
    assert disk.num_bytes == 0


@given(
    known=st.lists(st.integers(0, 9), unique=True),
    found=st.lists(st.integers(0, 9), unique=True),
    being_deleted=st.sets(st.integers(0, 9)),
)
def test_reconcile_ends_with_what_is_there_known_files_last(
    known: list[int], found: list[int], being_deleted: set[int]
) -> None:
    disk = DiskTier(1000)
    for number in known:
        disk.add(stored(number))
    disk.reconcile([stored(number) for number in found], {digest(number) for number in being_deleted})
    disk.check_integrity()
    there = [number for number in found if number not in being_deleted]
    new, old = [n for n in there if n not in known], [n for n in known if n in there]
    assert [block.key.digest for block in disk] == [digest(n) for n in (*new, *old)]

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.kv.block import Block, PrefixNode
from engine.kv.digest import Digester
from engine.kv.tier_cache import Promotion, Tier, TierCache, TierHit
from engine.kv.tier_drop import DropScope
from engine.kv.tiers import DiskTier, HostTier
from engine.request import Namespace
from tests.fake_disk import FILE, FakeDisk

SIZE = 2


class Bench:
    """A device of named contents, a tier cache and its disk. A block's content is the tokens up to its end, and its namespace."""

    def __init__(self, num_slots: int, max_files: int) -> None:
        self.slots: dict[int, object] = dict.fromkeys(range(num_slots), "empty")
        self.io = FakeDisk(self.slots)
        self.tiers = TierCache(Digester(b"p" * 32), HostTier(num_slots), DiskTier(max_files * FILE), self.io)
        self.device: dict[int, object] = {}
        self.num_blocks = 0

    def node(self, namespace: Namespace, tokens: tuple[int, ...]) -> PrefixNode:
        node = PrefixNode((), None, None, 0, namespace=namespace)
        for start in range(0, len(tokens), SIZE):
            node = PrefixNode(tokens[start : start + SIZE], node, None, node.depth + 1)
        return node

    def evict(self, namespace: Namespace, tokens: tuple[int, ...]) -> None:
        """The device forgets the block that ends with these tokens, and its place gets new content in the same step."""
        block_id = self.num_blocks = self.num_blocks + 1
        self.device[block_id] = (namespace, tokens)
        node = self.node(namespace, tokens)
        node.block = Block(block_id)
        self.tiers.offload(node)

    def match(self, namespace: Namespace, prompt: tuple[int, ...], num_on_device: int = 0) -> tuple[TierHit, ...]:
        """Of a prompt whose first tokens the device has."""
        path = [self.node(namespace, prompt[:end]) for end in range(SIZE, num_on_device + 1, SIZE)]
        return self.tiers.match(namespace, path, prompt, 0, SIZE)

    def load(self, namespace: Namespace, prompt: tuple[int, ...]) -> list[int]:
        """Load what can be loaded; returns the blocks, to be looked into after the step."""
        blocks = []
        for entry in self.tiers.reserve(self.match(namespace, prompt)):
            self.num_blocks += 1
            self.tiers.load(entry, self.num_blocks)
            blocks.append(self.num_blocks)
        return blocks

    def run_step(self) -> None:
        for store in self.tiers.stores:
            self.slots[store.host_slot] = self.device[store.block_id]
        for load in self.tiers.loads:
            self.device[load.block_id] = self.slots[load.host_slot]
        self.tiers.end_step()

    def settle(self) -> None:
        """Let the disk do all that it has to, and all that follows from it."""
        while self.tiers.is_busy or self.io.done:
            self.io.work(len(self.io.jobs))
            self.tiers.poll()
            self.tiers.check_integrity()


NS = Namespace()


def test_an_evicted_block_is_found_in_host_memory_and_comes_back() -> None:
    bench = Bench(num_slots=4, max_files=0)
    bench.evict(NS, (1, 2))
    bench.run_step()
    hits = bench.match(NS, (1, 2, 3))
    assert [(hit.tokens, hit.tier, hit.is_ready) for hit in hits] == [((1, 2), Tier.HOST, True)]
    (block,) = bench.load(NS, (1, 2, 3))
    bench.run_step()
    assert bench.device[block] == (NS, (1, 2))
    assert bench.io.num_writes == 0, "there is no disk"
    bench.tiers.check_integrity()


def test_being_written_to_the_disk_does_not_make_a_block_younger() -> None:
    bench = Bench(num_slots=12, max_files=100)
    old, new = tuple(range(100, 108)), tuple(range(16))
    for tokens in (old, new):
        for end in range(len(tokens), 0, -SIZE):
            bench.evict(NS, tokens[:end])
        bench.run_step()
    bench.io.work(4)  # the old prompt's writes end after the new one has come
    bench.tiers.poll()
    for number in range(200, 204):
        bench.evict(NS, (number, number))
    bench.run_step()
    assert len([hit for hit in bench.match(NS, (*new, 1)) if hit.is_ready]) == 8, "the old one has to make room"
    bench.tiers.check_integrity()


def test_one_token_is_left_to_compute_and_a_hole_ends_the_chain() -> None:
    bench = Bench(num_slots=4, max_files=0)
    for tokens in ((1, 2), (1, 2, 3, 4, 5, 6)):
        bench.evict(NS, tokens)
    bench.run_step()
    assert bench.match(NS, (1, 2)) == ()
    assert len(bench.match(NS, (1, 2, 3, 4, 5, 6, 7))) == 1


def test_another_salt_never_hits() -> None:
    bench = Bench(num_slots=4, max_files=4)
    bench.evict(Namespace(salt="a"), (1, 2))
    bench.run_step()
    bench.settle()
    for other in (NS, Namespace(salt="b"), Namespace(salt="a", rope_class=1)):
        assert bench.match(other, (1, 2, 3)) == ()
    assert len(bench.match(Namespace(salt="a"), (1, 2, 3))) == 1


def test_a_block_can_be_evicted_and_loaded_in_one_step() -> None:
    bench = Bench(num_slots=4, max_files=0)
    bench.evict(NS, (1, 2))
    (block,) = bench.load(NS, (1, 2, 3))
    bench.run_step()
    assert bench.device[block] == (NS, (1, 2))


def test_without_slots_nothing_is_kept_and_nothing_found() -> None:
    bench = Bench(num_slots=0, max_files=0)
    bench.evict(NS, (1, 2))
    assert bench.tiers.stores == ()
    assert bench.match(NS, (1, 2, 3)) == ()


def test_a_full_host_tier_moves_on_to_the_disk_and_a_promotion_brings_it_back() -> None:
    bench = Bench(num_slots=2, max_files=10)
    prompt = (1, 2, 3, 4, 5, 6, 7)
    for end in (6, 4, 2):  # leaves first, as the device evicts; each is on the disk before the next comes
        bench.evict(NS, prompt[:end])
        bench.run_step()
        bench.settle()
    assert [(hit.tier, hit.is_ready) for hit in bench.match(NS, prompt)] == [
        (Tier.HOST, True),
        (Tier.HOST, True),
        (Tier.DISK, False),
    ]
    assert len(bench.load(NS, prompt)) == 2
    bench.run_step()
    promotion = bench.tiers.promote(bench.match(NS, prompt)[2:])  # the two above are on the device by now
    assert not promotion.is_done
    bench.settle()
    assert promotion.is_done
    hits = bench.match(NS, prompt, 4)
    assert [(hit.tier, hit.is_ready) for hit in hits] == [(Tier.DISK, True)], "whoever loads it hits the disk"
    (entry,) = bench.tiers.reserve(hits)
    bench.tiers.load(entry, 99)
    bench.run_step()
    assert bench.device[99] == (NS, prompt[:6])
    assert bench.match(NS, prompt, 4)[0].tier is Tier.HOST, "from then on, the host"


def test_a_promotion_takes_what_fits_and_holds_the_chain_above_meanwhile() -> None:
    bench = Bench(num_slots=2, max_files=10)
    prompt = (1, 2, 3, 4, 5, 6, 7)
    for end in (6, 4, 2):
        bench.evict(NS, prompt[:end])
        bench.run_step()
        bench.settle()
    promotion = bench.tiers.promote(bench.match(NS, prompt))
    assert promotion.is_done, "there is no slot for the third block: both are part of the chain"
    bench.tiers.poll()
    bench.tiers.check_integrity()


@pytest.mark.parametrize("spoil", ["damaged", "gone"])
def test_an_unusable_file_is_a_miss(spoil: str) -> None:
    bench = Bench(num_slots=1, max_files=10)
    bench.evict(NS, (1, 2))
    bench.run_step()
    bench.settle()
    bench.evict(NS, (8, 9))
    bench.run_step()
    bench.settle()
    for key in bench.io.files:
        bench.io.files[key] = "damaged"
    if spoil == "gone":
        bench.io.files.clear()
    promotion = bench.tiers.promote(bench.match(NS, (1, 2, 3)))
    bench.settle()
    assert promotion.is_done
    assert bench.match(NS, (1, 2, 3)) == ()


def test_what_is_still_being_read_is_not_loaded() -> None:
    bench = Bench(num_slots=1, max_files=10)
    for first in (1, 8):
        bench.evict(NS, (first, first + 1))
        bench.run_step()
        bench.settle()
    bench.tiers.promote(bench.match(NS, (1, 2, 3)))
    assert [hit.is_ready for hit in bench.match(NS, (1, 2, 3))] == [False]
    assert bench.load(NS, (1, 2, 3)) == []
    bench.run_step()
    bench.settle()
    assert len(bench.load(NS, (1, 2, 3))) == 1
    bench.run_step()


def test_two_promotions_of_one_block_read_it_once() -> None:
    bench = Bench(num_slots=2, max_files=10)
    for first in (1, 3, 5):
        bench.evict(NS, (first, first + 1))
        bench.run_step()
        bench.settle()
    hits = bench.match(NS, (1, 2, 3))
    promotions = [bench.tiers.promote(hits), bench.tiers.promote(bench.match(NS, (1, 2, 3)))]
    assert [job[0] for job in bench.io.jobs] == ["read"]
    bench.settle()
    assert all(promotion.is_done for promotion in promotions)
    assert len(bench.load(NS, (1, 2, 3))) == 1


def test_a_slot_that_is_taken_for_a_read_is_not_stored_to_any_more() -> None:
    bench = Bench(num_slots=2, max_files=10)
    bench.evict(NS, (1, 2))
    bench.run_step()
    bench.settle()
    for first in (3, 5):
        bench.evict(NS, (first, first + 1))
    assert len(bench.tiers.stores) == 2
    bench.tiers.promote(bench.match(NS, (1, 2, 3)))
    assert len(bench.tiers.stores) == 1, "the other slot belongs to the disk thread now"
    bench.run_step()
    bench.settle()
    (block,) = bench.load(NS, (1, 2, 3))
    bench.run_step()
    assert bench.device[block] == (NS, (1, 2))


def test_a_full_disk_only_means_that_nothing_is_found_there() -> None:
    bench = Bench(num_slots=1, max_files=10)
    bench.io.is_full = True
    for first in (1, 3):
        bench.evict(NS, (first, first + 1))
        bench.run_step()
        bench.settle()
    assert bench.match(NS, (1, 2, 3)) == ()
    assert len(bench.match(NS, (3, 4, 5))) == 1


def test_dropping_a_prefix_takes_all_that_continues_it_in_all_tiers() -> None:
    bench = Bench(num_slots=2, max_files=10)
    for tokens in ((1, 2, 3, 4), (1, 2, 5, 6), (1, 2), (7, 8)):
        bench.evict(NS, tokens)
        bench.run_step()
        bench.settle()
    top = bench.match(NS, (1, 2, 3))[0]
    dropped = bench.tiers.drop(DropScope((top.digest,), top.digest), 0)
    assert (dropped.num_host_blocks, dropped.num_disk_blocks) == (1, 3)
    bench.settle()
    assert len(bench.io.files) == 1
    assert bench.match(NS, (1, 2, 3, 4, 5)) == ()
    assert len(bench.match(NS, (7, 8, 9))) == 1
    dropped = bench.tiers.reset()
    assert (dropped.num_host_blocks, dropped.num_disk_blocks) == (1, 1)
    bench.settle()
    assert bench.io.files == {}
    assert bench.tiers.host.num_used == 0


def test_a_block_that_is_dropped_while_it_is_written_does_not_stay_on_the_disk() -> None:
    bench = Bench(num_slots=4, max_files=10)
    bench.evict(NS, (1, 2))
    bench.run_step()
    assert [job[0] for job in bench.io.jobs] == ["write"]
    assert bench.tiers.reset().num_host_blocks == 1
    bench.settle()
    assert bench.io.files == {}
    assert bench.match(NS, (1, 2, 3)) == ()


def test_a_block_that_is_dropped_while_it_is_written_can_come_again_at_once() -> None:
    bench = Bench(num_slots=4, max_files=10)
    bench.evict(NS, (1, 2))
    bench.run_step()
    bench.tiers.reset()
    bench.evict(NS, (1, 2))
    bench.run_step()
    bench.settle()
    assert len(bench.io.files) == 1
    assert bench.tiers.disk.find(bench.match(NS, (1, 2, 3))[0].digest) is not None
    bench.tiers.reset()
    bench.settle()
    assert bench.io.files == {}


CONTENTS = tuple(
    (namespace, tokens)
    for namespace in (NS, Namespace(salt="x"))
    for tokens in ((1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6), (1, 2, 7, 8), (9, 9), (9, 9, 1, 1))
)


class TierMachine(RuleBasedStateMachine):
    """Anything in any order, with a disk that is slow, full or spoilt at will: whatever is loaded is what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(num_slots=4, max_files=4)
        self.loaded: list[tuple[int, object]] = []
        self.promotions: list[Promotion] = []
        self.in_step = False

    @rule(content=st.sampled_from(CONTENTS))
    def evict(self, content: tuple[Namespace, tuple[int, ...]]) -> None:
        self.bench.evict(*content)

    @rule(content=st.sampled_from(CONTENTS))
    def load(self, content: tuple[Namespace, tuple[int, ...]]) -> None:
        self.in_step = True
        namespace, tokens = content
        for index, block in enumerate(self.bench.load(namespace, (*tokens, 0))):
            self.loaded.append((block, (namespace, tokens[: (index + 1) * SIZE])))

    @rule(content=st.sampled_from(CONTENTS))
    def promote(self, content: tuple[Namespace, tuple[int, ...]]) -> None:
        namespace, tokens = content
        self.promotions.append(self.bench.tiers.promote(self.bench.match(namespace, (*tokens, 0))))

    @rule()
    def step(self) -> None:
        self.bench.run_step()
        for block, content in self.loaded:
            assert self.bench.device[block] == content, "another block's bytes were loaded"
        self.loaded.clear()
        self.in_step = False

    @rule(count=st.integers(1, 4))
    def disk_works(self, count: int) -> None:
        self.bench.io.work(count)

    @rule()
    def poll(self) -> None:
        if not self.in_step:
            self.bench.tiers.poll()

    @rule(is_full=st.booleans())
    def disk_full(self, is_full: bool) -> None:
        self.bench.io.is_full = is_full

    @rule(seed=st.integers(0, 9), is_gone=st.booleans())
    def spoil_a_file(self, seed: int, is_gone: bool) -> None:
        if self.bench.io.files:
            key = random.Random(seed).choice(list(self.bench.io.files))
            self.bench.io.files[key] = "damaged"
            if is_gone:
                del self.bench.io.files[key]

    @rule()
    def look_again(self) -> None:
        self.bench.io.scan()

    @rule(content=st.sampled_from(CONTENTS), everything=st.booleans())
    def drop(self, content: tuple[Namespace, tuple[int, ...]], everything: bool) -> None:
        if self.in_step:
            return
        tiers = self.bench.tiers
        if everything:
            tiers.reset()
        else:
            hits = self.bench.match(content[0], (*content[1], 0))
            if hits:
                tiers.drop(DropScope((hits[0].digest,), hits[0].digest), 0)
        assert self.bench.match(content[0], (*content[1], 0)) == () or not everything

    @invariant()
    def agrees(self) -> None:
        tiers = self.bench.tiers
        tiers.check_integrity()
        assert len({store.host_slot for store in tiers.stores}) == len(tiers.stores)

    def teardown(self) -> None:
        self.step()
        self.bench.io.is_full = False
        self.bench.settle()
        assert all(promotion.is_done for promotion in self.promotions)
        assert all(entry.pins == 0 for entry in self.bench.tiers.host)
        assert len(self.bench.io.files) <= 4, "the bound holds once the disk is at rest"


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)

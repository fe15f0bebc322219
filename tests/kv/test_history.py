"""Labels of prompt tokens, ghosts, ages; and random operators beside random requests, against a plain model of what is there."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.control import CacheControl, DropPrefix, PinPrefix, ResetCache, ShowCache, Unpin
from engine.kv.ghosts import GhostIndex
from engine.kv.history import FoundTokens
from engine.kv.manager import KVCacheManager
from engine.kv.pins import PinLimits
from engine.request import Namespace
from engine.stats import PromptSources
from tests.factories import can_admit
from tests.kv.test_manager import NS, start
from tests.kv.test_pins import Clock

ALICE, BOB = Namespace(salt="alice"), Namespace(salt="bob")


def make(num_blocks: int = 6) -> tuple[KVCacheManager, Clock]:
    clock = Clock()
    return KVCacheManager(num_blocks, 2, clock=clock, pin_limits=PinLimits(num_blocks, num_blocks, 1)), clock


def cache(manager: KVCacheManager, tokens: list[int], namespace: Namespace = NS) -> None:
    start(manager, "once", tokens, namespace=namespace)
    manager.free("once")


def label(manager: KVCacheManager, tokens: list[int], namespace: Namespace = NS) -> PromptSources:
    match = manager.match_prefix(namespace, tokens)
    sources = manager.sources(namespace, tokens, match, FoundTokens(device=match.num_tokens))
    assert sources.num_tokens == len(tokens)
    assert sources.num_cached_tokens == match.num_tokens
    return sources


def test_every_label() -> None:
    manager, clock = make()
    assert label(manager, [1, 2, 3, 4, 5]) == PromptSources(unseen=5)
    cache(manager, [1, 2, 3, 4], ALICE)
    assert label(manager, [1, 2, 3, 4, 5], ALICE) == PromptSources(device=4, unseen=1)
    assert label(manager, [1, 2, 3, 4, 5], BOB) == PromptSources(other_namespace=4, unseen=1)
    assert label(manager, [1, 2, 9, 9, 5], BOB) == PromptSources(other_namespace=2, unseen=3)
    clock.now += 10
    cache(manager, [*range(20, 32)], NS)  # takes the whole cache
    clock.now += 3
    assert label(manager, [1, 2, 3, 4, 5], ALICE) == PromptSources(evicted=4, unseen=1, evicted_seconds=3.0)
    assert label(manager, [1, 2, 3, 4, 5], BOB) == PromptSources(unseen=5), "nobody holds it any more"
    cache(manager, [1, 2, 3, 4], ALICE)
    assert label(manager, [1, 2, 3, 4, 5], ALICE) == PromptSources(device=4, unseen=1)
    manager.check_integrity()


def test_the_token_that_must_be_computed_is_neither_evicted_nor_elsewhere() -> None:
    manager, _ = make()
    cache(manager, [1, 2, 3, 4])
    assert label(manager, [1, 2, 3, 4]) == PromptSources(device=3, unseen=1)


def test_the_age_is_that_of_the_first_evicted_block_and_what_was_dropped_counts_as_evicted() -> None:
    manager, clock = make()
    cache(manager, [1, 2, 3, 4])
    manager.operator.drop(NS, [1, 2, 3], 0)  # one block: the first is continued by nothing, and goes too
    clock.now += 7
    assert label(manager, [1, 2, 3, 4, 5]) == PromptSources(evicted=4, unseen=1, evicted_seconds=7.0)


def test_ghosts_are_bounded_and_the_oldest_go_first() -> None:
    manager, _ = make(num_blocks=2)
    for first in range(100):
        cache(manager, [first, first])
        manager.check_integrity()
    assert len(manager.history.ghosts) == 8
    assert label(manager, [97, 97, 0]).evicted == 2
    assert label(manager, [50, 50, 0]).unseen == 3


def test_the_found_kinds_follow_each_other() -> None:
    manager, _ = make()
    found = FoundTokens(device=2, host=2, disk=1, in_flight=1)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    assert manager.sources(NS, prompt, manager.match_prefix(NS, prompt), found) == PromptSources(
        device=2, host=2, disk=1, in_flight=1, unseen=1
    )


def test_public_blocks_are_looked_up_as_public_and_what_follows_them_as_the_tenants() -> None:
    manager, clock = make()

    def serve(namespace: Namespace) -> PromptSources:
        match = manager.match_prefix(namespace, prompt, 4)
        manager.admit("a", namespace, match)
        sources = manager.sources(namespace, prompt, match, FoundTokens(device=match.num_tokens))
        assert manager.allocate("a", len(prompt))
        manager.take_copies()
        manager.finish_step()
        manager.commit("a", prompt, len(prompt))
        manager.free("a")
        manager.check_integrity()
        return sources

    prompt = [1, 2, 3, 4, 5, 6, 7]
    assert serve(ALICE) == PromptSources(unseen=7)
    assert serve(BOB) == PromptSources(device=4, other_namespace=2, unseen=1)
    cache(manager, [*range(20, 32)])
    clock.now += 5
    assert serve(ALICE) == PromptSources(evicted=6, unseen=1, evicted_seconds=5.0)


def test_ages_at_reuse_and_at_eviction() -> None:
    manager, clock = make()
    cache(manager, [1, 2, 3, 4])
    clock.now += 4
    start(manager, "a", [1, 2, 3, 4, 5])
    start(manager, "b", [1, 2, 3, 4, 6])  # they are in use: no rest has ended
    assert manager.history.take_reuse_gaps() == ((4.0, 2),)
    assert manager.history.take_reuse_gaps() == ()
    clock.now += 1
    manager.free("a")
    manager.free("b")
    clock.now += 2
    cache(manager, [*range(20, 32)])
    assert Counter(dict(manager.history.take_evict_idles())) == Counter({2.0: 4})
    assert manager.history.take_evict_idles() == ()


def tokens_of(rng: random.Random) -> list[int]:
    """Few distinct prompts with long common starts, so that everything meets."""
    return [rng.randrange(2) for _ in range(rng.randint(1, 9))]


class Random:
    """Requests and an operator at random; ``evicted`` and ``resident`` say for each namespace what a plain model knows."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.manager = KVCacheManager(12, 2, pin_limits=PinLimits(12, 5, 5), clock=self.clock)
        self.control = CacheControl(self.manager)
        self.running: dict[str, tuple[Namespace, list[int], int]] = {}
        self.num_done = 0

    def step(self) -> None:
        self.clock.now += 1
        self.num_done += 1
        self.rng.choice(
            (self.add, self.add, self.advance, self.advance, self.end, self.pin, self.unpin, self.drop, self.wait)
        )()
        self.control.expire()
        self.manager.check_integrity()
        self.check_labels()

    def namespace(self) -> tuple[Namespace, int]:
        return self.rng.choice(((NS, 0), (ALICE, 0), (ALICE, 2), (BOB, 2)))

    def add(self) -> None:
        tokens, (namespace, num_public) = tokens_of(self.rng), self.namespace()
        num_public = min(num_public, len(tokens))
        match = self.manager.match_prefix(namespace, tokens, num_public)
        before = self.manager.num_available_blocks
        if not can_admit(self.manager, match, len(tokens), 0):
            return
        sources = self.manager.sources(namespace, tokens, match, FoundTokens(device=match.num_tokens))
        assert sources.num_tokens == len(tokens)
        request_id = str(self.num_done)
        self.manager.admit(request_id, namespace, match)
        assert self.manager.allocate(request_id, len(tokens)), "can_admit promised these blocks"
        assert self.manager.num_available_blocks <= before
        self.manager.take_copies()
        self.manager.finish_step()
        self.running[request_id] = (namespace, tokens, match.num_tokens)

    def advance(self) -> None:
        for request_id, (namespace, tokens, computed) in list(self.running.items())[:2]:
            computed = self.rng.randint(computed, len(tokens))
            self.manager.commit(request_id, tokens, computed)
            self.running[request_id] = (namespace, tokens, computed)

    def end(self) -> None:
        if self.running:
            request_id = self.rng.choice(list(self.running))
            del self.running[request_id]
            self.manager.free(request_id)

    def pin(self) -> None:
        namespace, num_public = self.namespace()
        self.control.apply(
            PinPrefix(str(self.num_done), namespace, tuple(tokens_of(self.rng)), num_public, self.rng.randint(1, 20))
        )

    def unpin(self) -> None:
        for pin in list(self.manager.operator.pins)[:1]:
            self.control.apply(Unpin(pin.pin_id))

    def drop(self) -> None:
        namespace, num_public = self.namespace()
        before = self.manager.num_cached_blocks
        if self.rng.random() < 0.2:
            dropped = self.control.apply(ResetCache())
        else:
            dropped = self.control.apply(DropPrefix(namespace, tuple(tokens_of(self.rng)), num_public))
        assert self.manager.num_cached_blocks == before - dropped.num_blocks  # type: ignore[union-attr]

    def wait(self) -> None:
        self.clock.now += self.rng.randint(0, 10)

    def check_labels(self) -> None:
        """The survey's blocks are the pool's, and a shown prefix is found again in full."""
        view = self.control.apply(ShowCache(100, 100))
        num_published = sum(item.num_blocks for item in view.namespaces)  # type: ignore[union-attr]
        assert num_published == sum(item.num_blocks for item in view.by_bytes)  # type: ignore[union-attr]
        num_open = self.manager.num_referenced_blocks + self.manager.num_cached_blocks - num_published
        assert 0 <= num_open <= sum(-(-len(tokens) // 2) for _, tokens, _ in self.running.values())


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_operators_beside_random_requests(seed: int) -> None:
    world = Random(seed)
    for _ in range(60):
        world.step()
    for request_id in world.running:
        world.manager.free(request_id)
    for pin in list(world.manager.operator.pins):
        world.control.apply(Unpin(pin.pin_id))
    world.control.apply(ResetCache())
    world.manager.check_integrity()
    assert world.manager.num_free_blocks == 12


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_labels_are_those_of_a_plain_model(seed: int) -> None:
    """The model: all tokens up to each full block's end, by namespace, resident or gone; looked up in plain sets."""
    rng = random.Random(seed)
    manager, clock = make(num_blocks=8)
    manager.history.ghosts = GhostIndex(10_000)  # as many as the model remembers
    gone: dict[tuple[Namespace, tuple[int, ...]], float] = {}
    for _ in range(30):
        clock.now += 1
        before = resident(manager)
        tokens, namespace = tokens_of(rng), rng.choice((NS, ALICE, BOB))
        cache(manager, tokens, namespace)
        after = resident(manager)
        gone |= dict.fromkeys(before - after, clock.now)
        gone = {key: since for key, since in gone.items() if key not in after}
        prompt, reader = tokens_of(rng), rng.choice((NS, ALICE, BOB))
        assert label(manager, prompt, reader) == expected(manager, gone, prompt, reader, clock.now)


def resident(manager: KVCacheManager) -> set[tuple[Namespace, tuple[int, ...]]]:
    view = manager.operator.survey(1000, 1000)
    return {
        (item.namespace, item.token_ids[: index * 2]) for item in view.by_bytes for index in range(1, item.num_tokens // 2 + 1)
    }


def expected(
    manager: KVCacheManager,
    gone: dict[tuple[Namespace, tuple[int, ...]], float],
    prompt: list[int],
    reader: Namespace,
    now: float,
) -> PromptSources:
    found = manager.match_prefix(reader, prompt).num_tokens
    sources, here = PromptSources(device=found), resident(manager)
    for position in range(found, len(prompt)):
        key = tuple(prompt[: position - position % 2 + 2])
        is_full = len(key) == position - position % 2 + 2
        if is_full and (reader, key) in gone:
            seconds = sources.evicted_seconds
            seconds = now - gone[reader, key] if seconds is None else seconds
            sources = replace(sources, evicted=sources.evicted + 1, evicted_seconds=seconds)
        elif is_full and any((other, key) in here for other in (NS, ALICE, BOB) if other != reader):
            sources = replace(sources, other_namespace=sources.other_namespace + 1)
        else:
            sources = replace(sources, unseen=sources.unseen + 1)
    return sources

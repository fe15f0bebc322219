"""Everything at once: requests, pressure, forks, aborts, pins, drops, resets, a small host memory and a disk that fails.

A state machine does what it likes between two steps. After every rule all parts must agree; every match must be the one that a
plain model of the memories predicts, every token the one that follows from the request's own prompt; every request ends once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from engine.control import CacheControl, Dropped, DropPrefix, NotResident, Pinned, PinPrefix, Refused, ResetCache, Unpin
from engine.core import EngineCore
from engine.kv.digest import Digester
from engine.kv.match import PrefixMatch
from engine.kv.pins import PinLimits
from engine.kv.retention import Retention
from engine.kv.tails import TailSlots
from engine.kv.tier_cache import TierCache
from engine.kv.tier_drop import DropScope
from engine.kv.tiers import DiskTier, HostTier, Tier
from engine.request import Namespace, Request, RequestStatus, TokenEvent
from engine.sched.scheduler import Scheduler
from engine.stats import Admission
from tests.cache_model import (
    ALPHABET,
    Hit,
    Memories,
    WatchedManager,
    WayDisk,
    WayRunner,
    Ways,
    num_common,
    said,
)
from tests.factories import EOS, WatchedPool, make_request
from tests.fake_disk import FILE

NAMESPACES = (Namespace(), Namespace("x"), Namespace("y"), Namespace("x", rope_class=1))
STEMS = ((0, 1, 2, 3) * 6, (0, 1, 2, 3, 0, 1, 2, 2, 1, 0, 3, 3) * 2, (3, 3, 2, 1, 0) * 5)
PUBLIC = STEMS[0][:6]
PIN_BLOCKS = 3
MAX_NUM_SEQS = 4
WINDOWED_LEN = 80

TAILS = tuple(tail for length in range(4) for tail in product(range(ALPHABET), repeat=length))

tokens_of = st.tuples(st.sampled_from(STEMS), st.integers(1, 24), st.sampled_from(TAILS))
namespaces = st.sampled_from((NAMESPACES[0], *NAMESPACES))
number = st.integers(0, 30)


Choice = tuple[tuple[int, ...], int, tuple[int, ...]]


def spell(choice: Choice) -> list[int]:
    stem, length, tail = choice
    return [*stem[:length], *tail]


class CacheMachine(RuleBasedStateMachine):
    """``reached`` counts what has come about in all examples of a class, so that a test can see that they were worth it."""

    reached: ClassVar[Counter[str]]
    window: ClassVar[int | None] = None

    @initialize(
        block_size=st.sampled_from((2, 4)),
        num_blocks=st.sampled_from((8, 12, 24)),
        allow_partial=st.booleans(),
        budget=st.sampled_from((5, 16, 64)),
        sizes_below=st.sampled_from(((3, 60), (0, 0), (5, 4), (12, 0), (2, 30))),
    )
    def start(self, block_size: int, num_blocks: int, allow_partial: bool, budget: int, sizes_below: tuple[int, int]) -> None:
        self.now = 0.0
        num_slots, self.max_files = sizes_below
        retention = Retention(block_size, self.window, budget)
        self.max_len = (num_blocks - PIN_BLOCKS) * block_size
        if retention.max_blocks <= num_blocks - PIN_BLOCKS:
            self.max_len = WINDOWED_LEN
        self.ways = Ways(block_size)
        pool = WatchedPool(num_blocks)
        self.runner = WayRunner(block_size, pool, lambda request_id: self.ways_of(self.requests[request_id]), self.window)
        self.disk = WayDisk(self.runner.host, self.runner.from_disk)
        self.manager = WatchedManager(
            num_blocks,
            block_size,
            retention=retention,
            pool=pool,
            allow_partial=allow_partial,
            tails=None if allow_partial else TailSlots(MAX_NUM_SEQS),  # as in the quantized formats
            tiers=TierCache(Digester(b"p" * 32), HostTier(num_slots), DiskTier(self.max_files * FILE), self.disk),
            pin_limits=PinLimits(num_blocks, budget_blocks=PIN_BLOCKS, longest_blocks=num_blocks - PIN_BLOCKS),
            clock=lambda: self.now,
        )
        self.manager.witness = self
        self.memories = Memories(self.manager, self.runner)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=budget,
            eos_token_ids=(EOS,),
            clock=lambda: self.now,
        )
        self.core = EngineCore(self.scheduler, self.runner, block_bytes=64, clock=lambda: self.now)
        self.control = CacheControl(self.manager)
        self.requests: dict[str, Request] = {}
        self.known_ways: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: list[str] = []
        self.hits: dict[str, Hit] = {}  # of first admissions, until they are reported
        self.num_admitted = 0
        self.pins: dict[str, tuple[list[int], float]] = {}  # the last ways of the blocks, the end
        self.num_pins_asked = 0
        self.num_scheduled = 0

    # What the model predicts

    def ways_of(self, request: Request) -> list[int]:
        known = self.known_ways.get(request.request_id, [])
        if len(known) != request.num_tokens:
            known = self.ways.of(request.namespace, request.token_ids, request.num_public_tokens)
            self.known_ways[request.request_id] = known
        return known

    def matched(self, namespace: Namespace, tokens: Sequence[int], num_public_tokens: int, match: PrefixMatch) -> None:
        ways = self.ways.of(namespace, tokens, num_public_tokens)
        hit = self.memories.hit(ways)
        self.last_hit = (ways, hit)
        assert match.num_tokens == hit.num_tokens
        assert len(match.path) == hit.num_full_blocks
        assert (match.num_tier_tokens(Tier.HOST), match.num_tier_tokens(Tier.DISK)) == (hit.host, hit.disk)
        assert len(match.below) == hit.num_below

    def admitting(self, request_id: str, match: PrefixMatch) -> None:
        request = self.requests[request_id]
        ways, hit = self.last_hit
        assert ways == self.ways_of(request), "what was matched last is admitted"
        self.check_nobody_else_computes_it(request, ways, hit)
        if match.num_tokens != hit.num_tokens:
            assert match.num_tokens == hit.num_full_blocks * self.manager.block_size, "only a partial block may be left out"
            assert not self.has_room_for_all(request), "a partial block was left out without need"
            hit = Hit(hit.num_full_blocks, match.num_tokens, 0, 0, hit.num_below)
            self.reached["partial match without room"] += 1
        if request.status is RequestStatus.WAITING:
            self.hits[request_id] = hit
        self.reached["partial"] += match.partial is not None
        self.reached["resumed with a hit"] += request.status is RequestStatus.PREEMPTED and match.num_tokens > 0

    def check_nobody_else_computes_it(self, request: Request, ways: list[int], hit: Hit) -> None:
        size = self.manager.block_size
        for leader in self.requests.values():
            if leader.status is not RequestStatus.RUNNING or leader.num_uncomputed_tokens < size:
                continue
            num_shared = min(request.num_tokens - 1, num_common(ways, self.ways_of(leader)))
            num_shared = num_shared if self.manager.allow_partial else num_shared // size * size
            assert num_shared < hit.num_tokens + size, f"{leader.request_id} was about to compute this"

    def has_room_for_all(self, request: Request) -> bool:
        running = [r for r in self.requests.values() if r.status is RequestStatus.RUNNING]
        wanted = sum(self.manager.num_blocks_for(r.num_tokens + 1) + 1 for r in (*running, request))
        return wanted <= self.manager.num_blocks - self.manager.num_pinned_blocks

    def note_admission(self, admission: Admission) -> None:
        hit, sources = self.hits.pop(admission.request_id), admission.sources
        assert admission.num_cached_tokens == hit.num_tokens
        assert (sources.device + sources.in_flight, sources.host, sources.disk) == (hit.device, hit.host, hit.disk)
        assert sources.num_tokens == self.requests[admission.request_id].num_prompt_tokens
        self.num_admitted += 1
        for source in ("device", "host", "disk", "in_flight", "evicted", "other_namespace"):
            self.reached[source] += getattr(sources, source) > 0

    # Requests

    def submit(self, prompt: list[int], max_tokens: int, namespace: Namespace, seed: int) -> None:
        prompt = prompt[: self.max_len - 1]
        request_id = str(len(self.requests))
        request = make_request(request_id, prompt, max_tokens=min(max_tokens, self.max_len - len(prompt)))
        request.namespace, request.seed = namespace, seed
        request.num_public_tokens = num_common(PUBLIC, prompt)
        self.requests[request_id], self.tokens[request_id] = request, []
        assert self.core.add(request) is None

    @rule(choice=tokens_of, max_tokens=st.integers(1, 12), namespace=namespaces, seed=st.integers(0, 1))
    def add(self, choice: Choice, max_tokens: int, namespace: Namespace, seed: int) -> None:
        self.submit(spell(choice), max_tokens, namespace, seed)

    @rule(seed=st.integers(0, 9999), count=st.integers(2, 8))
    def crowd(self, seed: int, count: int) -> None:
        """Several at once, of whom most come to their end now."""
        rng = random.Random(seed)
        for _ in range(count):
            choice = (rng.choice(STEMS), rng.randint(1, 24), rng.choice(TAILS))
            self.submit(spell(choice), rng.randint(1, 8), rng.choice(NAMESPACES), rng.randrange(2))
        self.step(4 * count, 2)

    @rule(choice=tokens_of, max_tokens=st.integers(1, 12), namespace=namespaces, num_samples=st.integers(2, 4))
    def fork(self, choice: Choice, max_tokens: int, namespace: Namespace, num_samples: int) -> None:
        for seed in range(num_samples):
            self.submit(spell(choice), max_tokens, namespace, seed)

    @rule(which=number, tail=st.sampled_from(TAILS[1:]), max_tokens=st.integers(1, 8))
    def go_on(self, which: int, tail: tuple[int, ...], max_tokens: int) -> None:
        """The next turn of a conversation, whether the last one has ended or not."""
        if self.requests:
            before = self.requests[str(which % len(self.requests))]
            self.submit([*before.token_ids, *tail], max_tokens, before.namespace, before.seed)

    @rule(which=number)
    def abort(self, which: int) -> None:
        live = [request_id for request_id in self.requests if request_id not in self.ended]
        if live:
            request_id = live[which % len(live)]
            event = self.core.abort(request_id)
            assert event is not None
            self.reached["aborted"] += 1
            self.take(event)
            assert self.core.abort(request_id) is None

    @rule(count=st.integers(1, 6), num_jobs=st.sampled_from((0, 1, 4)))
    def step(self, count: int, num_jobs: int) -> None:
        """Steps, while the disk does so many jobs in each."""
        for _ in range(count):
            if self.core.has_work:
                self.step_once()
            self.disk.work(num_jobs)

    def step_once(self) -> bool:
        output = self.core.step()
        for admission in output.admissions:
            self.note_admission(admission)
        for event in output.events:
            self.take(event)
        stats = output.stats
        self.num_scheduled += stats.num_scheduled_tokens
        assert self.num_scheduled == self.runner.num_computed
        self.reached["preempted"] += stats.num_preemptions
        self.reached["evicted blocks"] += stats.num_evicted_blocks
        self.reached["merged"] += stats.num_merged_blocks
        self.memories.host()  # learns what is new there
        return output.has_run

    def take(self, event: TokenEvent) -> None:
        assert event.request_id not in self.ended
        if event.token_id is not None:
            self.tokens[event.request_id].append(event.token_id)
        if event.finish_reason is not None:
            request, tokens = self.requests[event.request_id], self.tokens[event.request_id]
            assert tokens == said(request.prompt_token_ids, len(tokens), request.seed, self.window)
            self.ended.append(event.request_id)
            self.reached["longer than the cache"] += (
                request.num_computed_tokens > self.manager.num_blocks * self.manager.block_size
            )

    # The operator

    def aim(self, which: int, length: int) -> tuple[Namespace, list[int], int]:
        """The beginning of what some request knows, or an unknown prefix; with its public tokens."""
        if not self.requests:
            return NAMESPACES[which % len(NAMESPACES)], [*STEMS[0][:length]], num_common(PUBLIC, STEMS[0][:length])
        request = self.requests[str(which % len(self.requests))]
        tokens = request.token_ids[:length]
        return request.namespace, tokens, num_common(PUBLIC, tokens)

    @rule(which=number, length=st.integers(1, 14), seconds=st.sampled_from((1.0, 100.0)))
    def pin(self, which: int, length: int, seconds: float) -> None:
        size = self.manager.block_size
        namespace, tokens, num_public = self.aim(which, length)
        wanted = self.ways.of(namespace, tokens, num_public)[size - 1 :: size]
        full = self.memories.full()
        num_resident = self.memories.num_full_blocks(self.ways.of(namespace, tokens, num_public), full, len(wanted))
        num_wanted = len(wanted)
        wanted = wanted[self.manager.num_behind(num_wanted * size) :]
        pin_id = str(self.num_pins_asked)
        self.num_pins_asked += 1
        result = self.control.apply(PinPrefix(pin_id, namespace, tuple(tokens), num_public, seconds))
        if len(self.pinned.union(wanted)) > PIN_BLOCKS:
            assert isinstance(result, Refused)
        elif num_resident < num_wanted:
            assert result == NotResident(num_resident * size)
        else:
            assert isinstance(result, Pinned)
            self.pins[pin_id] = (wanted, self.now + seconds)
            self.reached["pinned"] += bool(wanted)

    @property
    def pinned(self) -> set[int]:
        return {way for ways, _ in self.pins.values() for way in ways}

    @rule(which=number)
    def unpin(self, which: int) -> None:
        if self.pins:
            pin_id = list(self.pins)[which % len(self.pins)]
            self.control.apply(Unpin(pin_id))
            del self.pins[pin_id]

    @rule(seconds=st.sampled_from((0.5, 2.0, 30.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        ended = [pin_id for pin_id, (_, end) in self.pins.items() if end <= self.now]
        assert self.control.expire() == bool(ended)
        for pin_id in ended:
            del self.pins[pin_id]

    @rule(which=number, length=st.integers(1, 24), is_device=st.booleans())
    def drop(self, which: int, length: int, is_device: bool) -> None:
        if is_device:
            self.drop_on_device(which, length)
        else:
            self.drop_below(which)

    def drop_below(self, which: int) -> None:
        """In host memory and on the disk: a block, and all that continues it."""
        tiers = self.manager.tiers
        digests = [entry.digest for entry in tiers.host] + [block.key.digest for block in tiers.disk]
        if digests:
            digest = digests[which % len(digests)]
            place, known = self.memories.way_of(digest), self.memories.below()
            tiers.drop(DropScope((digest,), digest), 0)
            kept = self.memories.below()
            assert all(self.ways.is_below(way, place) for way in known - kept)
            assert place not in kept
            assert not any(self.ways.is_reached(way, known, {place}) for way in kept)
            self.reached["dropped below"] += 1

    def drop_on_device(self, which: int, length: int) -> None:
        namespace, tokens, num_public = self.aim(which, length)
        place = self.ways.place(namespace, tokens, num_public)
        num_kept = num_public // self.manager.block_size if namespace.salt else 0
        own = set(self.ways.of(namespace, tokens, num_public)[num_kept * self.manager.block_size :])
        before, num_cached = self.memories.device(), self.manager.num_cached_blocks
        below, num_below = self.memories.below(), self.num_blocks_below()
        result = self.control.apply(DropPrefix(namespace, tuple(tokens), num_public))
        after = self.memories.device()
        assert isinstance(result, Dropped)
        assert result.num_blocks == num_cached - self.manager.num_cached_blocks == len(before) - len(after)
        for block_id in before.keys() - after.keys():
            assert before[block_id][-1] in own or self.ways.is_below(before[block_id][-1], place), "another prefix was dropped"
        kept_below = self.memories.below()
        for block_id, ways in after.items():
            if self.manager._pool.blocks[block_id].is_reclaimable:
                assert not self.ways.is_below(ways[-1], place) or ways[-1] in own, (
                    "something was left that continues the prefix"
                )
                is_leaf = not any(other != block_id and self.ways.is_below(w[0], ways[-1]) for other, w in after.items())
                is_leaf &= not any(way != ways[-1] and self.ways.is_below(way, ways[-1]) for way in kept_below)
                assert not (is_leaf and ways[-1] in own and len(ways) == self.manager.block_size), "a block of it was left"
        assert result.num_host_blocks + result.num_disk_blocks == num_below - self.num_blocks_below()
        full = tokens[: len(tokens) // self.manager.block_size * self.manager.block_size]  # below, no part of a block is known
        place_below = self.ways.place(namespace, full, num_public)
        assert all(way in own or self.ways.is_below(way, place_below) for way in below - kept_below), (
            "another prefix was dropped below"
        )
        known = below.union(ways[-1] for ways in before.values() if len(ways) == self.manager.block_size)
        starts = {*own, self.ways.of(namespace, full, num_public)[-1] if full else None}
        left = {way for way in kept_below if self.ways.is_below(way, place) and self.ways.is_reached(way, known, starts)}
        assert not left, "something was left below"  # that can be found: a block between may be lost everywhere
        self.reached["dropped"] += result.num_blocks > 0
        self.reached["dropped in all tiers"] += result.num_blocks > 0 and below != kept_below

    def num_blocks_below(self) -> int:
        return sum(1 for _ in self.manager.tiers.host) + len(self.manager.tiers.disk)

    @rule()
    def reset(self) -> None:
        result = self.control.apply(ResetCache())
        assert isinstance(result, Dropped)
        assert self.manager.num_available_blocks == self.manager.num_free_blocks
        assert not self.memories.below()
        self.reached["reset"] += result.num_blocks > 0

    # The disk

    @rule(which=number, trouble=st.sampled_from(("full", "not full", "damaged", "gone", "looked at")))
    def disk_has_trouble(self, which: int, trouble: str) -> None:
        """While it is full, every write fails. A file is damaged, or deleted behind our back. The folder is looked through again."""
        if trouble.endswith("full"):
            self.disk.is_full = trouble == "full"
        elif trouble == "looked at":
            self.disk.scan()
        elif self.disk.files:
            key = list(self.disk.files)[which % len(self.disk.files)]
            self.disk.files[key] = "damaged"
            if trouble == "gone":
                del self.disk.files[key]
            self.reached[trouble] += 1

    @rule()
    def everything_ends(self) -> None:
        """All that is wanted is computed, and the disk does all it can meanwhile."""
        for _ in range(2000):
            if not self.core.has_work:
                break
            if not self.step_once():
                self.disk.work(1000)
        assert not self.core.has_work, "requests do not come to their end"
        while self.core.is_disk_busy:
            self.disk.work(1000)
            self.core.poll_disk()
        assert sorted(self.ended) == sorted(self.requests)
        assert self.manager.num_referenced_blocks == 0
        assert not self.hits

    # Always

    @invariant()
    def all_parts_agree(self) -> None:
        self.manager.check_integrity()
        assert {pin.pin_id for pin in self.manager.operator.pins} == set(self.pins)
        assert self.pinned <= self.memories.full(), "a pinned block is gone"
        assert self.manager.num_pinned_blocks == len(self.pinned)
        assert self.manager.tiers.host.num_used <= self.manager.tiers.host.num_slots
        assert self.manager.tiers.disk.num_bytes <= self.max_files * FILE

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.disk.is_full = False
        self.everything_ends()
        self.all_parts_agree()
        assert self.disk.files.keys() <= {block.key for block in self.manager.tiers.disk}, "a file was forgotten"
        for pin_id in list(self.pins):
            self.control.apply(Unpin(pin_id))
        self.control.apply(ResetCache())
        assert self.manager.num_free_blocks == self.manager.num_blocks
        assert not self.memories.device()


REACHED = (
    *("device", "host", "disk", "in_flight", "evicted", "other_namespace", "partial", "partial match without room"),
    *(
        "preempted",
        "resumed with a hit",
        "evicted blocks",
        "merged",
        "aborted",
        "pinned",
        "dropped",
        "reset",
        "dropped below",
        "dropped in all tiers",
    ),
    *("damaged", "gone"),
)


def test_whatever_happens_with_a_window() -> None:
    """Requests are longer than the cache; whatever is read and not held, or not of its own prefix, is an error of the runner."""

    class Machine(CacheMachine):
        reached: ClassVar[Counter[str]] = Counter()
        window: ClassVar[int | None] = 5

    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine,
        settings=settings(
            max_examples=150,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    names = ("longer than the cache", "device", "host", "disk", "in_flight", "partial", "evicted blocks", "pinned", "dropped")
    assert all(Machine.reached[name] for name in names), Machine.reached


def test_whatever_happens_the_cache_is_what_a_plain_model_says() -> None:
    class Machine(CacheMachine):
        reached: ClassVar[Counter[str]] = Counter()

    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine,
        settings=settings(
            max_examples=2000,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert all(Machine.reached[name] for name in REACHED), Machine.reached

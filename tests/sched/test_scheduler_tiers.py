"""The scheduler over a small device, a small host tier and a disk that is slow, full or spoilt: tokens stay what they must be."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import EngineCore, StepOutput
from engine.kv.digest import Digester
from engine.kv.tier_cache import TierCache
from engine.kv.tiers import DiskTier, HostTier
from engine.request import Namespace
from engine.sched.pressure import PressurePolicy, recompute_newest
from engine.sched.promotion import PATIENCE_SECONDS
from engine.stats import Admission
from tests.factories import RecordingRunner, expected_tokens, make_request, make_scheduler
from tests.fake_disk import FILE, FakeDisk

BLOCK = 4


@dataclass
class Setup:
    core: EngineCore
    runner: RecordingRunner
    disk: FakeDisk
    admissions: dict[str, Admission]
    tokens: dict[str, list[int]]
    ended: set[str]

    def step(self) -> StepOutput:
        output = self.core.step()
        for admission in output.admissions:
            assert admission.request_id not in self.admissions
            self.admissions[admission.request_id] = admission
        for event in output.events:
            if event.token_id is not None:
                self.tokens.setdefault(event.request_id, []).append(event.token_id)
            if event.finish_reason is not None:
                assert event.request_id not in self.ended
                self.ended.add(event.request_id)
        self.core.scheduler.manager.check_integrity()
        return output

    def run(self) -> None:
        """To the end, the disk doing all it can between steps."""
        while self.core.has_work:
            self.step()
            self.disk.work(1000)

    def settle(self) -> None:
        while self.core.is_disk_busy:
            self.disk.work(1000)
            self.core.poll_disk()

    def ask(self, request_id: str, prompt: list[int], **options: object) -> Admission:
        self.core.add(make_request(request_id, prompt, **options))  # type: ignore[arg-type]
        self.run()
        self.settle()
        assert self.tokens[request_id] == expected_tokens(prompt, len(self.tokens[request_id]))
        return self.admissions[request_id]


def make_setup(
    *,
    num_blocks: int,
    num_slots: int,
    max_files: int,
    budget: int = 32,
    clock: Callable[[], float] = lambda: 0.0,
    pressure: PressurePolicy | None = None,
) -> Setup:
    host: dict[int, list[tuple[int, int] | None]] = {}
    disk = FakeDisk(host)
    tiers = TierCache(Digester(b"p" * 32), HostTier(num_slots), DiskTier(max_files * FILE), disk)
    scheduler = make_scheduler(
        num_blocks=num_blocks, block_size=BLOCK, budget=budget, clock=clock, tiers=tiers, pressure=pressure
    )
    runner = RecordingRunner(BLOCK, scheduler.manager._pool)  # type: ignore[arg-type]
    runner.host = host
    core = EngineCore(scheduler, runner, block_bytes=64, clock=lambda: 0.0)
    return Setup(core, runner, disk, {}, {}, set())


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def sources(admission: Admission) -> tuple[int, int, int]:
    return admission.sources.device, admission.sources.host, admission.sources.disk


def test_what_the_device_evicted_is_loaded_from_host_memory() -> None:
    setup = make_setup(num_blocks=8, num_slots=20, max_files=0)
    assert sources(setup.ask("a", prompt_of(1, 21))) == (0, 0, 0)
    setup.ask("b", prompt_of(2, 27))  # takes the whole device
    computed = setup.runner.num_computed
    assert sources(setup.ask("c", prompt_of(1, 21))) == (0, 20, 0)
    assert setup.runner.num_computed - computed == 1 + 3, "one token of the prompt, and three that follow"
    assert setup.runner.num_loads == 5


def test_only_full_blocks_go_down() -> None:
    setup = make_setup(num_blocks=8, num_slots=20, max_files=0)
    setup.ask("a", prompt_of(1, 22))  # computes 25 tokens: six full blocks and a token
    setup.ask("b", prompt_of(2, 28))
    assert setup.core.idle_stats().cache.num_host_blocks == 6


def test_part_on_the_device_part_in_host_memory() -> None:
    setup = make_setup(num_blocks=8, num_slots=20, max_files=0)
    setup.ask("a", prompt_of(1, 21))
    setup.ask("b", prompt_of(2, 13))  # evicts some of a's blocks, deepest first
    admission = setup.ask("c", prompt_of(1, 21))
    assert admission.num_cached_tokens == 20
    assert admission.sources.device > 0
    assert admission.sources.host > 0


def test_a_request_waits_for_its_blocks_from_the_disk_and_nobody_waits_for_it() -> None:
    setup = make_setup(num_blocks=8, num_slots=5, max_files=50)
    setup.ask("a", prompt_of(1, 21))
    setup.ask("b", prompt_of(2, 27))
    setup.ask("b2", prompt_of(3, 27))  # a's blocks have left host memory by now
    setup.core.add(make_request("c", prompt_of(1, 21)))
    assert not setup.step().has_run, "there is nothing to do but to wait"
    setup.core.add(make_request("d", prompt_of(4, 5), max_tokens=2))
    while "d" not in setup.ended:
        assert setup.step().has_run
    assert "c" not in setup.admissions
    assert not setup.step().has_run
    setup.disk.work(1000)
    setup.run()
    assert sources(setup.admissions["c"]) == (0, 0, 20)
    assert setup.tokens["c"] == expected_tokens(prompt_of(1, 21), 4)
    setup.settle()
    assert sources(setup.ask("e", prompt_of(1, 21)))[2] == 0, "now it is on the device"


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_spoilt_file_is_computed_again(is_gone: bool) -> None:
    setup = make_setup(num_blocks=8, num_slots=5, max_files=50)
    setup.ask("a", prompt_of(1, 21))
    setup.ask("b", prompt_of(2, 27))
    setup.ask("b2", prompt_of(3, 27))
    for key in list(setup.disk.files):
        setup.disk.files[key] = "damaged"
        if is_gone:
            del setup.disk.files[key]
    assert sources(setup.ask("c", prompt_of(1, 21))) == (0, 0, 0)


def test_an_aborted_request_leaves_no_wait_behind() -> None:
    setup = make_setup(num_blocks=8, num_slots=5, max_files=50)
    setup.ask("a", prompt_of(1, 21))
    setup.ask("b", prompt_of(2, 27))
    setup.ask("b2", prompt_of(3, 27))
    setup.core.add(make_request("c", prompt_of(1, 21)))
    setup.step()
    setup.core.abort("c")
    assert not setup.core.has_work
    setup.settle()
    assert sources(setup.ask("d", prompt_of(1, 21))) == (0, 0, 20), "what was read for it is there"


def test_a_disk_that_hangs_is_not_waited_for_for_ever() -> None:
    now = 0.0
    setup = make_setup(num_blocks=8, num_slots=5, max_files=50, clock=lambda: now)
    setup.ask("a", prompt_of(1, 21))
    setup.ask("b", prompt_of(2, 27))
    setup.ask("b2", prompt_of(3, 27))
    setup.core.add(make_request("c", prompt_of(1, 21)))
    assert not setup.step().has_run
    setup.disk.work(2)  # and no more
    now = PATIENCE_SECONDS - 1
    assert not setup.step().has_run
    now = PATIENCE_SECONDS + 1
    while "c" not in setup.ended:
        assert setup.step().has_run
    assert sources(setup.admissions["c"]) == (0, 0, 8), "what has come is used"
    assert setup.tokens["c"] == expected_tokens(prompt_of(1, 21), 4)
    setup.settle()


def test_another_salt_never_hits_a_tier() -> None:
    setup = make_setup(num_blocks=8, num_slots=5, max_files=50)
    setup.ask("a", prompt_of(1, 21), salt="x")
    setup.ask("b", prompt_of(2, 27))
    setup.ask("b2", prompt_of(3, 27))
    assert sources(setup.ask("c", prompt_of(1, 21), salt="y")) == (0, 0, 0)
    assert sources(setup.ask("d", prompt_of(1, 21))) == (0, 0, 0)
    assert setup.ask("e", prompt_of(1, 21), salt="x").num_cached_tokens == 20


def test_a_public_prefix_is_shared_from_the_disk_and_what_follows_is_not() -> None:
    setup = make_setup(num_blocks=12, num_slots=16, max_files=100)
    public = prompt_of(9, 8)

    def ask(request_id: str, own: int, salt: str) -> Admission:
        request = make_request(request_id, public + prompt_of(own, 9), salt=salt)
        request.num_public_tokens = 8
        setup.core.add(request)
        setup.run()
        setup.settle()
        return setup.admissions[request_id]

    ask("a", 1, "x")
    for number in range(4):
        setup.ask(f"fill{number}", prompt_of(20 + number, 40))
    assert sources(ask("b", 1, "y")) == (0, 0, 8), "the public blocks, and not what x has said behind them"
    for number in range(4):
        setup.ask(f"again{number}", prompt_of(30 + number, 40))
    assert sources(ask("c", 1, "x")) == (0, 0, 16), "x finds its own again"
    assert ask("d", 1, "").num_cached_tokens == 8, "what was loaded for x hangs below x's branch"
    dropped = setup.core.scheduler.manager.operator.drop(Namespace(), public, 0)
    assert dropped.tiers.num_disk_blocks >= 6, "all that continues the public prefix goes with it, whoever's it is"


def test_preempted_work_comes_back_from_host_memory() -> None:
    setup = make_setup(num_blocks=10, num_slots=40, max_files=0, pressure=recompute_newest())
    prompts = {f"r{number}": prompt_of(number, 12) for number in range(6)}
    for request_id, prompt in prompts.items():
        setup.core.add(make_request(request_id, prompt, max_tokens=16))
    setup.run()
    for request_id, prompt in prompts.items():
        assert setup.tokens[request_id] == expected_tokens(prompt, 16)
    assert setup.runner.num_loads > 0


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**16),
    num_slots=st.integers(0, 12),
    max_files=st.sampled_from([0, 3, 60]),
    budget=st.sampled_from([3, 16, 64]),
)
def test_random_loads_end_once_with_the_right_tokens_whatever_the_disk_does(
    seed: int, num_slots: int, max_files: int, budget: int
) -> None:
    rng = random.Random(seed)
    setup = make_setup(num_blocks=14, num_slots=num_slots, max_files=max_files if num_slots else 0, budget=budget)
    shared = [prompt_of(n, 24) for n in range(3)]
    prompts = {}
    for number in range(40):
        prompt = rng.choice(shared)[: rng.randrange(1, 25)] + prompt_of(rng.randrange(6) + 50, rng.randrange(1, 12))
        prompts[f"r{number}"] = prompt
    arrivals, aborted = list(prompts), set[str]()
    num_idle = 0
    while arrivals or setup.core.has_work:
        for _ in range(min(len(arrivals), rng.choice([0, 0, 1, 4]))):
            request_id = arrivals.pop()
            salt = rng.choice(["", "x"])
            setup.core.add(make_request(request_id, prompts[request_id], max_tokens=rng.randrange(1, 10), salt=salt))
        if setup.core.has_work and not setup.step().has_run:
            num_idle += 1
            setup.disk.work(1)
        if rng.random() < 0.3:
            setup.disk.work(rng.randrange(1, 6))
        if rng.random() < 0.05:
            request_id = rng.choice(list(prompts))
            if setup.core.abort(request_id) is not None:
                aborted.add(request_id)
        if rng.random() < 0.05 and setup.disk.files:
            setup.disk.files[rng.choice(list(setup.disk.files))] = "damaged"
        setup.disk.is_full = rng.random() < 0.1
        assert num_idle < 10_000
    assert setup.ended | aborted == set(prompts)
    assert not setup.ended & aborted
    for request_id, tokens in setup.tokens.items():
        assert tokens == expected_tokens(prompts[request_id], len(tokens))
    assert setup.core.scheduler.manager.num_referenced_blocks == 0
    setup.disk.is_full = False
    setup.settle()
    setup.core.scheduler.manager.check_integrity()
    assert len(setup.disk.files) <= max_files

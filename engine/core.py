"""EngineCore: schedule, execute, update; nothing else. The same object runs in the engine process, in LLM and in tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.request import Request, TokenEvent
from engine.runner.runner import Runner
from engine.sched.scheduler import Scheduler, StepCounts
from engine.stats import Admission, CacheStats, StepStats


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step says to the outside."""

    events: tuple[TokenEvent, ...]
    admissions: tuple[Admission, ...]
    stats: StepStats

    @property
    def has_run(self) -> bool:
        """False when there was nothing to compute: all requests wait for the disk."""
        return self.stats.num_scheduled_tokens > 0


class EngineCore:
    """One engine without threads, processes or clocks of its own."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, block_bytes: int, clock: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._block_bytes = block_bytes
        self._clock = clock
        self._block_counts = (0, 0, 0)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> TokenEvent | None:
        """Take a request in. One that can never be served ends at once, with its last word."""
        return self.scheduler.add(request)

    def abort(self, request_id: str) -> TokenEvent | None:
        return self.scheduler.abort(request_id)

    def step(self) -> StepOutput:
        """Advance every request that the step has room for. There must be work; when all of it waits for the disk, nothing is run."""
        start = self._clock()
        self.poll_disk()
        plan = self.scheduler.schedule()
        if not plan.sequences:
            return StepOutput((), (), self.idle_stats())
        sampled = self._runner.execute(plan)
        events = self.scheduler.update(plan, sampled)
        counts = self.scheduler.take_counts()
        return StepOutput(tuple(events), tuple(counts.admissions), self._stats(counts, self._clock() - start))

    @property
    def is_disk_busy(self) -> bool:
        """Whether blocks are on their way from or to the disk; ``poll_disk`` sees to what follows."""
        return self.scheduler.manager.tiers.is_busy

    def poll_disk(self) -> None:
        self.scheduler.manager.tiers.poll()

    def wait_for_disk(self, seconds: float) -> None:
        """Return when the disk has done something, or after that time."""
        self.scheduler.manager.tiers.wait(seconds)

    def idle_stats(self) -> StepStats:
        """How the engine stands, for when aborts change it without a step."""
        return self._stats(StepCounts(), 0.0)

    def _stats(self, counts: StepCounts, seconds: float) -> StepStats:
        manager, before = self.scheduler.manager, self._block_counts
        self._block_counts = (manager.num_evicted_blocks, manager.num_copied_blocks, manager.num_merged_blocks)
        num_evicted, num_copied, num_merged = (now - then for now, then in zip(self._block_counts, before, strict=True))
        return StepStats(
            num_scheduled_tokens=counts.num_scheduled_tokens,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_sampled_tokens=counts.num_sampled_tokens,
            num_recomputed_tokens=counts.num_recomputed_tokens,
            num_preemptions=counts.num_preemptions,
            num_evicted_blocks=num_evicted,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            step_seconds=seconds,
            cache=self._cache_stats(),
            num_copied_blocks=num_copied,
            num_merged_blocks=num_merged,
            num_regrown_tokens=counts.num_regrown_tokens,
            reuse_gaps=manager.history.take_reuse_gaps(),
            evict_idles=manager.history.take_evict_idles(),
        )

    def _cache_stats(self) -> CacheStats:
        manager = self.scheduler.manager
        return CacheStats(
            num_blocks=manager.num_blocks,
            num_free_blocks=manager.num_free_blocks,
            num_cached_blocks=manager.num_cached_blocks,
            num_referenced_blocks=manager.num_referenced_blocks,
            block_bytes=self._block_bytes,
            block_size=manager.block_size,
            num_context_tokens=self.scheduler.num_context_tokens,
            num_host_blocks=manager.tiers.host.num_used,
            disk_bytes=manager.tiers.disk.num_bytes,
            num_block_references=manager.num_block_references,
            num_filled_slots=manager.num_filled_slots,
            num_pinned_blocks=manager.num_pinned_blocks,
        )

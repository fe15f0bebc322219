"""``python -m engine.evaluate.pressure``: what is computed twice when requests need more cache than there is.

The real scheduler and cache, over loads whose requests are all there at once; a runner that computes nothing. Counts, no times:
a step is a step, whatever it holds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from rich.console import Console
from rich.progress import Progress

from engine.core import EngineCore
from engine.evaluate.loads import LOADS, VOCAB_SIZE, Job, make_load
from engine.kv.digest import DIGEST_BYTES, Digester
from engine.kv.disk_worker import NoDisk
from engine.kv.manager import KVCacheManager
from engine.kv.tier_cache import TierCache
from engine.kv.tiers import DiskTier, HostTier
from engine.sched.plan import SampledToken, SampledTokens, ScheduledSequence, StepPlan
from engine.sched.pressure import PressurePolicy, cheapest_to_bring_back, recompute_newest
from engine.sched.scheduler import Scheduler

EOS = VOCAB_SIZE
BLOCK_SIZE = 16

HOST_SHARE = 4
"""The host tier's size, in caches."""


@dataclass(frozen=True, slots=True)
class Way:
    """What a load is served with. Tokens that come back from host memory are loaded, not computed."""

    make_policy: Callable[[], PressurePolicy]
    has_host_tier: bool = False


WAYS: dict[str, Way] = {
    "recompute newest": Way(recompute_newest),
    "cheapest to bring back": Way(cheapest_to_bring_back),
    "the same, with a host tier": Way(cheapest_to_bring_back, has_host_tier=True),
}
"""The baseline first."""


class ScriptedRunner:
    """Computes nothing: the token of a request depends on its id and place, and its script says after how many it ends."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._output_lens = {job.request.request_id: job.output_len for job in jobs}

    def execute(self, plan: StepPlan) -> SampledTokens:
        return SampledTokens(tuple(self._token(sequence) for sequence in plan.sequences))

    def _token(self, sequence: ScheduledSequence) -> SampledToken | None:
        if sequence.sample is None:
            return None
        position = sequence.sample.position
        if position + 1 >= self._output_lens[sequence.request_id]:
            return SampledToken(EOS)
        return SampledToken((int(sequence.request_id) * 7919 + position * 104_729) % VOCAB_SIZE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One load under one policy, to its end. ``num_computed`` and ``num_recomputed`` are tokens; ``mean_running`` is over steps."""

    num_steps: int
    num_computed: int
    num_recomputed: int
    num_preemptions: int
    max_preemptions: int
    mean_running: float

    @property
    def recompute_share(self) -> float:
        return self.num_recomputed / self.num_computed


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine's size."""

    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def run(self, jobs: Sequence[Job], way: Way, on_end: Callable[[], None]) -> Outcome:
        """Serve all jobs. ``on_end`` is called for each that has ended."""
        host = HostTier(HOST_SHARE * self.num_blocks if way.has_host_tier else 0)
        scheduler = Scheduler(
            KVCacheManager(
                self.num_blocks, BLOCK_SIZE, tiers=TierCache(Digester(bytes(DIGEST_BYTES)), host, DiskTier(0), NoDisk())
            ),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            eos_token_ids=(EOS,),
            clock=lambda: 0.0,
            pressure=way.make_policy(),
        )
        core = EngineCore(scheduler, ScriptedRunner(jobs), block_bytes=1, clock=lambda: 0.0)
        for job in jobs:
            refusal = core.add(job.request)
            assert refusal is None, "a request of the load can never fit"
        steps = []
        while core.has_work:
            output = core.step()
            steps.append(output.stats)
            for event in output.events:
                if event.finish_reason is not None:
                    on_end()
        return Outcome(
            num_steps=len(steps),
            num_computed=sum(step.num_scheduled_tokens for step in steps),
            num_recomputed=sum(step.num_recomputed_tokens for step in steps),
            num_preemptions=sum(step.num_preemptions for step in steps),
            max_preemptions=max(job.request.num_preemptions for job in jobs),
            mean_running=mean(step.num_running for step in steps),
        )


Results = Mapping[str, Mapping[str, Sequence[Outcome]]]
"""By load and policy, one outcome for each seed."""


def measure(engine: Engine, loads: Sequence[str], seeds: Sequence[int], on_end: Callable[[], None]) -> Results:
    return {
        load: {name: [engine.run(make_load(load, seed), way, on_end) for seed in seeds] for name, way in WAYS.items()}
        for load in loads
    }


def table(results: Results) -> str:
    """Markdown; means over the seeds. The last two columns compare with the first policy."""
    lines = [
        "| load | policy | steps | tokens computed | of these again | preemptions | most of one | running | again, of baseline | steps, of baseline |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for load, by_policy in results.items():
        base = next(iter(by_policy.values()))
        for name, outcomes in by_policy.items():
            shares = _mean(outcomes, lambda o: o.recompute_share), _mean(base, lambda o: o.recompute_share)
            steps = _mean(outcomes, lambda o: o.num_steps), _mean(base, lambda o: o.num_steps)
            lines.append(
                f"| {load} | {name} | {steps[0]:,.0f} | {_mean(outcomes, lambda o: o.num_computed):,.0f} | {shares[0]:.2%}"
                f" | {_mean(outcomes, lambda o: o.num_preemptions):,.0f} | {max(o.max_preemptions for o in outcomes)}"
                f" | {_mean(outcomes, lambda o: o.mean_running):.1f} | {_ratio(*shares)} | {_ratio(*steps)} |"
            )
    return "\n".join(lines)


def _mean(outcomes: Sequence[Outcome], value: Callable[[Outcome], float]) -> float:
    return mean(value(outcome) for outcome in outcomes)


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.3f}" if base else "-"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default=",".join(LOADS), help=f"comma-separated (default {','.join(LOADS)})")
    parser.add_argument("--seeds", type=int, default=3, help="each load is drawn so many times (default 3)")
    parser.add_argument("--blocks", type=int, default=512, help=f"blocks of {BLOCK_SIZE} tokens in the cache (default 512)")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    loads = options.loads.split(",")
    if unknown := [name for name in loads if name not in LOADS]:
        parser.error(f"unknown loads: {', '.join(unknown)}; there are {', '.join(LOADS)}")
    engine = Engine(options.blocks, options.max_num_seqs, options.max_num_batched_tokens)
    total = sum(LOADS[name][0] for name in loads) * options.seeds * len(WAYS)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(f"{len(loads)} loads, {len(WAYS)} policies, {options.seeds} seeds", total=total)
        results = measure(engine, loads, range(1, options.seeds + 1), lambda: bar.advance(task))
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())

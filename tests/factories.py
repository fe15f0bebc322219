"""Small real parts for tests: requests, managers, schedulers, and a runner that computes tokens without a model."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core import EngineCore
from engine.kv.manager import KVCacheManager
from engine.request import Namespace, Request, SamplingParams
from engine.sched.plan import SampledToken, SampledTokens, StepPlan
from engine.sched.scheduler import Scheduler

EOS = 999_999


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 4,
    salt: str = "",
    arrival_time: float = 0.0,
    **sampling: object,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)  # type: ignore[arg-type]
    return Request(request_id, tuple(prompt), params, seed=0, namespace=Namespace(salt=salt), arrival_time=arrival_time)


def make_scheduler(*, num_blocks: int = 40, block_size: int = 4, max_num_seqs: int = 8, budget: int = 32) -> Scheduler:
    return Scheduler(
        KVCacheManager(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        eos_token_ids=(EOS,),
        clock=lambda: 0.0,
    )


def next_token(tokens: Sequence[int]) -> int:
    """What the fake model says after these tokens: depends on all of them, so a wrong context shows at once."""
    value = 17
    for token in tokens:
        value = (value * 31 + token + 1) % 1009
    return value


class RecordingRunner:
    """A runner whose "cache" holds the token that was computed in each slot, and which reads its context back through the
    block table. If blocks are shared, copied, freed or reused wrongly, the context and so the token comes out wrong."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, tuple[int, int]] = {}  # slot -> (position, token)
        self.num_computed = 0

    def execute(self, plan: StepPlan) -> SampledTokens:
        self._check_write_targets(plan)
        out: list[SampledToken | None] = []
        for sequence in plan.sequences:
            for position, token in enumerate(sequence.token_ids, sequence.start):
                self.slots[self._slot(sequence.block_table, position)] = (position, token)
                self.num_computed += 1
            context = [self._read(sequence.block_table, position) for position in range(sequence.seq_len)]
            out.append(SampledToken(next_token(context)) if sequence.sample is not None else None)
        return SampledTokens(tuple(out))

    def _slot(self, block_table: tuple[int, ...], position: int) -> int:
        return block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _read(self, block_table: tuple[int, ...], position: int) -> int:
        stored_position, token = self.slots[self._slot(block_table, position)]
        assert stored_position == position, "a block holds another position than its table says"
        return token

    def _check_write_targets(self, plan: StepPlan) -> None:
        written = [self._slot(s.block_table, position) for s in plan.sequences for position in range(s.start, s.seq_len)]
        assert len(set(written)) == len(written), "two sequences write to one slot"


def make_core(scheduler: Scheduler) -> tuple[EngineCore, RecordingRunner]:
    runner = RecordingRunner(scheduler.manager.block_size)
    return EngineCore(scheduler, runner, block_bytes=64, clock=lambda: 0.0), runner


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]

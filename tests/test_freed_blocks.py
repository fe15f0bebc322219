"""Nothing reads what was freed: free blocks and tails of a real model's cache are NaN, and reused blocks are until they are written."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.kv.block import Block
from engine.llm import LLM
from engine.request import Request, SamplingParams
from engine.sched.plan import SampledTokens, StepPlan
from tests.short_answers import expect_short_answers
from tests.test_same_tokens_quantized import make_llm, one_thread, tiny

__all__ = ["one_thread", "tiny"]

NAN_BYTE = 0xFF


class Poison:
    """Fills with NaN what an LLM's cache lets go of, before every step. For caches without tiers."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_filled = 0
        self._manager, runner = llm.core.scheduler.manager, llm._engine.runner
        self._pool, self._storage = self._manager._pool, runner._storage
        self._taken: list[Block] = []
        self._allocate, self._execute = self._pool.allocate, runner.execute
        monkeypatch.setattr(self._pool, "allocate", self._noted)
        monkeypatch.setattr(runner, "execute", self._poisoned)

    def _noted(self) -> Block:
        block = self._allocate()
        self._taken.append(block)
        return block

    def _poisoned(self, plan: StepPlan) -> SampledTokens:
        assert not plan.stores
        for block in (*self._taken, *self._pool._free):
            self._storage.bytes[block.block_id].fill_(NAN_BYTE)
            self.num_filled += 1
        self._taken.clear()
        if self._manager._tails is not None:
            for slot in self._manager._tails._free:
                self._storage.tails[slot].fill_(float("nan"))
        return self._execute(plan)


def random_prompts(rng: random.Random, count: int) -> list[tuple[int, ...]]:
    """Many begin alike, so that blocks are shared, copied in part and freed by some of their holders."""
    stems = [tuple(rng.randrange(2, 250) for _ in range(24)) for _ in range(2)]
    return [
        (*rng.choice(stems)[: rng.randint(3, 24)], *(rng.randrange(2, 250) for _ in range(rng.randint(1, 9))))
        for _ in range(count)
    ]


def answers(llm: LLM, prompts: list[tuple[int, ...]]) -> tuple[list[Request], list[tuple[int, ...]]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=30, min_tokens=30)
    requests = [llm._add(prompt, sampling) for prompt in prompts]
    while llm.core.has_work:
        llm.core.step()
        llm.core.scheduler.manager.check_integrity()
    return requests, [tuple(request.token_ids[request.num_prompt_tokens :]) for request in requests]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_nothing_reads_what_was_freed(tiny: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(random.Random(7), 10)
    roomy = make_llm(tiny, dtype, block_size=4)
    expected = [answers(roomy, [prompt])[1][0] for prompt in prompts]
    small = make_llm(tiny, dtype, block_size=4, memory_bytes=roomy.info.tail_bytes + 34 * roomy.info.block_bytes)
    poison = Poison(small, monkeypatch)
    expect_short_answers(small)
    requests, tokens = answers(small, prompts)
    assert tokens == expected
    assert sum(request.num_preemptions for request in requests) >= 2
    assert poison.num_filled > 300

"""A model with a sliding window says what transformers says, whatever the chunks, hits and preemptions, in a cache smaller than it reads."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import CacheConfig, SchedulerConfig
from engine.llm import LLM
from engine.request import Request, SamplingParams
from engine.sched.plan import ScheduledSequence, StepPlan
from tests.tiny_folder import make_folder, one_thread

__all__ = ["one_thread"]

WINDOW, BLOCK_SIZE, NUM_TOKENS = 32, 4, 40
BLOCK_BYTES = BLOCK_SIZE * 2 * 3 * 2 * 12 * 4
PROMPTS = [tuple(2 + (7 * i + 3 * j * j + i * j) % 250 for j in range(length)) for i, length in enumerate((150, 20, 110, 131))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("windowed")
    model = make_folder(
        folder,
        class_name="MistralForCausalLM",
        sliding_window=WINDOW,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=512,
        attention_gain=10.0,
    )
    return folder, model


def make_llm(folder: Path, *, num_blocks: int = 400, chunk: int = 64, kv_dtype: str = "auto", **options: Any) -> LLM:
    return LLM(
        str(folder),
        cache=CacheConfig(memory_bytes=num_blocks * BLOCK_BYTES, block_size=BLOCK_SIZE, kv_dtype=kv_dtype),
        scheduler=SchedulerConfig(max_num_batched_tokens=chunk, max_num_seqs=8),
        **options,
    )


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logits_match_transformers(tiny: tuple[Path, Any], backend: str) -> None:
    folder, model = tiny
    with torch.no_grad():
        expected = model(torch.tensor([PROMPTS[0]])).logits[0]
        unbounded = model(torch.tensor([PROMPTS[0][-WINDOW:]])).logits[0, -1]
    assert float((unbounded - expected[-1]).abs().max()) > 1e-2, "what lies before the window has its effect through the layers"
    llm = make_llm(folder, attention_backend=backend)
    storage = llm.core._runner._storage
    ends = [20, 90, 91, 92, 93, 126, 127, 128, 129, 150]
    for start, end in zip([0, *ends], ends, strict=False):
        first = max(0, start - WINDOW + 1) // BLOCK_SIZE
        storage.elements[2 : 2 + first] = float("nan")
        table = tuple(range(2 + first, 2 + -(-end // BLOCK_SIZE)))
        plan = StepPlan((ScheduledSequence("a", PROMPTS[0][start:end], start, table, 0, None, first_block=first),))
        with torch.inference_mode():
            logits = llm.core._runner.score(plan)
        torch.testing.assert_close(logits, expected[start:end], atol=1e-4, rtol=1e-4)


def run(llm: LLM, prompts: list[tuple[int, ...]], sampling: SamplingParams = GREEDY, *, poison: bool = False) -> list[Request]:
    """All at once. With ``poison``, whatever is not held is forgotten and filled with NaN between steps."""
    requests = [llm._add(prompt, sampling) for prompt in prompts]
    manager = llm.core.scheduler.manager
    while llm.core.has_work:
        llm.core.step()
        manager.check_integrity()
        if poison:
            manager.operator.reset()
            llm.core._runner._storage.bytes[[block.block_id for block in manager._pool._free]] = 0xFF
    return requests


def outputs(requests: list[Request]) -> list[tuple[int, ...]]:
    return [tuple(request.token_ids[request.num_prompt_tokens :]) for request in requests]


@pytest.fixture(scope="module")
def alone(tiny: tuple[Path, Any]) -> list[tuple[int, ...]]:
    llm, model = make_llm(tiny[0]), tiny[1]
    tokens = [outputs(run(llm, [prompt]))[0] for prompt in PROMPTS]
    for prompt, said in zip(PROMPTS, tokens, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *said]])).logits[0, len(prompt) - 1 : -1]
        assert tuple(logits.argmax(-1).tolist()) == said
    return tokens


@pytest.mark.parametrize(("chunk", "backend"), [(5, "cpu"), (64, "cpu"), (300, "cpu"), (17, "reference")])
def test_in_any_chunks_with_nothing_left_behind_the_window(
    tiny: tuple[Path, Any], alone: list[tuple[int, ...]], chunk: int, backend: str
) -> None:
    llm = make_llm(tiny[0], chunk=chunk, attention_backend=backend)
    assert outputs(run(llm, PROMPTS, poison=True)) == alone


def test_with_hits(tiny: tuple[Path, Any], alone: list[tuple[int, ...]]) -> None:
    llm = make_llm(tiny[0])
    run(llm, PROMPTS)
    again = run(llm, PROMPTS)
    assert outputs(again) == alone
    assert [request.num_cached_tokens for request in again] == [len(prompt) - 1 for prompt in PROMPTS]
    rest = SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True)
    turns = run(llm, [(*prompt, *tokens[:-17]) for prompt, tokens in zip(PROMPTS, alone, strict=True)], rest)
    assert outputs(turns) == [tokens[-17:] for tokens in alone]
    assert all(request.num_cached_tokens == request.num_prompt_tokens - 1 for request in turns)


def test_a_hit_needs_no_more_than_the_window(tiny: tuple[Path, Any], alone: list[tuple[int, ...]]) -> None:
    """A cache of 20 blocks remembers the end of 190 tokens, not their beginning."""
    llm = make_llm(tiny[0], num_blocks=20, chunk=16)
    run(llm, PROMPTS[:1])
    rest = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    (request,) = run(llm, [(*PROMPTS[0], *alone[0][:-5])], rest)
    assert (request.num_cached_tokens, outputs([request])) == (len(PROMPTS[0]) + NUM_TOKENS - 6, [alone[0][-5:]])


def test_preempted_in_a_cache_that_holds_none_of_them_whole(tiny: tuple[Path, Any], alone: list[tuple[int, ...]]) -> None:
    """By force: what runs has its window set aside for it, so that it hardly comes to preemptions."""
    llm = make_llm(tiny[0], num_blocks=24, chunk=16)
    scheduler = llm.core.scheduler
    requests = [llm._add(prompt, GREEDY) for prompt in PROMPTS]
    for number in itertools.count(1):
        if not llm.core.has_work:
            break
        llm.core.step()
        if number % 23 == 0 and scheduler._running:
            scheduler._preempt(next(iter(scheduler._running.values())))
        scheduler.manager.check_integrity()
    assert outputs(requests) == alone
    assert sum(request.num_preemptions for request in requests) >= 4


def test_samples_that_fork_and_prefixes_of_one_step(tiny: tuple[Path, Any], alone: list[tuple[int, ...]]) -> None:
    llm = make_llm(tiny[0], chunk=48)
    requests = run(llm, [PROMPTS[0]] * 3 + [PROMPTS[0][:140]] + PROMPTS[2:])
    assert outputs(requests)[:3] == [alone[0]] * 3
    assert outputs(requests)[4:] == alone[2:]


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_a_quantized_cache(tiny: tuple[Path, Any], kv_dtype: str) -> None:
    expected = outputs(run(make_llm(tiny[0], kv_dtype=kv_dtype), PROMPTS))
    for chunk, backend in ((7, "cpu"), (33, "reference")):
        llm = make_llm(tiny[0], kv_dtype=kv_dtype, chunk=chunk, attention_backend=backend)
        assert outputs(run(llm, PROMPTS, poison=True)) == expected
    small = make_llm(tiny[0], kv_dtype=kv_dtype, num_blocks=14, chunk=16)
    assert small.info.num_blocks * BLOCK_SIZE < 150
    assert outputs(run(small, PROMPTS)) == expected

"""Logits of every architecture within 1e-4 of transformers, through the paged cache: whole prompts, chunks, decode, both backends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import CacheConfig, EngineConfig
from engine.load import load_engine
from engine.model.cpu_decoder import CPUDecoder
from engine.request import SamplingParams
from engine.runner.model_runner import ModelRunner
from engine.sched.plan import SampleSpec, ScheduledSequence, StepPlan
from tests.model.tiny_models import ARCHITECTURES, GPT2S, make_gpt2, make_model

GREEDY = SampleSpec(SamplingParams(temperature=0.0), seed=0, position=0)
BLOCK_SIZE = 4


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", [*ARCHITECTURES, *GPT2S])
def test_logits_match_transformers(name: str, backend: str, tmp_path: Path) -> None:
    model = (make_gpt2 if name in GPT2S else make_model)(name, tmp_path)
    tokens = torch.randint(3, 199, (50,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    runner = load_engine(
        EngineConfig(
            model_path=str(tmp_path),
            model_name=name,
            attention_backend=backend,
            cache=CacheConfig(block_size=BLOCK_SIZE, memory_bytes=1 << 20),
        )
    ).runner
    ends = [20, 27, 40, 41, 42, 43, 50]  # a prompt, chunks, three decodes, a chunk
    for start, end in zip([0, *ends], ends, strict=False):
        logits = step_logits(runner, tokens, start, end)
        torch.testing.assert_close(logits[0], expected[end - 1], atol=1e-4, rtol=1e-4)


def step_logits(runner: ModelRunner, tokens: list[int], start: int, end: int) -> torch.Tensor:
    """The last token's logits after computing tokens [start, end) into blocks that are not in order."""
    table = tuple(block ^ 1 for block in range(2, 2 + -(-end // BLOCK_SIZE)))
    plan = StepPlan((ScheduledSequence("a", tuple(tokens[start:end]), start, table, 0, GREEDY),))
    return runner.forward(plan)[1]


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", ["llama2", "llama-biases", "qwen2", "qwen3"])
def test_the_compiled_decode_gives_the_bits_of_the_plain_model(name: str, rows: int, tmp_path: Path) -> None:
    make_model(name, tmp_path)
    config = EngineConfig(
        model_path=str(tmp_path), model_name=name, cache=CacheConfig(block_size=BLOCK_SIZE, memory_bytes=1 << 20)
    )
    runner = load_engine(config).runner
    fast = runner._model
    assert isinstance(fast, CPUDecoder)
    prompts = [ScheduledSequence(str(i), (3 + i, 7, 9, 11 + i, 5), 0, (2 * i, 2 * i + 1), 0, GREEDY) for i in range(rows)]
    runner.forward(StepPlan(tuple(prompts)))
    decodes = StepPlan(tuple(ScheduledSequence(p.request_id, (13,), 5, p.block_table, 0, GREEDY) for p in prompts))
    quick = runner.forward(decodes)[1]
    runner._model = fast._model
    assert torch.equal(quick, runner.forward(decodes)[1])


@pytest.mark.parametrize(
    ("name", "kv_dtype", "rows"), [("llama-biases", "int8", 1), ("qwen3", "int4", 5), ("llama2", "fp8", 3)]
)
def test_so_does_the_compiled_decode_over_a_quantized_cache(name: str, kv_dtype: str, rows: int, tmp_path: Path) -> None:
    make_model(name, tmp_path)
    cache = CacheConfig(block_size=BLOCK_SIZE, memory_bytes=1 << 20, kv_dtype=kv_dtype)
    runner = load_engine(EngineConfig(model_path=str(tmp_path), model_name=name, cache=cache)).runner
    fast = runner._model
    assert isinstance(fast, CPUDecoder)
    said: list[torch.Tensor] = []
    for model in (fast, fast._model):  # the third decode reads a block that the second one filled
        runner._model = model
        steps = [(0, (3, 7, 9, 11, 5, 8)), *((position, (13,)) for position in range(6, 10))]
        for start, tokens in steps:
            plan = StepPlan(
                tuple(
                    ScheduledSequence(str(i), tokens, start, (3 * i, 3 * i + 1, 3 * i + 2), 0, GREEDY, i) for i in range(rows)
                )
            )
            said.append(runner.forward(plan)[1])
    for quick, slow in zip(said[:5], said[5:], strict=True):
        assert torch.equal(quick, slow)

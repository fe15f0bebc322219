"""Within a quantized format: the same greedy tokens hit or miss, in any chunks, batched, preempted and resumed, in both backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import CacheConfig, SchedulerConfig
from engine.kv.format import SEALED_TYPES
from engine.llm import LLM
from engine.request import SamplingParams
from engine.sched.pressure import recompute_newest
from tests.tiny_folder import make_folder, one_thread

pytestmark = pytest.mark.all_cores

__all__ = ["one_thread"]

TINY_PROMPTS = [tuple(2 + (7 * i + 3 * j * j + i * j) % 250 for j in range(5 + 9 * i)) for i in range(1, 6)]
PROMPTS = (
    "The three primary colours are red,",
    "To bake a loaf of bread you first need to mix the flour with water and salt. After that you let the dough rest, because",
)


def make_llm(path: Path, kv_dtype: str, *, chunk: int = 512, backend: str = "auto", **cache: Any) -> LLM:
    return LLM(
        str(path),
        attention_backend=backend,
        cache=CacheConfig(kv_dtype=kv_dtype, **{"memory_bytes": 64 * 2**20, **cache}),
        scheduler=SchedulerConfig(max_num_batched_tokens=chunk, max_num_seqs=8),
    )


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_folder(folder, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256)
    return folder


def tokens_of(llm: LLM, prompts: Any, num_tokens: int) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in llm.generate(prompts, greedy(num_tokens))]


@pytest.mark.parametrize("dtype", SEALED_TYPES)
def test_a_tiny_model_however_it_is_run(tiny: Path, dtype: str) -> None:
    llm = make_llm(tiny, dtype, block_size=4)
    alone = [tokens_of(llm, [prompt], 30)[0] for prompt in TINY_PROMPTS]
    for prompt, tokens in zip(TINY_PROMPTS, alone, strict=True):  # turns: what was said before is a hit
        (answer,) = llm.generate([(*prompt, *tokens[:13])], greedy(17))
        assert answer.num_cached_tokens >= (len(prompt) + 12) // 4 * 4, "all full blocks but the last token's are there"
        assert answer.token_ids == tokens[13:]
    for backend, chunk in (("cpu", 7), ("cpu", 64), ("reference", 7), ("reference", 512)):
        llm = make_llm(tiny, dtype, backend=backend, chunk=chunk, block_size=4)
        assert tokens_of(llm, TINY_PROMPTS, 30) == alone
    assert tokens_of(llm, TINY_PROMPTS, 30) == alone, "with prefix hits"


@pytest.mark.parametrize("dtype", SEALED_TYPES)
def test_a_tiny_model_preempted(tiny: Path, dtype: str) -> None:
    expected = tokens_of(make_llm(tiny, dtype, block_size=4), TINY_PROMPTS, 30)
    probe = make_llm(tiny, dtype, block_size=4).info
    llm = make_llm(tiny, dtype, block_size=4, memory_bytes=probe.tail_bytes + 32 * probe.block_bytes)
    llm.core.scheduler._pressure = recompute_newest()  # without foresight, so that it comes to preemptions
    requests = [llm._add(prompt, greedy(30)) for prompt in TINY_PROMPTS]
    while llm.core.has_work:
        llm.core.step()
        llm.core.scheduler.manager.check_integrity()
    assert sum(request.num_preemptions for request in requests) >= 3
    assert [tuple(request.token_ids[request.num_prompt_tokens :]) for request in requests] == expected


@pytest.mark.parametrize(("dtype", "others"), [("int8", [("cpu", 7), ("reference", 64)]), ("int4", [("reference", 7)])])
def test_smollm2_however_it_is_run(smollm2_path: Path, dtype: str, others: list[tuple[str, int]]) -> None:
    llm = make_llm(smollm2_path, dtype, memory_bytes=128 * 2**20)
    expected = [tokens_of(llm, [prompt], 20)[0] for prompt in PROMPTS]
    assert tokens_of(llm, PROMPTS, 20) == expected, "together, with prefix hits"
    assert llm.generate(PROMPTS[1:], greedy(1))[0].num_cached_tokens == 16
    for backend, chunk in others:
        assert (
            tokens_of(make_llm(smollm2_path, dtype, backend=backend, chunk=chunk, memory_bytes=128 * 2**20), PROMPTS, 20)
            == expected
        )

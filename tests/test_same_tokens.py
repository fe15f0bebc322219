"""SmolLM2 in float32 says what transformers says, however its requests are chunked, batched, shared or preempted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from engine.config import CacheConfig, SchedulerConfig
from engine.llm import LLM
from engine.request import SamplingParams

NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three primary colours are red,",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8, 13,",
    "To bake a loaf of bread you first need to mix the flour with water and salt. After that you let the dough rest, because",
)
BLOCK_BYTES = 737_280  # 16 tokens of 2 x 30 layers x 3 KV heads x 64 x float32


@pytest.fixture(scope="module")
def expected(smollm2_path: Path) -> list[tuple[int, ...]]:
    """Greedy tokens of transformers, one prompt at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    )
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
        answers.append(tuple(out[0, ids.input_ids.shape[1] :].tolist()))
    return answers


def make_llm(path: Path, *, num_blocks: int = 200, chunk: int = 512, backend: str = "auto", max_num_seqs: int = 64) -> LLM:
    return LLM(
        str(path),
        attention_backend=backend,
        cache=CacheConfig(memory_bytes=num_blocks * BLOCK_BYTES),
        scheduler=SchedulerConfig(max_num_batched_tokens=chunk, max_num_seqs=max_num_seqs),
    )


def token_ids(llm: LLM) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]


def test_alone_then_with_prefix_hits(smollm2_path: Path, expected: list[tuple[int, ...]]) -> None:
    llm = make_llm(smollm2_path)
    alone = [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    assert [answer.token_ids for answer in alone] == expected
    again = llm.generate(PROMPTS, GREEDY)
    assert [answer.token_ids for answer in again] == expected
    assert again[-1].num_cached_tokens == 16
    longer = [(*llm.tokenizer.encode(prompt), *tokens[:40]) for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    resumed = llm.generate(longer, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS - 40, ignore_eos=True))
    assert all(answer.num_cached_tokens >= 32 for answer in resumed), "generated tokens are reusable as a prefix"
    assert [answer.token_ids for answer in resumed] == [tokens[40:] for tokens in expected]


@pytest.mark.parametrize("chunk", [7, 64])
def test_all_at_once_in_chunks(smollm2_path: Path, expected: list[tuple[int, ...]], chunk: int) -> None:
    assert token_ids(make_llm(smollm2_path, chunk=chunk)) == expected


def test_preempted(smollm2_path: Path, expected: list[tuple[int, ...]]) -> None:
    llm = make_llm(smollm2_path, num_blocks=14)
    requests = [llm._add(tuple(llm.tokenizer.encode(prompt)), GREEDY) for prompt in PROMPTS]
    while llm.core.has_work:
        llm.core.step()
        llm.core.scheduler.manager.check_integrity()
    assert sum(request.num_preemptions for request in requests) >= 4
    assert [tuple(request.token_ids[request.num_prompt_tokens :]) for request in requests] == expected


def test_reference_backend(smollm2_path: Path, expected: list[tuple[int, ...]]) -> None:
    assert token_ids(make_llm(smollm2_path, backend="reference")) == expected

"""SmolLM2 in float32 says what transformers says, however its requests are chunked, batched, shared or preempted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from engine.config import CacheConfig, SchedulerConfig
from engine.llm import LLM
from engine.request import Namespace, Request, SamplingParams
from engine.sched.pressure import recompute_newest
from engine.stats import Admission
from tests.short_answers import expect_short_answers

pytestmark = pytest.mark.all_cores

NUM_TOKENS = 64
REQUEST_NUMBERS = itertools.count()
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS)
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


def make_llm(path: Path, *, num_blocks: int = 200, chunk: int = 512, backend: str = "auto", max_num_seqs: int = 64) -> LLM:
    return LLM(
        str(path),
        attention_backend=backend,
        cache=CacheConfig(memory_bytes=num_blocks * BLOCK_BYTES),
        scheduler=SchedulerConfig(max_num_batched_tokens=chunk, max_num_seqs=max_num_seqs),
    )


def token_ids(llm: LLM) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return make_llm(smollm2_path)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[tuple[int, ...]]:
    """The tokens of each prompt alone; the first test holds them against transformers."""
    return [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]


def test_transformers_would_choose_every_one_of_these_tokens(
    smollm2_path: Path, llm: LLM, expected: list[tuple[int, ...]]
) -> None:
    """Its greedy path is ours if, after our prompt and tokens so far, its likeliest next token is always ours."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    )
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        ids = llm.tokenizer.encode(prompt)
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
        logits[:, list(llm.info.eos_token_ids)] = float("-inf")  # as min_tokens does
        assert tuple(logits.argmax(-1).tolist()) == tokens


def test_with_prefix_hits(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    again = llm.generate(PROMPTS, GREEDY)
    assert [answer.token_ids for answer in again] == expected
    assert [answer.num_cached_tokens for answer in again] == [len(llm.tokenizer.encode(p)) - 1 for p in PROMPTS]
    longer = [(*llm.tokenizer.encode(prompt), *tokens[:40]) for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    rest = NUM_TOKENS - 40
    resumed = llm.generate(longer, SamplingParams(temperature=0.0, max_tokens=rest, min_tokens=rest))
    assert [answer.num_cached_tokens for answer in resumed] == [len(ids) - 1 for ids in longer], "generated tokens are reusable"
    assert [answer.token_ids for answer in resumed] == [tokens[40:] for tokens in expected]


def add(llm: LLM, salt: str, prompt: Sequence[int], max_tokens: int) -> Request:
    """A greedy request in a namespace of its own, where nothing is cached yet."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, min_tokens=max_tokens)
    request = Request(f"same-{next(REQUEST_NUMBERS)}", tuple(prompt), sampling, seed=0, namespace=Namespace(salt=salt))
    llm.core.add(request)
    return request


def finish(llm: LLM) -> list[Admission]:
    admissions: list[Admission] = []
    while llm.core.has_work:
        admissions += llm.core.step().admissions
        llm.core.scheduler.manager.check_integrity()
    return admissions


def outputs(request: Request) -> tuple[int, ...]:
    return tuple(request.token_ids[request.num_prompt_tokens :])


@pytest.mark.parametrize("num_equal", [1, 14, 21])
def test_with_a_partial_block_hit(llm: LLM, expected: list[tuple[int, ...]], num_equal: int) -> None:
    """What is resident differs from the prompt within a block: the block is copied up to there, and computed on."""
    salt, prompt = f"partial {num_equal}", llm.tokenizer.encode(PROMPTS[-1])
    add(llm, salt, [*prompt[:num_equal], 5, 6, 7, 8, 9], max_tokens=2)
    finish(llm)
    num_copied = llm.core.scheduler.manager.num_copied_blocks
    request = add(llm, salt, prompt, NUM_TOKENS)
    finish(llm)
    assert (request.num_cached_tokens, llm.core.scheduler.manager.num_copied_blocks) == (num_equal, num_copied + 1)
    assert outputs(request) == expected[-1]


def test_samples_and_other_prompts_that_share_a_step(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    """Three times each prompt, and each with a part of its answer, all at once and nothing cached."""
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    requests: list[tuple[Request, tuple[int, ...]]] = []
    for prompt, tokens in zip(prompts, expected, strict=True):
        requests += [(add(llm, "step", [*prompt, *tokens[:21]], NUM_TOKENS - 21), tokens[21:]) for _ in range(3)]
        requests.append((add(llm, "step", [*prompt, *tokens[:30]], NUM_TOKENS - 30), tokens[30:]))
    admissions = finish(llm)
    assert [outputs(request) for request, _ in requests] == [tokens for _, tokens in requests]
    assert sum(a.sources.in_flight == a.num_cached_tokens == a.num_prompt_tokens - 1 for a in admissions) >= 16
    assert sum(a.num_prompt_tokens - a.num_cached_tokens for a in admissions) <= sum(map(len, prompts)) + 8 * 21 + 2 * 8 + 8 * 9


def test_forked_from_the_open_block_of_a_running_request(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    prompt = llm.tokenizer.encode(PROMPTS[0])
    first = add(llm, "fork", prompt, NUM_TOKENS)
    for _ in range(23):
        llm.core.step()
    fork = add(llm, "fork", first.token_ids, NUM_TOKENS - 23)
    other = add(llm, "fork", [*first.token_ids[:-5], 5], 1)
    finish(llm)
    assert fork.num_cached_tokens == fork.num_prompt_tokens - 1
    assert other.num_cached_tokens == other.num_prompt_tokens - 1
    assert (outputs(first), outputs(fork)) == (expected[0], expected[0][23:])


@pytest.mark.parametrize("chunk", [7, 64])
def test_all_at_once_in_chunks(smollm2_path: Path, expected: list[tuple[int, ...]], chunk: int) -> None:
    assert token_ids(make_llm(smollm2_path, chunk=chunk)) == expected


@pytest.mark.parametrize("policy", ["default", "newest"])
def test_preempted(smollm2_path: Path, expected: list[tuple[int, ...]], policy: str) -> None:
    llm = make_llm(smollm2_path, num_blocks=14)
    if policy == "newest":
        llm.core.scheduler._pressure = recompute_newest()  # without foresight, so that it comes to preemptions
    else:
        expect_short_answers(llm)  # with foresight, but the answers turn out longer than all before
    requests = [llm._add(tuple(llm.tokenizer.encode(prompt)), GREEDY) for prompt in PROMPTS]
    while llm.core.has_work:
        llm.core.step()
        llm.core.scheduler.manager.check_integrity()
    assert sum(request.num_preemptions for request in requests) >= 4
    assert [tuple(request.token_ids[request.num_prompt_tokens :]) for request in requests] == expected


def test_reference_backend(smollm2_path: Path, expected: list[tuple[int, ...]]) -> None:
    assert token_ids(make_llm(smollm2_path, backend="reference")) == expected

"""Within a quantized format: the same greedy tokens hit or miss, in any chunks, batched, preempted and resumed, in both backends;
in int8 also shared with others of the step, forked, and out of host memory and files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.config import CacheConfig, SchedulerConfig
from engine.kv.format import SEALED_TYPES
from engine.llm import LLM
from engine.request import Namespace, Request, SamplingParams
from engine.sched.pressure import recompute_newest
from engine.stats import Admission
from tests.short_answers import expect_short_answers, up_to_eos
from tests.tiny_folder import make_folder, one_thread

__all__ = ["one_thread"]

REQUEST_NUMBERS = itertools.count()
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


@pytest.mark.parametrize("policy", ["default", "newest"])
@pytest.mark.parametrize("dtype", SEALED_TYPES)
def test_a_tiny_model_preempted(tiny: Path, dtype: str, policy: str) -> None:
    expected = tokens_of(make_llm(tiny, dtype, block_size=4), TINY_PROMPTS, 30)
    probe = make_llm(tiny, dtype, block_size=4).info
    llm = make_llm(tiny, dtype, block_size=4, memory_bytes=probe.tail_bytes + 32 * probe.block_bytes)
    sampling = greedy(30)
    if policy == "newest":
        llm.core.scheduler._pressure = recompute_newest()  # without foresight, so that it comes to preemptions
    else:
        expect_short_answers(llm)  # with foresight, but the answers turn out longer than all before
        sampling = SamplingParams(temperature=0.0, max_tokens=30)
        expected = [up_to_eos(tokens) for tokens in expected]
    requests = [llm._add(prompt, sampling) for prompt in TINY_PROMPTS]
    while llm.core.has_work:
        llm.core.step()
        llm.core.scheduler.manager.check_integrity()
    assert sum(request.num_preemptions for request in requests) >= 2
    assert [tuple(request.token_ids[request.num_prompt_tokens :]) for request in requests] == expected


def add(llm: LLM, salt: str, prompt: Sequence[int], num_tokens: int) -> Request:
    """A request in a namespace of its own, where nothing is cached yet."""
    number = next(REQUEST_NUMBERS)
    request = Request(f"same-{number}", tuple(prompt), greedy(num_tokens), seed=0, namespace=Namespace(salt=salt))
    llm.core.add(request)
    return request


def finish(llm: LLM) -> list[Admission]:
    admissions: list[Admission] = []
    while llm.core.has_work or llm.core.is_disk_busy:
        output = llm.core.step()
        admissions += output.admissions
        llm.core.scheduler.manager.check_integrity()
        if not output.has_run:
            llm.core.wait_for_disk(1.0)
            llm.core.poll_disk()
    return admissions


def outputs(request: Request) -> tuple[int, ...]:
    return tuple(request.token_ids[request.num_prompt_tokens :])


@pytest.fixture(scope="module")
def roomy(tiny: Path) -> LLM:
    return make_llm(tiny, "int8", block_size=4, memory_bytes=2**20)


@pytest.fixture(scope="module")
def alone(tiny: Path, roomy: LLM) -> list[tuple[int, ...]]:
    """The tokens of each tiny prompt, each in a namespace of its own: nothing is a hit."""
    answers = []
    for index, prompt in enumerate(TINY_PROMPTS):
        request = add(roomy, f"alone {index}", prompt, 30)
        finish(roomy)
        assert request.num_cached_tokens == 0
        answers.append(outputs(request))
    return answers


@pytest.mark.parametrize("num_equal", [3, 21, 38])
def test_a_block_that_matches_in_part_is_computed_again(roomy: LLM, alone: list[tuple[int, ...]], num_equal: int) -> None:
    salt, prompt = f"partial {num_equal}", TINY_PROMPTS[-1]
    add(roomy, salt, [*prompt[:num_equal], 5, 6, 7, 8, 9], 2)
    finish(roomy)
    request = add(roomy, salt, prompt, 30)
    finish(roomy)
    assert (request.num_cached_tokens, roomy.core.scheduler.manager.num_copied_blocks) == (num_equal // 4 * 4, 0)
    assert outputs(request) == alone[-1]


def test_samples_and_other_prompts_that_share_a_step(roomy: LLM, alone: list[tuple[int, ...]]) -> None:
    """Twice each of two prompts with a part of its answer, and once with more of it, all at once and nothing cached."""
    requests: list[tuple[Request, tuple[int, ...]]] = []
    for prompt, tokens in zip(TINY_PROMPTS[3:], alone[3:], strict=True):
        requests += [(add(roomy, "step", [*prompt, *tokens[:9]], 21), tokens[9:]) for _ in range(2)]
        requests.append((add(roomy, "step", [*prompt, *tokens[:15]], 15), tokens[15:]))
    admissions = finish(roomy)
    assert [outputs(request) for request, _ in requests] == [tokens for _, tokens in requests]
    shared = [a for a in admissions if a.sources.in_flight == a.num_cached_tokens > 0]
    assert len(shared) == 4, "all but the first of each prompt"
    assert all(a.num_cached_tokens % 4 == 0 for a in shared)


def test_forked_from_a_running_request(roomy: LLM, alone: list[tuple[int, ...]]) -> None:
    first = add(roomy, "fork", TINY_PROMPTS[2], 30)
    while first.num_tokens < first.num_prompt_tokens + 14:
        roomy.core.step()
    fork = add(roomy, "fork", first.token_ids, 16)
    finish(roomy)
    assert fork.num_cached_tokens >= (fork.num_prompt_tokens - 2) // 4 * 4, "all blocks that are full"
    assert (outputs(first), outputs(fork)) == (alone[2], alone[2][14:])


def test_from_host_memory_and_from_files_after_a_restart(tiny: Path, tmp_path: Path, alone: list[tuple[int, ...]]) -> None:
    probe = make_llm(tiny, "int8", block_size=4).info
    room = {"memory_bytes": probe.tail_bytes + 24 * probe.block_bytes, "host_bytes": 48 * probe.block_bytes}
    tiers = {**room, "disk_path": str(tmp_path), "block_size": 4}
    order = (4, 3, 2, 4, 1, 3, 4)
    sources = []
    for _ in range(2):
        llm = make_llm(tiny, "int8", **tiers)
        for index in order:
            request = add(llm, "tiers", TINY_PROMPTS[index], 30)
            sources += [admission.sources for admission in finish(llm)]
            assert outputs(request) == alone[index]
        llm.close()
    before, after = sources[: len(order)], sources[len(order) :]
    assert any(source.host >= 16 for source in before)
    assert after[0].disk >= 16, "the process that knew them is gone, its files are not"


@pytest.mark.all_cores
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

"""A request's tokens depend on its own length alone: not on its neighbours, the chunks, a hit or a preemption, whatever the scaling."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import CacheConfig, SchedulerConfig
from engine.llm import LLM
from engine.request import Namespace, Request, SamplingParams
from engine.rope_classes import choose_rope_class
from engine.sched.plan import ScheduledSequence, StepPlan
from engine.sched.pressure import recompute_newest
from tests.short_answers import expect_short_answers, up_to_eos
from tests.tiny_folder import make_folder, one_thread

__all__ = ["one_thread"]

REQUEST_NUMBERS = itertools.count()
TRAINED = 32
HALF = 6  # rotary dimensions / 2 of the tiny model's heads
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "ntk": {"rope_type": "ntk", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 8.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 8.0,
        "short_factor": [1.0] * HALF,
        "long_factor": [1.0 + i for i in range(HALF)],
        "original_max_position_embeddings": TRAINED,
    },
}
DECLARED = ("llama3", "longrope")  # their checkpoints state the context that the scaling reaches
LADDERS = ("ntk", "dynamic", "yarn", "longrope")
PROMPTS = [tuple(2 + (7 * i + 3 * j * j + i * j) % 250 for j in range(length)) for i, length in enumerate((5, 20, 17, 190, 60))]
NUM_TOKENS = (11, 12, 40, 30, 50)  # with their prompts: 16, 32, 57, 220 and 110 tokens, so every class of a ladder has one


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), TRAINED)


@pytest.fixture(scope="module")
def folders(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model for each scaling: the same weights, and the context that such a checkpoint states."""
    declared = write_model(tmp_path_factory.mktemp("declared"), 8 * TRAINED)
    return {name: declared if name in DECLARED else tiny for name in SCALINGS}


def write_model(folder: Path, max_position_embeddings: int) -> Path:
    make_folder(
        folder,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=2 * HALF,
        max_position_embeddings=max_position_embeddings,
        attention_gain=10.0,
    )
    return folder


def make_llm(
    folder: Path,
    scaling: dict[str, Any] | None,
    *,
    num_blocks: int = 400,
    chunk: int = 512,
    kv_dtype: str = "auto",
    **options: Any,
) -> LLM:
    block_bytes = 2 * 3 * 2 * 2 * HALF * 4 * 4
    return LLM(
        str(folder),
        rope_scaling=None if scaling is None else json.dumps(scaling),
        cache=CacheConfig(memory_bytes=num_blocks * block_bytes, block_size=4, kv_dtype=kv_dtype),
        scheduler=SchedulerConfig(max_num_batched_tokens=chunk, max_num_seqs=8),
        **options,
    )


def fitting(llm: LLM) -> list[int]:
    limit = llm.info.max_model_len
    return [i for i in range(len(PROMPTS)) if len(PROMPTS[i]) + NUM_TOKENS[i] <= limit]


def greedy(num_tokens: int, *, ignore_eos: bool = True) -> SamplingParams:
    """With ``ignore_eos`` the scheduler knows that the length is fixed."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=ignore_eos)


def alone(llm: LLM, index: int) -> tuple[int, ...]:
    return llm.generate([PROMPTS[index]], greedy(NUM_TOKENS[index]))[0].token_ids


def together(llm: LLM, indices: list[int], *, ignore_eos: bool = True) -> tuple[list[Request], list[tuple[int, ...]]]:
    requests = [llm._add(PROMPTS[i], greedy(NUM_TOKENS[i], ignore_eos=ignore_eos)) for i in indices]
    while llm.core.has_work:
        llm.core.step()
        llm.core.scheduler.manager.check_integrity()
    return requests, [tuple(request.token_ids[request.num_prompt_tokens :]) for request in requests]


@pytest.mark.parametrize(
    ("rope_type", "policy"), [(name, "static") for name in SCALINGS] + [(name, "ladder") for name in LADDERS]
)
def test_the_same_tokens_alone_beside_longer_ones_in_any_chunks_and_after_hits(
    folders: dict[str, Path], rope_type: str, policy: str
) -> None:
    folder, options = folders[rope_type], {"rope_policy": policy, "max_model_len": 8 * TRAINED}
    llm = make_llm(folder, SCALINGS[rope_type], **options)
    indices = fitting(llm)
    expected = [alone(llm, i) for i in indices]
    assert [alone(llm, i) for i in indices] == expected, "with prefix hits"
    backwards = indices[::-1]
    for chunk, backend in ((512, "auto"), (7, "auto"), (13, "reference")):
        fresh = make_llm(folder, SCALINGS[rope_type], chunk=chunk, attention_backend=backend, **options)
        assert together(fresh, backwards)[1] == expected[::-1]


@pytest.mark.parametrize("rope_type", list(SCALINGS))
def test_logprobs_do_not_depend_on_a_neighbour_eight_times_as_long(folders: dict[str, Path], rope_type: str) -> None:
    llm = make_llm(folders[rope_type], SCALINGS[rope_type], max_model_len=8 * TRAINED)
    mine = scheduled(llm, PROMPTS[1][:20], tuple(range(5)))
    other = scheduled(llm, PROMPTS[3][:160], tuple(range(5, 45)))
    (alone_rows, first, last) = (
        llm._engine.runner.score(StepPlan(sequences)).log_softmax(-1) for sequences in ((mine,), (mine, other), (other, mine))
    )
    assert (alone_rows - first[:20]).abs().max() < 1e-5
    assert (alone_rows - last[-20:]).abs().max() < 1e-5


def scheduled(llm: LLM, tokens: tuple[int, ...], table: tuple[int, ...]) -> ScheduledSequence:
    return ScheduledSequence("", tokens, 0, table, choose_rope_class(llm.info.rope_classes, len(tokens)), None, None)


@pytest.mark.parametrize("policy", ["default", "newest"])
@pytest.mark.parametrize("rope_type", LADDERS)
def test_the_same_tokens_when_preempted(folders: dict[str, Path], rope_type: str, policy: str) -> None:
    folder = folders[rope_type]
    llm = make_llm(folder, SCALINGS[rope_type])
    indices = fitting(llm)
    expected = [alone(llm, i) for i in indices]
    small = make_llm(folder, SCALINGS[rope_type], num_blocks=66)
    if policy == "newest":
        small.core.scheduler._pressure = recompute_newest()  # without foresight, so that it comes to preemptions
    else:
        expect_short_answers(small)  # with foresight, but the answers turn out longer than all before
        expected = [up_to_eos(tokens) for tokens in expected]
    requests, tokens = together(small, indices, ignore_eos=policy == "newest")
    assert sum(request.num_preemptions for request in requests) >= 1
    assert tokens == expected


@pytest.mark.parametrize("rope_type", LADDERS[:3])
def test_one_that_grows_says_in_each_class_what_the_class_says(tiny: Path, rope_type: str) -> None:
    """Alone, and beside others in small chunks and a small cache: the text so far goes on as a request of the next class would."""
    llm = make_llm(tiny, SCALINGS[rope_type])
    limits = tuple(max_len for _, max_len in llm.info.rope_classes)
    assert limits == (TRAINED, 2 * TRAINED, 4 * TRAINED, 8 * TRAINED)
    prompt, num_tokens = PROMPTS[0], 5 * TRAINED
    context = list(prompt)
    for rope_class, limit in enumerate(limits):
        most = min(limit, len(prompt) + num_tokens) - len(context)
        context += outputs(run(llm, context, most, Namespace("twin", rope_class)))
    expected = tuple(context[len(prompt) :])
    assert len(expected) == num_tokens
    assert outputs(run(llm, prompt, num_tokens, Namespace("alone"), limits)) == expected
    small = make_llm(tiny, SCALINGS[rope_type], num_blocks=66, chunk=13)
    neighbours = [small._add(PROMPTS[i], greedy(NUM_TOKENS[i])) for i in fitting(small)]
    assert outputs(run(small, prompt, num_tokens, Namespace(), limits)) == expected
    assert [outputs(request) for request in neighbours] == [alone(llm, i) for i in fitting(llm)]


def run(llm: LLM, prompt: Sequence[int], num_tokens: int, namespace: Namespace, limits: tuple[int, ...] = ()) -> Request:
    name = f"grow-{next(REQUEST_NUMBERS)}"
    request = Request(name, tuple(prompt), greedy(num_tokens), seed=0, namespace=namespace, rope_limits=limits)
    llm.core.add(request)
    while llm.core.has_work:
        llm.core.step()
        llm.core.scheduler.manager.check_integrity()
    return request


def outputs(request: Request) -> tuple[int, ...]:
    return tuple(request.token_ids[request.num_prompt_tokens :])


@pytest.mark.parametrize("rope_type", ["ntk", "dynamic", "yarn"])
def test_within_the_trained_length_the_ladder_is_a_server_without_scaling(tiny: Path, rope_type: str) -> None:
    plain, ladder = make_llm(tiny, None), make_llm(tiny, SCALINGS[rope_type])
    short = fitting(plain)
    assert short == [0, 1]
    longer = [i for i in fitting(ladder) if i not in short]
    tokens = dict(zip([*longer, *short], together(ladder, [*longer, *short])[1], strict=True))
    assert [tokens[i] for i in short] == [alone(plain, i) for i in short]


def test_the_tokens_do_follow_from_the_rotation(folders: dict[str, Path]) -> None:
    """What makes the other tests mean something: each scaling gives the longest request tokens of its own."""
    llms = {name: make_llm(folders[name], SCALINGS[name], max_model_len=8 * TRAINED) for name in SCALINGS}
    answers = {name: alone(llm, 3) for name, llm in llms.items()}
    assert len(set(answers.values())) == len(answers)


def test_no_hit_crosses_classes(tiny: Path) -> None:
    """The same prompt with room for more tokens is rotated otherwise: nothing of it may be found."""
    llm = make_llm(tiny, SCALINGS["yarn"])
    prompt = PROMPTS[1]
    room = [TRAINED - len(prompt), 2 * TRAINED - len(prompt), 2 * TRAINED - len(prompt) + 1, 8 * TRAINED - len(prompt)]
    answers = [llm.generate([prompt], greedy(num_tokens))[0] for num_tokens in room]
    assert [answer.num_cached_tokens for answer in answers] == [0, 0, 0, 0]
    again = [llm.generate([prompt], greedy(num_tokens))[0] for num_tokens in room]
    assert [answer.num_cached_tokens for answer in again] == [len(prompt) - 1] * 4
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in answers]
    assert len({answer.token_ids[:12] for answer in answers}) > 1, "the classes do rotate differently"


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("float32", 1e-3), ("int8", 1e-2)])
@pytest.mark.parametrize("rope_type", list(SCALINGS))
def test_perplexity_token_by_token_is_that_of_one_prefill(
    folders: dict[str, Path], rope_type: str, kv_dtype: str, tolerance: float
) -> None:
    """At 1, 2, 4 and 8 times the trained length, in the class that a request of the length gets."""
    llm = make_llm(folders[rope_type], SCALINGS[rope_type], kv_dtype=kv_dtype, max_model_len=8 * TRAINED)
    tokens = [2 + (11 * i + 5 * i * i) % 250 for i in range(8 * TRAINED)]
    for length in (TRAINED, 2 * TRAINED, 4 * TRAINED, 8 * TRAINED):
        whole, steps = (perplexity(llm, tokens[:length], chunk) for chunk in (length, 1))
        assert steps == pytest.approx(whole, rel=tolerance)


def perplexity(llm: LLM, tokens: list[int], chunk: int) -> float:
    rope_class = choose_rope_class(llm.info.rope_classes, len(tokens))
    table = tuple(range(-(-len(tokens) // 4)))
    tail = 0 if llm.info.tail_bytes else None
    plans = [
        StepPlan((ScheduledSequence("", tuple(tokens[i : i + chunk]), i, table, rope_class, None, tail),))
        for i in range(0, len(tokens), chunk)
    ]
    logits = torch.cat([llm._engine.runner.score(plan) for plan in plans])
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:])).exp())

"""Endless requests: what they compute is what a plain twin gets that keeps unrotated keys, in blocks that never grow in number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.metadata import AttentionWork
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.errors import ConfigError, InsufficientMemoryError
from engine.kv.stream import StreamShape
from engine.llm import LLM
from engine.model.llama import LlamaModel
from engine.model.ops import TorchOps
from engine.model.rope import rope_frequencies
from engine.model.rotary_order import order_rotary_rows
from engine.model.weights import load_weights, open_checkpoint
from engine.request import Request, SamplingParams
from engine.runner.sampler import sample
from engine.sched.plan import SampledTokens, StepPlan
from engine.sched.pressure import recompute_newest
from tests.tiny_folder import make_folder, one_thread

__all__ = ["one_thread"]

SINKS, WINDOW, BLOCK_SIZE, HEAD_DIM = 4, 64, 4, 12
PLACES, LEAVING = SINKS + WINDOW, WINDOW // 8
BLOCK_BYTES = BLOCK_SIZE * 2 * 3 * 2 * HEAD_DIM * 4
PROMPTS = [tuple(2 + (7 * i + 3 * j * j + i * j) % 250 for j in range(length)) for i, length in enumerate((15, 40, 190))]
SHORT = tuple(range(5, 35))


def endless(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    shape: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD_DIM}
    make_folder(folder, max_position_embeddings=PLACES, attention_gain=10.0, **shape)
    return folder


def make_llm(folder: Path, *, num_blocks: int = 200, chunk: int = 64, kv_dtype: str = "auto", **options: Any) -> LLM:
    return LLM(
        str(folder),
        cache=CacheConfig(memory_bytes=num_blocks * BLOCK_BYTES, block_size=BLOCK_SIZE, kv_dtype=kv_dtype),
        scheduler=SchedulerConfig(max_num_batched_tokens=chunk, max_num_seqs=8),
        attention_sinks=SINKS,
        window=WINDOW,
        **options,
    )


class TwinAttention:
    """Keeps all keys unrotated, and rotates those that are in the cache by their places, anew for each token."""

    name = "twin"

    def __init__(self, frequencies: torch.Tensor) -> None:
        self._frequencies = frequencies
        self._k: dict[int, list[torch.Tensor]] = {}
        self._v: dict[int, list[torch.Tensor]] = {}
        self.cached: list[int] = []

    def plan(self, work: AttentionWork) -> None:
        """Nothing to plan."""

    def step(self, position: int) -> None:
        if len(self.cached) == PLACES:
            del self.cached[SINKS : SINKS + LEAVING]
        self.cached.append(position)

    def _rotate(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        angles = places[:, None, None] * self._frequencies
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self._k.setdefault(layer, []).append(k[0].clone())
        self._v.setdefault(layer, []).append(v[0].clone())
        places = torch.arange(len(self.cached))
        keys = self._rotate(torch.stack([self._k[layer][position] for position in self.cached]), places)
        values = torch.stack([self._v[layer][position] for position in self.cached])
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (keys, values))
        scores = keys @ self._rotate(q, places[-1:])[0][:, :, None] / HEAD_DIM**0.5
        return (scores.softmax(1) * values).sum(1)[None]


def twin_logits(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    weights = load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=lambda done, total: None)
    order_rotary_rows(weights, config.rope, config.num_heads, config.num_kv_heads)
    attention = TwinAttention(rope_frequencies(config.rope, PLACES)[0])
    model = LlamaModel(config, weights, TorchOps(), attention)
    one, row = torch.ones((1, HEAD_DIM // 2)), torch.zeros(1, dtype=torch.long)
    logits = []
    with torch.inference_mode():
        for position, token in enumerate(tokens):
            attention.step(position)
            logits.append(model.forward(torch.tensor([token]), torch.tensor([position]), one, 0 * one, row)[0])
    return torch.stack(logits)


class Recorder:
    """A runner that keeps the logits of all that is sampled."""

    def __init__(self, llm: LLM) -> None:
        self._runner: Any = llm.core._runner
        self.logits: list[torch.Tensor] = []
        llm.core._runner = self

    def execute(self, plan: StepPlan) -> SampledTokens:
        with torch.inference_mode():
            batch, logits = self._runner.forward(plan)
            self.logits.extend(logits.clone())
            drawn = dict(zip(batch.sampling_sequences, sample(logits, batch.specs), strict=True))
        return SampledTokens(tuple(drawn.get(index) for index in range(len(plan.sequences))))


def run(llm: LLM, prompts: Sequence[tuple[int, ...]], num_tokens: int, *, poison: bool = True) -> list[Request]:
    requests = [llm._add(prompt, endless(num_tokens)) for prompt in prompts]
    manager, storage = llm.core.scheduler.manager, llm.core._runner
    while llm.core.has_work:
        llm.core.step()
        manager.check_integrity()
        if poison:
            manager.operator.reset()
            bytes_ = getattr(storage, "_runner", storage)._storage.bytes
            bytes_[[block.block_id for block in manager._pool._free]] = 0xFF
    return requests


def outputs(requests: Sequence[Request]) -> list[tuple[int, ...]]:
    return [tuple(request.token_ids[request.num_prompt_tokens :]) for request in requests]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_logits_are_those_of_the_twin_for_hundreds_of_tokens(tiny: Path, backend: str) -> None:
    llm = make_llm(tiny, attention_backend=backend, max_model_len=100_000)
    recorder = Recorder(llm)
    (request,) = run(llm, PROMPTS[:1], 300)
    expected = twin_logits(tiny, request.token_ids[:-1])[len(PROMPTS[0]) - 1 :]
    torch.testing.assert_close(torch.stack(recorder.logits), expected, atol=2e-4, rtol=1e-4)
    assert outputs([request])[0] == tuple(expected.argmax(-1).tolist())


@pytest.fixture(scope="module")
def alone(tiny: Path) -> list[tuple[int, ...]]:
    """The longest prompt is longer than sinks and window: it streams through."""
    llm = make_llm(tiny)
    tokens = [outputs(run(llm, [prompt], 150))[0] for prompt in PROMPTS]
    expected = twin_logits(tiny, (*PROMPTS[2], *tokens[2]))[len(PROMPTS[2]) - 1 : -1]
    assert tokens[2] == tuple(expected.argmax(-1).tolist())
    return tokens


@pytest.mark.parametrize("chunk", [3, 30, 512])
def test_in_any_chunks_and_beside_each_other(tiny: Path, alone: list[tuple[int, ...]], chunk: int) -> None:
    llm = make_llm(tiny, chunk=chunk)
    assert outputs(run(llm, PROMPTS, 150)) == alone
    assert llm.core.scheduler.manager.num_free_blocks == 200


def test_memory_is_constant_and_streams_wait_for_it(tiny: Path, alone: list[tuple[int, ...]]) -> None:
    """Room for one of them, and a bit."""
    llm = make_llm(tiny, num_blocks=PLACES // BLOCK_SIZE + 5)
    assert llm.info.stream_len == PLACES
    manager, held = llm.core.scheduler.manager, []
    requests = [llm._add(prompt, endless(150)) for prompt in PROMPTS]
    while llm.core.has_work:
        held.append(llm.core.step().stats.cache)
        assert llm.core.scheduler.num_running <= 1
        manager.check_integrity()
    assert outputs(requests) == alone
    assert max(cache.num_referenced_blocks for cache in held) == PLACES // BLOCK_SIZE
    assert max(cache.num_context_tokens for cache in held) == PLACES - 1, "when all places are taken, some are left at once"
    assert all(request.num_preemptions == 0 for request in requests)


def test_a_preempted_stream_starts_over_and_says_the_same(tiny: Path, alone: list[tuple[int, ...]]) -> None:
    llm = make_llm(tiny)
    llm.core.scheduler._pressure = recompute_newest()
    requests = [llm._add(prompt, endless(150)) for prompt in PROMPTS]
    for number in range(10_000):
        if not llm.core.has_work:
            break
        llm.core.step()
        if number in (40, 90):
            llm.core.scheduler._preempt(requests[number % 3])
        llm.core.scheduler.manager.check_integrity()
    assert outputs(requests) == alone
    assert sum(request.num_preemptions for request in requests) == 2


def test_streams_stay_out_of_the_prefix_tree_and_short_requests_are_as_ever(tiny: Path) -> None:
    llm = make_llm(tiny)
    streams = run(llm, [SHORT, SHORT], 60, poison=False)
    assert [request.num_cached_tokens for request in streams] == [0, 0]
    assert llm.core.scheduler.manager.num_cached_blocks == 0
    first, again = (run(llm, [SHORT], 20, poison=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, len(SHORT) - 1)
    assert outputs([first]) == outputs([again]) == [outputs(streams)[0][:20]]
    assert run(llm, [SHORT], 60, poison=False)[0].num_cached_tokens == 0


def test_the_shape_says_which_tokens_are_cached() -> None:
    shape = StreamShape(block_size=4, num_sink_blocks=1, num_window_blocks=16)
    assert (shape.max_tokens, shape.num_leaving) == (68, 2)
    assert [shape.num_left(position) for position in (0, 67, 68, 75, 76, 20_000)] == [0, 0, 2, 2, 4, 4984]
    assert [shape.num_to_go(position) for position in (0, 67, 68, 75, 76)] == [68, 1, 8, 1, 8]
    assert max(position - 4 * shape.num_left(position) for position in range(20_000)) == 67


def test_what_cannot_be_streamed_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="int8"):
        make_llm(tiny, kv_dtype="int8")
    with pytest.raises(ConfigError, match="88 tokens in whole blocks, more than the 68 that the model was trained for"):
        LLM(str(tiny), cache=CacheConfig(memory_bytes=200 * BLOCK_BYTES, block_size=8), attention_sinks=4, window=75)
    with pytest.raises(InsufficientMemoryError, match="68 tokens in whole blocks; the KV cache holds 64"):
        make_llm(tiny, num_blocks=16)
    with pytest.raises(ConfigError, match="1,048,577 is more than the 1,048,576 tokens"):
        make_llm(tiny, max_model_len=2**20 + 1)
    with pytest.raises(ConfigError, match="68 tokens in whole blocks, and no request may become longer than 68"):
        make_llm(tiny, max_model_len=68)
    with pytest.raises(ConfigError, match="--window"):
        EngineConfig(model_path="", model_name="", attention_sinks=4)
    make_folder(tmp_path, class_name="MistralForCausalLM", sliding_window=32)
    with pytest.raises(ConfigError, match="sliding window"):
        make_llm(tmp_path)

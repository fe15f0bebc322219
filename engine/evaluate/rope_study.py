"""What a RoPE scaling does to a model beyond its trained length: perplexity by position, and the rank of a hidden number.

One set of weights, one cache, and a RoPE class for each scaling: the model reads as a server would, in chunks through the paged
cache. Knows no files.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.attention.backend import choose_backend
from engine.config import CacheConfig
from engine.demo.data import passkey_document
from engine.errors import UnsupportedModelError
from engine.kv.offload import HostBuffer
from engine.kv.storage import KVStorage
from engine.load import build_runner, kv_format
from engine.model.rotary_order import order_rotary_rows
from engine.model.weights import load_weights, open_checkpoint
from engine.model_config import ModelConfig
from engine.rope_classes import RopeClass
from engine.rope_config import RopeConfig
from engine.sched.plan import ScheduledSequence, StepPlan
from engine.tokenizer import Tokenizer

CPU = torch.device("cpu")
NUM_BUCKETS = 16
NUM_KEYS = 100
_KEYS_AT_A_TIME = 25
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Scaling:
    """A row of the study: ``classes[m]`` is what a window of m times the trained length is read with."""

    name: str
    classes: dict[int, RopeClass]


def scalings(model: ModelConfig, multiples: Sequence[int]) -> list[Scaling]:
    """None, then linear, NTK and YaRN as a server for the largest multiple would serve all with them, then those that look at the length.

    Raises:
        UnsupportedModelError: the model has no rotary positions, or a scaling of its own.
    """
    base, trained, most = model.rope, model.max_position_embeddings, max(multiples)
    if base.rope_type != "default":
        raise UnsupportedModelError(f"the study needs unscaled rotary positions; this model's are {base.rope_type}")

    def scaled(rope_type: str, factor: int, length: int) -> RopeClass:
        name = rope_type if rope_type in ("default", "dynamic") else f"{rope_type}-{factor}"
        return RopeClass(name, _rope(base, rope_type, factor, trained), length, most * trained)

    plain = scaled("default", 1, trained)
    dynamic = {m: replace(scaled("dynamic", 1, m * trained), name=f"dynamic-{m}") if m > 1 else plain for m in multiples}
    ladder = {m: scaled("yarn", m, trained) if m > 1 else plain for m in multiples}

    def same(rope_type: str) -> dict[int, RopeClass]:
        return dict.fromkeys(multiples, scaled(rope_type, most, trained))

    rows = [Scaling("none", dict.fromkeys(multiples, plain))]
    rows += [Scaling(f"{name} x {most}", same(kind)) for name, kind in (("linear", "linear"), ("NTK", "ntk"), ("YaRN", "yarn"))]
    return [*rows, Scaling("dynamic NTK", dynamic), Scaling("ladder (YaRN)", ladder)]


def _rope(base: RopeConfig, rope_type: str, factor: int, trained: int) -> RopeConfig:
    if rope_type == "default":
        return base
    scaled = replace(base, rope_type=rope_type, factor=float(factor), original_len=trained)
    return replace(scaled, beta_fast=32.0, beta_slow=1.0, truncate=True) if rope_type == "yarn" else scaled


@dataclass(frozen=True, slots=True)
class PerplexityCell:
    """Mean negative log-likelihoods, in nats: of all tokens but the windows' first, and by position, in NUM_BUCKETS equal parts."""

    num_tokens: int
    nll: float
    by_position: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PasskeyCell:
    """Ranks of the true key among NUM_KEYS, 1 is best, one for each document."""

    ranks: tuple[int, ...]


class Reader:
    """The model over a float32 cache of one window and room for the keys. ``classes`` are all that will be asked for."""

    def __init__(self, path: Path, classes: Sequence[RopeClass], window: int, chunk: int = 512) -> None:
        checkpoint = open_checkpoint(path)
        config = checkpoint.config
        weights = load_weights(checkpoint, dtype=torch.float32, device=CPU, progress=lambda done, total: None)
        order_rotary_rows(weights, config.rope, config.num_heads, config.num_kv_heads)
        fmt = kv_format(CacheConfig(kv_dtype="float32"), config, "float32", CPU)
        self._size, self._chunk = fmt.block_size, chunk
        self._num_blocks = -(-window // fmt.block_size) + 1
        storage = KVStorage(fmt, self._num_blocks + 2 * _KEYS_AT_A_TIME, CPU, 0)
        attention = choose_backend("auto", storage, config.num_heads, torch.float32)
        self._runner = build_runner(config, weights, attention, HostBuffer(storage, 0), classes, CPU)
        self._numbers = {rope_class: index for index, rope_class in enumerate(classes)}

    def perplexity(self, rope_class: RopeClass, windows: Sequence[Sequence[int]], advance: Advance) -> PerplexityCell:
        """``windows`` are token ids of one length, a multiple of NUM_BUCKETS."""
        length = len(windows[0])
        sums = torch.zeros(length, dtype=torch.float64)
        for tokens in windows:
            ids = torch.tensor(tokens)
            for start in range(0, length, self._chunk):
                part = tokens[start : start + self._chunk]
                logits = self._score(rope_class, part, start)
                following = ids[start + 1 : start + 1 + len(part)]
                nll = torch.nn.functional.cross_entropy(logits[: len(following)], following, reduction="none")
                sums[start + 1 : start + 1 + len(following)] += nll.double()
                advance(len(part))
        by_position: list[float] = (sums / len(windows)).view(NUM_BUCKETS, -1).mean(1).tolist()
        by_position[0] *= (length // NUM_BUCKETS) / (length // NUM_BUCKETS - 1)  # the first token is not predicted
        num_tokens = len(windows) * (length - 1)
        return PerplexityCell(num_tokens, float(sums.sum()) / num_tokens, tuple(by_position))

    def passkey_rank(
        self, rope_class: RopeClass, prompt: Sequence[int], keys: Sequence[Sequence[int]], advance: Advance
    ) -> int:
        """Which place ``keys[0]`` takes among all, by the likelihood of its tokens behind the prompt."""
        whole = (len(prompt) - 1) // self._size * self._size
        for start in range(0, whole, self._chunk):
            part = prompt[start : min(start + self._chunk, whole)]
            self._score(rope_class, part, start)
            advance(len(part))
        scores: list[float] = []
        for first in range(0, len(keys), _KEYS_AT_A_TIME):
            scores += self._key_scores(rope_class, prompt, whole, keys[first : first + _KEYS_AT_A_TIME])
        advance(len(prompt) - whole)
        return 1 + sum(score > scores[0] for score in scores[1:])

    def _score(self, rope_class: RopeClass, tokens: Sequence[int], start: int) -> torch.Tensor:
        table = tuple(range(-(-(start + len(tokens)) // self._size)))
        sequence = ScheduledSequence("", tuple(tokens), start, table, self._numbers[rope_class], None, None)
        return self._runner.score(StepPlan((sequence,)))

    def _key_scores(
        self, rope_class: RopeClass, prompt: Sequence[int], whole: int, keys: Sequence[Sequence[int]]
    ) -> list[float]:
        """Log-likelihoods. The prompt's full blocks are shared; what is open of it is computed beside each key."""
        shared = tuple(range(whole // self._size))
        sequences = []
        for index, key in enumerate(keys):
            own = self._num_blocks + 2 * index
            tokens = (*prompt[whole:], *key)
            assert len(tokens) <= 2 * self._size
            sequences.append(
                ScheduledSequence(str(index), tokens, whole, (*shared, own, own + 1), self._numbers[rope_class], None, None)
            )
        logits = self._runner.score(StepPlan(tuple(sequences))).float().log_softmax(-1)
        parts = torch.split(logits, [len(sequence.token_ids) for sequence in sequences])
        return [_log_likelihood(part, key) for part, key in zip(parts, keys, strict=True)]


def _log_likelihood(log_p: torch.Tensor, key: Sequence[int]) -> float:
    """log_p [tokens, vocab_size] of the rows before and at the key's tokens, which stand last."""
    before = log_p[-len(key) - 1 : -1]
    return float(before.gather(1, torch.tensor(key)[:, None]).sum())


def passkey_prompt(tokenizer: Tokenizer, length: int, depth: float, seed: int) -> tuple[list[int], list[list[int]]]:
    """A prompt that, with its key, is at most ``length`` tokens long, the key at ``depth`` of its filler; and NUM_KEYS keys, the true one
    first."""
    rng = random.Random(f"{seed} {length} {depth}")

    def build(num_fillers: int) -> tuple[str, str]:
        before = round(depth * num_fillers)
        document = passkey_document(random.Random(f"{seed} {depth}"), before, num_fillers - before)
        return document.text, document.key

    few, more = (len(tokenizer.encode(build(count)[0])) for count in (0, 8))
    num_fillers = max(0, (length - 8 - few) * 8 // (more - few))
    while num_fillers and len(tokenizer.encode(build(num_fillers)[0])) > length - 8:
        num_fillers -= 1
    text, key = build(num_fillers)
    prompt = tokenizer.encode(text)
    others = rng.sample([str(number) for number in range(10_000, 100_000) if str(number) != key], NUM_KEYS - 1)
    keys = [tokenizer.encode(f"{text} {each}") for each in (key, *others)]
    assert all(ids[: len(prompt)] == prompt for ids in keys), "the key's tokens begin within the prompt's"
    return prompt, [ids[len(prompt) :] for ids in keys]

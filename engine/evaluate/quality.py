"""Perplexity, KL and greedy agreement of KV formats against float32, over windows of text that the model reads as a server would.

Each window is one sequence, prefilled in chunks through the attention backend and the paged cache of the format: a query reads its
own block unquantized and every earlier one as it was sealed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.attention.backend import choose_backend
from engine.attention.sealing import seal
from engine.config import CacheConfig
from engine.kv.format import SEALED_TYPES, KVFormat
from engine.kv.offload import HostBuffer
from engine.kv.storage import KVStorage
from engine.load import build_runner, kv_format
from engine.model.checkpoint import Checkpoint
from engine.model.rotary_order import order_rotary_rows
from engine.model.value_rotation import rotate_values
from engine.model.weights import ModelWeights, load_weights
from engine.rope_classes import plan_rope, rope_classes
from engine.sched.plan import ScheduledSequence, StepPlan

BASE = "float32"  # what the others are held against
CPU = torch.device("cpu")


@dataclass(slots=True)
class Tally:
    """Sums over the tokens that have a next one in their window."""

    num_tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    num_agreed: int = 0

    def add(self, logits: torch.Tensor, base_logits: torch.Tensor, next_tokens: torch.Tensor) -> None:
        """logits [tokens, vocab_size] of this format and of the base; next_tokens int64 [tokens]."""
        log_p, base_log_p = logits.float().log_softmax(-1), base_logits.float().log_softmax(-1)
        self.num_tokens += len(next_tokens)
        self.nll -= log_p.gather(1, next_tokens[:, None]).double().sum().item()
        self.kl += (base_log_p.exp() * (base_log_p - log_p)).sum(-1).double().sum().item()
        self.num_agreed += int((log_p.argmax(-1) == base_log_p.argmax(-1)).sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.num_tokens)


@dataclass(frozen=True, slots=True)
class Quality:
    """What a format costs. ``ratio`` is against the same cache in bfloat16; ``change`` is of the perplexity, against float32."""

    kv_dtype: str
    bytes_per_token: float
    ratio: float
    perplexity: float
    change: float
    kl: float
    agreement: float
    num_tokens: int


class Reader:
    """The model over one format's cache, which holds ``num_sequences`` sequences of ``window`` tokens."""

    def __init__(
        self, checkpoint: Checkpoint, weights: ModelWeights, fmt: KVFormat, window: int, backend: str, num_sequences: int
    ) -> None:
        self.format = fmt
        self._blocks_each = -(-window // fmt.block_size)
        num_tail_slots = num_sequences if fmt.is_quantized else 0
        self._storage = KVStorage(fmt, num_sequences * self._blocks_each, CPU, num_tail_slots)
        attention = choose_backend(backend, self._storage, checkpoint.config.num_heads, torch.float32)
        classes = rope_classes(plan_rope(checkpoint.config, None, "static", window), window)
        self.runner = build_runner(checkpoint.config, weights, attention, HostBuffer(self._storage, 0), classes, CPU)

    def sequence(self, tokens: Sequence[int], start: int, index: int = 0) -> ScheduledSequence:
        """Tokens to compute at positions from ``start`` on, in the blocks and tail slot of sequence ``index``."""
        first = index * self._blocks_each
        table = tuple(range(first, first + -(-(start + len(tokens)) // self.format.block_size)))
        return ScheduledSequence(str(index), tuple(tokens), start, table, 0, None, index if self.format.is_quantized else None)

    def fill(self) -> None:
        """Give every block some content, as if it had been computed: for timing."""
        fmt, storage = self.format, self._storage
        if not fmt.is_quantized:
            storage.elements.normal_()
            return
        storage.tails.normal_()
        tile = torch.randn((64, fmt.num_kv_heads, fmt.block_size, fmt.head_dim))
        picked = torch.arange(len(storage.bytes)) % len(tile)
        sealed = {kind: seal(tile, kind) for kind in SEALED_TYPES[fmt.dtype]}
        for layer in range(fmt.num_layers):
            for parts in fmt.sealed(layer):
                content = sealed[parts.kind]
                storage.part(parts.codes)[:] = content.codes[picked]
                storage.part(parts.scales)[:] = content.scales[picked]
                if parts.zeros is not None and content.zeros is not None:
                    storage.part(parts.zeros)[:] = content.zeros[picked]


def open_readers(
    checkpoint: Checkpoint, kv_dtypes: Sequence[str], window: int, block_size: int, backend: str, num_sequences: int = 1
) -> list[Reader]:
    """One for each format. The formats that store V rotated share a second set of weights."""
    formats = [
        kv_format(CacheConfig(kv_dtype=name, block_size=block_size), checkpoint.config, "float32", CPU) for name in kv_dtypes
    ]
    weights = {}
    for rotates in {fmt.rotates_values for fmt in formats}:
        weights[rotates] = load_weights(checkpoint, dtype=torch.float32, device=CPU, progress=lambda done, total: None)
        config = checkpoint.config
        order_rotary_rows(weights[rotates], config.rope, config.num_heads, config.num_kv_heads)
        if rotates:
            rotate_values(weights[rotates], config.num_kv_heads, config.head_dim)
    return [Reader(checkpoint, weights[fmt.rotates_values], fmt, window, backend, num_sequences) for fmt in formats]


def measure(
    readers: Sequence[Reader], windows: Sequence[Sequence[int]], chunk: int, on_chunk: Callable[[], None] = lambda: None
) -> list[Quality]:
    """Let every reader read every window, ``chunk`` tokens at a time; the first reader's format is the base."""
    tallies = [Tally() for _ in readers]
    for tokens in windows:
        for start, end in _chunks(len(tokens), chunk):
            next_tokens = torch.tensor(tokens[start + 1 : end + 1])
            base: torch.Tensor | None = None
            for reader, tally in zip(readers, tallies, strict=True):
                logits = reader.runner.score(StepPlan((reader.sequence(tokens[start:end], start),)))[: len(next_tokens)]
                base = logits if base is None else base
                tally.add(logits, base, next_tokens)
                on_chunk()
    return [_quality(reader.format, tally, tallies[0]) for reader, tally in zip(readers, tallies, strict=True)]


def _chunks(length: int, chunk: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, chunk):
        yield start, min(start + chunk, length)


def _quality(fmt: KVFormat, tally: Tally, base: Tally) -> Quality:
    bfloat16_bytes = 2 * fmt.num_layers * fmt.num_kv_heads * fmt.head_dim * 2
    return Quality(
        kv_dtype=fmt.dtype,
        bytes_per_token=fmt.bytes_per_token,
        ratio=fmt.bytes_per_token / bfloat16_bytes,
        perplexity=tally.perplexity,
        change=tally.perplexity / base.perplexity - 1,
        kl=tally.kl / tally.num_tokens,
        agreement=tally.num_agreed / tally.num_tokens,
        num_tokens=tally.num_tokens,
    )

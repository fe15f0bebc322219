"""Both backends over quantized caches, against float64 attention written out by hand over what the sealing rule says is read."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.backend import AttentionBackend, choose_backend
from engine.attention.metadata import AttentionWork, WorkItem
from engine.attention.sealing import seal, unseal
from engine.kv.format import SEALED_TYPES, KVFormat
from engine.kv.storage import KVStorage
from tests.tiny_folder import one_thread

__all__ = ["one_thread"]

BACKENDS = ("reference", "cpu")
TOLERANCE = {"float32": 3e-6, "bfloat16": 3e-2, "float16": 4e-3}
LAYER = 1


@dataclass
class Sequence:
    """A sequence with all its K, V and Q, its blocks and tail slot, and how much of it has been computed."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: tuple[int, ...]
    tail_slot: int
    computed: int = 0
    out: list[torch.Tensor] = field(default_factory=list)


class Cache:
    """A backend over a storage full of NaN, and sequences that it computes step by step."""

    def __init__(
        self,
        backend: str,
        dtype: str,
        lengths: list[int],
        *,
        heads: tuple[int, int, int] = (9, 3, 64),
        block_size: int = 16,
        compute: str = "float32",
        window: int | None = None,
    ) -> None:
        num_heads, kv_heads, head_dim = heads
        self.block_size = block_size
        self.window = window
        self.dtype = getattr(torch, compute)
        fmt = KVFormat(
            dtype=dtype, num_layers=2, num_kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, tail_dtype="float32"
        )
        counts = [-(-length // block_size) for length in lengths]
        ids = list(range(sum(counts) + 3))
        random.Random(5).shuffle(ids)
        self.storage = KVStorage(fmt, len(ids), torch.device("cpu"), num_tail_slots=len(lengths) + 1)
        self.storage.bytes.fill_(0xFF)
        self.storage.tails.fill_(float("nan"))
        self.backend: AttentionBackend = choose_backend(backend, self.storage, num_heads, self.dtype)
        generator = torch.Generator().manual_seed(sum(lengths))

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        self.sequences = [
            Sequence(
                randn(length, num_heads, head_dim),
                randn(length, kv_heads, head_dim) * 2 + randn(kv_heads, head_dim),
                randn(length, kv_heads, head_dim),
                tuple(ids.pop() for _ in range(count)),
                slot,
            )
            for slot, (length, count) in enumerate(zip(lengths, counts, strict=True), start=1)
        ]

    def step(self, counts: list[int]) -> None:
        """Compute the next tokens of each sequence, as many as ``counts`` says (0: it sits this step out)."""
        chosen = [(s, n) for s, n in zip(self.sequences, counts, strict=True) if n]
        rows = [slice(s.computed, s.computed + n) for s, n in chosen]
        items, row = [], 0
        for s, n in chosen:
            first_block = 0 if self.window is None else max(0, s.computed - self.window + 1) // self.block_size
            used = s.table[first_block : -(-(s.computed + n) // self.block_size)]
            self.storage.bytes[list(s.table[:first_block])] = 0xFF
            start, end = first_block * self.block_size, s.computed + n
            items.append(WorkItem(row, n, s.computed, used, start, end, s.tail_slot, self.window))
            row += n
        q, k, v = (
            torch.cat([getattr(s, name)[span] for (s, _), span in zip(chosen, rows, strict=True)]) for name in ("q", "k", "v")
        )
        fused = torch.cat((k, v), dim=1)  # as the model gives them: views into one fused row
        self.backend.plan(AttentionWork(tuple(items), (0,) * row, self.block_size))
        out = self.backend.run(LAYER, q, fused[:, : k.shape[1]], fused[:, k.shape[1] :])
        for (s, n), part in zip(chosen, out.split([n for _, n in chosen]), strict=True):
            s.out.append(part)
            s.computed += n


def expected(s: Sequence, dtype: str, block_size: int, window: int | None = None) -> torch.Tensor:
    sealed = []
    for x, kind in zip((s.k, s.v), SEALED_TYPES[dtype], strict=True):
        num_full = len(x) // block_size
        full = x[: num_full * block_size].float().unflatten(0, (num_full, block_size)).transpose(1, 2)
        sealed.append(unseal(seal(full.contiguous(), kind), kind).transpose(1, 2).flatten(0, 1).to(x.dtype).double())
    group = s.q.shape[1] // s.k.shape[1]
    out = torch.empty(s.q.shape, dtype=torch.float64)
    for i in range(s.computed):
        own = i // block_size * block_size
        k, v = (torch.cat((y[:own], x[own : i + 1].double())) for y, x in zip(sealed, (s.k, s.v), strict=True))
        first = 0 if window is None else max(0, i + 1 - window)
        k, v = k[first:], v[first:]
        for h in range(s.q.shape[1]):
            scores = k[:, h // group] @ s.q[i, h].double() / s.q.shape[2] ** 0.5
            out[i, h] = torch.softmax(scores, dim=0) @ v[:, h // group]
    return out


def check(cache: Cache, dtype: str, compute: str = "float32") -> None:
    for s in cache.sequences:
        got = torch.cat(s.out).double()
        torch.testing.assert_close(
            got,
            expected(s, dtype, cache.block_size, cache.window)[: s.computed],
            atol=TOLERANCE[compute],
            rtol=TOLERANCE[compute],
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", SEALED_TYPES)
def test_decodes_and_prefills_in_one_batch_match_float64(backend: str, dtype: str) -> None:
    cache = Cache(backend, dtype, [40, 330, 17, 48])
    for counts in ([5, 300, 0, 16], [1, 1, 15, 1], [1, 20, 1, 30], [33, 1, 1, 1], [0, 8, 0, 0]):
        cache.step(counts)
    check(cache, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "window"), [("int8", 1), ("int8", 40), ("k8v4", 16), ("int4", 7), ("fp8", 100)])
def test_a_query_sees_its_window_only(backend: str, dtype: str, window: int) -> None:
    cache = Cache(backend, dtype, [60, 330, 37, 48], heads=(4, 2, 16), window=window)
    for counts in ([5, 300, 0, 16], [1, 1, 15, 1], [1, 20, 1, 30], [33, 1, 1, 1], [1, 8, 19, 0], [1, 0, 1, 0]):
        cache.step(counts)
    check(cache, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "block_size"), [((4, 4, 32), 1), ((8, 1, 16), 5), ((14, 2, 64), 32), ((3, 3, 6), 3)])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_head_shapes_and_block_sizes(backend: str, heads: tuple[int, int, int], block_size: int, dtype: str) -> None:
    cache = Cache(backend, dtype, [70, 9], heads=heads, block_size=block_size)
    for counts in ([3, 1], [60, 1], [1, 7], [1, 0], [1, 0]):
        cache.step(counts)
    check(cache, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_other_compute_types(backend: str, compute: str) -> None:
    cache = Cache(backend, "int8", [40], compute=compute)
    for counts in ([20], [1], [11], [1]):
        cache.step(counts)
    check(cache, "int8", compute)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_chunking_seals_the_same_bytes_in_both_backends(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(SEALED_TYPES)))
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    whole = Cache("reference", dtype, lengths, heads=(4, 2, 8), block_size=4)
    whole.step(lengths)
    pieces = {name: Cache(name, dtype, lengths, heads=(4, 2, 8), block_size=4) for name in BACKENDS}
    sizes = iter(data.draw(st.lists(st.integers(0, 9), max_size=12)))
    while any(s.computed < len(s.q) for s in pieces["cpu"].sequences):
        counts = [min(next(sizes, 3), len(s.q) - s.computed) for s in pieces["cpu"].sequences]
        if any(counts):
            for cache in pieces.values():
                cache.step(counts)
    for cache in pieces.values():
        assert torch.equal(cache.storage.bytes, whole.storage.bytes)
        for one, other in zip(cache.sequences, whole.sequences, strict=True):
            torch.testing.assert_close(torch.cat(one.out), other.out[0], atol=3e-6, rtol=3e-6)


def test_a_decode_has_the_same_bits_alone_and_in_a_batch() -> None:
    lengths = [100 + 31 * i for i in range(8)]
    batch, alone = (Cache("cpu", "int8", lengths, heads=(3, 1, 16)) for _ in range(2))
    batch.step([length - 1 for length in lengths])
    alone.step([length - 1 for length in lengths])
    batch.step([1] * len(lengths))
    for index in range(len(lengths)):
        alone.step([int(i == index) for i in range(len(lengths))])
    for one, other in zip(alone.sequences, batch.sequences, strict=True):
        assert torch.equal(one.out[-1], other.out[-1])


@pytest.mark.parametrize("length", [255, 256, 257, 700])
def test_decode_across_the_split_length(length: int) -> None:
    cache = Cache("cpu", "k8v4", [length], heads=(2, 1, 16), block_size=7)
    cache.step([length - 1])
    cache.step([1])
    check(cache, "k8v4")

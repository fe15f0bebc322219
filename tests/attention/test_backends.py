"""Every backend against float64 attention written out by hand, over shuffled block tables in a cache full of NaN."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from engine.attention.backend import AttentionBackend, choose_backend
from engine.attention.metadata import AttentionWork, WorkItem
from engine.kv.format import KVFormat
from engine.kv.storage import KVStorage

BACKENDS = ("reference", "cpu")
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}


@dataclass
class Case:
    """Sequences of (context before, new tokens) with random K, V and Q, and the storage that holds the contexts."""

    backend: AttentionBackend
    work: AttentionWork
    q: torch.Tensor
    k_new: torch.Tensor
    v_new: torch.Tensor
    k: list[torch.Tensor]
    v: list[torch.Tensor]

    def run(self) -> torch.Tensor:
        self.backend.plan(self.work)
        return self.backend.run(1, self.q, self.k_new, self.v_new)


def make_case(
    name: str,
    sequences: list[tuple[int, int]],
    *,
    dtype: str = "float32",
    heads: tuple[int, int, int] = (9, 3, 64),
    block_size: int = 16,
    window: int | None = None,
) -> Case:
    num_heads, kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(sum(a + 3 * b for a, b in sequences))
    torch_dtype = getattr(torch, dtype)
    tables, num_blocks = make_tables(sequences, block_size)
    storage = KVStorage(
        KVFormat(dtype=dtype, num_layers=2, num_kv_heads=kv_heads, head_dim=head_dim, block_size=block_size),
        num_blocks,
        torch.device("cpu"),
    )
    storage.elements.fill_(float("nan"))
    ks, vs, items, slots = [], [], [], []
    row = 0
    for (before, new), table in zip(sequences, tables, strict=True):
        k, v = (torch.randn((before + new, kv_heads, head_dim), generator=generator).to(torch_dtype) for _ in range(2))
        first_block = 0 if window is None else max(0, before - window + 1) // block_size
        for position in range(first_block * block_size, before):
            block, offset = table[position // block_size], position % block_size
            storage.k(1)[block, :, offset] = k[position]
            storage.v(1)[block, :, offset] = v[position]
        held = tuple(table[first_block:])
        items.append(WorkItem(row, new, before, held, first_block * block_size, before + new, window=window))
        slots.extend(table[p // block_size] * block_size + p % block_size for p in range(before, before + new))
        ks.append(k)
        vs.append(v)
        row += new
    q = torch.randn((row, num_heads, head_dim), generator=generator).to(torch_dtype)
    # as the model gives them: views into one fused row
    fused = torch.cat([torch.cat((k[b:], v[b:]), dim=1) for (b, _), k, v in zip(sequences, ks, vs, strict=True)])
    work = AttentionWork(tuple(items), tuple(slots), block_size)
    return Case(
        choose_backend(name, storage, num_heads, torch_dtype), work, q, fused[:, :kv_heads], fused[:, kv_heads:], ks, vs
    )


def make_tables(sequences: list[tuple[int, int]], block_size: int) -> tuple[list[list[int]], int]:
    counts = [-(-(a + b) // block_size) for a, b in sequences]
    ids = list(range(sum(counts) + 3))
    random.Random(5).shuffle(ids)
    return [[ids.pop() for _ in range(count)] for count in counts], sum(counts) + 3


def expected(case: Case) -> torch.Tensor:
    out = []
    for item, k, v in zip(case.work.items, case.k, case.v, strict=True):
        group = case.q.shape[1] // k.shape[1]
        for i in range(item.num_queries):
            end = item.first_position + i + 1
            seen = slice(0 if item.window is None else max(0, end - item.window), end)
            for h in range(case.q.shape[1]):
                q, kh, vh = (
                    case.q[item.query_start + i, h].double(),
                    k[seen, h // group].double(),
                    v[seen, h // group].double(),
                )
                out.append(torch.softmax(kh @ q / q.shape[0] ** 0.5, dim=0) @ vh)
    return torch.stack(out).view(case.q.shape)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_decodes_and_prefills_in_one_batch_match_float64(name: str, dtype: str) -> None:
    case = make_case(name, [(0, 1), (5, 1), (300, 1), (0, 7), (33, 20), (15, 1), (16, 1)], dtype=dtype)
    torch.testing.assert_close(case.run().double(), expected(case), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "heads", [(4, 4, 32), (8, 1, 16), (14, 2, 64), (2, 2, 128), (3, 3, 6), (8, 2, 12), (10, 2, 40), (4, 2, 72)]
)
@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_head_shapes_and_block_sizes(name: str, heads: tuple[int, int, int], block_size: int) -> None:
    case = make_case(name, [(40, 1), (3, 1), (17, 6)], heads=heads, block_size=block_size)
    torch.testing.assert_close(case.run().double(), expected(case), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 700])
def test_decode_across_the_split_length(length: int) -> None:
    case = make_case("cpu", [(length - 1, 1)], block_size=7)
    torch.testing.assert_close(case.run().double(), expected(case), atol=2e-6, rtol=2e-6)


def test_a_prefill_longer_than_what_torch_gets_at_once() -> None:
    case = make_case("cpu", [(37, 530)], heads=(2, 1, 16))
    torch.testing.assert_close(case.run().double(), expected(case), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("window", [1, 2, 16, 31, 270])
def test_a_query_sees_its_window_only_and_blocks_behind_it_are_not_there(name: str, window: int) -> None:
    sequences = [(0, 1), (300, 1), (0, 40), (33, 20), (15, 1), (16, 1), (700, 300)]
    case = make_case(name, sequences, heads=(4, 2, 16), window=window)
    torch.testing.assert_close(case.run().double(), expected(case), atol=2e-6, rtol=2e-6)


def test_a_windowed_decode_has_the_same_bits_whatever_is_held_behind_the_window() -> None:
    """That depends on the chunks before."""
    case = make_case("cpu", [(700, 1)], window=300)
    out = case.run()
    (item,) = case.work.items
    more = WorkItem(0, 1, 700, (0, *item.block_ids), item.start - 16, 701, window=300)
    case.backend.plan(AttentionWork((more,), case.work.slots, 16))
    assert torch.equal(case.backend.run(1, case.q, case.k_new, case.v_new), out)


def test_large_scores_do_not_overflow_and_nan_stays_nan() -> None:
    case = make_case("cpu", [(300, 1)])
    case.q *= 200.0
    torch.testing.assert_close(case.run().double(), expected(case), atol=1e-4, rtol=1e-4)
    case.v_new.fill_(float("nan"))
    assert case.run().isnan().any()


def test_a_decode_has_the_same_bits_alone_and_in_a_batch() -> None:
    batch = make_case("cpu", [(100 + 31 * i, 1) for i in range(16)])
    together = batch.run()
    for index, item in enumerate(batch.work.items):
        rows = slice(index, index + 1)
        alone = AttentionWork(
            (WorkItem(0, 1, item.first_position, item.block_ids, 0, item.end),), (batch.work.slots[index],), 16
        )
        batch.backend.plan(alone)
        assert torch.equal(batch.backend.run(1, batch.q[rows], batch.k_new[rows], batch.v_new[rows]), together[rows])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_both_backends_leave_the_same_bytes_in_the_cache(dtype: str) -> None:
    cases = [make_case(name, [(5, 1), (0, 20)], dtype=dtype) for name in BACKENDS]
    for case in cases:
        case.run()
    first, second = (case.backend._storage.bytes for case in cases)  # type: ignore[attr-defined]
    assert torch.equal(first, second)

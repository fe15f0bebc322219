"""The CPU backend: numba kernels read decode contexts in place; prefill gathers a sequence's blocks for torch's attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention import cpu_kernels
from engine.attention.metadata import AttentionWork, WorkItem
from engine.attention.reference import PreparedItem, attend_item, prepare_item
from engine.kv.storage import KVStorage

QUERIES_AT_A_TIME = 256  # rows of a prefill that torch's attention gets at once

# How numba is shown the elements of each type, 16-bit floats as their bits; and how ``cpu_kernels.decode`` is told of it.
BITS_VIEW = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.uint16}
ELEMENTS = {torch.float32: cpu_kernels.FLOAT32, torch.bfloat16: cpu_kernels.BFLOAT16, torch.float16: cpu_kernels.FLOAT16}


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The decode items of a step, split into units of at most SPLIT tokens, and room for the units' results.

    rows int64 [sequences], the batch row of each; tables int32 [sequences, blocks]; units int32 [units, 3]; first_unit int32
    [sequences + 1]; partial float32 [units, kv_heads, group, head_dim]; peaks, totals float32 [units, kv_heads, group].
    """

    rows: NDArray[np.int64]
    tables: NDArray[np.int32]
    units: NDArray[np.int32]
    first_unit: NDArray[np.int32]
    partial: NDArray[np.float32]
    peaks: NDArray[np.float32]
    totals: NDArray[np.float32]


def plan_decode(items: list[WorkItem], kv_heads: int, group: int, head_dim: int) -> DecodePlan | None:
    if not items:
        return None
    tables = np.zeros((len(items), max(len(item.block_ids) for item in items)), np.int32)
    units: list[tuple[int, int, int]] = []
    first_unit = [0]
    for seq, item in enumerate(items):
        tables[seq, : len(item.block_ids)] = item.block_ids
        length = item.end - item.start
        starts = range(item.first_seen(item.first_position) - item.start, length, cpu_kernels.SPLIT)
        units.extend((seq, start, min(start + cpu_kernels.SPLIT, length)) for start in starts)
        first_unit.append(len(units))
    return DecodePlan(
        rows=np.array([item.query_start for item in items], np.int64),
        tables=tables,
        units=np.array(units, np.int32),
        first_unit=np.array(first_unit, np.int32),
        partial=np.empty((len(units), kv_heads, group, head_dim), np.float32),
        peaks=np.empty((len(units), kv_heads, group), np.float32),
        totals=np.empty((len(units), kv_heads, group), np.float32),
    )


def contiguous(q: torch.Tensor) -> NDArray[np.float32]:
    """Queries as ``decode`` takes them: another layout would be another compilation."""
    return q.flatten(1).float().contiguous().numpy()


def split_queries(item: WorkItem, block_size: int) -> Iterator[WorkItem]:
    """The item as items of at most QUERIES_AT_A_TIME rows: none of them gathers blocks that none of its rows sees."""
    for first in range(0, item.num_queries, QUERIES_AT_A_TIME):
        num_queries = min(QUERIES_AT_A_TIME, item.num_queries - first)
        first_position = item.first_position + first
        end = min(item.end, first_position + num_queries)
        first_block = (item.first_seen(first_position) - item.start) // block_size
        yield replace(
            item,
            query_start=item.query_start + first,
            num_queries=num_queries,
            first_position=first_position,
            block_ids=item.block_ids[first_block : -(-(end - item.start) // block_size)],
            start=item.start + first_block * block_size,
            end=end,
        )


class CPUAttention:
    """See ``AttentionBackend``. Decode contexts are split at fixed lengths, so a row's result never depends on its neighbours."""

    name = "cpu"

    def __init__(self, storage: KVStorage, num_heads: int, dtype: torch.dtype) -> None:
        self.format = storage.format
        self.pool = storage.elements.view(BITS_VIEW[storage.elements.dtype]).numpy()
        self.slots = np.empty(0, np.int64)
        self.decode: DecodePlan | None = None
        self._storage = storage
        self._dtype = dtype
        self._group = num_heads // storage.format.num_kv_heads
        self._prefill: tuple[PreparedItem, ...] = ()

    @property
    def is_decode_only(self) -> bool:
        return not self._prefill

    def plan(self, work: AttentionWork) -> None:
        fmt, device = self.format, self._storage.bytes.device
        self.slots = np.array(work.slots, np.int64)
        decodes = [item for item in work.items if item.num_queries == 1]
        self.decode = plan_decode(decodes, fmt.num_kv_heads, self._group, fmt.head_dim)
        pieces = (piece for item in work.items if item.num_queries > 1 for piece in split_queries(item, work.block_size))
        self._prefill = tuple(prepare_item(piece, self._dtype, device) for piece in pieces)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        fmt, stored = self.format, self._storage.elements.dtype
        k_bits, v_bits = (x.flatten(1).to(stored).view(BITS_VIEW[stored]).numpy() for x in (k, v))
        offsets = fmt.k_offset(layer), fmt.v_offset(layer)
        cpu_kernels.store_kv(k_bits, v_bits, self.slots, self.pool, *offsets, fmt.block_size, fmt.head_dim)
        out = torch.empty(q.shape, dtype=q.dtype)
        if self.decode is not None:
            self._run_decode(self.decode, layer, q, out)
        for prepared in self._prefill:
            rows = slice(prepared.item.query_start, prepared.item.query_start + prepared.item.num_queries)
            out[rows] = attend_item(prepared, q[rows], self._storage.k(layer), self._storage.v(layer))
        return out

    def decode_arguments(self) -> tuple[Any, ...] | None:
        """In the order in which ``cpu_decode_kernels`` takes them; None when nothing decodes."""
        plan = self.decode
        if plan is None:
            return None
        return self.slots, plan.rows, plan.tables, plan.units, plan.first_unit, plan.partial, plan.peaks, plan.totals

    def cache_arguments(self, layer: int) -> tuple[Any, ...]:
        fmt = self.format
        offsets, scale = (fmt.k_offset(layer), fmt.v_offset(layer)), np.float32(fmt.head_dim**-0.5)
        return self.pool, *offsets, fmt.block_size, fmt.num_kv_heads, fmt.head_dim, scale

    def _run_decode(self, plan: DecodePlan, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        fmt = self.format
        wide = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32)
        cpu_kernels.decode(
            contiguous(q), plan.rows, fmt.num_kv_heads, fmt.head_dim, self.pool.view(np.uint8),
            ELEMENTS[self._storage.elements.dtype], fmt.k_offset(layer), fmt.v_offset(layer), plan.tables, plan.units,
            np.float32(fmt.head_dim**-0.5), fmt.block_size, plan.partial, plan.peaks, plan.totals,
        )  # fmt: skip
        cpu_kernels.merge(plan.partial, plan.peaks, plan.totals, plan.first_unit, plan.rows, wide.flatten(1).numpy())
        if wide is not out:
            rows = torch.from_numpy(plan.rows)
            out[rows] = wide[rows].to(out.dtype)

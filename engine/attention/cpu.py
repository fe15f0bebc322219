"""The CPU backend: numba kernels read decode contexts in place; prefill gathers a sequence's blocks for torch's attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention import cpu_kernels
from engine.attention.metadata import AttentionWork, WorkItem
from engine.attention.reference import PreparedItem, attend_item, prepare_item
from engine.kv.storage import KVStorage

# How numba is shown the elements of each type; 16-bit floats as their bits, see cpu_kernels.load_tile.
BITS_VIEW = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The decode items of a step, split into units of at most SPLIT tokens.

    rows int64 [sequences]; tables int32 [sequences, blocks]; units int32 [units, 3]; first_unit int32 [sequences + 1].
    """

    rows: torch.Tensor
    tables: NDArray[np.int32]
    units: NDArray[np.int32]
    first_unit: NDArray[np.int32]

    @property
    def num_units(self) -> int:
        return len(self.units)


def plan_decode(items: list[WorkItem]) -> DecodePlan | None:
    if not items:
        return None
    tables = np.zeros((len(items), max(len(item.block_ids) for item in items)), np.int32)
    units: list[tuple[int, int, int]] = []
    first_unit = [0]
    for seq, item in enumerate(items):
        tables[seq, : len(item.block_ids)] = item.block_ids
        length = item.end - item.start
        starts = range(0, length, cpu_kernels.SPLIT)
        units.extend((seq, start, min(start + cpu_kernels.SPLIT, length)) for start in starts)
        first_unit.append(len(units))
    return DecodePlan(
        rows=torch.tensor([item.query_start for item in items], dtype=torch.long),
        tables=tables,
        units=np.array(units, np.int32),
        first_unit=np.array(first_unit, np.int32),
    )


class CPUAttention:
    """See ``AttentionBackend``. Decode contexts are split at fixed lengths, so a row's result never depends on its neighbours."""

    name = "cpu"

    def __init__(self, storage: KVStorage) -> None:
        self._storage = storage
        self._dtype = storage.elements.dtype
        self._pool = storage.elements.view(BITS_VIEW[self._dtype]).numpy()
        self._slots = np.empty(0, np.int64)
        self._decode: DecodePlan | None = None
        self._prefill: tuple[PreparedItem, ...] = ()

    def plan(self, work: AttentionWork) -> None:
        device = self._storage.bytes.device
        self._slots = np.array(work.slots, np.int64)
        self._decode = plan_decode([item for item in work.items if item.num_queries == 1])
        self._prefill = tuple(prepare_item(item, self._dtype, device) for item in work.items if item.num_queries > 1)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        fmt = self._storage.format
        bits = BITS_VIEW[self._dtype]
        offsets = fmt.k_offset(layer), fmt.v_offset(layer)
        cpu_kernels.store_kv(k.view(bits).numpy(), v.view(bits).numpy(), self._slots, self._pool, *offsets, fmt.block_size)
        out = torch.empty(q.shape, dtype=q.dtype)
        if self._decode is not None:
            self._run_decode(self._decode, layer, q, out)
        for prepared in self._prefill:
            rows = slice(prepared.item.query_start, prepared.item.query_start + prepared.item.num_queries)
            out[rows] = attend_item(prepared, q[rows], self._storage.k(layer), self._storage.v(layer))
        return out

    def _run_decode(self, plan: DecodePlan, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        fmt = self._storage.format
        group = q.shape[1] // fmt.num_kv_heads
        queries = q[plan.rows].float().view(len(plan.rows), fmt.num_kv_heads, group, fmt.head_dim).numpy()
        partial = np.empty((plan.num_units, *queries.shape[1:]), np.float32)
        peaks = np.empty(partial.shape[:3], np.float32)
        totals = np.empty(partial.shape[:3], np.float32)
        cpu_kernels.decode(
            queries, self._pool, fmt.k_offset(layer), fmt.v_offset(layer), plan.tables, plan.units,
            np.float32(fmt.head_dim**-0.5), fmt.block_size, partial, peaks, totals,
        )  # fmt: skip
        cpu_kernels.merge(
            partial, peaks, totals, plan.first_unit, queries
        )  # the queries are spent: their memory takes the result
        out[plan.rows] = torch.from_numpy(queries).view(len(plan.rows), q.shape[1], fmt.head_dim).to(out.dtype)

"""The CPU backend over a quantized cache: numba seals and unseals blocks, and decodes over their bytes in place; prefill is torch's
attention over unsealed blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention import cpu_kernels, cpu_sealed_kernels
from engine.attention.cpu import QUERIES_AT_A_TIME, DecodePlan, contiguous, plan_decode
from engine.attention.metadata import AttentionWork, WorkItem
from engine.attention.sealed_reference import SealedReferenceAttention
from engine.kv.format import KVFormat, SealedParts, SealedType
from engine.kv.storage import KVStorage

Kind = tuple[int, bool, int, bool]  # (bits, e4m3, zero_step, per_channel): how the kernels are told of a SealedType
Offsets = tuple[int, int, int]  # (codes, scales, zeros) in bytes


def as_kind(kind: SealedType) -> Kind:
    return kind.bits, kind.e4m3, kind.zero_step, kind.per_channel


def as_offsets(parts: SealedParts) -> Offsets:
    return parts.codes.offset, parts.scales.offset, parts.zeros.offset if parts.zeros is not None else 0


class NumbaCodec:
    """See ``BlockCodec``. Gives the bytes and values that TorchCodec gives."""

    def __init__(self, storage: KVStorage) -> None:
        self._format = storage.format
        self._pool = storage.bytes.numpy()

    def write(self, parts: SealedParts, block_ids: torch.Tensor, x: torch.Tensor) -> None:
        fmt, source = self._format, x.float().reshape(len(x), -1).numpy()
        rows = np.arange(len(x))
        kind, at = as_kind(parts.kind), as_offsets(parts)
        shape = fmt.num_kv_heads, fmt.block_size, fmt.head_dim
        cpu_sealed_kernels.seal(source, rows, 0, self._pool, block_ids.numpy(), kind, at, shape)

    def read(self, parts: SealedParts, block_ids: torch.Tensor) -> torch.Tensor:
        fmt = self._format
        out = torch.empty((fmt.num_kv_heads, len(block_ids) * fmt.block_size, fmt.head_dim))
        cpu_sealed_kernels.unseal(
            self._pool, block_ids.numpy(), as_kind(parts.kind), as_offsets(parts), out.numpy(), fmt.block_size
        )
        return out


class CacheArguments(NamedTuple):
    """A layer's cache as the kernels take it: the pool uint8 [num_blocks, block_bytes], the tails float32 [tail slots, elements],
    (KV heads, block size, head size), the softmax scale, K's and V's place in a block, and their first elements in a tail slot."""

    pool: NDArray[np.uint8]
    tails: NDArray[np.float32]
    shape: tuple[int, int, int]
    scale: np.float32
    parts: tuple[tuple[Kind, Offsets], tuple[Kind, Offsets]]
    tail_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class SealedDecodePlan:
    """The decode items of a step. ``plan`` as in the float formats; the rest is int64, one to each sequence.

    ``tail_slots``; ``tail_rows``: where the new row goes, tail slot * block_size + offset; ``tail_starts``: the first token of
    the table that is read out of the tail. The sequences whose block fills have their slots in ``full_slots`` and their blocks in
    ``full_ids``.
    """

    plan: DecodePlan
    tail_slots: NDArray[np.int64]
    tail_rows: NDArray[np.int64]
    tail_starts: NDArray[np.int64]
    full_slots: NDArray[np.int64]
    full_ids: NDArray[np.int64]

    @property
    def arguments(self) -> tuple[NDArray[np.int64] | NDArray[np.int32] | NDArray[np.float32], ...]:
        """In the order in which ``cpu_sealed_decode_kernels`` takes them."""
        plan = self.plan
        return (
            self.tail_rows, self.tail_slots, self.tail_starts, self.full_slots, self.full_ids,
            plan.rows, plan.tables, plan.units, plan.first_unit, plan.partial, plan.peaks, plan.totals,
        )  # fmt: skip


def plan_sealed_decode(items: list[WorkItem], fmt: KVFormat, group: int) -> SealedDecodePlan | None:
    plan = plan_decode(items, fmt.num_kv_heads, group, fmt.head_dim)
    if plan is None:
        return None
    size = fmt.block_size
    slots = np.array([item.tail_slot for item in items], np.int64)
    positions = np.array([item.first_position - item.start for item in items], np.int64)  # in the item's own blocks
    full = [item for item in items if item.end % size == 0]
    return SealedDecodePlan(
        plan=plan,
        tail_slots=slots,
        tail_rows=slots * size + positions % size,
        tail_starts=positions - positions % size,
        full_slots=np.array([item.tail_slot for item in full], np.int64),
        full_ids=np.array([item.block_ids[(item.first_position - item.start) // size] for item in full], np.int64),
    )


class SealedCPUAttention:
    """See ``AttentionBackend``. Decode contexts are split at fixed lengths, so a row's result never depends on its neighbours.

    The tails are float32, whatever the model computes in.
    """

    name = "cpu"

    def __init__(self, storage: KVStorage, num_heads: int) -> None:
        fmt = storage.format
        assert fmt.tail_dtype == "float32"
        self._pool = storage.bytes.numpy()
        self._tails = storage.tails.flatten(1).numpy()  # [tail slots, elements]
        self._format = fmt
        self._shape = fmt.num_kv_heads, fmt.block_size, fmt.head_dim
        self._group = num_heads // fmt.num_kv_heads
        self.decode: SealedDecodePlan | None = None
        self.is_decode_only = True
        self._cache_arguments = tuple(self._arguments(layer) for layer in range(fmt.num_layers))
        self._prefill = SealedReferenceAttention(storage, NumbaCodec(storage), QUERIES_AT_A_TIME)

    def plan(self, work: AttentionWork) -> None:
        decodes = [item for item in work.items if item.num_queries == 1]
        prefills = tuple(item for item in work.items if item.num_queries > 1)
        self.decode = plan_sealed_decode(decodes, self._format, self._group)
        self.is_decode_only = not prefills
        self._prefill.plan(replace(work, items=prefills))

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        if self.decode is not None:
            self._run_decode(self.decode, layer, (q, k, v), out)
        self._prefill.run_into(out, layer, q, k, v)
        return out

    def _run_decode(
        self, decode: SealedDecodePlan, layer: int, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], out: torch.Tensor
    ) -> None:
        """Store the new rows, attend, and seal the blocks that are full now."""
        plan, fmt = decode.plan, self._format
        k, v = (x.flatten(1).float().numpy() for x in qkv[1:])
        pool, tails, shape, scale, parts, offsets = self._cache_arguments[layer]
        rows = plan.rows
        cpu_kernels.store_kv(k[rows], v[rows], decode.tail_rows, tails, *offsets, fmt.block_size, fmt.head_dim)
        cpu_sealed_kernels.decode(
            contiguous(qkv[0]), rows, shape, pool, parts, tails, offsets, decode.tail_slots, decode.tail_starts, plan.tables,
            plan.units, scale, plan.partial, plan.peaks, plan.totals,
        )  # fmt: skip
        wide = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32)
        cpu_kernels.merge(plan.partial, plan.peaks, plan.totals, plan.first_unit, rows, wide.flatten(1).numpy())
        if wide is not out:
            picked = torch.from_numpy(rows)
            out[picked] = wide[picked].to(out.dtype)
        if len(decode.full_ids):
            for (kind, at), offset in zip(parts, offsets, strict=True):
                cpu_sealed_kernels.seal(tails, decode.full_slots, offset, pool, decode.full_ids, kind, at, shape)

    def decode_arguments(self) -> tuple[Any, ...] | None:
        """In the order in which ``cpu_sealed_decode_kernels`` takes them; None when nothing decodes."""
        return self.decode.arguments if self.decode is not None else None

    def cache_arguments(self, layer: int) -> tuple[Any, ...]:
        """What the kernels need to know of a layer's cache, in the order of CacheArguments."""
        return tuple(self._cache_arguments[layer])

    def _arguments(self, layer: int) -> CacheArguments:
        fmt = self._format
        k, v = fmt.sealed(layer)
        parts = (as_kind(k.kind), as_offsets(k)), (as_kind(v.kind), as_offsets(v))
        scale = np.float32(fmt.head_dim**-0.5)
        return CacheArguments(self._pool, self._tails, self._shape, scale, parts, (fmt.k_offset(layer), fmt.v_offset(layer)))

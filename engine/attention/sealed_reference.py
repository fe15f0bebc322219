"""Attention over a quantized cache, the slow twin: in torch, one work item at a time, on any device.

A query reads its own block as it was computed and every earlier one as it was sealed, in prefill as in decode:

    keys of an item   | blocks before the last query's, as sealed | rows from the start of the first query's block on, as computed |
    query sees        | those of blocks before its own            | those of its own block, up to its own                          |

With a window, of both only what lies in it. The rows of the first query's block that earlier steps computed come out of the
sequence's tail slot. Blocks that fill are sealed;
the rows behind them go to the tail slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.attention.metadata import AttentionWork, WorkItem
from engine.attention.sealing import BlockCodec, TorchCodec
from engine.kv.format import SealedParts
from engine.kv.storage import KVStorage


@dataclass(frozen=True, slots=True)
class SealedPiece:
    """Some of an item's queries: rows [first, end) of the item. They read the first ``num_sealed`` tokens as sealed, and the raw
    rows [raw_start, raw_end), counted from the start of the block of the item's first query.
    ``mask`` bool [queries, keys]: what each
    query sees; None for all."""

    first: int
    end: int
    num_sealed: int
    raw_start: int
    raw_end: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class SealedItem:
    """A work item with its tensors.

    ``num_opened``: rows of the first query's block that are in the tail slot already; ``full_ids``: blocks that fill in this step;
    ``context_ids``: blocks before the last query's.
    """

    item: WorkItem
    tail_slot: int
    num_opened: int
    full_ids: torch.Tensor
    context_ids: torch.Tensor
    pieces: tuple[SealedPiece, ...]

    @property
    def rows(self) -> slice:
        return slice(self.item.query_start, self.item.query_start + self.item.num_queries)


def prepare_sealed_item(item: WorkItem, block_size: int, device: torch.device, queries_at_a_time: int) -> SealedItem:
    assert item.tail_slot is not None, "a sequence of a quantized format needs a tail slot"
    assert item.start % block_size == 0
    first_block, num_opened = divmod(item.first_position - item.start, block_size)
    num_full = (num_opened + item.num_queries) // block_size

    def ids(start: int, end: int) -> torch.Tensor:
        return torch.tensor(item.block_ids[start:end], dtype=torch.long, device=device)

    firsts = range(0, item.num_queries, queries_at_a_time)
    pieces = (_piece(item, first, min(first + queries_at_a_time, item.num_queries), block_size, device) for first in firsts)
    return SealedItem(
        item=item,
        tail_slot=item.tail_slot,
        num_opened=num_opened,
        full_ids=ids(first_block, first_block + num_full),
        context_ids=ids(0, (item.end - 1 - item.start) // block_size),
        pieces=tuple(pieces),
    )


def _piece(item: WorkItem, first: int, end: int, block_size: int, device: torch.device) -> SealedPiece:
    """Positions are counted from the item's ``start``, raw rows from the start of its first query's block."""
    opened_at = item.first_position - item.start
    first_position, end_position = opened_at + first, opened_at + end
    num_sealed = (end_position - 1) // block_size * block_size
    raw_position = first_position // block_size * block_size
    origin = opened_at // block_size * block_size
    queries = torch.arange(first_position, end_position)[:, None]
    sealed, raw = torch.arange(num_sealed)[None, :], torch.arange(raw_position, end_position)[None, :]
    sees_sealed = sealed // block_size < queries // block_size
    sees_raw = (raw // block_size == queries // block_size) & (raw <= queries)
    visible = torch.cat((sees_sealed, sees_raw), dim=1)
    if item.window is not None:
        visible &= torch.cat((sealed, raw), dim=1) > queries - item.window
    mask = None if visible.all() else visible.to(device)
    return SealedPiece(first, end, num_sealed, raw_position - origin, end_position - origin, mask)


class SealedReferenceAttention:
    """See ``AttentionBackend``. ``codec`` and ``queries_at_a_time`` are for a backend that has faster parts."""

    name = "reference"

    def __init__(self, storage: KVStorage, codec: BlockCodec | None = None, queries_at_a_time: int = 1 << 30) -> None:
        self._storage = storage
        self._codec = codec if codec is not None else TorchCodec(storage)
        self._queries_at_a_time = queries_at_a_time
        self._items: tuple[SealedItem, ...] = ()

    def plan(self, work: AttentionWork) -> None:
        device, at_a_time = self._storage.bytes.device, self._queries_at_a_time
        self._items = tuple(prepare_sealed_item(item, work.block_size, device, at_a_time) for item in work.items)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.run_into(out, layer, q, k, v)
        return out

    def run_into(self, out: torch.Tensor, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """As ``run``, for the rows of the planned items; the other rows of ``out`` are left alone."""
        parts = self._storage.format.sealed(layer)
        for prepared in self._items:
            rows, tail = prepared.rows, self._storage.tails[prepared.tail_slot, layer]
            raw = [self._store(prepared, *each).to(q.dtype) for each in zip(parts, tail, (k[rows], v[rows]), strict=True)]
            context = [self._codec.read(part, prepared.context_ids).to(q.dtype) for part in parts]
            for piece in prepared.pieces:
                span = slice(rows.start + piece.first, rows.start + piece.end)
                out[span] = _attend(piece, q[span], context, raw)

    def _store(self, prepared: SealedItem, parts: SealedParts, tail: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Put new rows [num_queries, num_kv_heads, head_dim] where they belong: into sealed blocks, and into the tail.

        ``tail`` is the slot's tile [num_kv_heads, block_size, head_dim]. Returns the rows from the start of the first query's block
        on, [num_kv_heads, rows, head_dim].
        """
        kv_heads, block_size, head_dim = tail.shape
        raw = torch.cat((tail[:, : prepared.num_opened], new.transpose(0, 1).to(tail.dtype)), dim=1)
        num_full = len(prepared.full_ids)
        if num_full:
            full = raw[:, : num_full * block_size].reshape(kv_heads, num_full, block_size, head_dim)
            self._codec.write(parts, prepared.full_ids, full.transpose(0, 1))
        rest = raw[:, num_full * block_size :]
        tail[:, : rest.shape[1]] = rest
        return raw


def _attend(piece: SealedPiece, q: torch.Tensor, context: list[torch.Tensor], raw: list[torch.Tensor]) -> torch.Tensor:
    """q [queries, heads, head_dim] -> the same shape; K and V [num_kv_heads, tokens, head_dim]."""
    k, v = (
        torch.cat((sealed[:, : piece.num_sealed], rows[:, piece.raw_start : piece.raw_end]), dim=1)
        for sealed, rows in zip(context, raw, strict=True)
    )
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], attn_mask=piece.mask, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)

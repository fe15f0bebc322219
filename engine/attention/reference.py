"""The slow twin: gather the blocks, then torch's scaled_dot_product_attention, one work item at a time. Any device, any dtype.

The cache may hold another float type than the model computes in: keys and values are rounded to it, also for their own query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.attention.metadata import AttentionWork, WorkItem
from engine.kv.storage import KVStorage


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """A work item with its tensors: block ids [blocks], and an additive mask [num_queries, tokens] or None for no mask."""

    item: WorkItem
    block_ids: torch.Tensor
    mask: torch.Tensor | None


def prepare_item(item: WorkItem, dtype: torch.dtype, device: torch.device) -> PreparedItem:
    block_ids = torch.tensor(item.block_ids, dtype=torch.long, device=device)
    mask = None
    last_position = item.first_position + item.num_queries - 1
    if item.num_queries > 1 or item.first_seen(last_position) > item.start:
        positions = torch.arange(item.first_position, last_position + 1, device=device)[:, None]
        keys = torch.arange(item.start, item.end, device=device)[None, :]
        hidden = keys > positions
        if item.window is not None:
            hidden |= keys <= positions - item.window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return PreparedItem(item, block_ids, mask)


def gather(tiles: torch.Tensor, block_ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """tiles [num_blocks, kv_heads, block_size, head_dim] -> [kv_heads, num_tokens, head_dim] of the named blocks."""
    picked = tiles[block_ids].transpose(0, 1)
    return picked.reshape(picked.shape[0], -1, picked.shape[3])[:, :num_tokens]


def attend_item(prepared: PreparedItem, q: torch.Tensor, k_tiles: torch.Tensor, v_tiles: torch.Tensor) -> torch.Tensor:
    """q [num_queries, heads, head_dim] -> the same shape."""
    num_tokens = prepared.item.end - prepared.item.start
    k = gather(k_tiles, prepared.block_ids, num_tokens).to(q.dtype)
    v = gather(v_tiles, prepared.block_ids, num_tokens).to(q.dtype)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), attn_mask=prepared.mask, enable_gqa=True
    )
    return out.squeeze(0).transpose(0, 1)


class ReferenceAttention:
    """See ``AttentionBackend``. Items are whole sequences: merging split ranges is for the fast backends."""

    name = "reference"

    def __init__(self, storage: KVStorage, dtype: torch.dtype) -> None:
        self._storage = storage
        self._dtype = dtype
        self._items: tuple[PreparedItem, ...] = ()
        self._blocks = self._offsets = torch.empty(0, dtype=torch.long)

    def plan(self, work: AttentionWork) -> None:
        device = self._storage.bytes.device
        slots = torch.tensor(work.slots, dtype=torch.long, device=device)
        self._blocks = slots // work.block_size
        self._offsets = slots % work.block_size
        self._items = tuple(prepare_item(item, self._dtype, device) for item in work.items)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k_tiles, v_tiles = self._storage.k(layer), self._storage.v(layer)
        k_tiles[self._blocks, :, self._offsets] = k.to(k_tiles.dtype)
        v_tiles[self._blocks, :, self._offsets] = v.to(v_tiles.dtype)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for prepared in self._items:
            rows = slice(prepared.item.query_start, prepared.item.query_start + prepared.item.num_queries)
            out[rows] = attend_item(prepared, q[rows], k_tiles, v_tiles)
        return out

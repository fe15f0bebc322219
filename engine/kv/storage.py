"""The bytes of the KV cache: one tensor, one row for each block. The only torch in this package."""

from __future__ import annotations

import torch

from engine.errors import InsufficientMemoryError
from engine.kv.block import BlockCopy
from engine.kv.format import KVFormat, Part


class KVStorage:
    """A uint8 tensor [num_blocks, block_bytes] and its typed views. On a CPU, memory is committed as blocks are first written.

    Quantized formats have ``tails`` beside it, [num_tail_slots, *format.tail_slot_shape]: the open blocks.
    """

    def __init__(self, fmt: KVFormat, num_blocks: int, device: torch.device, num_tail_slots: int = 0) -> None:
        self.format = fmt
        self.num_blocks = num_blocks
        try:
            self.bytes = torch.empty((num_blocks, fmt.block_bytes), dtype=torch.uint8, device=device)
            tail_dtype = getattr(torch, fmt.tail_dtype or fmt.dtype)
            self.tails = torch.empty((num_tail_slots, *fmt.tail_slot_shape), dtype=tail_dtype, device=device)
        except RuntimeError as error:
            num_bytes = num_blocks * fmt.block_bytes + num_tail_slots * fmt.tail_slot_bytes
            raise InsufficientMemoryError(
                f"cannot reserve {num_blocks} KV blocks of {fmt.block_bytes} bytes ({num_bytes} in all)"
                f" on {device}; lower --kv-cache-memory"
            ) from error

    @property
    def elements(self) -> torch.Tensor:
        """[num_blocks, block_elements] of a float format, a view."""
        return self.bytes.view(getattr(torch, self.format.dtype))

    def k(self, layer: int) -> torch.Tensor:
        """The layer's K tiles in a float format: [num_blocks, num_kv_heads, block_size, head_dim], a view."""
        return self._tiles(self.format.k_offset(layer))

    def v(self, layer: int) -> torch.Tensor:
        """The layer's V tiles in a float format: [num_blocks, num_kv_heads, block_size, head_dim], a view."""
        return self._tiles(self.format.v_offset(layer))

    def part(self, part: Part) -> torch.Tensor:
        """A part of every block of a quantized format: [num_blocks, *part.shape], a view."""
        return self.bytes[:, part.offset : part.end].view(self.num_blocks, *part.shape)

    def copy(self, copy: BlockCopy) -> None:
        """Make the copy in all layers, K and V, in a float format. What the target holds behind those tokens is left alone."""
        fmt = self.format
        assert not fmt.is_quantized, "sealed blocks are whole: nothing is copied out of them"
        tiles = self.elements.view(self.num_blocks, 2 * fmt.num_layers * fmt.num_kv_heads, fmt.block_size, fmt.head_dim)
        tiles[copy.target, :, : copy.num_tokens] = tiles[copy.source, :, : copy.num_tokens]

    def turn_keys(self, block_ids: tuple[int, ...], cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate the keys of the blocks, all layers, in a float format, by the angles of ``cos`` and ``sin`` [head_dim / 2]."""
        assert not self.format.is_quantized, "sealed keys cannot be turned"
        ids = torch.tensor(block_ids, dtype=torch.long, device=self.bytes.device)
        for layer in range(self.format.num_layers):
            tiles = self.k(layer)
            first, second = tiles[ids].float().chunk(2, dim=-1)
            tiles[ids] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(tiles.dtype)

    def _tiles(self, offset: int) -> torch.Tensor:
        fmt = self.format
        flat = self.elements[:, offset : offset + fmt.tile_elements]
        return flat.view(self.num_blocks, fmt.num_kv_heads, fmt.block_size, fmt.head_dim)

"""What a block of the KV cache looks like in bytes. The metric, the memory plan and the storage all read it from here."""

from __future__ import annotations

from dataclasses import dataclass

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFormat:
    """The layout of one block: ``block_size`` tokens, all layers, one contiguous run of bytes.

    block: | layer 0: K tile, V tile | layer 1: K tile, V tile | ...
    tile:  [num_kv_heads, block_size, head_dim] of ``dtype``
    """

    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    def __post_init__(self) -> None:
        assert self.dtype in ELEMENT_BYTES, f"no KV element type {self.dtype}"

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def tile_elements(self) -> int:
        """Elements of K (or of V) of one layer in one block."""
        return self.num_kv_heads * self.block_size * self.head_dim

    @property
    def block_elements(self) -> int:
        return 2 * self.num_layers * self.tile_elements

    @property
    def block_bytes(self) -> int:
        return self.block_elements * self.element_bytes

    @property
    def bytes_per_token(self) -> float:
        return self.block_bytes / self.block_size

    def k_offset(self, layer: int) -> int:
        """Where the layer's K tile starts in a block, in elements."""
        return 2 * layer * self.tile_elements

    def v_offset(self, layer: int) -> int:
        """Where the layer's V tile starts in a block, in elements."""
        return self.k_offset(layer) + self.tile_elements

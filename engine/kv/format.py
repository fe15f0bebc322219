"""What a block of the KV cache looks like in bytes. The metric, the memory plan and the storage all read it from here."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedType:
    """How K or V of a full block is written: a code for each element, and for each group of elements a scale and a zero.

    An element is ``(code + zero_step * (zero - 128)) * scale`` with an unsigned code of ``bits`` bits and a zero of 8; or, for
    ``e4m3``, ``code * scale`` with an 8-bit float and no zero. Scales are 8-bit floats: see ``engine.attention.sealing``.
    A group is one channel over the tokens of the block (``per_channel``), or all channels of one token.
    """

    bits: int
    per_channel: bool
    e4m3: bool = False

    @property
    def zero_step(self) -> int:
        """Zeros reach 8 times a group's range either way: channels of K lie far from 0."""
        return {8: 16, 4: 1}[self.bits]

    @property
    def searches(self) -> bool:
        """In 4 bits the scale is the one with the least error, not the one that just covers all elements."""
        return self.bits == 4

    def num_groups(self, block_size: int, head_dim: int) -> int:
        """Groups of one head in one block."""
        return head_dim if self.per_channel else block_size


# K and V of each quantized format. K's error sits in a few large channels, so it is scaled by channel; V by token.
SEALED_TYPES = {
    "fp8": (SealedType(bits=8, per_channel=True, e4m3=True), SealedType(bits=8, per_channel=False, e4m3=True)),
    "int8": (SealedType(bits=8, per_channel=True), SealedType(bits=8, per_channel=False)),
    "k8v4": (SealedType(bits=8, per_channel=True), SealedType(bits=4, per_channel=False)),
    "int4": (SealedType(bits=4, per_channel=True), SealedType(bits=4, per_channel=False)),
}


@dataclass(frozen=True, slots=True)
class Part:
    """A run of bytes in every block, seen as an array of them."""

    offset: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + prod(self.shape)


@dataclass(frozen=True, slots=True)
class SealedParts:
    """K or V of one layer in a block of a quantized format.

    codes [num_kv_heads, block_size, head_dim * bits / 8]: in 4 bits, byte i of a row holds channel i below and i + head_dim / 2 above.
    scales, zeros [num_kv_heads, groups]; e4m3 has no zeros.
    """

    kind: SealedType
    codes: Part
    scales: Part
    zeros: Part | None

    @property
    def end(self) -> int:
        return self.scales.end if self.zeros is None else self.zeros.end


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFormat:
    """The layout of one block: ``block_size`` tokens, all layers, one contiguous run of bytes.

    float formats      | layer 0: K, V | layer 1: K, V | ...       K, V: [num_kv_heads, block_size, head_dim] of ``dtype``
    quantized formats  | layer 0: K codes, V codes, K scales, K zeros, V scales, V zeros | layer 1: ...   see SealedParts

    In a quantized format a block holds bytes only once it is full. The open last block of each sequence lies in a tail slot,
    [num_layers, K and V, num_kv_heads, block_size, head_dim] of ``tail_dtype`` (which float formats leave out).
    """

    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    tail_dtype: str | None = None
    sealing: int = 1  # raised when a quantized block's bytes come to mean something else: part of the name of blocks on a disk

    def __post_init__(self) -> None:
        assert self.dtype in ("float32", "bfloat16", "float16", *SEALED_TYPES), f"no KV element type {self.dtype}"
        assert (self.tail_dtype is not None) == self.is_quantized, "quantized formats, and only those, have tails"
        assert self.head_dim % 2 == 0, "4-bit codes lie two to a byte, and rotation takes channels in pairs"

    @property
    def is_quantized(self) -> bool:
        return self.dtype in SEALED_TYPES

    @property
    def element_bytes(self) -> int:
        """Float formats only."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def rotates_values(self) -> bool:
        """Whether V is to be rotated before it is stored, see ``engine.model.value_rotation``: in 4 bits."""
        return self.is_quantized and SEALED_TYPES[self.dtype][1].bits == 4

    @property
    def tile_elements(self) -> int:
        """Elements of K (or of V) of one layer in one block."""
        return self.num_kv_heads * self.block_size * self.head_dim

    @property
    def layer_bytes(self) -> int:
        return self._sealed_from(0)[1].end if self.is_quantized else 2 * self.tile_elements * self.element_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def bytes_per_token(self) -> float:
        return self.block_bytes / self.block_size

    @property
    def tail_slot_shape(self) -> tuple[int, ...]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def tail_slot_bytes(self) -> int:
        """What the open block of one sequence takes beside the pool; 0 in float formats."""
        return 0 if self.tail_dtype is None else prod(self.tail_slot_shape) * ELEMENT_BYTES[self.tail_dtype]

    def k_offset(self, layer: int) -> int:
        """Where the layer's K tile starts, in elements: in a block of a float format, in a tail slot of a quantized one."""
        return 2 * layer * self.tile_elements

    def v_offset(self, layer: int) -> int:
        """Where the layer's V tile starts, in elements, as ``k_offset``."""
        return self.k_offset(layer) + self.tile_elements

    def sealed(self, layer: int) -> tuple[SealedParts, SealedParts]:
        """K and V of the layer in a block of a quantized format."""
        return self._sealed_from(layer * self.layer_bytes)

    def _sealed_from(self, offset: int) -> tuple[SealedParts, SealedParts]:
        k_type, v_type = SEALED_TYPES[self.dtype]
        k_codes = self._codes(offset, k_type)
        v_codes = self._codes(k_codes.end, v_type)
        k = self._with_groups(k_type, k_codes, v_codes.end)
        return k, self._with_groups(v_type, v_codes, k.end)

    def _codes(self, offset: int, kind: SealedType) -> Part:
        return Part(offset, (self.num_kv_heads, self.block_size, self.head_dim * kind.bits // 8))

    def _with_groups(self, kind: SealedType, codes: Part, offset: int) -> SealedParts:
        shape = (self.num_kv_heads, kind.num_groups(self.block_size, self.head_dim))
        scales = Part(offset, shape)
        return SealedParts(kind, codes, scales, None if kind.e4m3 else Part(scales.end, shape))

"""Sealing: from a full block's K or V to the bytes of a quantized format and back, in torch on any device.

The plain twin of ``cpu_sealed_kernels``. Knows groups, codes, scales and zeros; see ``engine.kv.format.SealedType`` for what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.kv.format import SealedParts, SealedType
from engine.kv.storage import KVStorage

# A scale is one byte c: the float32 with the bits (c + SCALE_BIAS) << 20, that is 5 bits of exponent, 3 of mantissa, 2^-24 to 224.
SCALE_BIAS = (127 - 24) * 8
NAN_SCALE = 255  # so that NaN in, and a block of 0xFF bytes, come out as NaN
E4M3_MAX = 448.0
SCALE_SHIFTS = (-3, -2, -1, 1, 2, 3)  # in 4 bits: which neighbours of the scale that covers all elements are tried

Coded = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # codes, scales and zeros as uint8, before packing


@dataclass(frozen=True, slots=True)
class Sealed:
    """K or V of blocks, all uint8, shapes as in ``SealedParts`` behind any leading ones. e4m3 has no zeros."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None


def encode_scales(scales: torch.Tensor) -> torch.Tensor:
    """float32 -> the bytes of the next scales that are no smaller (or the largest that there is)."""
    codes = ((scales.view(torch.int32) + 0xFFFFF) >> 20) - SCALE_BIAS
    return torch.where(scales.isfinite(), codes.clamp(0, NAN_SCALE - 1), NAN_SCALE).to(torch.uint8)


def decode_scales(codes: torch.Tensor) -> torch.Tensor:
    wide = ((codes.int() + SCALE_BIAS) << 20).view(torch.float32)
    return wide.masked_fill(codes == NAN_SCALE, float("nan"))


def seal(x: torch.Tensor, kind: SealedType) -> Sealed:
    """x float32 [..., num_kv_heads, block_size, head_dim], whole blocks."""
    dim = -2 if kind.per_channel else -1
    if kind.e4m3:
        scales = encode_scales(x.abs().amax(dim, keepdim=True) / E4M3_MAX)
        codes = (x / decode_scales(scales)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        return Sealed(codes, scales.squeeze(dim), None)
    low, high = x.aminmax(dim=dim, keepdim=True)
    num_steps = 2**kind.bits - kind.zero_step  # zeros are multiples of zero_step: so many codes are always inside the range
    reach = torch.maximum(low.abs(), high.abs()) / (127 * kind.zero_step)
    covering = encode_scales(torch.maximum((high - low) / num_steps, reach))
    best = _with_scales(x, (low + high) / 2, covering, kind)
    if kind.searches:
        best = _search(x, (low + high) / 2, best, dim, kind)
    codes, scales, zeros = best
    return Sealed(_pack(codes, kind.bits), scales.squeeze(dim), zeros.squeeze(dim))


def _search(x: torch.Tensor, middle: torch.Tensor, best: Coded, dim: int, kind: SealedType) -> Coded:
    """The best of the given codes and those with neighbouring scales. Among the tokens of a K channel, an element's error counts the
    more the further it stands out: the first token of a text does, in every channel, and all later ones attend to it."""
    wide = x.double()
    weights = (wide - wide.mean(dim, keepdim=True)).square() if kind.per_channel else torch.ones_like(wide)
    covering = best[1]

    def error(coded: Coded) -> torch.Tensor:
        codes, scales, zeros = coded
        back = (codes.float() + (zeros.float() - 128) * kind.zero_step) * decode_scales(scales)
        return ((back.double() - wide).square() * weights).sum(dim, keepdim=True)

    least = error(best)
    for shift in SCALE_SHIFTS:
        shifted = (covering.int() + shift).clamp(0, NAN_SCALE - 1).to(torch.uint8)
        candidate = _with_scales(x, middle, shifted.where(covering != NAN_SCALE, covering), kind)
        now = error(candidate)
        codes, scales, zeros = (torch.where(now < least, new, old) for new, old in zip(candidate, best, strict=True))
        best, least = (codes, scales, zeros), torch.minimum(now, least)
    return best


def _with_scales(x: torch.Tensor, middle: torch.Tensor, scales: torch.Tensor, kind: SealedType) -> Coded:
    """With these scales, the codes' range laid around ``middle``."""
    step, top = decode_scales(scales), 2**kind.bits - 1
    zeros = ((middle / step - top / 2) / kind.zero_step).round().clamp(-128, 127)
    codes = ((x / step).round() - kind.zero_step * zeros).clamp(0, top).to(torch.uint8)
    return codes, scales, (zeros + 128).to(torch.uint8)


def unseal(sealed: Sealed, kind: SealedType) -> torch.Tensor:
    """float32 [..., num_kv_heads, block_size, head_dim]."""
    dim = -2 if kind.per_channel else -1
    scales = decode_scales(sealed.scales).unsqueeze(dim)
    if sealed.zeros is None:
        return sealed.codes.view(torch.float8_e4m3fn).float() * scales
    zeros = (sealed.zeros.float() - 128) * kind.zero_step
    return (_unpack(sealed.codes, kind.bits).float() + zeros.unsqueeze(dim)) * scales


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return codes
    low, high = codes.chunk(2, dim=-1)
    return low | (high << 4)


def _unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return codes if bits == 8 else torch.cat((codes & 15, codes >> 4), dim=-1)


class BlockCodec(Protocol):
    """Writes and reads sealed blocks of a storage."""

    def write(self, parts: SealedParts, block_ids: torch.Tensor, x: torch.Tensor) -> None:
        """Seal x [blocks, num_kv_heads, block_size, head_dim] into the blocks of these ids."""

    def read(self, parts: SealedParts, block_ids: torch.Tensor) -> torch.Tensor:
        """[num_kv_heads, blocks * block_size, head_dim] float32 of the blocks of these ids, in their order."""


class TorchCodec:
    """See ``BlockCodec``."""

    def __init__(self, storage: KVStorage) -> None:
        self._storage = storage

    def write(self, parts: SealedParts, block_ids: torch.Tensor, x: torch.Tensor) -> None:
        sealed = seal(x.float(), parts.kind)
        self._storage.part(parts.codes)[block_ids] = sealed.codes
        self._storage.part(parts.scales)[block_ids] = sealed.scales
        if parts.zeros is not None and sealed.zeros is not None:
            self._storage.part(parts.zeros)[block_ids] = sealed.zeros

    def read(self, parts: SealedParts, block_ids: torch.Tensor) -> torch.Tensor:
        zeros = None if parts.zeros is None else self._storage.part(parts.zeros)[block_ids]
        sealed = Sealed(self._storage.part(parts.codes)[block_ids], self._storage.part(parts.scales)[block_ids], zeros)
        return unseal(sealed, parts.kind).transpose(0, 1).flatten(1, 2)

"""What sealing keeps of a block: the error of each format, its extremes, and that numba and torch agree byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.sealed_cpu import NumbaCodec
from engine.attention.sealing import NAN_SCALE, TorchCodec, decode_scales, encode_scales, seal, unseal
from engine.kv.format import SEALED_TYPES, KVFormat, SealedType
from engine.kv.storage import KVStorage

KINDS = sorted({kind for pair in SEALED_TYPES.values() for kind in pair}, key=str)


def make_storage(dtype: str, *, kv_heads: int = 3, head_dim: int = 64, block_size: int = 16, num_blocks: int = 9) -> KVStorage:
    fmt = KVFormat(
        dtype=dtype, num_layers=2, num_kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, tail_dtype="float32"
    )
    storage = KVStorage(fmt, num_blocks, torch.device("cpu"), num_tail_slots=4)
    storage.bytes.fill_(0xFF)
    storage.tails.fill_(float("nan"))
    return storage


def test_scales_round_up_by_an_eighth_at_most() -> None:
    values = torch.logspace(-23.9, 7.7, 5000, base=2.0)
    back = decode_scales(encode_scales(values))
    assert (back >= values).all()
    assert (back <= values * 1.1251).all()
    assert torch.equal(encode_scales(decode_scales(torch.arange(255).to(torch.uint8))), torch.arange(255).to(torch.uint8))
    assert encode_scales(torch.tensor([float("nan"), float("inf")])).tolist() == [NAN_SCALE, NAN_SCALE]
    assert decode_scales(torch.tensor([NAN_SCALE], dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_an_element_is_kept_to_half_a_step(kind: SealedType, shift: float) -> None:
    x = torch.randn((5, 3, 16, 64), generator=torch.Generator().manual_seed(1)) + shift
    back = unseal(seal(x, kind), kind)
    dim = -2 if kind.per_channel else -1
    if kind.e4m3:
        assert ((back - x).abs() <= x.abs() / 16 + x.abs().amax(dim, keepdim=True) / 448 / 512 * 1.13).all()
        return
    spread = x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True)
    step = torch.maximum(spread / (2**kind.bits - kind.zero_step), x.abs().amax(dim, keepdim=True) / (127 * kind.zero_step))
    if kind.searches:  # more for what stands out of a K channel, at the others' expense
        bound = step.square().mean().div(12).sqrt() * (1.2 if kind.per_channel else 1.0)
        assert (back - x).square().mean().sqrt() <= bound
    else:
        assert ((back - x).abs() <= step * 1.126 / 2 * 1.001).all()


def test_in_4_bits_the_channels_of_a_token_that_stands_out_are_kept_best() -> None:
    kind = SEALED_TYPES["int4"][0]
    x = torch.randn((50, 1, 16, 64), generator=torch.Generator().manual_seed(2))
    x[:, :, 3] *= 8
    error = (unseal(seal(x, kind), kind) - x).square().mean(dim=(0, 1, 3))
    assert error[3] < error.mean() / 2


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_come_out_as_nan_and_zeros_as_zeros(kind: SealedType) -> None:
    x = torch.zeros((3, 1, 4, 4))
    x[1, 0, 2, 3], x[2, 0, 2, 3] = float("nan"), float("inf")
    back = unseal(seal(x, kind), kind)
    assert torch.equal(back[0], x[0])
    group = (slice(None), 3) if kind.per_channel else (2, slice(None))
    for block in back[1:, 0]:
        assert block[group].isnan().all()
        assert block.isnan().sum() == 4


@pytest.mark.parametrize("dtype", SEALED_TYPES)
@pytest.mark.parametrize("shape", [(3, 64, 16), (1, 6, 5), (2, 32, 1)])
def test_numba_writes_the_bytes_that_torch_writes_and_reads_the_same_values(dtype: str, shape: tuple[int, int, int]) -> None:
    kv_heads, head_dim, block_size = shape
    storages = [make_storage(dtype, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size) for _ in range(2)]
    generator = torch.Generator().manual_seed(head_dim)
    x = torch.randn((4, kv_heads, block_size, head_dim), generator=generator) * torch.logspace(-6, 2, head_dim) + torch.randn(
        head_dim, generator=generator
    )
    x[1] = 0
    x[2, 0, 0, 0] = float("nan")
    x[3, 0, 0, 0] = 1e6
    ids = torch.tensor([7, 2, 0, 5])
    codecs = TorchCodec(storages[0]), NumbaCodec(storages[1])
    for parts in storages[0].format.sealed(1):
        for codec in codecs:
            codec.write(parts, ids, x)
        slow, fast = (codec.read(parts, ids) for codec in codecs)
        torch.testing.assert_close(fast, slow, equal_nan=True, rtol=0, atol=0)
    nan_groups = storages[0].bytes.eq(NAN_SCALE)
    assert torch.equal(storages[0].bytes[[7, 2, 5]], storages[1].bytes[[7, 2, 5]])
    assert nan_groups[[1, 3, 4, 6, 8]].all(), "other blocks are left alone"


@given(st.lists(st.floats(-448, 448, width=32), min_size=1, max_size=64))
@settings(max_examples=200, deadline=None)
def test_numbas_e4m3_is_torchs(values: list[float]) -> None:
    from engine.attention.cpu_sealed_kernels import encode_e4m3

    room = np.empty(1, np.float32)
    expected = torch.tensor(values).to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    assert [int(encode_e4m3(np.float32(value), room)) for value in values] == expected

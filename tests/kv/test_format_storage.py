"""The bytes of a block: what the format says, what the storage holds, and that both mean the same."""

from __future__ import annotations

import pytest
import torch

from engine.errors import InsufficientMemoryError
from engine.kv.block import BlockCopy
from engine.kv.format import ELEMENT_BYTES, SEALED_TYPES, KVFormat
from engine.kv.storage import KVStorage

CPU = torch.device("cpu")


def small_format(dtype: str = "float32") -> KVFormat:
    return KVFormat(dtype=dtype, num_layers=3, num_kv_heads=2, head_dim=4, block_size=5)


def test_smollm2_costs_45_kib_per_token_in_float32() -> None:
    fmt = KVFormat(dtype="float32", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)
    assert fmt.block_bytes == 2 * 30 * 3 * 64 * 4 * 16 == 737_280
    assert fmt.bytes_per_token == 46_080
    half = KVFormat(dtype="bfloat16", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)
    assert half.bytes_per_token == 23_040


SMOLLM2 = {"num_layers": 30, "num_kv_heads": 3, "head_dim": 64, "block_size": 16}
K8, V8 = 16 * 64 + 2 * 64, 16 * 64 + 2 * 16  # codes, then a scale and a zero for each channel of K, each token of V
K4, V4 = 8 * 64 + 2 * 64, 8 * 64 + 2 * 16
FP8 = 2 * 16 * 64 + 64 + 16  # no zeros


@pytest.mark.parametrize(
    ("dtype", "head_bytes", "ratio"),
    [("fp8", FP8, 0.520), ("int8", K8 + V8, 0.539), ("k8v4", K8 + V4, 0.414), ("int4", K4 + V4, 0.289)],
)
def test_what_quantized_formats_cost_with_everything_counted(dtype: str, head_bytes: int, ratio: float) -> None:
    fmt = KVFormat(dtype=dtype, tail_dtype="float32", **SMOLLM2)
    assert fmt.block_bytes == 30 * 3 * head_bytes
    assert round(fmt.bytes_per_token / 23_040, 3) == ratio
    assert fmt.tail_slot_bytes == 737_280, "a tail slot is a block in float32"


@pytest.mark.parametrize("dtype", SEALED_TYPES)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (6, 5), (2, 1)])
def test_the_parts_of_all_layers_cover_a_quantized_block_once(dtype: str, head_dim: int, block_size: int) -> None:
    fmt = KVFormat(dtype=dtype, num_layers=3, num_kv_heads=2, head_dim=head_dim, block_size=block_size, tail_dtype="float32")
    storage = KVStorage(fmt, 4, CPU, num_tail_slots=2)
    assert storage.tails.shape == (2, 3, 2, 2, block_size, head_dim)
    storage.bytes.zero_()
    for layer in range(3):
        for sealed in fmt.sealed(layer):
            for part in (sealed.codes, sealed.scales, sealed.zeros):
                if part is not None:
                    view = storage.part(part)
                    view += 1
    assert storage.bytes.eq(1).all()


def test_float_formats_have_no_tails() -> None:
    storage = KVStorage(small_format(), 2, CPU)
    assert storage.tails.numel() == small_format().tail_slot_bytes == 0


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_the_tiles_of_all_layers_cover_a_block_once(dtype) -> None:
    fmt = small_format(dtype)
    storage = KVStorage(fmt, 4, CPU)
    assert storage.bytes.shape == (4, fmt.block_bytes)
    storage.bytes.zero_()
    for layer in range(fmt.num_layers):
        for tiles in (storage.k(layer), storage.v(layer)):
            assert tiles.shape == (4, 2, 5, 4)
            tiles += 1
    assert torch.equal(storage.elements, torch.ones_like(storage.elements))


def test_a_block_is_one_run_of_bytes_in_the_documented_order() -> None:
    fmt = small_format()
    storage = KVStorage(fmt, 2, CPU)
    storage.elements[:] = torch.arange(storage.elements.numel()).reshape(2, -1)
    assert storage.bytes.is_contiguous()
    tile = 2 * 5 * 4
    assert storage.k(0)[1, 0, 0, 0] == storage.elements.shape[1]
    assert storage.v(0)[0, 0, 0, 0] == tile
    assert storage.k(2)[0, 1, 3, 2] == 4 * tile + 1 * 20 + 3 * 4 + 2
    assert storage.v(2)[1, 1, 4, 3] == 2 * storage.elements.shape[1] - 1


def test_views_write_through_to_the_bytes_of_their_block_alone() -> None:
    storage = KVStorage(small_format("float16"), 3, CPU)
    storage.bytes.zero_()
    storage.k(1)[1] = 7.0
    assert storage.bytes[1].any()
    assert not storage.bytes[[0, 2]].any()


def test_an_unknown_element_type_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="int3"):
        small_format("int3")


def test_more_than_the_address_space_is_an_error_with_the_numbers() -> None:
    fmt = small_format()
    with pytest.raises(InsufficientMemoryError, match=f"{fmt.block_bytes} bytes.*lower --kv-cache-memory"):
        KVStorage(fmt, 2**45, CPU)


def test_a_copy_takes_the_first_tokens_in_every_layer_and_leaves_the_rest_alone() -> None:
    fmt = small_format()
    storage = KVStorage(fmt, 3, CPU)
    storage.elements[:] = torch.arange(storage.elements.numel()).reshape(3, -1)
    before = storage.elements.clone()
    storage.copy(BlockCopy(source=2, target=0, num_tokens=3))
    for layer in range(fmt.num_layers):
        for offset, tiles in ((fmt.k_offset(layer), storage.k(layer)), (fmt.v_offset(layer), storage.v(layer))):
            old = before[0, offset : offset + fmt.tile_elements].view(2, 5, 4)
            assert torch.equal(tiles[0, :, :3], tiles[2, :, :3])
            assert torch.equal(tiles[0, :, 3:], old[:, 3:])
    assert torch.equal(storage.elements[1:], before[1:])

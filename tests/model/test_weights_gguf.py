"""GGUF files of every supported type load as the model they were written from; the llama row order is undone."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoint_files import assert_equals_state, llama31_factors, load, tiny_model, to_pair_order, write_gguf
from gguf import GGMLQuantizationType as Kind

from engine.errors import DamagedModelError, ModelNotFoundError, UnsupportedModelError
from engine.gguf_file import read_gguf_header
from engine.model.weights import open_checkpoint

# Rows that are whole blocks of every type: 256 elements.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}


def rounded_state(model, kind: Kind) -> dict[str, torch.Tensor]:
    """The state dict after a trip of its matrices through ``kind``."""

    def trip(tensor: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind))

    return {name: tensor if tensor.ndim == 1 else trip(tensor) for name, tensor in model.state_dict().items()}


def random_blocks(kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Bytes of a type that the gguf package reads but cannot write; the half-precision scales are made finite."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (rows * columns // block_size, block_bytes), dtype=np.uint8)
    scales = {Kind.Q4_K: (0, 2), Kind.Q6_K: (208,)}[kind]
    for at in scales:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(0.125).tobytes(), dtype=np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_float32_files_equal_the_state_dict(arch: str, tmp_path: Path) -> None:
    model = tiny_model(arch, head_dim=32) if arch == "qwen3" else tiny_model(arch)
    write_gguf(tmp_path / "m.gguf", model, arch)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.config.dtype == "float32"
    assert checkpoint.config.eos_token_ids == (2,)
    assert_equals_state(load(tmp_path / "m.gguf"), model.state_dict(), torch.float32)


def test_ties_and_biases_show_in_the_tensors(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    write_gguf(tmp_path / "m.gguf", model, "llama")
    weights = load(tmp_path / "m.gguf", torch.bfloat16)
    assert weights.lm_head is weights.embed
    assert_equals_state(weights, model.state_dict(), torch.bfloat16)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_types_that_gguf_writes(kind: Kind, tmp_path: Path) -> None:
    model = tiny_model("llama", **WIDE)
    write_gguf(tmp_path / "m.gguf", model, "llama", kind)
    dtype = {Kind.F16: "float16"}.get(kind, "bfloat16")
    assert open_checkpoint(tmp_path / "m.gguf").config.dtype == dtype
    assert_equals_state(load(tmp_path / "m.gguf"), rounded_state(model, kind), torch.float32)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K])
def test_types_that_gguf_only_reads(kind: Kind, tmp_path: Path) -> None:
    model = tiny_model("llama", **WIDE)
    name, rows = "blk.0.attn_k.weight", 128
    blocks = random_blocks(kind, rows, 256)
    write_gguf(tmp_path / "m.gguf", model, "llama", raw={name: (blocks, kind)})
    found = load(tmp_path / "m.gguf").layers[0].qkv[256 : 256 + rows]
    expected = gguf.quants.dequantize(blocks, kind)
    assert np.array_equal(to_pair_order(found.numpy(), heads=2), expected)


def test_one_q4_k_block_by_hand(tmp_path: Path) -> None:
    """Scale 0.5 with 6-bit scales 1, minimum 0.25 with 6-bit minima 2, all nibbles 3: 0.5 * 1 * 3 - 0.25 * 2 = 1."""
    model = tiny_model("qwen2", **WIDE)
    scales_and_minima = bytes([1] * 4 + [2] * 4 + [0x21] * 4)
    block = np.frombuffer(struct.pack("<ee", 0.5, 0.25) + scales_and_minima + bytes([0x33] * 128), dtype=np.uint8)
    write_gguf(tmp_path / "m.gguf", model, "qwen2", raw={"blk.0.attn_v.weight": (np.tile(block, (128, 1)), Kind.Q4_K)})
    assert torch.equal(load(tmp_path / "m.gguf").layers[0].qkv[384:], torch.ones(128, 256))


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    model = tiny_model("llama", **WIDE)
    write_gguf(tmp_path / "m.gguf", model, "llama", Kind.Q5_0)
    with pytest.raises(UnsupportedModelError, match=r"has type Q5_0.*Q8_0"):
        open_checkpoint(tmp_path / "m.gguf")


def test_llama31_factors_are_not_a_weight(tmp_path: Path) -> None:
    model = tiny_model("llama")
    factors = np.array(llama31_factors(16, 10000.0, 8.0), dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", model, "llama", extra={"rope_freqs.weight": factors})
    assert open_checkpoint(tmp_path / "m.gguf").config.rope.rope_type == "llama3"
    assert_equals_state(load(tmp_path / "m.gguf"), model.state_dict(), torch.float32)


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.0.attn_q.scale", "cls.weight", "blk.0.attn_v.bias"])
def test_unknown_tensors_are_refused_by_name(name: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("llama"), "llama", extra={name: np.ones(32, dtype=np.float32)})
    with pytest.raises(UnsupportedModelError, match=name):
        open_checkpoint(tmp_path / "m.gguf")


def test_shapes_are_checked_against_the_metadata(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.intermediate_size = 128
    write_gguf(tmp_path / "m.gguf", model, "llama")
    with pytest.raises(DamagedModelError, match=r"ffn_gate\.weight has shape \[96, 64\], but the config implies \[128, 64\]"):
        open_checkpoint(tmp_path / "m.gguf")
    model.config.intermediate_size, model.config.num_hidden_layers = 96, 3
    write_gguf(tmp_path / "m.gguf", model, "llama")
    with pytest.raises(DamagedModelError, match=r"model\.layers\.2\.input_layernorm\.weight is missing"):
        open_checkpoint(tmp_path / "m.gguf")


def test_truncation_anywhere_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model("llama"), "llama")
    whole = path.read_bytes()
    for length in [0, 3, 4, 7, 20, 100, 500, 900, 1500, len(whole) // 2, len(whole) - 33]:
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedModelError) as error:
            open_checkpoint(path)
        assert "\n" not in str(error.value)


def test_flipped_header_bytes_never_escape_as_other_errors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model("llama"), "llama")
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    refused = 0
    for at in rng.integers(0, 2000, 300):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ int(rng.integers(1, 256))]) + whole[at + 1 :])
        try:
            open_checkpoint(path)
        except (DamagedModelError, UnsupportedModelError):
            refused += 1
    assert refused > 100


def header(version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def key(name: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + bytes(60), "does not begin with 'GGUF'"),
        (header(tensors=2**60), "truncated"),
        (header(keys=1, rest=key(b"a") + struct.pack("<I", 77) + bytes(40)), "unknown value type 77"),
        (header(keys=1, rest=key(b"a") + struct.pack("<IIQ", 9, 9, 1) + bytes(40)), "unknown value type 9"),
        (header(keys=1, rest=key(b"a") + struct.pack("<IIQ", 9, 8, 2**62)), "truncated"),
        (header(keys=1, rest=key(b"a") + struct.pack("<IIQ", 9, 4, 2**62) + bytes(64)), "truncated"),
        (header(keys=1, rest=key(b"\xff\xfe") + bytes(64)), "not UTF-8"),
        (header(keys=2, rest=(key(b"a") + struct.pack("<IB", 0, 1)) * 2), "key a is given twice"),
        (header(tensors=1, rest=key(b"t") + struct.pack("<I", 9) + bytes(64)), "9 dimensions"),
        (header(tensors=1, rest=key(b"t") + struct.pack("<IQIQ", 1, 31, 8, 0) + bytes(64)), "cannot have the shape"),
        (header(tensors=1, rest=key(b"t") + struct.pack("<IQIQ", 1, 2**50, 0, 0) + bytes(64)), "truncated"),
        (header(tensors=2, rest=(key(b"t") + struct.pack("<IQIQ", 1, 4, 0, 0)) * 2 + bytes(64)), "listed twice"),
        (header(keys=1, rest=key(b"general.alignment") + struct.pack("<II", 4, 33)), "power of two"),
    ],
)
def test_damaged_headers(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(DamagedModelError, match=message):
        read_gguf_header(path)


def test_unknown_versions_and_types_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header(version=1))
    with pytest.raises(UnsupportedModelError, match="GGUF version 1"):
        read_gguf_header(path)
    path.write_bytes(header(tensors=1, rest=key(b"t") + struct.pack("<IQIQ", 1, 4, 999, 0) + bytes(64)))
    with pytest.raises(UnsupportedModelError, match="unknown type 999"):
        read_gguf_header(path)


def test_metadata_equals_the_packages_own_reader(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model("llama"), "llama", metadata={"x.flag": True, "x.text": "é", "x.real": 0.5})
    reader, found = gguf.GGUFReader(path), read_gguf_header(path)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert found.metadata == expected
    assert {t.name: (t.data_offset, t.n_bytes) for t in reader.tensors} == {
        t.name: (t.offset, t.nbytes) for t in found.tensors.values()
    }


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"m\.gguf: No such file"):
        open_checkpoint(tmp_path / "m.gguf")

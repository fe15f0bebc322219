"""Opens a .gguf file: names its tensors as Hugging Face does and marks the q and k whose rows are in pair order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from engine.errors import UnsupportedModelError
from engine.gguf_file import GGUFHeader, GGUFTensor, read_gguf_header
from engine.model.checkpoint import PLAIN_ENCODINGS, QUANTIZED_ENCODINGS, Checkpoint, StoredTensor, read_values
from engine.model_config import ModelConfig

ROPE_FACTORS = "rope_freqs.weight"
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# A quantized file has no element type of its own. The models it is made from were trained in bfloat16, whose range it needs.
QUANTIZED_DTYPE = "bfloat16"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def open_gguf(path: Path) -> Checkpoint:
    """Read the header. Raises ModelNotFoundError, DamagedModelError or UnsupportedModelError."""
    header = read_gguf_header(path)
    config = ModelConfig.from_gguf(
        header.metadata,
        shapes={name: tensor.shape for name, tensor in header.tensors.items()},
        dtype=_dtype(header.tensors),
        rope_factors=_rope_factors(path, header),
    )
    pairs = header.metadata["general.architecture"] == "llama"
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if pairs else {}
    tensors = {}
    for name, tensor in header.tensors.items():
        if name != ROPE_FACTORS:
            hf_name, kind = _hf_name(path, name)
            tensors[hf_name] = _stored(path, tensor, heads.get(kind))
    return Checkpoint(path, config, tensors)


def _hf_name(path: Path, name: str) -> tuple[str, str]:
    """The Hugging Face name, and the kind of layer tensor ("attn_q"; "" outside the layers)."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name], ""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in LAYER_NAMES:
        raise UnsupportedModelError(f"{path}: tensor {name} is not supported")
    return f"model.layers.{int(match[1])}.{LAYER_NAMES[match[2]]}.{match[3]}", match[2]


def _stored(path: Path, tensor: GGUFTensor, pair_heads: int | None) -> StoredTensor:
    known = (*PLAIN_ENCODINGS, *QUANTIZED_ENCODINGS)
    if tensor.encoding not in known:
        raise UnsupportedModelError(
            f"{path}: tensor {tensor.name} has type {tensor.encoding}, which is not supported (supported: {', '.join(known)})"
        )
    if len(tensor.shape) == 1 and tensor.encoding not in PLAIN_ENCODINGS:
        raise UnsupportedModelError(f"{path}: tensor {tensor.name} is a quantized vector ({tensor.encoding}): not supported")
    return StoredTensor(tensor.name, tensor.shape, tensor.encoding, path, tensor.offset, tensor.nbytes, pair_heads)


def _dtype(tensors: Mapping[str, GGUFTensor]) -> str:
    """The type of the matrices, by torch's name; norms and biases are float32 in most files."""
    encodings = {tensor.encoding for tensor in tensors.values() if len(tensor.shape) > 1}
    return DTYPES.get(encodings.pop(), QUANTIZED_DTYPE) if len(encodings) == 1 else QUANTIZED_DTYPE


def _rope_factors(path: Path, header: GGUFHeader) -> list[float] | None:
    if ROPE_FACTORS not in header.tensors:
        return None
    factors: list[float] = read_values(_stored(path, header.tensors[ROPE_FACTORS], None)).flatten().tolist()
    return factors

"""Names the tensors of a GPT-2 checkpoint as those of a Llama are named, and undoes how it stores them.

Its projections are stored input-major (transformers' Conv1D), and q, k and v as one. Some files lack the leading "transformer.".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from engine.errors import DamagedModelError, UnsupportedModelError
from engine.model.checkpoint import Columns, StoredTensor, encoded_nbytes

OUTER_NAMES = {
    "wte.weight": "model.embed_tokens.weight",
    "wpe.weight": "model.embed_positions.weight",
    "ln_f.weight": "model.norm.weight",
    "ln_f.bias": "model.norm.bias",
    "lm_head.weight": "lm_head.weight",
}
NORMS = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
PROJECTIONS = {
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.c_proj": ("self_attn.o_proj",),
    "mlp.c_fc": ("mlp.up_proj",),
    "mlp.c_proj": ("mlp.down_proj",),
}
# Buffers that old files store, as float32, uint8 or bool; they follow from the architecture.
CAUSAL_MASK = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"


def name_like_llama(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Raises UnsupportedModelError for a tensor that GPT-2 does not have, DamagedModelError for a shape that cannot be meant."""
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        for own_name, part in _named(path, name.removeprefix("transformer."), tensor):
            if own_name in tensors:
                raise DamagedModelError(f"{path}: two tensors stand for {own_name}, the second is {name}")
            tensors[own_name] = part
    return tensors


def _named(path: Path, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    if name in OUTER_NAMES:
        yield OUTER_NAMES[name], tensor
        return
    match = re.fullmatch(r"h\.(\d+)\.(\w+(?:\.\w+)?)\.(weight|bias)", name)
    if match is None or match[2] not in (NORMS.keys() | PROJECTIONS.keys()):
        raise UnsupportedModelError(f"{path}: tensor {tensor.name} has no place in a GPT-2")
    layer, kind = f"model.layers.{int(match[1])}", match[3]
    if match[2] in NORMS:
        yield f"{layer}.{NORMS[match[2]]}.{kind}", tensor
        return
    targets = PROJECTIONS[match[2]]
    for index, target in enumerate(targets):
        yield f"{layer}.{target}.{kind}", _part(tensor, index, len(targets), num_dims=2 if kind == "weight" else 1)


def _part(tensor: StoredTensor, index: int, num_parts: int, num_dims: int) -> StoredTensor:
    """Part ``index`` of ``num_parts`` of a projection's outputs: columns of a stored weight, a piece of a bias."""
    if len(tensor.shape) != num_dims or tensor.shape[-1] % num_parts:
        raise DamagedModelError(
            f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}, which is not {num_parts} equal projections"
        )
    size = tensor.shape[-1] // num_parts
    if num_dims == 2:
        return replace(tensor, shape=(size, tensor.shape[0]), columns=Columns(index * size, tensor.shape[1]))
    nbytes = encoded_nbytes((size,), tensor.encoding)
    return replace(tensor, shape=(size,), offset=tensor.offset + index * nbytes, nbytes=nbytes)

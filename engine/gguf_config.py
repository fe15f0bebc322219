"""Reads GGUF metadata into a ModelConfig. Knows no file: a parsed header (gguf_file) goes in."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from engine.errors import DamagedModelError, UnsupportedModelError
from engine.model_config import LLAMA, QWEN2, QWEN3, ModelConfig
from engine.model_fields import Fields, shared_head_dim, shown, token_id
from engine.rope_config import RopeConfig

GGUF_ARCHITECTURES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}

# Keys under the architecture's prefix that change nothing, with the values for which that holds.
_HARMLESS: Mapping[str, Collection[Any] | None] = {
    "tensor_data_layout": ("Meta AI original pth",),  # the adjacent-pairs row order that "llama" files have anyway
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.finetuned": None,
    "rope.scaling.original_context_length": None,  # read by YaRN alone
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,),
}


def read_gguf_config(
    metadata: Mapping[str, Any],
    *,
    shapes: Mapping[str, Sequence[int]],
    dtype: str,
    rope_factors: Sequence[float] | None,
) -> ModelConfig:
    """See ModelConfig.from_gguf."""
    architecture, fields = _fields(metadata)
    hidden_size, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = _head_dim(fields, hidden_size, num_heads)
    result = ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(fields, shapes),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=fields.integer("context_length"),
        rope=_rope(fields, head_dim, rope_factors),
        tie_word_embeddings="output.weight" not in shapes,
        dtype=dtype,
        qkv_bias=architecture == QWEN2 or "blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm=architecture == QWEN3,
        sliding_window=fields.optional_integer("attention.sliding_window"),
        bos_token_id=token_id("GGUF", "bos_token_id", metadata.get("tokenizer.ggml.bos_token_id")),
        eos_token_ids=_eos_token_ids(metadata),
    )
    fields.refuse_rest(_HARMLESS)
    return result


def _fields(metadata: Mapping[str, Any]) -> tuple[str, Fields]:
    """The architecture by Hugging Face's name, and the keys under its prefix, without it."""
    name = str(metadata.get("general.architecture"))
    if name not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise UnsupportedModelError(f"GGUF: general.architecture = {shown(name)} is not supported (supported: {known})")
    for key, harmless in (("general.type", "model"), ("split.count", 1)):
        if metadata.get(key, harmless) not in (harmless, 0):
            raise UnsupportedModelError(f"GGUF: {key} = {shown(metadata[key])} is not supported")
    prefix = f"{name}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return GGUF_ARCHITECTURES[name], Fields("GGUF", own, prefix=prefix)


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.optional_integer("attention.key_length") or shared_head_dim(fields, hidden_size, num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        found = fields.integer(key, head_dim)
        if found != head_dim:
            raise fields.unsupported(key, found, f" beside a head size of {head_dim}")
    return head_dim


def _vocab_size(fields: Fields, shapes: Mapping[str, Sequence[int]]) -> int:
    """As declared, or else the rows of the embedding (older files declare none)."""
    if "token_embd.weight" not in shapes:
        raise DamagedModelError("GGUF: tensor token_embd.weight is missing")
    return fields.integer("vocab_size", shapes["token_embd.weight"][0])


def _eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """End of text, of turn and of message: each of them ends a generation."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (token_id("GGUF", key, metadata.get(f"tokenizer.ggml.{key}")) for key in keys)
    return tuple(dict.fromkeys(each for each in ids if each is not None))


def _rope(fields: Fields, head_dim: int, factors: Sequence[float] | None) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10000.0)
    scaling, factor = fields.take("rope.scaling.type") or "none", fields.number("rope.scaling.factor", 1.0)
    if scaling not in ("none", "linear", "yarn"):
        raise fields.unsupported("rope.scaling.type", scaling, " (supported: none, linear, yarn)")
    if scaling == "none" and factor != 1.0:
        raise fields.unsupported("rope.scaling.factor", factor, " without rope.scaling.type")
    if factors is not None and any(each != 1.0 for each in factors):
        if scaling != "none":
            raise fields.unsupported("rope.scaling.type", scaling, " together with a rope_freqs.weight tensor")
        return _llama3_rope(theta, head_dim, factors)
    if scaling == "yarn":
        return _yarn_rope(fields, theta, head_dim, factor)
    if scaling == "linear":
        return RopeConfig(rope_type="linear", theta=theta, head_dim=head_dim, rotary_dim=head_dim, factor=factor)
    return RopeConfig(rope_type="default", theta=theta, head_dim=head_dim, rotary_dim=head_dim)


def _yarn_rope(fields: Fields, theta: float, head_dim: int, factor: float) -> RopeConfig:
    """As in a config.json: the attention factor is 0.1 ln(factor) + 1, the band edges are whole dimensions."""
    if factor <= 0:
        raise fields.damaged(f"rope.scaling.factor must be above 0, got {factor:g}")
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        head_dim=head_dim,
        rotary_dim=head_dim,
        factor=factor,
        original_len=fields.integer("rope.scaling.original_context_length", fields.integer("context_length")),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        truncate=True,
    )


def _llama3_rope(theta: float, head_dim: int, factors: Sequence[float]) -> RopeConfig:
    """The llama3 scaling whose per-frequency factors a GGUF holds in place of its parameters.

    All Llama 3.1 to 3.3 models use the bands 1 and 4 of 8192 positions; only the factor varies. Factors that these
    do not reproduce (to float32 rounding) are refused.
    """
    low, high, original, factor = 1.0, 4.0, 8192, max(factors)
    expected = []
    for i in range(0, head_dim, 2):
        turns = original / (2 * math.pi * theta ** (i / head_dim))  # of this frequency within the original context
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected.append(1 / ((1 - share) / factor + share))
    if len(factors) != len(expected) or not all(
        math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, expected, strict=True)
    ):
        raise UnsupportedModelError("GGUF: rope_freqs.weight holds other factors than Llama 3.1's scaling gives: not supported")
    return RopeConfig(
        rope_type="llama3",
        theta=theta,
        head_dim=head_dim,
        rotary_dim=head_dim,
        factor=factor,
        original_len=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )

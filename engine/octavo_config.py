"""Reads and writes the config.json of model_type "octavo": our own trainer's, in which every part of the block is a choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.hf_keys import HARMLESS, read_dtype, read_token_ids
from engine.model_config import OCTAVO, ModelConfig
from engine.model_fields import Fields
from engine.rope_config import no_rope, read_rope

NORMS, NORM_POSITIONS, POSITIONS = ("rmsnorm", "layernorm"), ("pre", "post"), ("rope", "learned")
MLPS = ("swiglu", "gelu", "gelu_tanh")


def read_octavo(fields: Fields, generation_config: Mapping[str, Any]) -> ModelConfig:
    """All sizes and all choices are required: a default that changed later would change published models."""
    num_heads, head_dim = fields.integer("num_attention_heads"), fields.integer("head_dim")
    max_position_embeddings, bias = fields.integer("max_position_embeddings"), _flag(fields, "bias")
    is_learned = _choice(fields, "positions", POSITIONS) == "learned"
    result = ModelConfig(
        architecture=OCTAVO,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=head_dim,
        norm_eps=fields.number("norm_eps"),
        max_position_embeddings=max_position_embeddings,
        rope=no_rope(head_dim) if is_learned else read_rope(fields, head_dim, max_position_embeddings),
        tie_word_embeddings=_flag(fields, "tie_word_embeddings"),
        dtype=read_dtype(fields),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        qk_norm=_flag(fields, "qk_norm"),
        norm=_choice(fields, "norm", NORMS),
        norm_bias=_flag(fields, "norm_bias"),
        is_post_norm=_choice(fields, "norm_position", NORM_POSITIONS) == "post",
        mlp=_choice(fields, "mlp", MLPS),
        **read_token_ids(fields, generation_config),
    )
    fields.refuse_rest(HARMLESS)
    return result


def write_octavo(config: ModelConfig) -> dict[str, Any]:
    """What ``read_octavo`` reads the same ``config`` from. Its rotation must be unscaled: that is how models are trained here."""
    assert config.qkv_bias == config.o_bias == config.mlp_bias
    assert config.rope.rope_type in ("none", "default")
    values: dict[str, Any] = {
        "architectures": [OCTAVO],
        "model_type": "octavo",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "norm": config.norm,
        "norm_bias": config.norm_bias,
        "norm_position": "post" if config.is_post_norm else "pre",
        "norm_eps": config.norm_eps,
        "mlp": config.mlp,
        "bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "positions": "learned" if config.has_learned_positions else "rope",
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": config.dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }
    return values if config.has_learned_positions else {**values, "rope_theta": config.rope.theta}


def _choice(fields: Fields, key: str, known: tuple[str, ...]) -> str:
    value = fields.take(key)
    if value is None:
        raise fields.damaged(f"{key} is missing")
    if not isinstance(value, str) or value not in known:
        raise fields.unsupported(key, value, f" (supported: {', '.join(known)})")
    return value


def _flag(fields: Fields, key: str) -> bool:
    if fields.take(key) is None:
        raise fields.damaged(f"{key} is missing")
    return fields.boolean(key, False)

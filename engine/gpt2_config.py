"""Reads the config.json of a GPT-2 checkpoint. Its keys have names of their own; each is honoured or refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine.hf_keys import HARMLESS, read_dtype, read_token_ids
from engine.model_config import GPT2, ModelConfig
from engine.model_fields import Fields, shared_head_dim
from engine.rope_config import no_rope

_MLPS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}

_HARMLESS: Mapping[str, Collection[Any] | None] = {
    **HARMLESS,
    # Dropout and the heads of other tasks act in training or not at all here; the upcast only changes rounding in 16 bits.
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn")),
    **dict.fromkeys(
        ("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj")
    ),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}


def read_gpt2(fields: Fields, generation_config: Mapping[str, Any]) -> ModelConfig:
    """Layer norms and all projections have biases; the position table has n_positions rows."""
    hidden_size, num_heads = fields.integer("n_embd"), fields.integer("n_head")
    head_dim = shared_head_dim(fields, hidden_size, num_heads)
    result = ModelConfig(
        architecture=GPT2,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.optional_integer("n_inner") or 4 * hidden_size,
        num_layers=fields.integer("n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        max_position_embeddings=_num_positions(fields),
        rope=no_rope(head_dim),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", True),
        dtype=read_dtype(fields),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        norm="layernorm",
        norm_bias=True,
        mlp=_mlp(fields),
        **read_token_ids(fields, generation_config),
    )
    fields.refuse_rest(_HARMLESS)
    return result


def _num_positions(fields: Fields) -> int:
    """n_ctx is what older checkpoints call the same number beside it."""
    num_positions = fields.integer("n_positions")
    other = fields.integer("n_ctx", num_positions)
    if other != num_positions:
        raise fields.unsupported("n_ctx", other, f" beside n_positions = {num_positions}")
    return num_positions


def _mlp(fields: Fields) -> str:
    name = fields.take("activation_function", "gelu_new")
    if name not in _MLPS:
        raise fields.unsupported("activation_function", name, f" (supported: {', '.join(_MLPS)})")
    return _MLPS[name]

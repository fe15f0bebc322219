"""Reads config.json and generation_config.json as transformers writes them, versions 4 and 5, into a ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.gpt2_config import read_gpt2
from engine.hf_keys import HARMLESS, read_dtype, read_token_ids, refuse_quantization
from engine.model_config import GPT2, LLAMA, MISTRAL, OCTAVO, QWEN2, QWEN3, ModelConfig
from engine.model_fields import Fields, shared_head_dim, shown
from engine.octavo_config import read_octavo
from engine.rope_config import read_rope

MODEL_TYPES = {"llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3, "gpt2": GPT2, "octavo": OCTAVO}


def read_hf_config(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelConfig:
    """See ModelConfig.from_hf."""
    fields = Fields("config.json", config)
    architecture = _architecture(fields)
    refuse_quantization(fields)
    if architecture == GPT2:
        return read_gpt2(fields, generation_config)
    if architecture == OCTAVO:
        return read_octavo(fields, generation_config)
    return _read_llama(fields, architecture, generation_config)


def _read_llama(fields: Fields, architecture: str, generation_config: Mapping[str, Any]) -> ModelConfig:
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers, max_position_embeddings = fields.integer("num_hidden_layers"), fields.integer("max_position_embeddings")
    head_dim = _head_dim(fields, architecture, hidden_size, num_heads)
    attention_bias = _bias(fields, "attention_bias", architecture in (LLAMA, QWEN3))
    result = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps"),
        max_position_embeddings=max_position_embeddings,
        rope=read_rope(fields, head_dim, max_position_embeddings),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        dtype=read_dtype(fields),
        qkv_bias=attention_bias or architecture == QWEN2,
        o_bias=attention_bias,
        mlp_bias=_bias(fields, "mlp_bias", architecture == LLAMA),
        qk_norm=architecture == QWEN3,
        sliding_window=_sliding_window(fields, architecture, num_layers),
        **read_token_ids(fields, generation_config),
    )
    fields.refuse_rest({**HARMLESS, "hidden_act": ("silu", "swish")})
    return result


def _head_dim(fields: Fields, architecture: str, hidden_size: int, num_heads: int) -> int:
    if fields.take("head_dim", 128 if architecture == QWEN3 else None) is None:  # transformers' defaults
        return shared_head_dim(fields, hidden_size, num_heads)
    return fields.integer("head_dim", 128)


def _bias(fields: Fields, key: str, built: bool) -> bool:
    """The flag ``key``; true is refused where the architecture has no such bias."""
    bias = fields.boolean(key, False)
    if bias and not built:
        raise fields.unsupported(key, bias, " for this architecture")
    return bias


def _architecture(fields: Fields) -> str:
    architectures, model_type = fields.take("architectures"), fields.take("model_type")
    if not architectures:
        architectures = [MODEL_TYPES.get(str(model_type), model_type)]
    known = ", ".join(MODEL_TYPES.values())
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in MODEL_TYPES.values():
        raise fields.unsupported("architectures", architectures, f" (supported: {known})")
    architecture: str = architectures[0]
    if model_type is not None and MODEL_TYPES.get(str(model_type)) != architecture:
        raise fields.unsupported("model_type", model_type, f" together with {architecture}")
    return architecture


def _sliding_window(fields: Fields, architecture: str, num_layers: int) -> int | None:
    """The window that holds in every layer, or None where no layer has one."""
    window, first_sliding = _window(fields, architecture, num_layers)
    declared = fields.take("layer_types")
    if declared is not None and (not isinstance(declared, list) or len(declared) != num_layers):
        raise fields.damaged(f"layer_types must name {num_layers} layers, got {shown(declared)}")
    kinds = sorted({str(kind) for kind in declared or ()})
    if declared is None or (architecture == MISTRAL and kinds == ["full_attention"]):  # transformers goes by the window
        full, sliding = first_sliding > 0, first_sliding < num_layers
        kinds = ["full_attention"] * full + ["sliding_attention"] * sliding
    if kinds == ["full_attention"]:
        return None
    if kinds != ["sliding_attention"]:
        raise fields.unsupported("layer_types", kinds, ": all layers must have full attention, or all the same sliding window")
    if window is None:
        raise fields.damaged("layer_types names sliding_attention, but no sliding_window is in use")
    return window


def _window(fields: Fields, architecture: str, num_layers: int) -> tuple[int | None, int]:
    """The window in use, if any, and the first layer that has it. An absent sliding_window is 4096 in transformers."""
    if architecture == LLAMA:
        if fields.boolean("use_sliding_window", False):
            raise fields.unsupported("use_sliding_window", True, " for this architecture")
        return None, num_layers
    window = None if fields.take("sliding_window", 4096) is None else fields.integer("sliding_window", 4096)
    in_use = fields.boolean("use_sliding_window", architecture == MISTRAL)
    first_sliding = 0 if architecture == MISTRAL else fields.integer("max_window_layers", 28, minimum=0)
    return (window, first_sliding) if in_use and window is not None else (None, num_layers)

"""Reads config.json and generation_config.json as transformers writes them, versions 4 and 5, into a ModelConfig."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine.model_config import LLAMA, MISTRAL, QWEN2, QWEN3, ModelConfig
from engine.model_fields import Fields, shared_head_dim, shown, token_id
from engine.rope_config import read_rope

MODEL_TYPES = {"llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3}

# Keys that transformers or its users write and that change nothing here, whatever their value. Dropout and
# initialisation act in training alone; sampling defaults are the request's business.
# fmt: off
_NEVER_MATTER = (
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "transformers.js_config", "use_cache",
    "initializer_range", "attention_dropout", "pad_token_id", "unk_token_id", "sep_token_id", "tokenizer_class",
    "return_dict", "return_dict_in_generate", "torchscript", "output_hidden_states", "output_attentions",
    "output_scores", "output_past", "tie_last_hidden_states", "id2label", "label2id", "num_labels", "problem_type",
    "task_specific_params", "finetuning_task", "prefix", "attn_implementation", "_attn_implementation",
    "_attn_implementation_autoset", "_experts_implementation", "max_sequence_length", "is_llama_config",
    "unsloth_fixed", "unsloth_version", "do_sample", "temperature", "top_k", "top_p", "typical_p", "min_length",
    "max_length", "num_return_sequences", "early_stopping",
)
# fmt: on

# The same, with the values for which it holds.
_HARMLESS: Mapping[str, Collection[Any] | None] = {
    **dict.fromkeys(_NEVER_MATTER),
    "pretraining_tp": (1,),
    "hidden_act": ("silu", "swish"),
    "use_mrope": (False,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "use_bfloat16": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({},),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "diversity_penalty": (0.0,),
    "length_penalty": (1.0,),
    "remove_invalid_values": (False,),
}


def read_hf_config(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelConfig:
    """See ModelConfig.from_hf."""
    fields = Fields("config.json", config)
    architecture = _architecture(fields)
    _refuse_quantization(fields)
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
        rms_norm_eps=fields.number("rms_norm_eps"),
        max_position_embeddings=max_position_embeddings,
        rope=read_rope(fields, head_dim, max_position_embeddings),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        dtype=_dtype(fields),
        qkv_bias=attention_bias or architecture == QWEN2,
        o_bias=attention_bias,
        mlp_bias=_bias(fields, "mlp_bias", architecture == LLAMA),
        qk_norm=architecture == QWEN3,
        sliding_window=_sliding_window(fields, architecture, num_layers),
        **_token_ids(fields, generation_config),
    )
    fields.refuse_rest(_HARMLESS)
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


def _refuse_quantization(fields: Fields) -> None:
    quantization = fields.take("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise fields.unsupported("quantization_config", method, "; use an unquantized checkpoint or a GGUF file")


def _dtype(fields: Fields) -> str:
    older, dtype = fields.take("torch_dtype"), fields.take("dtype")
    value = older if dtype is None else dtype
    return "float32" if value is None else str(value).removeprefix("torch.")


def _token_ids(fields: Fields, generation_config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, tuple[str, Any]] = {}
    for key in ("bos_token_id", "eos_token_id"):
        own, source = fields.take(key), "config.json"
        if generation_config.get(key) is not None:
            own, source = generation_config[key], "generation_config.json"
        found[key] = (source, own)
    source, eos = found["eos_token_id"]
    ids = [token_id(source, "eos_token_id", each) for each in (eos if isinstance(eos, list) else [eos])]
    return {
        "bos_token_id": token_id(found["bos_token_id"][0], "bos_token_id", found["bos_token_id"][1]),
        "eos_token_ids": tuple(dict.fromkeys(each for each in ids if each is not None)),
    }


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

"""What every config.json of transformers has in common: keys that change nothing, the element type, the token ids."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine.model_fields import Fields, token_id

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
HARMLESS: Mapping[str, Collection[Any] | None] = {
    **dict.fromkeys(_NEVER_MATTER),
    "pretraining_tp": (1,),
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


def refuse_quantization(fields: Fields) -> None:
    quantization = fields.take("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise fields.unsupported("quantization_config", method, "; use an unquantized checkpoint or a GGUF file")


def read_dtype(fields: Fields) -> str:
    older, dtype = fields.take("torch_dtype"), fields.take("dtype")
    value = older if dtype is None else dtype
    return "float32" if value is None else str(value).removeprefix("torch.")


def read_token_ids(fields: Fields, generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """``bos_token_id`` and ``eos_token_ids`` for a ModelConfig; generation_config.json wins."""
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

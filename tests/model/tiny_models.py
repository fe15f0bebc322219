"""Tiny random models of every architecture, written to disk by transformers: the reference that we are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaForCausalLM", {"rms_norm_eps": 1e-5}),
    "llama3": (
        "LlamaForCausalLM",
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}, "tie_word_embeddings": True},
    ),
    "llama-linear": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-yarn": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("LlamaForCausalLM", {"num_key_value_heads": 6}),
    "mistral": ("MistralForCausalLM", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
}

# GPT-2's own names for the same shape; its config writes them all, whatever the model is built from.
GPT2_SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "n_positions": 128,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
GPT2S: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2-exact-gelu": {"activation_function": "gelu", "n_inner": 80, "tie_word_embeddings": False},
}


def make_gpt2(name: str, folder: Path) -> Any:
    """As ``make_model``."""
    return _made(transformers.GPT2LMHeadModel, {**GPT2_SHAPE, **GPT2S[name]}, len(name), folder)


def make_model(name: str, folder: Path) -> Any:
    """Save the model into ``folder`` and return transformers' own, in float32."""
    class_name, extra = ARCHITECTURES[name]
    return _made(getattr(transformers, class_name), {**SHAPE, **extra}, len(name), folder)


def _made(model_class: Any, config: dict[str, Any], seed: int, folder: Path) -> Any:
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**config)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that are not 1 and 0, so that leaving one out shows
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model

"""Small random models as files: saved by transformers, or written as GGUF from a transformers model's state dict; and how
to compare what was loaded with them."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.model.weights import ModelWeights, load_weights, open_checkpoint

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_model(family: str, **changes: object) -> PreTrainedModel:
    """Random everywhere: biases and norms too, which transformers would leave at 0 and 1."""
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


# Written from the description of the two rotary layouts, apart from the code under test: row x of pair j of a head.
def to_pair_order(rows: np.ndarray, heads: int) -> np.ndarray:
    head_dim = rows.shape[0] // heads
    result = np.empty_like(rows)
    for head in range(heads):
        for j in range(head_dim // 2):
            result[head * head_dim + 2 * j] = rows[head * head_dim + j]
            result[head * head_dim + 2 * j + 1] = rows[head * head_dim + head_dim // 2 + j]
    return result


HF_TO_GGUF = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(hf_name: str) -> str:
    module, _, leaf = hf_name.rpartition(".")
    if module in OUTER:
        return f"{OUTER[module]}.{leaf}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{HF_TO_GGUF[part]}.{leaf}"


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    arch: str,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    metadata: dict[str, object] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    raw: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> None:
    """``kind`` is for the matrices; vectors stay float32. ``raw`` replaces tensors (by GGUF name) with given bytes."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if arch == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_eos_token_id(2)
    writer.add_token_list(["a", "b", "c"])
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, _value_type(value))
    tensors = model.state_dict()
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name, tensor in tensors.items():
        _add_tensor(writer, name, tensor.float().numpy(), arch, config, kind, raw or {})
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(writer, name, values, arch, config, kind, raw) -> None:
    if arch == "llama" and "q_proj" in name:
        values = to_pair_order(values, config.num_attention_heads)
    if arch == "llama" and "k_proj" in name:
        values = to_pair_order(values, config.num_key_value_heads)
    if gguf_name(name) in raw:
        data, raw_kind = raw[gguf_name(name)]
        writer.add_tensor(gguf_name(name), data, raw_dtype=raw_kind)
    elif values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(gguf_name(name), values)
    else:
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)


def _value_type(value: object) -> gguf.GGUFValueType:
    if isinstance(value, bool):
        return gguf.GGUFValueType.BOOL
    if isinstance(value, int):
        return gguf.GGUFValueType.UINT32
    return gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.STRING


def llama31_factors(head_dim: int, theta: float, factor: float, *, original: int = 8192) -> list[float]:
    """As the converter of llama.cpp writes them: by wavelength."""
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        if wavelength < original / 4:
            factors.append(1.0)
        elif wavelength > original:
            factors.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def load(path: Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(open_checkpoint(path), dtype=dtype, device="cpu", progress=lambda done, total: None)


def assert_equals_state(weights: ModelWeights, state: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Exact equality, after rounding the reference to ``dtype``; also that nothing of ``state`` is left over."""
    left = {name: tensor.to(dtype) for name, tensor in state.items()}

    def check(found: torch.Tensor | None, *names: str) -> None:
        expected = [left.pop(name) for name in names if name in left]
        if not expected:
            assert found is None
            return
        assert found is not None
        assert found.dtype == dtype
        assert torch.equal(found, torch.cat(expected))
        assert found.is_contiguous()
        assert found.data_ptr() % 64 == 0

    check(weights.embed, "model.embed_tokens.weight")
    check(weights.final_norm, "model.norm.weight")
    if weights.lm_head is not weights.embed:
        check(weights.lm_head, "lm_head.weight")
    else:
        left.pop("lm_head.weight", None)
    for i, layer in enumerate(weights.layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        check(layer.input_norm, f"model.layers.{i}.input_layernorm.weight")
        check(layer.qkv, *(f"{attention}.{part}_proj.weight" for part in "qkv"))
        check(layer.qkv_bias, *(f"{attention}.{part}_proj.bias" for part in "qkv"))
        check(layer.q_norm, f"{attention}.q_norm.weight")
        check(layer.k_norm, f"{attention}.k_norm.weight")
        check(layer.o, f"{attention}.o_proj.weight")
        check(layer.o_bias, f"{attention}.o_proj.bias")
        check(layer.post_attention_norm, f"model.layers.{i}.post_attention_layernorm.weight")
        check(layer.gate_up, f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
        check(layer.gate_up_bias, f"{mlp}.gate_proj.bias", f"{mlp}.up_proj.bias")
        check(layer.down, f"{mlp}.down_proj.weight")
        check(layer.down_bias, f"{mlp}.down_proj.bias")
    assert not left


MEASURE = """
import sys
from pathlib import Path
import torch
from engine.model.weights import load_weights, open_checkpoint

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

for path in sys.argv[1:]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = status("VmRSS")
    weights = load_weights(open_checkpoint(Path(path)), dtype=torch.float32, device="cpu", progress=lambda done, total: None)
    print((status("VmHWM") - before) / weights.nbytes)
    del weights
"""


def peak_ratios(*paths: Path) -> list[float]:
    """The growth of a fresh process's peak memory (anonymous and mapped) while loading, over the size of the weights."""
    done = subprocess.run([sys.executable, "-c", MEASURE, *map(str, paths)], check=True, capture_output=True, text=True)
    return [float(line) for line in done.stdout.split()]

"""config.json as transformers writes it is read in full; what is not implemented is refused by name."""

from __future__ import annotations

import json

import pytest
from checkpoint_files import SIZES, tiny_model
from transformers import LlamaConfig

from engine.errors import DamagedModelError, UnsupportedModelError
from engine.model_config import ModelConfig
from engine.rope_config import RopeConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    **SIZES,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def of_type(family: str, **changes: object) -> dict[str, object]:
    names = {"mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    return {**LLAMA, "architectures": [f"{names[family]}ForCausalLM"], "model_type": family, **changes}


def test_llama_config_is_read() -> None:
    config = ModelConfig.from_hf({**LLAMA, "rope_theta": 5e5, "tie_word_embeddings": True})
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-5,
        max_position_embeddings=256,
        rope=RopeConfig(rope_type="default", theta=5e5, head_dim=16, rotary_dim=16),
        tie_word_embeddings=True,
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_transformers_saves_is_accepted(family: str, tmp_path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    config = ModelConfig.from_hf(
        json.loads((tmp_path / "config.json").read_text()), json.loads((tmp_path / "generation_config.json").read_text())
    )
    assert config.head_dim == (128 if family == "qwen3" else 16)
    assert config.qkv_bias == (family == "qwen2")
    assert config.qk_norm == (family == "qwen3")
    assert config.sliding_window == (4096 if family == "mistral" else None)
    assert config.eos_token_ids == (2,)
    assert config.dtype == "float32"


def test_every_key_of_the_default_config_is_known() -> None:
    full = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).to_dict()
    assert ModelConfig.from_hf(full).num_kv_heads == 2


def test_published_smollm2_config_is_accepted() -> None:
    published = {
        **LLAMA,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.041666666666666664,
        "is_llama_config": True,
        "mlp_bias": False,
        "pad_token_id": 2,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "rope_scaling": None,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "transformers_version": "4.42.3",
        "use_cache": True,
    }
    assert ModelConfig.from_hf(published).rope.rope_type == "default"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"rope_scaling": {**LLAMA3_ROPE}, "rope_theta": 5e5}, ("llama3", 5e5, 8.0)),
        ({"rope_theta": None, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}}, ("llama3", 5e5, 8.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ("linear", 1e4, 2.0)),
        ({"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}}, ("linear", 1e4, 2.0)),
        ({"rope_theta": None}, ("default", 1e4, None)),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, ("default", 7.0, None)),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}, ("default", 1e4, None)),
    ],
)
def test_both_rope_spellings(changes: dict[str, object], found: tuple[str, float, float | None]) -> None:
    rope = ModelConfig.from_hf({**LLAMA, **changes}).rope
    assert (rope.rope_type, rope.theta, rope.factor) == found
    assert rope.rotary_dim == 16
    if rope.rope_type == "llama3":
        assert (rope.low_freq_factor, rope.high_freq_factor, rope.original_len) == (1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPTJForCausalLM"]}, ["architectures", "GPTJForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, ["architectures"]),
        ({"architectures": None, "model_type": "gemma"}, ["gemma"]),
        ({"model_type": "granite"}, ["model_type", "granite"]),
        ({"model_type": ["llama"]}, ["model_type"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"pretraining_tp": 2}, ["pretraining_tp", "2"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ({"auto_map": {"AutoModelForCausalLM": "mine.Llama"}}, ["auto_map", "mine.Llama"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantization_config", "gptq"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["float8_e4m3fn"]),
        ({"sliding_window": 128}, ["sliding_window", "128"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"head_dim": 15}, ["head_dim", "15"]),
        ({"partial_rotary_factor": 0.2}, ["partial_rotary_factor", "0.2", "3"]),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, ["partial_rotary_factor", "1.5"]),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 4]}}, ["rope_scaling", "mrope", "yarn"]),
        ({"rope_scaling": {"rope_type": "proportional"}}, ["rope_scaling", "proportional"]),
        ({"rope_scaling": {"rope_type": ["yarn"], "factor": 2.0}}, ["rope_scaling", "yarn"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "low_freq_factor": 1.0}}, ["rope_scaling", "low_freq_factor"]),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 7}},
            ["rope_scaling", "7"],
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mystery": 1}}, ["rope_scaling", "mystery"]),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, ["rope_scaling", "factor"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters", "full_attention"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"layer_types": ["linear_attention"] * 2}, ["layer_types", "linear_attention"]),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        ModelConfig.from_hf({**LLAMA, **changes})
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_biases_that_an_architecture_does_not_have_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="attention_bias = True"):
        ModelConfig.from_hf(of_type(family, attention_bias=True))
    with pytest.raises(UnsupportedModelError, match="mlp_bias = True"):
        ModelConfig.from_hf(of_type(family, mlp_bias=True))


@pytest.mark.parametrize("missing", sorted(LLAMA3_ROPE.keys() - {"rope_type", "original_max_position_embeddings"}))
def test_llama3_scaling_has_no_defaults(missing: str) -> None:
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != missing}
    with pytest.raises(DamagedModelError, match=f"rope_scaling: {missing} is missing"):
        ModelConfig.from_hf({**LLAMA, "rope_scaling": scaling})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number, got '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"num_attention_heads": True}, "num_attention_heads must be a whole number"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"hidden_size": 66}, "hidden size 66 is not a multiple of 4"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be positive and finite"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be positive and finite"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id must hold token ids"),
        ({"layer_types": ["full_attention"]}, "layer_types must name 2 layers"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "rope_type 'llama3' and type 'linear' differ"),
        ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.0}}, "low_freq_factor 4.0 must be below"),
        ({"rope_scaling": LLAMA3_ROPE, "rope_parameters": {"rope_type": "default"}}, "both given and differ"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta is 5.0, but 10000.0 at the top level"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        (
            {"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5, but 1.0",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1] * 8}}, "short_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [1] * 7}},
            "long_factor must hold 8 numbers",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [0] * 8}},
            "long_factor must be positive",
        ),
        ({"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_theta must be above 1"),
    ],
)
def test_contradictions_are_damage(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DamagedModelError, match=message.replace("(", "\\(")):
        ModelConfig.from_hf({**LLAMA, **changes})


def test_llama3_scaling_without_theta_is_refused() -> None:
    with pytest.raises(DamagedModelError, match="rope_theta is missing"):
        ModelConfig.from_hf({**LLAMA, "rope_theta": None, "rope_scaling": LLAMA3_ROPE})


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("mistral", {"sliding_window": 100}, 100),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {}, 4096),
        ("mistral", {"sliding_window": 100, "layer_types": ["full_attention"] * 2}, 100),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": False, "max_window_layers": 1}, None),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 0}, 100),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 2}, None),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 100),
        ("qwen3", {"layer_types": ["full_attention"] * 2, "max_window_layers": 2, "sliding_window": None}, None),
    ],
)
def test_sliding_window(family: str, changes: dict[str, object], window: int | None) -> None:
    assert ModelConfig.from_hf(of_type(family, **changes)).sliding_window == window


def test_a_mix_of_full_and_sliding_layers_is_refused() -> None:
    mixed = of_type("qwen2", sliding_window=100, use_sliding_window=True, max_window_layers=1)
    with pytest.raises(UnsupportedModelError, match="layer_types"):
        ModelConfig.from_hf(mixed)
    with pytest.raises(DamagedModelError, match="no sliding_window is in use"):
        ModelConfig.from_hf(of_type("qwen2", layer_types=["sliding_attention"] * 2))


def test_generation_config_wins_for_the_end_tokens() -> None:
    assert ModelConfig.from_hf(LLAMA, {"eos_token_id": [7, 8, 7], "temperature": 0.6}).eos_token_ids == (7, 8)
    assert ModelConfig.from_hf(LLAMA, {"temperature": 0.6}).eos_token_ids == (2,)
    assert ModelConfig.from_hf({**LLAMA, "eos_token_id": None}).eos_token_ids == ()


def test_defaults_of_absent_keys_are_those_of_transformers() -> None:
    without = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert ModelConfig.from_hf(without).num_kv_heads == 4
    assert ModelConfig.from_hf(of_type("qwen3")).head_dim == 128
    assert ModelConfig.from_hf({**LLAMA, "architectures": None}).architecture == "LlamaForCausalLM"
    assert ModelConfig.from_hf({**LLAMA, "dtype": "float16"}).dtype == "float16"

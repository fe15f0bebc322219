"""GGUF metadata, and what only the tensors tell, become the same ModelConfig."""

from __future__ import annotations

import pytest
from checkpoint_files import llama31_factors

from engine.errors import DamagedModelError, UnsupportedModelError
from engine.model_config import ModelConfig

METADATA = {
    "general.architecture": "llama",
    "general.type": "model",
    "general.name": "Tiny",
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5e5,
    "llama.rope.dimension_count": 16,
    "llama.vocab_size": 96,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
SHAPES = {"token_embd.weight": (96, 64), "output.weight": (96, 64)}


def read(changes: dict[str, object] | None = None, *, shapes=SHAPES, rope_factors=None) -> ModelConfig:
    metadata = {key: value for key, value in {**METADATA, **(changes or {})}.items() if value is not None}
    return ModelConfig.from_gguf(metadata, shapes=shapes, dtype="float32", rope_factors=rope_factors)


def test_llama_metadata_is_read() -> None:
    config = read()
    assert (config.architecture, config.vocab_size, config.num_kv_heads, config.head_dim) == ("LlamaForCausalLM", 96, 2, 16)
    assert (config.rope.rope_type, config.rope.theta, config.rope.rotary_dim) == ("default", 5e5, 16)
    assert not config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_tensors_tell_of_ties_biases_and_vocabulary() -> None:
    shapes = {"token_embd.weight": (96, 64), "blk.0.attn_q.bias": (64,), "blk.0.attn_output.bias": (64,)}
    config = read({"llama.vocab_size": None}, shapes=shapes)
    assert (config.tie_word_embeddings, config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True, False)
    assert config.vocab_size == 96


def test_every_end_token_ends_a_generation() -> None:
    extra = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    assert read(extra).eos_token_ids == (2, 5)


def test_linear_scaling() -> None:
    rope = read({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}).rope
    assert (rope.rope_type, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize("original", [64, None])
def test_yarn_is_that_of_a_config_json(original: int | None) -> None:
    hf = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original or 256},
    }
    assert read({**YARN, "llama.rope.scaling.original_context_length": original}).rope == ModelConfig.from_hf(hf).rope


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama31_factors_are_recognised(factor: float) -> None:
    rope = read(rope_factors=llama31_factors(16, 5e5, factor)).rope
    assert (rope.rope_type, rope.factor, rope.low_freq_factor, rope.high_freq_factor) == ("llama3", factor, 1.0, 4.0)
    assert rope.original_len == 8192


def test_factors_of_one_are_no_scaling() -> None:
    assert read(rope_factors=[1.0] * 8).rope.rope_type == "default"


@pytest.mark.parametrize("factors", [llama31_factors(16, 5e5, 8.0, original=4096), [1.0, 2.0], [2.0] * 8])
def test_other_factors_are_refused(factors: list[float]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        read(rope_factors=factors)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "gemma3"}, ["general.architecture", "gemma3"]),
        ({"general.architecture": None}, ["general.architecture"]),
        ({"general.type": "adapter"}, ["general.type", "adapter"]),
        ({"split.count": 2}, ["split.count", "2"]),
        ({"llama.expert_count": 8}, ["llama.expert_count", "8"]),
        ({"llama.attention.scale": 0.5}, ["llama.attention.scale", "0.5"]),
        ({"llama.rope.scaling.type": "longrope"}, ["llama.rope.scaling.type", "longrope"]),
        ({**YARN, "llama.rope.scaling.yarn_ext_factor": 0.5}, ["llama.rope.scaling.yarn_ext_factor"]),
        ({**YARN, "llama.rope.scaling.yarn_log_multiplier": 0.1}, ["llama.rope.scaling.yarn_log_multiplier"]),
        ({"llama.rope.scaling.factor": 4.0}, ["llama.rope.scaling.factor"]),
        ({"llama.rope.scaling.attn_factor": 0.5}, ["llama.rope.scaling.attn_factor"]),
        ({"llama.rope.dimension_count": 8}, ["llama.rope.dimension_count", "8"]),
        ({"llama.attention.key_length": 16, "llama.attention.value_length": 8}, ["llama.attention.value_length", "8"]),
        ({"llama.attention.causal": False}, ["llama.attention.causal"]),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        read(changes)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count must be a whole number"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id must hold token ids"),
    ],
)
def test_incomplete_metadata_is_damage(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DamagedModelError, match=message):
        read(changes)


def test_a_file_without_an_embedding_is_damage() -> None:
    with pytest.raises(DamagedModelError, match=r"token_embd\.weight is missing"):
        read(shapes={})

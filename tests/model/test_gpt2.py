"""GPT-2 checkpoints: every key honoured or refused by name, old and new names of tensors, and the wall of the position table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config

from engine.async_engine import check_request
from engine.config import CacheConfig, EngineConfig
from engine.errors import ConfigError, ContextLengthError, DamagedModelError, UnsupportedModelError
from engine.load import LoadedEngine, load_engine
from engine.model.cpu_ops import CPUOps
from engine.model.ops import TorchOps
from engine.model.weights import load_weights, open_checkpoint
from engine.model_config import ModelConfig
from engine.request import SamplingParams
from tests.model.tiny_models import make_gpt2


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**GPT2Config(architectures=["GPT2LMHeadModel"]).to_dict(), **changes})


def test_gpt2_as_published() -> None:
    published = {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
        "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
        "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
        "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
        "summary_use_proj": True, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    }  # fmt: skip
    config = ModelConfig.from_hf(published)
    assert (config.max_position_embeddings, config.intermediate_size, config.head_dim, config.num_kv_heads) == (
        1024,
        3072,
        64,
        12,
    )
    assert (config.norm, config.norm_bias, config.is_post_norm, config.mlp) == ("layernorm", True, False, "gelu_tanh")
    assert config.qkv_bias
    assert config.o_bias
    assert config.mlp_bias
    assert config.tie_word_embeddings
    assert config.has_learned_positions
    assert not config.has_llama_block


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation_function": "relu"}, ["activation_function", "relu"]),
        ({"scale_attn_weights": False}, ["scale_attn_weights", "False"]),
        ({"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
        ({"add_cross_attention": True}, ["add_cross_attention"]),
        ({"n_ctx": 512}, ["n_ctx", "512", "1024"]),
        ({"rope_theta": 1e4}, ["rope_theta"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, ["rope_scaling"]),
        ({"num_key_value_heads": 2}, ["num_key_value_heads"]),
        ({"no_such_key": 1}, ["no_such_key"]),
    ],
)
def test_what_it_does_not_compute_is_refused_by_name(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(**changes)
    for word in words:
        assert word in str(caught.value)


def test_old_files_have_no_prefix_and_store_masks_and_the_head(tmp_path: Path) -> None:
    make_gpt2("gpt2", tmp_path)
    new = load_weights(open_checkpoint(tmp_path), dtype=torch.float32, device="cpu", progress=lambda done, total: None)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    kinds = (torch.float32, torch.uint8, torch.bool)
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 128, 128, dtype=kind) for i, kind in enumerate(kinds)}
    tensors |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(3)}
    save_file({**tensors, "lm_head.weight": tensors["wte.weight"].clone()}, tmp_path / "model.safetensors")
    old = load_weights(open_checkpoint(tmp_path), dtype=torch.float32, device="cpu", progress=lambda done, total: None)
    for a, b in zip(new.tensors(), old.tensors(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "tensor", "error", "word"),
    [
        ("transformer.h.0.attn.c_attn.weight", torch.ones(48, 143), DamagedModelError, "c_attn"),
        ("transformer.h.0.attn.c_attn.weight", torch.ones(144), DamagedModelError, "c_attn"),
        ("transformer.h.0.crossattention.c_attn.weight", torch.ones(48, 144), UnsupportedModelError, "crossattention"),
        ("transformer.wpe.weight", torch.ones(64, 48), DamagedModelError, "wpe"),
        ("wte.weight", torch.ones(199, 48), DamagedModelError, "embed_tokens"),
    ],
)
def test_tensors_that_cannot_be_meant_are_named(
    name: str, tensor: torch.Tensor, error: type[Exception], word: str, tmp_path: Path
) -> None:
    make_gpt2("gpt2", tmp_path)
    save_file({**load_file(tmp_path / "model.safetensors"), name: tensor}, tmp_path / "model.safetensors")
    with pytest.raises(error, match=word):
        open_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2")
    make_gpt2("gpt2", path)
    return path


def load(folder: Path, **config: Any) -> LoadedEngine:
    cache = CacheConfig(block_size=4, memory_bytes=1 << 20)
    return load_engine(EngineConfig(model_path=str(folder), model_name="gpt2", cache=cache, **config))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"max_model_len": 129}, ["129", "128", "learned table"]),
        ({"rope_scaling": json.dumps({"rope_type": "yarn", "factor": 2.0})}, ["--rope-scaling", "128", "learned table"]),
        ({"window": 64}, ["--window", "learned positions"]),
        ({"rope_policy": "ladder"}, ["--rope-policy ladder", "128", "learned table"]),
    ],
)
def test_no_option_reaches_past_the_table(config: dict[str, Any], words: list[str], folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder, **config)
    for word in words:
        assert word in str(caught.value)


def test_a_prompt_past_the_table_is_refused_with_the_reason_and_the_numbers(folder: Path) -> None:
    info = load(folder).info
    assert (info.max_model_len, info.position_table_len, info.rope_classes) == (128, 128, (("none", 128),))
    check_request(info, [5] * 100, SamplingParams(max_tokens=28))
    with pytest.raises(ContextLengthError, match=r"128 tokens, the rows of its learned position table.* asks for 201"):
        check_request(info, [5] * 200, SamplingParams(max_tokens=1))
    shortened = load(folder, max_model_len=64).info
    with pytest.raises(ContextLengthError, match=r"context is 64 tokens; the request asks for 101"):
        check_request(shortened, [5] * 100, SamplingParams(max_tokens=1))


def test_the_kernels_give_what_torch_gives() -> None:
    """And a row the same bits in any batch."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 131, generator=generator) * 3
    weight, bias = torch.randn(2, 131, generator=generator)
    fast, slow = CPUOps(), TorchOps()
    wide = torch.cat((x, torch.full((1, 131), 200.0), torch.full((1, 131), -200.0)))
    for is_tanh in (False, True):
        torch.testing.assert_close(fast.gelu(wide, is_tanh), slow.gelu(wide, is_tanh), atol=1e-6, rtol=2e-6)
        assert torch.equal(fast.gelu(x[2:3], is_tanh), fast.gelu(x, is_tanh)[2:3])
    for each in (bias, None):
        torch.testing.assert_close(
            fast.layer_norm(x, weight, each, 1e-5), slow.layer_norm(x, weight, each, 1e-5), atol=2e-6, rtol=2e-6
        )
        assert torch.equal(fast.layer_norm(x[2:3], weight, each, 1e-5), fast.layer_norm(x, weight, each, 1e-5)[2:3])

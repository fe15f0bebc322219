"""Figures of a 7B shape, as the recipe's swaps change it, and that the counts are those of what is loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.capacity.shape import count_parameters, kv_bytes_per_token
from engine.demo.model import DemoModel, rotary
from engine.model.weights import num_parameters
from engine.model_config import ModelConfig
from engine.rope_config import no_rope
from tests.demo.test_switches import BASE, SWITCHES

VANILLA_7B = ModelConfig(
    architecture="OctavoForCausalLM", vocab_size=128_000, hidden_size=4096, intermediate_size=4 * 4096, num_layers=32, num_heads=32,
    num_kv_heads=32, head_dim=128, norm_eps=1e-5, max_position_embeddings=8192, rope=no_rope(128), tie_word_embeddings=True,
    dtype="bfloat16", qkv_bias=True, o_bias=True, mlp_bias=True, norm="layernorm", norm_bias=True, mlp="gelu",
)  # fmt: skip
MODERN_7B = replace(
    VANILLA_7B, num_kv_heads=8, intermediate_size=10_928, rope=rotary(128), qkv_bias=False, o_bias=False, mlp_bias=False,
    norm="rmsnorm", norm_bias=False, mlp="swiglu", qk_norm=True,
)  # fmt: skip


@pytest.mark.parametrize(("config", "kib", "gb_at_32k"), [(VANILLA_7B, 512, 17.2), (MODERN_7B, 128, 4.3)])
def test_kv_of_a_7b_shape(config: ModelConfig, kib: int, gb_at_32k: float) -> None:
    per_token = kv_bytes_per_token(config, "bfloat16")
    assert per_token == kib * 1024
    assert round(per_token * 32_768 / 1e9, 1) == gb_at_32k


@pytest.mark.parametrize(("config", "billions"), [(VANILLA_7B, 7.0), (MODERN_7B, 6.2)])
def test_parameters_of_a_7b_shape(config: ModelConfig, billions: float) -> None:
    counts = count_parameters(config)
    assert round(counts.total / 1e9, 1) == billions
    assert counts.total == num_parameters(config)
    assert counts.embedding == 524_288_000


def test_what_each_swap_saves() -> None:
    """Of 7.0 B: fewer KV heads save 0.8 B, the table of positions 34 M; three matrices of 8/3 d weigh as much as two of 4 d."""
    vanilla, modern = count_parameters(VANILLA_7B), count_parameters(MODERN_7B)
    assert vanilla.attention - modern.attention == pytest.approx(2 * 32 * 4096 * 3072, rel=0.001)
    assert (vanilla.positions, modern.positions) == (8192 * 4096, 0)
    assert modern.mlp / vanilla.mlp == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("name", SWITCHES)
def test_the_counts_are_those_of_the_model_that_is_built_and_of_the_one_that_is_loaded(name: str) -> None:
    config = replace(BASE, **SWITCHES[name])
    total = count_parameters(config).total
    assert total == num_parameters(config) == DemoModel(config, seed=0).num_parameters

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import DamagedModelError
from engine.model_config import ModelConfig
from engine.rope_config import RopeConfig

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=199,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    max_position_embeddings=128,
    rope=RopeConfig(rope_type="default", theta=1e4, head_dim=8, rotary_dim=8),
    tie_word_embeddings=True,
    dtype="float32",
    eos_token_ids=(2, 198),
)


def test_an_end_token_outside_the_vocabulary_is_refused_at_start() -> None:
    """min_tokens bans it in the logits: one such request would end the engine for everyone."""
    with pytest.raises(DamagedModelError, match="eos_token_id 199 is outside the vocabulary of 199 tokens"):
        replace(CONFIG, eos_token_ids=(2, 199))

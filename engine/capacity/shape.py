"""Parameters and KV bytes that follow from a ModelConfig, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv.format import KVFormat
from engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Numbers of parameters; ``attention``, ``mlp`` and ``norms`` are of all layers together. A tied head counts as none."""

    embedding: int
    positions: int
    attention: int
    mlp: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.positions + self.attention + self.mlp + self.norms + self.head


def count_parameters(config: ModelConfig) -> ParameterCount:
    embedding = config.vocab_size * config.hidden_size
    return ParameterCount(
        embedding=embedding,
        positions=config.max_position_embeddings * config.hidden_size if config.has_learned_positions else 0,
        attention=config.num_layers * _attention(config),
        mlp=config.num_layers * _mlp(config),
        norms=_norms(config),
        head=0 if config.tie_word_embeddings else embedding,
    )


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> int:
    """In a float format ("bfloat16"): K and V of one token in all layers."""
    fmt = KVFormat(
        dtype=dtype, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, block_size=16
    )
    assert not fmt.is_quantized, "a sealed format's bytes depend on the block"
    return fmt.block_bytes // fmt.block_size


def _attention(config: ModelConfig) -> int:
    hidden, q_rows, kv_rows = config.hidden_size, config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    weights = hidden * (2 * q_rows + kv_rows)
    return weights + config.qkv_bias * (q_rows + kv_rows) + config.o_bias * hidden + 2 * config.qk_norm * config.head_dim


def _mlp(config: ModelConfig) -> int:
    num_in = 2 if config.mlp == "swiglu" else 1  # a gate beside the projection
    hidden, inner = config.hidden_size, config.intermediate_size
    return (num_in + 1) * hidden * inner + config.mlp_bias * (num_in * inner + hidden)


def _norms(config: ModelConfig) -> int:
    """Two in a layer; one at the end where the layers norm their inputs."""
    count = 2 * config.num_layers + (not config.is_post_norm)
    return count * config.hidden_size * (1 + config.norm_bias)

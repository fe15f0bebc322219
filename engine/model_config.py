"""The shape of a model: everything that decides what it computes, read from a checkpoint's own description.

The rule of the two readers (hf_config, gguf_config): a key that changes the result and is not implemented is refused by
name, never ignored. Knows no tensors and no files; who opens a checkpoint hands its description in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import DTYPES
from engine.errors import DamagedModelError, UnsupportedModelError
from engine.rope_config import RopeConfig

LLAMA, MISTRAL, QWEN2, QWEN3 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-style decoder. ``dtype`` is the checkpoint's own element type, by torch's name ("bfloat16").

    ``sliding_window``, where given, holds for every layer: a query sees the last so many tokens, its own included.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    dtype: str
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise DamagedModelError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim = {self.head_dim} is odd: rotary embedding needs an even head_dim")
        if self.dtype not in DTYPES:
            raise UnsupportedModelError(f"weights of type {self.dtype} are not supported (supported: {', '.join(DTYPES)})")

        outside = [token_id for token_id in self.eos_token_ids if not 0 <= token_id < self.vocab_size]
        if outside:
            raise DamagedModelError(f"eos_token_id {outside[0]} is outside the vocabulary of {self.vocab_size} tokens")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read a parsed config.json; ``generation_config`` (parsed generation_config.json) wins for the token ids."""
        from engine.hf_config import read_hf_config

        return read_hf_config(config, generation_config or {})

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        *,
        shapes: Mapping[str, Sequence[int]],
        dtype: str,
        rope_factors: Sequence[float] | None = None,
    ) -> ModelConfig:
        """Read GGUF metadata. What GGUF tells only through its tensors comes apart from it.

        ``shapes`` are the tensors by their names in the file, rows first (biases and tied embeddings show there);
        ``rope_factors`` is the content of rope_freqs.weight, by which each rotary frequency is divided.
        """
        from engine.gguf_config import read_gguf_config

        return read_gguf_config(metadata, shapes=shapes, dtype=dtype, rope_factors=rope_factors)

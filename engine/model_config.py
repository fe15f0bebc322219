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
GPT2, OCTAVO = "GPT2LMHeadModel", "OctavoForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder, Llama-style unless said otherwise. ``dtype`` is the checkpoint's own element type, by torch's name ("bfloat16").

    ``norm`` is "rmsnorm" or "layernorm", of the residual stream; QK-norm is always RMSNorm. ``is_post_norm``: each sublayer's
    output is added first and the sum normed (and nothing is normed at the end), not the input of each sublayer. ``mlp`` is
    "swiglu", or without a gate "gelu" (exact) or "gelu_tanh" (GPT-2's approximation).

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
    norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    dtype: str
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm: str = "rmsnorm"
    norm_bias: bool = False
    is_post_norm: bool = False
    mlp: str = "swiglu"
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise DamagedModelError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2 and not self.has_learned_positions:
            raise UnsupportedModelError(f"head_dim = {self.head_dim} is odd: rotary embedding needs an even head_dim")
        if self.norm == "rmsnorm" and self.norm_bias:
            raise UnsupportedModelError("an RMSNorm has no bias: norm_bias goes with layernorm")
        if self.dtype not in DTYPES:
            raise UnsupportedModelError(f"weights of type {self.dtype} are not supported (supported: {', '.join(DTYPES)})")

        outside = [token_id for token_id in self.eos_token_ids if not 0 <= token_id < self.vocab_size]
        if outside:
            raise DamagedModelError(f"eos_token_id {outside[0]} is outside the vocabulary of {self.vocab_size} tokens")

    @property
    def has_learned_positions(self) -> bool:
        """A table with a row for each of max_position_embeddings positions, in place of rotation: nothing reaches past it."""
        return self.rope.rope_type == "none"

    @property
    def has_llama_block(self) -> bool:
        """Pre-norm RMSNorm, rotation and SwiGLU: what the compiled decoders compute."""
        return self.norm == "rmsnorm" and not self.is_post_norm and self.mlp == "swiglu" and not self.has_learned_positions

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

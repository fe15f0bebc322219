"""The decoder as a trainable torch module, every part of its block a choice of the ModelConfig.

The parameters have the names under which the engine expects them, so the state dict is the checkpoint. Written for training only: whole
sequences, no cache. The engine's model is the other implementation of the same function, and a test compares the two.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from engine.model_config import OCTAVO, ModelConfig
from engine.rope_config import RopeConfig, no_rope

INIT_STD = 0.02


def demo_config(*, vocab_size: int = 2048, context_len: int = 256, num_kv_heads: int = 2, num_layers: int = 4) -> ModelConfig:
    """The recipe of octavo-tiny; a variant is made by ``dataclasses.replace``. d_ff is 8/3 of the width, rounded up to a multiple of 16."""
    hidden_size, head_dim = 192, 32
    return ModelConfig(
        architecture=OCTAVO,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=-(-8 * hidden_size // 3 // 16) * 16,
        num_layers=num_layers,
        num_heads=8,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=1e-5,
        max_position_embeddings=context_len,
        rope=rotary(head_dim),
        tie_word_embeddings=True,
        dtype="float16",
        qk_norm=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def rotary(head_dim: int, theta: float = 1e4) -> RopeConfig:
    return RopeConfig(rope_type="default", theta=theta, head_dim=head_dim, rotary_dim=head_dim)


def learned(config: ModelConfig) -> RopeConfig:
    """In place of ``config.rope``: a table of positions."""
    return no_rope(config.head_dim)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * head_dim, hidden, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(head_dim, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(head_dim, eps=config.norm_eps)

    def heads(self, x: torch.Tensor, rotation: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v [B, heads, T, head_dim], normed and rotated. ``rotation`` float32 [2, T, head_dim / 2]: cos, then sin."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = _rotate(q, rotation), _rotate(k, rotation)
        return q, k, v

    def forward(self, x: torch.Tensor, rotation: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self.heads(x, rotation)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return attended


class Mlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.kind = config.mlp
        if config.mlp == "swiglu":
            self.gate_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "swiglu":
            inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        else:
            inner = F.gelu(self.up_proj(x), approximate="tanh" if self.kind == "gelu_tanh" else "none")
        out: torch.Tensor = self.down_proj(inner)
        return out


class Block(nn.Module):
    """Pre-norm: x + f(norm(x)). Post-norm: norm(x + f(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.is_post_norm = config.is_post_norm
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.post_attention_layernorm = _norm(config)
        if config.is_post_norm:
            self.post_mlp_layernorm = _norm(config)
        else:
            self.input_layernorm = _norm(config)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor | None) -> torch.Tensor:
        if self.is_post_norm:
            x = self.post_attention_layernorm(x + self.self_attn(x, rotation))
            normed: torch.Tensor = self.post_mlp_layernorm(x + self.mlp(x))
            return normed
        x = x + self.self_attn(self.input_layernorm(x), rotation)
        added: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return added


class Trunk(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.has_learned_positions:
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        if not config.is_post_norm:
            self.norm = _norm(config)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        length = token_ids.shape[1]
        x = self.embed_tokens(token_ids)
        if self.config.has_learned_positions:
            x, rotation = x + self.embed_positions.weight[:length], None
        else:
            rotation = _rotation(self.config.rope, length)
        for layer in self.layers:
            x = layer(x, rotation)
        out: torch.Tensor = x if self.config.is_post_norm else self.norm(x)
        return out


class DemoModel(nn.Module):
    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialise(seed)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids int64 [B, T] -> logits float32 [B, T, vocab_size]."""
        head = self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight
        return F.linear(self.model(token_ids), head)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def _initialise(self, seed: int) -> None:
        """Normal with INIT_STD; what writes into the residual stream is smaller by sqrt(2 layers), as in GPT-2. Biases 0, norms 1."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = INIT_STD / math.sqrt(2 * self.config.num_layers) if is_output else INIT_STD
                nn.init.normal_(parameter, std=std, generator=generator)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


def _rotation(rope: RopeConfig, length: int) -> torch.Tensor:
    inv_freq = rope.theta ** (-torch.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
    angles = torch.arange(length)[:, None] * inv_freq
    return torch.stack((angles.cos(), angles.sin()))


def _rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Element i of a head with element i + head_dim / 2."""
    (first, second), (cos, sin) = x.chunk(2, dim=-1), rotation
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

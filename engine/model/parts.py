"""The parts of a decoder block that differ between families, each made from a layer's weights: a norm, a residual stream, an MLP.

The model puts them together once; in a step nobody asks what kind they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.model.ops import Ops
from engine.model.weights import LayerWeights, ModelWeights
from engine.model_config import ModelConfig


class Norm(Protocol):
    """Over the last dimension; x and residual [rows, hidden] of the compute dtype, contiguous."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual += x, in place; returns the norm of residual."""


@dataclass(frozen=True, slots=True)
class RMSNorm:
    weight: torch.Tensor  # [hidden]
    eps: float
    ops: Ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: torch.Tensor  # [hidden]
    bias: torch.Tensor | None  # [hidden]
    eps: float
    ops: Ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        residual += x
        return self(residual)


Join = Callable[[torch.Tensor, torch.Tensor, Norm], tuple[torch.Tensor, torch.Tensor]]


def join_pre_norm(x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """What the next sublayer reads is normed; the stream goes on as it is."""
    return norm.add(x, residual), residual


def join_post_norm(x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """The stream itself is normed (Vaswani et al., arXiv 1706.03762)."""
    normed = norm.add(x, residual)
    return normed, normed


@dataclass(frozen=True, slots=True)
class Norms:
    """All norms of a model where they act: ``first`` before the first layer, the others after each layer's two sublayers.

    ``join`` takes a sublayer's output, the residual stream and a norm; it returns what the next sublayer reads and the stream.
    """

    first: Callable[[torch.Tensor], torch.Tensor]
    after_attention: tuple[Norm, ...]
    after_mlp: tuple[Norm, ...]
    join: Join


def arrange_norms(config: ModelConfig, weights: ModelWeights, ops: Ops) -> Norms:
    layers = weights.layers
    after_attention = tuple(
        make_norm(config, layer.post_attention_norm, layer.post_attention_norm_bias, ops) for layer in layers
    )
    if config.is_post_norm:
        after_mlp = tuple(make_norm(config, layer.post_mlp_norm, layer.post_mlp_norm_bias, ops) for layer in layers)
        return Norms(_as_it_is, after_attention, after_mlp, join_post_norm)
    first, *others = (make_norm(config, layer.input_norm, layer.input_norm_bias, ops) for layer in layers)
    final = make_norm(config, weights.final_norm, weights.final_norm_bias, ops)
    return Norms(first, after_attention, (*others, final), join_pre_norm)


def make_norm(config: ModelConfig, weight: torch.Tensor | None, bias: torch.Tensor | None, ops: Ops) -> Norm:
    assert weight is not None
    if config.norm == "rmsnorm":
        return RMSNorm(weight, config.norm_eps, ops)
    return LayerNorm(weight, bias, config.norm_eps, ops)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


class Mlp(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, hidden]."""


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """down(silu(gate x) * up x)."""

    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    ops: Ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.ops.linear(x, self.gate_up, self.gate_up_bias)
        return self.ops.linear(self.ops.silu_mul(gate_up), self.down, self.down_bias)


@dataclass(frozen=True, slots=True)
class Gelu:
    """down(gelu(up x)); ``is_tanh``: by GPT-2's approximation."""

    up: torch.Tensor
    up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    is_tanh: bool
    ops: Ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        up = self.ops.linear(x, self.up, self.up_bias)
        return self.ops.linear(self.ops.gelu(up, self.is_tanh), self.down, self.down_bias)


def make_mlp(config: ModelConfig, layer: LayerWeights, ops: Ops) -> Mlp:
    if config.mlp == "swiglu":
        assert layer.gate_up is not None
        return SwiGLU(layer.gate_up, layer.gate_up_bias, layer.down, layer.down_bias, ops)
    assert layer.up is not None
    return Gelu(layer.up, layer.up_bias, layer.down, layer.down_bias, config.mlp == "gelu_tanh", ops)

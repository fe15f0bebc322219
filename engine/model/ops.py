"""The small operations between the matrix products: the interface, and the plain torch twin that runs anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How a fused QKV row [(num_heads + 2 * num_kv_heads) * head_dim] falls into heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[rows, ...] -> views q [rows, num_heads, head_dim], k and v [rows, num_kv_heads, head_dim]."""
        q, k, v = torch.split(qkv, [self.q_size, self.kv_size, self.kv_size], dim=-1)
        rows = qkv.shape[0]
        kv_shape = (rows, self.num_kv_heads, self.head_dim)
        return q.view(rows, self.num_heads, self.head_dim), k.view(kv_shape), v.view(kv_shape)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """QK-norm: RMSNorm over each head of q and k, before the rotation. Weights [head_dim]."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


class Ops(Protocol):
    """All tensors are [rows, features] of the compute dtype, contiguous, unless said otherwise."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x @ weight.T + bias; weight [out, in]."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467)."""

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += x, in place; returns rms_norm(residual)."""

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension (arXiv 1607.06450)."""

    def rotate(self, qkv: torch.Tensor, shape: HeadShape, cos: torch.Tensor, sin: torch.Tensor, norm: HeadNorm | None) -> None:
        """Norm (if any) and rotate q and k inside ``qkv``, in place. cos, sin float32 [rows, head_dim / 2], half layout."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, 2n] -> silu(first half) * second half (SwiGLU, arXiv 2002.05202)."""

    def gelu(self, x: torch.Tensor, is_tanh: bool) -> torch.Tensor:
        """x times the normal distribution function of x (arXiv 1606.08415); ``is_tanh``: by the paper's tanh approximation."""


class TorchOps:
    """See ``Ops``. Norms and rotations in float32 whatever the compute dtype, as the Hugging Face models do."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * scaled.to(x.dtype)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def rotate(self, qkv: torch.Tensor, shape: HeadShape, cos: torch.Tensor, sin: torch.Tensor, norm: HeadNorm | None) -> None:
        q, k, _ = shape.split(qkv)
        if norm is not None:
            q.copy_(self.rms_norm(q, norm.q_weight, norm.eps))
            k.copy_(self.rms_norm(k, norm.k_weight, norm.eps))
        for heads in (q, k):
            first, second = heads.float().chunk(2, dim=-1)
            c, s = cos[:, None, :], sin[:, None, :]
            heads.copy_(torch.cat((first * c - second * s, second * c + first * s), dim=-1))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu(self, x: torch.Tensor, is_tanh: bool) -> torch.Tensor:
        return F.gelu(x, approximate="tanh" if is_tanh else "none")

"""The operations of ``Ops`` as fused numba kernels, for float32 on a CPU."""

from __future__ import annotations

import numpy as np
import torch

from engine.model import cpu_gpt2_kernels as gpt2_kernels
from engine.model import cpu_ops_kernels as kernels
from engine.model.cpu_matmul import matmul
from engine.model.ops import HeadNorm, HeadShape

_NONE = np.empty(0, np.float32)


class CPUOps:
    """See ``Ops``. float32 only. A row has the same bits in any batch of two rows or more."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.shape[0]
        out = torch.empty((rows, weight.shape[0]), dtype=torch.float32)
        if rows:
            matmul(x.numpy(), weight.numpy(), out.numpy())
        return out if bias is None else out.add_(bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        kernels.rms_norm(x.numpy(), weight.numpy(), np.float32(eps), out.numpy())
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        kernels.add_rms_norm(x.numpy(), residual.numpy(), weight.numpy(), np.float32(eps))
        return x

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        biases = _NONE if bias is None else bias.numpy()
        gpt2_kernels.layer_norm(x.numpy(), weight.numpy(), biases, np.float32(eps), out.numpy())
        return out

    def rotate(self, qkv: torch.Tensor, shape: HeadShape, cos: torch.Tensor, sin: torch.Tensor, norm: HeadNorm | None) -> None:
        q_weight = _NONE if norm is None else norm.q_weight.numpy()
        k_weight = _NONE if norm is None else norm.k_weight.numpy()
        eps = np.float32(0.0 if norm is None else norm.eps)
        kernels.rotate(
            qkv.numpy(), cos.numpy(), sin.numpy(), shape.num_heads, shape.num_kv_heads, shape.head_dim, q_weight, k_weight, eps
        )

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2), dtype=torch.float32)
        kernels.silu_mul(gate_up.numpy(), out.numpy())
        return out

    def gelu(self, x: torch.Tensor, is_tanh: bool) -> torch.Tensor:
        out = torch.empty_like(x)
        (gpt2_kernels.gelu_tanh if is_tanh else gpt2_kernels.gelu)(x.numpy(), out.numpy())
        return out

"""The operations of ``Ops`` as fused numba kernels, for float32 on a CPU with few rows; many rows go to torch's matrix library.

A decode step is some 300 small calls: torch's cost per call (5-15 microseconds) would be a tenth of the step, numba's is 1.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from engine.model import cpu_ops_kernels as kernels
from engine.model.ops import HeadNorm, HeadShape

# Up to this many rows the kernel, which streams the weights once, beats torch's float32 matrix product (README, "On a CPU").
MAX_SKINNY_ROWS = 64

_NO_NORM = np.empty(0, np.float32)


class CPUOps:
    """See ``Ops``. float32 only. ``skinny_matmul`` gives each row the same bits in any batch of up to MAX_SKINNY_ROWS rows."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.shape[0]
        if rows > MAX_SKINNY_ROWS:
            return F.linear(x, weight, bias)
        out = torch.empty((rows, weight.shape[0]), dtype=torch.float32)
        if rows:
            kernels.skinny_matmul(x.numpy(), weight.numpy(), out.numpy())
        return out if bias is None else out.add_(bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        kernels.rms_norm(x.numpy(), weight.numpy(), np.float32(eps), out.numpy())
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        kernels.add_rms_norm(x.numpy(), residual.numpy(), weight.numpy(), np.float32(eps))
        return x

    def rotate(self, qkv: torch.Tensor, shape: HeadShape, cos: torch.Tensor, sin: torch.Tensor, norm: HeadNorm | None) -> None:
        q_weight = _NO_NORM if norm is None else norm.q_weight.numpy()
        k_weight = _NO_NORM if norm is None else norm.k_weight.numpy()
        eps = np.float32(0.0 if norm is None else norm.eps)
        kernels.rotate(
            qkv.numpy(), cos.numpy(), sin.numpy(), shape.num_heads, shape.num_kv_heads, shape.head_dim, q_weight, k_weight, eps
        )

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2), dtype=torch.float32)
        kernels.silu_mul(gate_up.numpy(), out.numpy())
        return out

"""numba kernels behind CPUOps for what GPT-2 has instead of RMSNorm and SwiGLU. All arrays float32, C-contiguous.

Each row by itself, in one order: its bits are the same in any batch.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from engine.model.cpu_ops_kernels import FAST


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def layer_norm(x, weight, bias, eps, out):
    """``bias`` may be empty. The variance is that of the differences from the mean, in a second pass."""
    rows, width = x.shape
    for m in prange(rows):
        total = np.float32(0.0)
        for i in range(width):
            total += x[m, i]
        mean = total / np.float32(width)
        squares = np.float32(0.0)
        for i in range(width):
            squares += (x[m, i] - mean) * (x[m, i] - mean)
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(width) + eps)
        for i in range(width):
            out[m, i] = (x[m, i] - mean) * scale * weight[i]
        if bias.size:
            for i in range(width):
                out[m, i] += bias[i]


@njit(cache=True, parallel=True, error_model="numpy")
def gelu(x, out):
    rows, width = x.shape
    for m in prange(rows):
        for i in range(width):
            out[m, i] = np.float32(0.5) * x[m, i] * (np.float32(1.0) + math.erf(x[m, i] * np.float32(0.7071067811865476)))


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def gelu_tanh(x, out):
    """x / 2 * (1 + tanh(y)) is x / (1 + exp(-2y)), y = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    rows, width = x.shape
    for m in prange(rows):
        for i in range(width):
            y = np.float32(-1.5957691216057308) * (x[m, i] + np.float32(0.044715) * x[m, i] * x[m, i] * x[m, i])
            out[m, i] = x[m, i] / (np.float32(1.0) + np.exp(min(y, np.float32(88.0))))

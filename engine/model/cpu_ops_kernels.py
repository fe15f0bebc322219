"""numba kernels behind CPUOps. All arrays float32, C-contiguous. Compiled at first use, cached on disk."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

# No nnan/ninf: a NaN must come out as a NaN. Sums may be reordered, in the same way at every call.
FAST = {"reassoc", "nsz", "arcp", "contract"}


@njit(cache=True, error_model="numpy")
def add_bias(x, bias):
    """x[m] += bias, or nothing when the bias is empty."""
    if bias.size:
        for m in range(x.shape[0]):
            for i in range(x.shape[1]):
                x[m, i] += bias[i]


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def rms_norm(x, weight, eps, out):
    rows, width = x.shape
    for m in prange(rows):
        total = np.float32(0.0)
        for i in range(width):
            total += x[m, i] * x[m, i]
        scale = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            out[m, i] = x[m, i] * scale * weight[i]


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def add_rms_norm(x, residual, weight, eps):
    """residual += x, then x = rms_norm(residual)."""
    rows, width = x.shape
    for m in prange(rows):
        total = np.float32(0.0)
        for i in range(width):
            s = residual[m, i] + x[m, i]
            residual[m, i] = s
            total += s * s
        scale = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            x[m, i] = residual[m, i] * scale * weight[i]


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def rotate(qkv, cos, sin, num_heads, num_kv_heads, head_dim, q_weight, k_weight, eps):
    """Norm (when the weights are not empty) and rotate the q and k heads of each row, in place, half layout."""
    rows = qkv.shape[0]
    half = head_dim // 2
    for m in prange(rows):
        for head in range(num_heads + num_kv_heads):
            at = head * head_dim
            weight = q_weight if head < num_heads else k_weight
            if weight.size:
                total = np.float32(0.0)
                for i in range(head_dim):
                    total += qkv[m, at + i] * qkv[m, at + i]
                scale = np.float32(1.0) / np.sqrt(total / np.float32(head_dim) + eps)
                for i in range(head_dim):
                    qkv[m, at + i] = qkv[m, at + i] * scale * weight[i]
            for i in range(half):
                first, second = qkv[m, at + i], qkv[m, at + half + i]
                qkv[m, at + i] = first * cos[m, i] - second * sin[m, i]
                qkv[m, at + half + i] = second * cos[m, i] + first * sin[m, i]


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def silu_mul(gate_up, out):
    """out = gate / (1 + exp(-gate)) * up. exp as in the attention kernel: 2^n from exponent bits, 2^f from a polynomial."""
    rows, width = out.shape
    for m in prange(rows):
        bits = np.empty(width, np.int32)
        for i in range(width):
            x = min(max(-gate_up[m, i], np.float32(-87.0)), np.float32(88.0)) * np.float32(1.4426950408889634)
            n = np.floor(x + np.float32(0.5))
            f = x - n
            p = np.float32(1.5403530e-4)
            p = p * f + np.float32(1.3333558e-3)
            p = p * f + np.float32(9.6181291e-3)
            p = p * f + np.float32(5.5504109e-2)
            p = p * f + np.float32(2.4022651e-1)
            p = p * f + np.float32(6.9314718e-1)
            out[m, i] = p * f + np.float32(1.0)
            bits[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
        scale = bits.view(np.float32)
        for i in range(width):
            gate = gate_up[m, i]
            out[m, i] = gate / (np.float32(1.0) + out[m, i] * scale[i]) * gate_up[m, width + i]

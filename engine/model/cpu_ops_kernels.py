"""numba kernels behind CPUOps. All arrays float32, C-contiguous. Compiled at first use, cached on disk."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

# No nnan/ninf: a NaN must come out as a NaN. Sums may be reordered, in the same way at every call.
FAST = {"reassoc", "nsz", "arcp", "contract"}

ROWS_AT_A_TIME = 96  # so many rows of x, of a few hundred to thousand columns, stay in a core's own cache


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _four_by_three(x, w, n, m, out):
    """Rows n to n + 3 of w against rows m to m + 2 of x: twelve sums in registers, seven loads for twelve products."""
    a0 = a1 = a2 = b0 = b1 = b2 = c0 = c1 = c2 = d0 = d1 = d2 = np.float32(0.0)
    for k in range(x.shape[1]):
        w0, w1, w2, w3 = w[n, k], w[n + 1, k], w[n + 2, k], w[n + 3, k]
        x0, x1, x2 = x[m, k], x[m + 1, k], x[m + 2, k]
        a0 += w0 * x0
        a1 += w0 * x1
        a2 += w0 * x2
        b0 += w1 * x0
        b1 += w1 * x1
        b2 += w1 * x2
        c0 += w2 * x0
        c1 += w2 * x1
        c2 += w2 * x2
        d0 += w3 * x0
        d1 += w3 * x1
        d2 += w3 * x2
    out[m, n], out[m, n + 1], out[m, n + 2], out[m, n + 3] = a0, b0, c0, d0
    out[m + 1, n], out[m + 1, n + 1], out[m + 1, n + 2], out[m + 1, n + 3] = a1, b1, c1, d1
    out[m + 2, n], out[m + 2, n + 1], out[m + 2, n + 2], out[m + 2, n + 3] = a2, b2, c2, d2


@njit(cache=True, fastmath=FAST, error_model="numpy")
def _eight_by_one(x, w, n, m, out):
    """Rows n to n + 7 of w against row m of x."""
    a = b = c = d = e = f = g = h = np.float32(0.0)
    for k in range(x.shape[1]):
        x0 = x[m, k]
        a += w[n, k] * x0
        b += w[n + 1, k] * x0
        c += w[n + 2, k] * x0
        d += w[n + 3, k] * x0
        e += w[n + 4, k] * x0
        f += w[n + 5, k] * x0
        g += w[n + 6, k] * x0
        h += w[n + 7, k] * x0
    out[m, n], out[m, n + 1], out[m, n + 2], out[m, n + 3] = a, b, c, d
    out[m, n + 4], out[m, n + 5], out[m, n + 6], out[m, n + 7] = e, f, g, h


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _one_row(x, w, out):
    """The product for a single row: w is read as one stream, which main memory gives fastest."""
    for n in prange(w.shape[0]):
        total = np.float32(0.0)
        for k in range(x.shape[1]):
            total += w[n, k] * x[0, k]
        out[0, n] = total


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def _few_rows(x, w, out, first, last):
    """Rows [first, last) of the product. Eight rows of w are read once for all of them; the rows of x stay in the caches.

    The compiler sums both tile shapes in the same order (a test holds it to that), so a row's result does not depend on how many
    rows there are.
    """
    width = w.shape[0]
    by_three = last - (last - first) % 3
    for tile in prange(width // 8):
        n = tile * 8
        for m in range(first, by_three, 3):
            _four_by_three(x, w, n, m, out)
            _four_by_three(x, w, n + 4, m, out)
        for m in range(by_three, last):
            _eight_by_one(x, w, n, m, out)
    for n in range(width - width % 8, width):
        for m in range(first, last):
            total = np.float32(0.0)
            for k in range(x.shape[1]):
                total += w[n, k] * x[m, k]
            out[m, n] = total


@njit(cache=True, error_model="numpy")
def matmul(x, w, out):
    """out[m, n] = sum_k x[m, k] * w[n, k]."""
    rows = x.shape[0]
    if rows == 1:
        _one_row(x, w, out)
        return
    for first in range(0, rows, ROWS_AT_A_TIME):
        _few_rows(x, w, out, first, min(first + ROWS_AT_A_TIME, rows))


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

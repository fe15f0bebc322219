"""One whole layer of a decode step in one compiled call. Composed of the kernels of CPUOps and of the CPU attention backend."""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.attention.cpu_kernels import FLOAT32, decode, merge, store_kv
from engine.model.cpu_matmul import matmul
from engine.model.cpu_ops_kernels import add_bias, add_rms_norm, rotate, silu_mul


@njit(cache=True, error_model="numpy")
def decode_layer(x, residual, weights, next_norm, eps, cos, sin, cache, plan, room):
    """x float32 [rows, hidden], normed for this layer: becomes the next layer's normed input; residual likewise, in place.

    ``weights``: the layer's arrays in the order of ``cpu_decoder.LayerArrays``, absent ones empty. ``cache``: (pool, K offset, V
    offset, block size, KV heads, head size, softmax scale). ``plan``: (slots, rows, tables, units, first unit, partial, peaks,
    totals). ``room``: (qkv, attention output, gate and up, activation), each [rows, width].
    """
    qkv_weight, qkv_bias, q_norm, k_norm, o_weight, o_bias, norm, gate_up_weight, gate_up_bias, down_weight, down_bias = weights
    pool, k_offset, v_offset, block_size, kv_heads, head_dim, scale = cache
    slots, rows, tables, units, first_unit, partial, peaks, totals = plan
    qkv, attended, gate_up, activation = room
    q_size, kv_size = attended.shape[1], kv_heads * head_dim

    matmul(x, qkv_weight, qkv)
    add_bias(qkv, qkv_bias)
    rotate(qkv, cos, sin, q_size // head_dim, kv_heads, head_dim, q_norm, k_norm, eps)
    k, v = qkv[:, q_size : q_size + kv_size], qkv[:, q_size + kv_size :]
    store_kv(k, v, slots, pool, k_offset, v_offset, block_size, head_dim)
    decode(
        qkv, rows, kv_heads, head_dim, pool.view(np.uint8), FLOAT32, k_offset, v_offset, tables, units, scale, block_size,
        partial, peaks, totals,
    )  # fmt: skip
    merge(partial, peaks, totals, first_unit, rows, attended)
    matmul(attended, o_weight, x)
    add_bias(x, o_bias)
    add_rms_norm(x, residual, norm, eps)
    matmul(x, gate_up_weight, gate_up)
    add_bias(gate_up, gate_up_bias)
    silu_mul(gate_up, activation)
    matmul(activation, down_weight, x)
    add_bias(x, down_bias)
    add_rms_norm(x, residual, next_norm, eps)

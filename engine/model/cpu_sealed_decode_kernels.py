"""One whole layer of a decode step over a quantized cache in one compiled call; see ``cpu_decode_kernels`` for the float formats."""

from __future__ import annotations

from numba import njit

from engine.attention.cpu_kernels import merge, store_kv
from engine.attention.cpu_sealed_kernels import decode, seal
from engine.model.cpu_matmul import matmul
from engine.model.cpu_ops_kernels import add_bias, add_rms_norm, rotate, silu_mul


@njit(cache=True, error_model="numpy")
def sealed_decode_layer(x, residual, weights, next_norm, eps, cos, sin, cache, plan, room):
    """As ``decode_layer``. ``cache``: (pool, tails, shape, softmax scale, ((kind, offsets) of K and of V), first elements of K and V
    in a tail slot); ``plan``: (tail rows, tail slots, tail starts, full slots, full ids, rows, tables, units, first unit, partial,
    peaks, totals), see ``sealed_cpu.SealedDecodePlan``.
    """
    qkv_weight, qkv_bias, q_norm, k_norm, o_weight, o_bias, norm, gate_up_weight, gate_up_bias, down_weight, down_bias = weights
    pool, tails, shape, scale, parts, tail_offsets = cache
    tail_rows, tail_slots, tail_starts, full_slots, full_ids, rows, tables, units, first_unit, partial, peaks, totals = plan
    qkv, attended, gate_up, activation = room
    kv_heads, block_size, head_dim = shape
    q_size, kv_size = attended.shape[1], kv_heads * head_dim

    matmul(x, qkv_weight, qkv)
    add_bias(qkv, qkv_bias)
    rotate(qkv, cos, sin, q_size // head_dim, kv_heads, head_dim, q_norm, k_norm, eps)
    k, v = qkv[:, q_size : q_size + kv_size], qkv[:, q_size + kv_size :]
    store_kv(k, v, tail_rows, tails, tail_offsets[0], tail_offsets[1], block_size, head_dim)
    decode(
        qkv,
        rows,
        shape,
        pool,
        parts,
        tails,
        tail_offsets,
        tail_slots,
        tail_starts,
        tables,
        units,
        scale,
        partial,
        peaks,
        totals,
    )
    merge(partial, peaks, totals, first_unit, rows, attended)
    if len(full_ids):
        seal(tails, full_slots, tail_offsets[0], pool, full_ids, parts[0][0], parts[0][1], shape)
        seal(tails, full_slots, tail_offsets[1], pool, full_ids, parts[1][0], parts[1][1], shape)
    matmul(attended, o_weight, x)
    add_bias(x, o_bias)
    add_rms_norm(x, residual, norm, eps)
    matmul(x, gate_up_weight, gate_up)
    add_bias(gate_up, gate_up_bias)
    silu_mul(gate_up, activation)
    matmul(activation, down_weight, x)
    add_bias(x, down_bias)
    add_rms_norm(x, residual, next_norm, eps)

"""numba kernels of the CPU attention backend: store K and V into blocks, and decode over the blocks in place.

The pool is seen as [num_blocks, block_elements]; a layer's K tile starts at element ``k_offset`` of a block, V at ``v_offset``,
each [kv_heads, block_size, head_dim]. Compiled at first use for each element type and cached on disk.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

# No nnan/ninf: a NaN must come out as a NaN. Sums may be reordered, in the same way at every call.
FAST = {"reassoc", "nsz", "arcp", "contract"}

SPLIT = 256  # tokens of context that one work unit reads; fixed, so that a result never depends on who shares the batch


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def store_kv(k, v, slots, pool, k_offset, v_offset, block_size, head_dim):
    """k, v [rows, kv_heads * head_dim] of the pool's element type (or its bits): row i goes to slot slots[i]."""
    tile = block_size * head_dim
    for row in prange(k.shape[0]):
        block = slots[row] // block_size
        at = (slots[row] % block_size) * head_dim
        for head in range(k.shape[1] // head_dim):
            for d in range(head_dim):
                pool[block, k_offset + head * tile + at + d] = k[row, head * head_dim + d]
                pool[block, v_offset + head * tile + at + d] = v[row, head * head_dim + d]


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _scores(q, heads, k, num_tokens, head_dim, out, at):
    """out[g, at + t] = q[g] . k[t] for the tokens of one tile, four tokens at a time. q flat: heads * head_dim."""
    whole = num_tokens - num_tokens % 4
    for g in range(heads):
        for t in range(0, whole, 4):
            base = t * head_dim
            s0 = s1 = s2 = s3 = np.float32(0.0)
            for d in range(head_dim):
                x = q[g * head_dim + d]
                s0 += x * k[base + d]
                s1 += x * k[base + head_dim + d]
                s2 += x * k[base + 2 * head_dim + d]
                s3 += x * k[base + 3 * head_dim + d]
            out[g, at + t] = s0
            out[g, at + t + 1] = s1
            out[g, at + t + 2] = s2
            out[g, at + t + 3] = s3
        for t in range(whole, num_tokens):
            s0 = np.float32(0.0)
            for d in range(head_dim):
                s0 += q[g * head_dim + d] * k[t * head_dim + d]
            out[g, at + t] = s0


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _weigh(weights, heads, at, v, num_tokens, head_dim, out):
    """out[g] += weights[g, at + t] * v[t] for the tokens of one tile, four tokens at a time."""
    whole = num_tokens - num_tokens % 4
    for g in range(heads):
        for t in range(0, whole, 4):
            base = t * head_dim
            w0, w1, w2, w3 = weights[g, at + t], weights[g, at + t + 1], weights[g, at + t + 2], weights[g, at + t + 3]
            for d in range(head_dim):
                out[g, d] += (
                    w0 * v[base + d]
                    + w1 * v[base + head_dim + d]
                    + w2 * v[base + 2 * head_dim + d]
                    + w3 * v[base + 3 * head_dim + d]
                )
        for t in range(whole, num_tokens):
            w0 = weights[g, at + t]
            for d in range(head_dim):
                out[g, d] += w0 * v[t * head_dim + d]


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")
def _exp_row(row, bits, num_tokens, peak):
    """row[t] = exp(row[t] - peak) and their sum, for arguments <= 0, within 2e-7 relative; below e^-87 it is 0.

    2^x = 2^n * 2^f with n the nearest integer: the polynomial is the Taylor series of 2^f on [-1/2, 1/2], n goes into the
    exponent bits. Written as two loops that vectorise without a vector-math library.
    """
    for t in range(num_tokens):
        x = max((row[t] - peak) * np.float32(1.4426950408889634), np.float32(-126.0))
        n = np.floor(x + np.float32(0.5))
        f = x - n
        p = np.float32(1.5403530e-4)
        p = p * f + np.float32(1.3333558e-3)
        p = p * f + np.float32(9.6181291e-3)
        p = p * f + np.float32(5.5504109e-2)
        p = p * f + np.float32(2.4022651e-1)
        p = p * f + np.float32(6.9314718e-1)
        row[t] = p * f + np.float32(1.0)
        bits[t] = (np.int32(n) + np.int32(127)) << np.int32(23)
    scale = bits.view(np.float32)
    total = np.float32(0.0)
    for t in range(num_tokens):
        e = row[t] * scale[t]
        row[t] = e
        total += e
    return total


def load_tile(pool, block, offset, size, scratch):
    """A tile's elements as float32: the pool's own memory where it is float32, else widened into ``scratch``.

    The pool's numba type says what its elements are: float32, uint16 for the bits of bfloat16, int16 for those of float16.
    """
    raise NotImplementedError("only inside compiled code")


@overload(load_tile)
def _load_tile(pool, block, offset, size, scratch):
    return {types.float32: _load_float32, types.uint16: _load_bfloat16, types.int16: _load_float16}[pool.dtype]


def _load_float32(pool, block, offset, size, scratch):
    return pool[block, offset : offset + size]


def _load_bfloat16(pool, block, offset, size, scratch):
    # bfloat16 bits are the upper half of a float32
    wide = scratch.view(np.uint32)
    for i in range(size):
        wide[i] = np.uint32(pool[block, offset + i]) << np.uint32(16)
    return scratch[:size]


def _load_float16(pool, block, offset, size, scratch):
    # float16 bits moved into a float32, then times 2^112: exact, subnormals included (infinities do not occur)
    wide = scratch.view(np.uint32)
    for i in range(size):
        half = np.uint32(np.uint16(pool[block, offset + i]))
        wide[i] = ((half & np.uint32(0x8000)) << np.uint32(16)) | ((half & np.uint32(0x7FFF)) << np.uint32(13))
    for i in range(size):
        scratch[i] *= np.float32(5.192296858534828e33)
    return scratch[:size]


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def decode(q, rows, kv_heads, head_dim, pool, k_offset, v_offset, tables, units, scale, block_size, partial, peaks, totals):
    """Attention of one query row per sequence over one split of its context, for all units and KV heads.

    q float32 [batch rows, num_heads * head_dim], sequence s asks with row rows[s]; tables int32 [sequences, blocks]; units int32
    [units, 3] of (sequence, first token, token behind the last), at most SPLIT tokens each. Writes what ``merge`` reads.
    """
    heads = partial.shape[2]
    tile = block_size * head_dim
    for job in prange(units.shape[0] * kv_heads):
        unit, head = job // kv_heads, job % kv_heads
        seq, start, end = units[unit, 0], units[unit, 1], units[unit, 2]
        query = np.empty(heads * head_dim, np.float32)  # contiguous, as a view of q need not be: the loops over it vectorise
        for i in range(heads * head_dim):
            query[i] = q[rows[seq], head * heads * head_dim + i] * scale
        out = partial[unit, head]
        weights = np.empty((heads, SPLIT), np.float32)
        bits = np.empty(SPLIT, np.int32)
        scratch = np.empty(tile, np.float32)
        at = 0
        while start + at < end:
            block, skip = tables[seq, (start + at) // block_size], (start + at) % block_size
            count = min(block_size - skip, end - start - at)
            k = load_tile(pool, block, k_offset + head * tile + skip * head_dim, count * head_dim, scratch)
            _scores(query, heads, k, count, head_dim, weights, at)
            at += count
        for g in range(heads):
            peak = np.float32(-np.inf)
            for t in range(end - start):
                peak = max(peak, weights[g, t])
            peaks[unit, head, g] = peak
            totals[unit, head, g] = _exp_row(weights[g], bits, end - start, peak)
        out[:] = np.float32(0.0)
        at = 0
        while start + at < end:
            block, skip = tables[seq, (start + at) // block_size], (start + at) % block_size
            count = min(block_size - skip, end - start - at)
            v = load_tile(pool, block, v_offset + head * tile + skip * head_dim, count * head_dim, scratch)
            _weigh(weights, heads, at, v, count, head_dim, out)
            at += count


@njit(cache=True, parallel=True, fastmath=FAST, error_model="numpy")
def merge(partial, peaks, totals, first_unit, rows, out):
    """Join the units of each sequence by log-sum-exp.

    partial [units, kv_heads, group, head_dim] unnormalised sums, peaks and totals [units, kv_heads, group]; sequence s owns units
    [first_unit[s], first_unit[s + 1]) and is written to row rows[s] of out [batch rows, num_heads * head_dim].
    """
    _, kv_heads, heads, head_dim = partial.shape
    for seq in prange(len(rows)):
        for head in range(kv_heads):
            for g in range(heads):
                peak = np.float32(-np.inf)
                for unit in range(first_unit[seq], first_unit[seq + 1]):
                    peak = max(peak, peaks[unit, head, g])
                total = np.float32(0.0)
                result = out[rows[seq], (head * heads + g) * head_dim : (head * heads + g + 1) * head_dim]
                result[:] = np.float32(0.0)
                for unit in range(first_unit[seq], first_unit[seq + 1]):
                    factor = np.exp(peaks[unit, head, g] - peak)
                    total += totals[unit, head, g] * factor
                    for d in range(head_dim):
                        result[d] += partial[unit, head, g, d] * factor
                for d in range(head_dim):
                    result[d] /= total

"""numba kernels of the CPU attention backend: store K and V into blocks, and decode over the blocks in place.

The pool is [num_blocks, block_elements] or its bytes; a layer's K tile starts at element ``k_offset`` of a block, V at ``v_offset``,
each [kv_heads, block_size, head_dim]. Compiled at first use and cached on disk; ``decode`` once for all element types, as each
would take 15 seconds.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from engine.attention.cpu_tiles import LANES, score_tile, softmax_row, weigh_tile

# No nnan/ninf: a NaN must come out as a NaN. Sums may be reordered, in the same way at every call.
FAST = {"reassoc", "nsz", "arcp", "contract"}

SPLIT = 256  # tokens of context that one work unit reads; fixed, so that a result never depends on who shares the batch
MANY_UNITS = 8

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2  # element types of a pool


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


@njit(cache=True, error_model="numpy")
def _score_in_place(
    q, q_at, heads, floats, halves, element, at, num_tokens, ahead_at, head_dim, scores, scores_at, stride, scratch
):
    """``score_tile`` over the tile at element ``at`` of the pool's bytes, widened into ``scratch`` where it is not float32."""
    if element == FLOAT32:
        score_tile(q, q_at, heads, floats, at, num_tokens, floats, ahead_at, head_dim, scores, scores_at, stride)
    else:
        _widen(halves, element, at, num_tokens * head_dim, scratch)
        score_tile(q, q_at, heads, scratch, 0, num_tokens, scratch, 0, head_dim, scores, scores_at, stride)


@njit(cache=True, error_model="numpy")
def _weigh_in_place(
    weights, weights_at, heads, stride, floats, halves, element, at, num_tokens, ahead_at, head_dim, out, out_at, scratch
):
    """``weigh_tile`` over a tile of the pool, as ``_score_in_place``."""
    if element == FLOAT32:
        weigh_tile(weights, weights_at, heads, stride, floats, at, num_tokens, floats, ahead_at, head_dim, out, out_at)
    else:
        _widen(halves, element, at, num_tokens * head_dim, scratch)
        weigh_tile(weights, weights_at, heads, stride, scratch, 0, num_tokens, scratch, 0, head_dim, out, out_at)


@njit(cache=True, error_model="numpy")
def _widen(halves, element, at, size, scratch):
    wide, first = scratch.view(np.uint32), np.uintp(at)
    if element == BFLOAT16:  # its bits are the upper half of a float32
        for i in range(size):
            wide[i] = np.uint32(halves[first + np.uintp(i)]) << np.uint32(16)
        return
    # float16 bits moved into a float32, then times 2^112: exact, subnormals included (infinities do not occur)
    for i in range(size):
        half = np.uint32(halves[first + np.uintp(i)])
        wide[i] = ((half & np.uint32(0x8000)) << np.uint32(16)) | ((half & np.uint32(0x7FFF)) << np.uint32(13))
    for i in range(size):
        scratch[i] *= np.float32(5.192296858534828e33)


@njit(cache=True, parallel=True, error_model="numpy")
def decode(
    q, rows, kv_heads, head_dim, pool, element, k_offset, v_offset, tables, units, scale, block_size, partial, peaks, totals
):  # fmt: skip
    """Attention of one query row per sequence over one split of its context, for all units and KV heads.

    q float32 [batch rows, num_heads * head_dim or more], contiguous, sequence s asks with row rows[s]; pool uint8 [num_blocks, block
    bytes] of ``element``; tables int32 [sequences, blocks]; units int32 [units, 3] of (sequence, first token, token behind the last),
    at most SPLIT tokens each. Writes what ``merge`` reads.

    Where there are units enough for all threads, one reads all KV heads: their tiles lie side by side in a block, and a longer
    run of bytes comes faster from memory. The results are the same.
    """
    heads_at_a_time = kv_heads if units.shape[0] >= MANY_UNITS else 1
    jobs = kv_heads // heads_at_a_time
    flat, block_elements = pool.reshape(-1), pool.shape[1] // (4 if element == FLOAT32 else 2)
    for job in prange(units.shape[0] * jobs):
        unit, first_head = job // jobs, (job % jobs) * heads_at_a_time
        seq, start, end = units[unit, 0], units[unit, 1], units[unit, 2]
        _decode_unit(
            q, rows[seq], first_head, first_head + heads_at_a_time, head_dim, flat, element, block_elements, k_offset, v_offset, tables, seq,
            start, end, scale, block_size, partial, peaks, totals, unit,
        )  # fmt: skip


@njit(cache=True, error_model="numpy")
def _decode_unit(
    q, row, first_head, last_head, head_dim, pool, element, block_elements, k_offset, v_offset, tables, seq,
    start, end, scale, block_size, partial, peaks, totals, unit,
):  # fmt: skip
    """The tokens [start, end) of one sequence for KV heads [first_head, last_head). The pool is its bytes, flat."""
    heads, tile = partial.shape[2], block_size * head_dim
    stride = (end - start + LANES - 1) // LANES * LANES  # from one head's weights to the next's
    group = heads * head_dim
    query = np.empty((last_head - first_head) * group, np.float32)
    for i in range(len(query)):
        query[i] = q[row, first_head * group + i] * scale
    weights = np.empty((last_head - first_head) * heads * stride, np.float32)
    out = np.zeros(len(query), np.float32)
    scratch = np.empty(tile, np.float32)
    floats, halves = pool.view(np.float32), pool.view(np.uint16)  # once: a view in an inner loop counts references
    first_index, last_index = start // block_size, (end - 1) // block_size

    for index in range(first_index, last_index + 1):
        first, last = max(start, index * block_size), min(end, (index + 1) * block_size)
        block, following = tables[seq, index] * block_elements, tables[seq, min(index + 1, last_index)] * block_elements
        for i in range(last_head - first_head):
            offset = k_offset + (first_head + i) * tile
            at = block + offset + (first - index * block_size) * head_dim
            _score_in_place(
                query, i * group, heads, floats, halves, element, at, last - first, following + offset, head_dim,
                weights, i * heads * stride + first - start, stride, scratch,
            )  # fmt: skip

    result = np.empty(2, np.float32)
    for i in range(last_head - first_head):
        for g in range(heads):
            softmax_row(weights, (i * heads + g) * stride, end - start, result)
            peaks[unit, first_head + i, g], totals[unit, first_head + i, g] = result[0], result[1]

    for index in range(first_index, last_index + 1):
        first, last = max(start, index * block_size), min(end, (index + 1) * block_size)
        block, following = tables[seq, index] * block_elements, tables[seq, min(index + 1, last_index)] * block_elements
        for i in range(last_head - first_head):
            offset = v_offset + (first_head + i) * tile
            at = block + offset + (first - index * block_size) * head_dim
            _weigh_in_place(
                weights, i * heads * stride + first - start, heads, stride, floats, halves, element, at, last - first,
                following + offset, head_dim, out, i * group, scratch,
            )  # fmt: skip

    for i in range(last_head - first_head):
        for g in range(heads):
            for d in range(head_dim):
                partial[unit, first_head + i, g, d] = out[i * group + g * head_dim + d]


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

"""numba kernels of the CPU backend over a quantized cache: seal full blocks, unseal them, and decode over the bytes in place.

The pool is uint8 [num_blocks, block_bytes]. ``kind`` is (bits, e4m3, zero_step, per_channel) of a ``SealedType``, ``at`` the byte
offsets (codes, scales, zeros) of K or V of a layer in a block, ``shape`` (KV heads, block size, head size). Tails and other unsealed
blocks are float32 [count, elements]. The torch twins are in ``sealing`` and ``sealed_reference``.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from engine.attention.cpu_kernels import MANY_UNITS
from engine.attention.cpu_sealed_tiles import fold_scales, read_groups, shift_row, widen_codes
from engine.attention.cpu_tiles import LANES, score_tile, softmax_row, weigh_tile
from engine.attention.sealing import E4M3_MAX, NAN_SCALE, SCALE_BIAS, SCALE_SHIFTS

_SCALES = ((np.arange(256, dtype=np.int32) + np.int32(SCALE_BIAS)) << np.int32(20)).view(np.float32)
_SCALES[NAN_SCALE] = np.nan
_MAX = np.float32(E4M3_MAX)


@njit(cache=True, error_model="numpy")
def _encode_scale(step, bits):
    """The byte of the next scale that is no smaller; ``bits`` is room for one float32."""
    if not np.isfinite(step):
        return NAN_SCALE
    bits[0] = step
    code = ((bits.view(np.int32)[0] + 0xFFFFF) >> 20) - SCALE_BIAS
    return min(max(code, 0), NAN_SCALE - 1)


@njit(cache=True, error_model="numpy")
def encode_e4m3(x, bits):
    """The e4m3 byte nearest to x, ties to even; |x| is at most 448. ``bits`` is room for one float32."""
    bits[0] = x
    word = bits.view(np.uint32)[0]
    sign = (word >> np.uint32(24)) & np.uint32(0x80)
    magnitude = word & np.uint32(0x7FFFFFFF)
    if magnitude < np.uint32(121 << 23):  # below 2^-6 steps are 2^-9
        return np.uint8(sign | np.uint32(np.rint(np.abs(x) * np.float32(512.0))))
    magnitude += np.uint32(0x7FFFF) + ((magnitude >> np.uint32(20)) & np.uint32(1))
    return np.uint8(sign | ((magnitude >> np.uint32(20)) - np.uint32(120 << 3)))


@njit(cache=True, error_model="numpy")
def _zero(middle, step, kind):
    """The zero that lays the codes' range around ``middle``."""
    top = np.float32(2 ** kind[0] - 1)
    zero = np.rint((middle / step - top / np.float32(2.0)) / np.float32(kind[2]))
    return min(max(zero, np.float32(-128.0)), np.float32(127.0))


@njit(cache=True, error_model="numpy")
def _code(value, step, zero, kind):
    code = np.rint(value / step) - np.float32(kind[2]) * zero
    return min(max(code, np.float32(0.0)), np.float32(2 ** kind[0] - 1))


@njit(cache=True, error_model="numpy")
def _search_scale(x, start, stride, count, kind, middle, covering):
    """The byte of the scale, ``covering`` or near it, with the least error; twin of the loop in ``sealing.seal``."""
    mean = 0.0
    for i in range(count):
        mean += np.float64(x[start + i * stride])
    mean /= count
    best, least = covering, np.inf
    for index in range(len(SCALE_SHIFTS) + 1):
        scale = covering if index == 0 else min(max(covering + SCALE_SHIFTS[index - 1], 0), NAN_SCALE - 1)
        step = _SCALES[scale]
        zero = _zero(middle, step, kind)
        error = 0.0
        for i in range(count):
            value = x[start + i * stride]
            back = (_code(value, step, zero, kind) + np.float32(kind[2]) * zero) * step
            weight = (np.float64(value) - mean) ** 2 if kind[3] else 1.0
            error += (np.float64(back) - np.float64(value)) ** 2 * weight
        if error < least:
            best, least = scale, error
    return best


@njit(cache=True, error_model="numpy")
def _seal_group(x, start, stride, count, kind, codes):
    """Codes of one group of a tile x into ``codes``, flat like x, one to an element. Returns (scale, zero) as their bytes."""
    bits = np.empty(1, np.float32)
    low = high = x[start]
    flaw = np.float32(0.0)  # NaN as soon as one element is NaN or infinite
    for i in range(count):
        value = x[start + i * stride]
        low, high = min(low, value), max(high, value)
        flaw += value - value
    reach = max(abs(low), abs(high)) + flaw
    if kind[1]:
        scale = _encode_scale(reach / _MAX, bits)
        step = _SCALES[scale]
        for i in range(count):
            value = min(max(x[start + i * stride] / step, -_MAX), _MAX)
            codes[start + i * stride] = encode_e4m3(value, bits)
        return scale, 0
    num_steps = np.float32(2 ** kind[0] - kind[2])
    middle = (low + high) / np.float32(2.0)
    scale = _encode_scale(max((high - low) / num_steps, reach / np.float32(127 * kind[2])), bits)
    if kind[0] == 4 and scale != NAN_SCALE:
        scale = _search_scale(x, start, stride, count, kind, middle, scale)
    step = _SCALES[scale]
    zero = _zero(middle, step, kind)
    for i in range(count):
        codes[start + i * stride] = np.uint8(_code(x[start + i * stride], step, zero, kind))
    return scale, int(zero) + 128


@njit(cache=True, error_model="numpy", parallel=True)
def seal(source, source_rows, source_offset, pool, block_ids, kind, at, shape):
    """Block block_ids[i] is sealed from row source_rows[i] of ``source``, which holds it from element source_offset on."""
    kv_heads, block_size, head_dim = shape
    tile = block_size * head_dim
    row_bytes = head_dim * kind[0] // 8
    groups, stride, count = (head_dim, head_dim, block_size) if kind[3] else (block_size, 1, head_dim)
    first = 1 if kind[3] else head_dim  # from a group's first element to the next group's
    for job in prange(len(block_ids) * kv_heads):
        index, head = job // kv_heads, job % kv_heads
        target = pool[block_ids[index]]
        start = source_offset + head * tile
        x = source[source_rows[index], start : start + tile]
        codes = np.empty(tile, np.uint8)
        for group in range(groups):
            scale, zero = _seal_group(x, group * first, stride, count, kind, codes)
            target[at[1] + head * groups + group] = scale
            if not kind[1]:
                target[at[2] + head * groups + group] = zero
        for token in range(block_size):
            byte = at[0] + (head * block_size + token) * row_bytes
            for i in range(row_bytes):
                code = codes[token * head_dim + i]
                if kind[0] == 4:
                    code |= codes[token * head_dim + row_bytes + i] << 4
                target[byte + i] = code


@njit(cache=True, error_model="numpy")
def _zero_step(kind):
    """As float32; 0 for the types without zeros."""
    return np.float32(0.0) if kind[1] else np.float32(kind[2])


@njit(cache=True, error_model="numpy", parallel=True)
def unseal(pool, block_ids, kind, at, out, block_size):
    """out float32 [kv_heads, blocks * block_size, head_dim]: the named blocks in their order."""
    kv_heads, _, head_dim = out.shape
    per_channel = kind[3]
    groups = head_dim if per_channel else block_size
    row_bytes = head_dim * kind[0] // 8
    flat = pool.reshape(-1)
    for job in prange(len(block_ids) * kv_heads):
        index, head = job // kv_heads, job % kv_heads
        block = block_ids[index] * pool.shape[1]
        scales, offsets = np.empty(groups, np.float32), np.empty(groups, np.float32)
        first = block + head * groups
        read_groups(flat, first + at[1], first + at[2], _zero_step(kind), groups, scales, offsets)
        scratch = np.empty(block_size * head_dim, np.float32)
        byte = block + at[0] + head * block_size * row_bytes
        widen_codes(flat, byte, byte, block_size, head_dim, kind, scratch)
        for token in range(block_size):
            row = out[head, index * block_size + token]
            for d in range(head_dim):
                group = d if per_channel else token
                row[d] = scratch[token * head_dim + d] * scales[group] + offsets[group]


@njit(cache=True, parallel=True, error_model="numpy")
def decode(
    q, rows, shape, pool, parts, tails, tail_offsets, tail_slots, tail_starts, tables, units, scale, partial, peaks, totals
):  # fmt: skip
    """As ``cpu_kernels.decode``, over sealed blocks; sequence s reads its table's tokens from tail_starts[s] on out of tail slot
    tail_slots[s].

    ``parts``: (kind, offsets) of K, per channel, and of V, per token; ``tail_offsets``: the first elements of the layer's K and V in
    a tail slot.
    """
    heads_at_a_time = shape[0] if units.shape[0] >= MANY_UNITS else 1
    jobs = shape[0] // heads_at_a_time
    (k_kind, at_k), (v_kind, at_v) = parts  # here: numba takes no nested tuples into a parallel loop
    flat, flat_tails = pool.reshape(-1), tails.reshape(-1)
    for job in prange(units.shape[0] * jobs):
        unit, first_head = job // jobs, (job % jobs) * heads_at_a_time
        seq, start, end = units[unit, 0], units[unit, 1], units[unit, 2]
        _decode_unit(
            q, rows[seq], first_head, first_head + heads_at_a_time, shape, flat, pool.shape[1], k_kind, at_k, v_kind, at_v,
            flat_tails, tail_slots[seq] * tails.shape[1], tail_offsets, tail_starts[seq], tables, seq, start, end, scale,
            partial, peaks, totals, unit,
        )  # fmt: skip


@njit(cache=True, error_model="numpy")
def _decode_unit(
    q, row, first_head, last_head, shape, pool, block_bytes, k_kind, at_k, v_kind, at_v, tails, tail, tail_offsets, tail_start,
    tables, seq, start, end, scale, partial, peaks, totals, unit,
):  # fmt: skip
    """The tokens [start, end) of one sequence for KV heads [first_head, last_head). Pool and tails are flat, its tail at ``tail``."""
    _, block_size, head_dim = shape
    heads, tile, num_heads = partial.shape[2], block_size * head_dim, last_head - first_head
    stride = (end - start + LANES - 1) // LANES * LANES  # from one head's weights to the next's
    group = heads * head_dim
    query = np.empty(num_heads * group, np.float32)
    for i in range(len(query)):
        query[i] = q[row, first_head * group + i] * scale
    weights = np.empty(num_heads * heads * stride, np.float32)
    out = np.zeros(num_heads * group, np.float32)
    shifts = np.zeros(num_heads * heads, np.float32)  # what zeros add: to a head's scores, later to its output
    scratch, scaled = np.empty(tile, np.float32), np.empty(group, np.float32)
    scales, offsets = np.empty(max(head_dim, block_size), np.float32), np.empty(max(head_dim, block_size), np.float32)
    first_index, last_index = start // block_size, (end - 1) // block_size
    k_row, v_row = head_dim * k_kind[0] // 8, head_dim * v_kind[0] // 8

    for index in range(first_index, last_index + 1):
        first, last = max(start, index * block_size), min(end, (index + 1) * block_size)
        skip, count = first - index * block_size, last - first
        block, following = tables[seq, index] * block_bytes, tables[seq, min(index + 1, last_index)] * block_bytes
        for i in range(num_heads):
            head, at = first_head + i, i * heads * stride + first - start
            if first >= tail_start:
                key = tail + tail_offsets[0] + head * tile + skip * head_dim
                score_tile(query, i * group, heads, tails, key, count, tails, key, head_dim, weights, at, stride)
                continue
            groups = block + head * head_dim
            read_groups(pool, groups + at_k[1], groups + at_k[2], _zero_step(k_kind), head_dim, scales, offsets)
            byte = at_k[0] + (head * block_size + skip) * k_row
            for g in range(heads):
                shift = fold_scales(query, i * group + g * head_dim, scales, offsets, head_dim, scaled, g * head_dim)
                shifts[i * heads + g] = shift
            widen_codes(pool, block + byte, following + byte, count, head_dim, k_kind, scratch)
            score_tile(scaled, 0, heads, scratch, 0, count, scratch, 0, head_dim, weights, at, stride)
            for g in range(heads):
                shift_row(weights, at + g * stride, count, shifts[i * heads + g])

    result = np.empty(2, np.float32)
    for i in range(num_heads):
        for g in range(heads):
            softmax_row(weights, (i * heads + g) * stride, end - start, result)
            peaks[unit, first_head + i, g], totals[unit, first_head + i, g] = result[0], result[1]

    shifts[:] = np.float32(0.0)
    for index in range(first_index, last_index + 1):
        first, last = max(start, index * block_size), min(end, (index + 1) * block_size)
        skip, count = first - index * block_size, last - first
        block, following = tables[seq, index] * block_bytes, tables[seq, min(index + 1, last_index)] * block_bytes
        for i in range(num_heads):
            head, at = first_head + i, i * heads * stride + first - start
            if first >= tail_start:
                value = tail + tail_offsets[1] + head * tile + skip * head_dim
                weigh_tile(weights, at, heads, stride, tails, value, count, tails, value, head_dim, out, i * group)
                continue
            groups = block + head * block_size + skip
            read_groups(pool, groups + at_v[1], groups + at_v[2], _zero_step(v_kind), count, scales, offsets)
            byte = at_v[0] + (head * block_size + skip) * v_row
            for g in range(heads):
                row_at = at + g * stride
                shifts[i * heads + g] += fold_scales(weights, row_at, scales, offsets, count, weights, row_at)
            widen_codes(pool, block + byte, following + byte, count, head_dim, v_kind, scratch)
            weigh_tile(weights, at, heads, stride, scratch, 0, count, scratch, 0, head_dim, out, i * group)

    for i in range(num_heads):
        for g in range(heads):
            for d in range(head_dim):
                partial[unit, first_head + i, g, d] = out[i * group + g * head_dim + d] + shifts[i * heads + g]

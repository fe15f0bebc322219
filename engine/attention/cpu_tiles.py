"""The inner loops of decode attention on a CPU, in LLVM instructions: scores, softmax and weighted sum for one tile of the cache.

A tile is [tokens, head_dim] of float32. Its query heads (a group of 1 to 3 at a time) are kept in registers against it, so each
element of K and V is loaded once for all of them. Results depend on the tile alone, never on how many tiles there are.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.attention.emit import INDEX, INT, Emitter, constant

LANES = 8  # float32 in an AVX2 register, of which there are sixteen
MAX_HEADS = 3  # 3 heads x 4 vectors of sums leave four registers for the operands
TOKENS = 4  # scores of one head at a time
VECTORS = 4  # of a weighted sum at a time
LOG2_E = 1.4426950408889634

# Taylor series of 2^f on [-1/2, 1/2], highest power first
EXP2_COEFFICIENTS = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)


@intrinsic
def _dot_products(
    typing_context, q, q_at, num_heads, k, k_at, num_tokens, ahead, ahead_at, head_dim, scores, scores_at, stride
):
    """scores[g * stride + t] = q[g] . k[t] for up to MAX_HEADS heads and TOKENS tokens or one; fetches the same rows of ``ahead``.

    q, k and ahead are rows of head_dim elements, one after the other.
    """

    def codegen(context, builder, signature, arguments):
        emit = Emitter(context, builder, signature, arguments)
        for shape in product(range(MAX_HEADS, 0, -1), (TOKENS, 1)):
            is_this = [builder.icmp_signed("==", arguments[i], INDEX(n)) for i, n in zip((2, 5), shape, strict=True)]
            with builder.if_then(builder.and_(*is_this)):
                _emit_dot_products(emit, arguments, *shape)
        return context.get_dummy_value()

    index = types.intp
    return types.void(q, index, index, k, index, index, ahead, index, index, scores, index, index), codegen


def _emit_dot_products(emit, arguments, num_heads, num_tokens):
    builder, end = emit.builder, arguments[8]
    q_rows = _rows(emit, emit.pointer(0, 1), end, num_heads)
    k_rows = _rows(emit, emit.pointer(3, 4), end, num_tokens)
    next_rows = _rows(emit, emit.pointer(6, 7), end, num_tokens)

    def accumulate(lanes):
        def body(d, sums):
            queries = [emit.load(emit.at(row, d), lanes) for row in q_rows]
            sums = list(sums)
            for t, row in enumerate(k_rows):  # one key at a time: there are no registers for more
                key = emit.load(emit.at(row, d), lanes)
                for g, query in enumerate(queries):
                    sums[g * num_tokens + t] = emit.fma(query, key, sums[g * num_tokens + t])
            return sums

        return body

    def two_steps(d, sums):
        for row in next_rows:
            emit.prefetch(emit.at(row, d), 3)
        return accumulate(LANES)(emit.add(d, LANES), accumulate(LANES)(d, sums))

    pair, single = emit.whole(end, 2 * LANES), emit.whole(end, LANES)
    sums = emit.loop(0, pair, 2 * LANES, [constant(0.0, LANES)] * (num_heads * num_tokens), two_steps)
    sums = emit.loop(pair, single, LANES, sums, accumulate(LANES))
    sums = [fold_lanes(builder, total, builder.fadd) for total in sums]
    sums = emit.loop(single, end, 1, sums, accumulate(1))
    for (g, t), total in zip(product(range(num_heads), range(num_tokens)), sums, strict=True):
        emit.store(total, emit.at(emit.pointer(9, 10), emit.add(emit.mul(arguments[11], g), t)))


def _rows(emit, pointer, stride, count):
    return [emit.at(pointer, emit.mul(stride, row)) for row in range(count)]


def fold_lanes(builder, vector, join):
    """All lanes joined into one, halves first, as a vector of one lane."""
    count = vector.type.count
    while count > 1:
        count //= 2
        low, high = (
            builder.shuffle_vector(
                vector, vector, ir.Constant(ir.VectorType(INT, count), [INT(i + start) for i in range(count)])
            )
            for start in (0, count)
        )
        vector = join(low, high)
    return vector


@intrinsic
def _weighted_sum(
    typing_context,
    weights,
    weights_at,
    num_heads,
    stride,
    v,
    v_at,
    num_elements,
    ahead,
    ahead_at,
    head_dim,
    num_tokens,
    out,
    out_at,
):
    """out[g * head_dim + d] += sum_t weights[g * stride + t] * v[t * head_dim + d] for up to MAX_HEADS heads and ``num_elements`` d:
    VECTORS whole vectors, one, or one element."""

    def codegen(context, builder, signature, arguments):
        emit = Emitter(context, builder, signature, arguments)
        for num_heads, (num_vectors, lanes) in product(range(MAX_HEADS, 0, -1), ((VECTORS, LANES), (1, LANES), (1, 1))):
            is_this = [builder.icmp_signed("==", arguments[i], INDEX(n)) for i, n in ((2, num_heads), (6, num_vectors * lanes))]
            with builder.if_then(builder.and_(*is_this)):
                _emit_weighted_sum(emit, arguments, num_heads, num_vectors, lanes)
        return context.get_dummy_value()

    index = types.intp
    return types.void(weights, index, index, index, v, index, index, ahead, index, index, index, out, index), codegen


def _emit_weighted_sum(emit, arguments, num_heads, num_vectors, lanes):
    head_dim = arguments[9]
    weight_rows = _rows(emit, emit.pointer(0, 1), arguments[3], num_heads)
    value, following = emit.pointer(4, 5), emit.pointer(7, 8)
    out_rows = _rows(emit, emit.pointer(11, 12), head_dim, num_heads)
    targets = [emit.at(row, lanes * i) for row in out_rows for i in range(num_vectors)]

    def body(t, sums):
        row = emit.mul(t, head_dim)
        places = [emit.add(row, lanes * i) for i in range(num_vectors)]
        for place in places[::2]:
            emit.prefetch(emit.at(following, place), 3)
        factors = [emit.splat(emit.at(weight_row, t), lanes) for weight_row in weight_rows]
        sums = list(sums)
        for i, place in enumerate(places):
            number = emit.load(emit.at(value, place), lanes)
            for g, factor in enumerate(factors):
                sums[g * num_vectors + i] = emit.fma(factor, number, sums[g * num_vectors + i])
        return sums

    sums = emit.loop(0, arguments[10], 1, [emit.load(target, lanes) for target in targets], body)
    for total, target in zip(sums, targets, strict=True):
        emit.store(total, target)


@intrinsic
def _softmax(typing_context, row, row_at, num_padded, result):
    """row[t] = exp(row[t] - peak) within 2e-7 relative, e^-87 and less as 1e-38; result = [peak, sum of row]. Padded to LANES."""

    def codegen(context, builder, signature, arguments):
        emit = Emitter(context, builder, signature, arguments)
        scores, end = emit.pointer(0, 1), arguments[2]
        peaks = emit.loop(
            0, end, LANES, [constant(float("-inf"), LANES)],
            lambda t, best: [emit.maximum(emit.load(emit.at(scores, t), LANES), best[0])],
        )  # fmt: skip
        peak = fold_lanes(builder, peaks[0], emit.maximum)
        emit.store(peak, emit.pointer(3))
        zeros = ir.Constant(ir.VectorType(INT, LANES), [INT(0)] * LANES)
        shift = builder.fmul(builder.shuffle_vector(peak, peak, zeros), constant(-LOG2_E, LANES))

        def body(t, total):
            weight = _exp2(emit, emit.fma(emit.load(emit.at(scores, t), LANES), constant(LOG2_E, LANES), shift))
            emit.store(weight, emit.at(scores, t))
            return [builder.fadd(total[0], weight)]

        total = emit.loop(0, end, LANES, [constant(0.0, LANES)], body)
        emit.store(fold_lanes(builder, total[0], builder.fadd), emit.at(emit.pointer(3), 1))
        return context.get_dummy_value()

    return types.void(row, types.intp, types.intp, result), codegen


def _exp2(emit, x):
    """2^x for x <= 0: 2^n * 2^f with n the nearest integer, which goes into the exponent bits."""
    builder, lanes = emit.builder, x.type.count
    x = emit.maximum(x, constant(-126.0, lanes))
    n = emit.floor(builder.fadd(x, constant(0.5, lanes)))
    f = builder.fsub(x, n)
    power = constant(EXP2_COEFFICIENTS[0], lanes)
    for coefficient in EXP2_COEFFICIENTS[1:]:
        power = emit.fma(power, f, constant(coefficient, lanes))
    integers = ir.VectorType(INT, lanes)
    exponent = builder.add(builder.fptosi(n, integers), ir.Constant(integers, [INT(127)] * lanes))
    bits = builder.shl(exponent, ir.Constant(integers, [INT(23)] * lanes))
    return builder.fmul(power, builder.bitcast(bits, x.type))


@njit(cache=True, error_model="numpy", inline="always")
def _group_size(remaining):
    """How many heads to take at once: 4 are taken as 2 and 2."""
    if remaining >= MAX_HEADS and remaining != MAX_HEADS + 1:
        return MAX_HEADS
    return min(remaining, 2)


@njit(cache=True, error_model="numpy")
def score_tile(q, q_at, heads, k, k_at, num_tokens, ahead, ahead_at, head_dim, scores, scores_at, stride):
    """scores[scores_at + g * stride + t] = q[g] . k[t]. q [heads, head_dim] and k [num_tokens, head_dim] lie flat at q_at and k_at.

    All float32. The tile at ``ahead_at`` of ``ahead`` is fetched into the cache on the way: the next one that will be asked for.
    """
    g = 0
    while g < heads:
        size = _group_size(heads - g)
        t = 0
        while t < num_tokens:
            count = TOKENS if num_tokens - t >= TOKENS else 1
            token = t * head_dim
            _dot_products(
                q, q_at + g * head_dim, size, k, k_at + token, count, ahead, ahead_at + token, head_dim,
                scores, scores_at + g * stride + t, stride,
            )  # fmt: skip
            t += count
        g += size


@njit(cache=True, error_model="numpy")
def weigh_tile(weights, weights_at, heads, stride, v, v_at, num_tokens, ahead, ahead_at, head_dim, out, out_at):
    """out[out_at + g * head_dim + d] += sum_t weights[weights_at + g * stride + t] * v[t, d]; see ``score_tile``."""
    g = 0
    while g < heads:
        size = _group_size(heads - g)
        d = 0
        while d < head_dim:
            count = VECTORS * LANES if head_dim - d >= VECTORS * LANES else LANES if head_dim - d >= LANES else 1
            _weighted_sum(
                weights, weights_at + g * stride, size, stride, v, v_at + d, count, ahead, ahead_at + d, head_dim, num_tokens,
                out, out_at + g * head_dim + d,
            )  # fmt: skip
            d += count
        g += size


@njit(cache=True, error_model="numpy")
def softmax_row(row, row_at, num_tokens, result):
    """row[t] = exp(row[t] - peak) for ``num_tokens`` scores; result float32 [2] becomes (peak, sum). Has room up to whole LANES."""
    num_padded = (num_tokens + LANES - 1) // LANES * LANES
    for t in range(num_tokens, num_padded):
        row[row_at + t] = np.float32(-np.inf)
    _softmax(row, row_at, num_padded, result)

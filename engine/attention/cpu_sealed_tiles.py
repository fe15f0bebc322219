"""The inner loops over the bytes of a quantized cache, in LLVM instructions: codes to float32, scales and zeros into what they scale.

For one tile of one KV head, which ``cpu_tiles`` then reads as float32. Scales are folded into the query (K) and into the weights (V),
so that each element costs one conversion and no multiplication.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.attention.cpu_tiles import LANES, fold_lanes
from engine.attention.emit import BYTE, FLOAT, Emitter, constant, integers
from engine.attention.sealing import NAN_SCALE, SCALE_BIAS

CACHE_LINE = 64
QUIET_NAN = 0x7FC00000
E4M3_TO_FLOAT32 = 2.0**120  # the bits moved into a float32, then times this: exact, subnormals included


def _sweep(emit, count, sums, body):
    """sums = body(i, sums, lanes) over ``count`` elements: whole vectors first, then one by one. Returns the sums in one lane."""
    builder, single = emit.builder, emit.whole(count, LANES)
    sums = emit.loop(0, single, LANES, [constant(0.0, LANES)] * sums, lambda i, sums: body(i, sums, LANES))
    sums = [fold_lanes(builder, total, builder.fadd) for total in sums]
    return emit.loop(single, count, 1, sums, lambda i, sums: body(i, sums, 1))


def _numbers(emit, codes):
    return [emit.to_float(codes)]


def _halves(emit, codes):
    """Of each byte the lower four bits, and the upper."""
    lanes = codes.type.count
    lower, upper = emit.builder.and_(codes, integers(15, lanes)), emit.builder.lshr(codes, integers(4, lanes))
    return [emit.to_float(lower), emit.to_float(upper)]


def _e4m3(emit, codes):
    builder, lanes = emit.builder, codes.type.count
    sign = builder.shl(builder.and_(codes, integers(0x80, lanes)), integers(24, lanes))
    magnitude = builder.shl(builder.and_(codes, integers(0x7F, lanes)), integers(20, lanes))
    bits = builder.bitcast(builder.or_(sign, magnitude), ir.VectorType(FLOAT, lanes))
    return [builder.fmul(bits, constant(E4M3_TO_FLOAT32, lanes))]


def _widen(decode):
    """out = the codes of ``num_rows`` rows as float32, flat; fetches the rows at ``ahead_at`` meanwhile.

    ``decode`` makes of a vector of bytes one vector of elements, or two that lie ``row_bytes`` elements apart.
    """

    @intrinsic
    def kernel(typing_context, pool, at, ahead_at, num_rows, row_bytes, out):
        def codegen(context, builder, signature, arguments):
            emit = Emitter(context, builder, signature, arguments)
            codes, ahead, out = emit.pointer(0, 1, BYTE), emit.pointer(0, 2, BYTE), emit.pointer(5)
            num_rows, row_bytes = arguments[3:5]

            def fetch(i, _):
                emit.prefetch(emit.at(ahead, i, BYTE), 3)
                return []

            def row(r, _):
                start = emit.mul(r, row_bytes)

                def body(i, sums, lanes):
                    parts = decode(emit, emit.load_bytes(emit.at(codes, emit.add(start, i), BYTE), lanes))
                    first = emit.at(out, emit.add(emit.mul(start, len(parts)), i))
                    for part, elements in enumerate(parts):
                        emit.store(elements, emit.at(first, emit.mul(row_bytes, part)))
                    return sums

                _sweep(emit, row_bytes, 0, body)
                return []

            emit.loop(0, emit.mul(num_rows, row_bytes), CACHE_LINE, [], fetch)
            emit.loop(0, num_rows, 1, [], row)
            return context.get_dummy_value()

        index = types.intp
        return types.void(pool, index, index, index, index, out), codegen

    return kernel


_widen_numbers, _widen_halves, _widen_e4m3 = (_widen(decode) for decode in (_numbers, _halves, _e4m3))


@njit(cache=True, error_model="numpy")
def widen_codes(pool, at, ahead_at, num_tokens, head_dim, kind, out):
    """out float32 [num_tokens, head_dim], flat: the codes from byte ``at`` of the flat pool on.

    Through the first cache, and no slower than turning codes into numbers in the registers of the tiles' loops, which lack some for it.
    The tile at ``ahead_at`` is fetched into the cache on the way: the next one that will be asked for.
    """
    if kind[0] == 4:
        _widen_halves(pool, at, ahead_at, num_tokens, head_dim // 2, out)
    elif kind[1]:
        _widen_e4m3(pool, at, ahead_at, 1, num_tokens * head_dim, out)
    else:
        _widen_numbers(pool, at, ahead_at, 1, num_tokens * head_dim, out)


@intrinsic
def read_groups(typing_context, pool, scales_at, zeros_at, zero_step, count, scales, offsets):
    """The scales of ``count`` groups, and what their zeros add to an element: nothing where ``zero_step`` is 0.

    Places are bytes of the flat pool. Twin of ``sealing.decode_scales``.
    """

    def codegen(context, builder, signature, arguments):
        emit = Emitter(context, builder, signature, arguments)
        codes, zeros, scales, offsets = emit.pointer(0, 1, BYTE), emit.pointer(0, 2, BYTE), emit.pointer(5), emit.pointer(6)

        def body(i, sums, lanes):
            code = emit.load_bytes(emit.at(codes, i, BYTE), lanes)
            bits = builder.shl(builder.add(code, integers(SCALE_BIAS, lanes)), integers(20, lanes))
            is_nan = builder.icmp_signed("==", code, integers(NAN_SCALE, lanes))
            bits = builder.select(is_nan, integers(QUIET_NAN, lanes), bits)
            scale = builder.bitcast(bits, ir.VectorType(FLOAT, lanes))
            zero = builder.sub(emit.load_bytes(emit.at(zeros, i, BYTE), lanes), integers(128, lanes))
            steps = builder.fmul(emit.to_float(zero), emit.spread(arguments[3], lanes))
            emit.store(scale, emit.at(scales, i))
            emit.store(builder.fmul(steps, scale), emit.at(offsets, i))
            return sums

        _sweep(emit, arguments[4], 0, body)
        return context.get_dummy_value()

    return types.void(pool, types.intp, types.intp, types.float32, types.intp, scales, offsets), codegen


@intrinsic
def fold_scales(typing_context, x, x_at, scales, offsets, count, out, out_at):
    """out[i] = x[i] * scales[i]; returns the sum of x[i] * offsets[i]. ``x`` may be ``out``."""

    def codegen(context, builder, signature, arguments):
        emit = Emitter(context, builder, signature, arguments)
        x, scales, offsets, out = emit.pointer(0, 1), emit.pointer(2), emit.pointer(3), emit.pointer(5, 6)

        def body(i, sums, lanes):
            value = emit.load(emit.at(x, i), lanes)
            emit.store(builder.fmul(value, emit.load(emit.at(scales, i), lanes)), emit.at(out, i))
            return [emit.fma(value, emit.load(emit.at(offsets, i), lanes), sums[0])]

        (total,) = _sweep(emit, arguments[4], 1, body)
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.float32(x, types.intp, scales, offsets, types.intp, out, types.intp), codegen


@intrinsic
def shift_row(typing_context, x, x_at, count, shift):
    """x[i] += shift."""

    def codegen(context, builder, signature, arguments):
        emit = Emitter(context, builder, signature, arguments)
        row = emit.pointer(0, 1)

        def body(i, sums, lanes):
            place = emit.at(row, i)
            emit.store(builder.fadd(emit.load(place, lanes), emit.spread(arguments[3], lanes)), place)
            return sums

        _sweep(emit, arguments[2], 0, body)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, types.float32), codegen

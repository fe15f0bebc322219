"""float32 matrix products x @ w.T for a CPU: numba around one hand-written tile, since LLVM does not keep such a tile in registers.

The tile takes four rows of w and sixteen rows of x. Every product sum runs over k in order, one fused multiply-add after the other,
so the result for a row of x has the same bits whatever other rows there are. The exception is a single row, which is read and
summed as one stream: memory gives that a fifth more bytes a second.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

ROWS, LANES, UNROLL = 4, 16, 16
ROWS_OF_X_AT_A_TIME = 64  # four panels of up to 1,536 columns stay in a core's own cache

_FLOAT, _INT, _INDEX = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_BYTE_POINTER = ir.IntType(8).as_pointer()


@intrinsic
def _tile(typing_context, w, n, ahead, panel, result):
    """result[r, lane] = sum_k w[n + r, k] * panel[k, lane], and fetch rows ``ahead`` of w into the caches meanwhile.

    w float32 [out, depth], panel float32 [depth, LANES], result float32 [ROWS, LANES], all C-contiguous.
    """

    def codegen(context, builder, signature, arguments):
        arrays = [context.make_array(signature.args[i])(context, builder, arguments[i]) for i in (0, 3, 4)]
        w_array, panel_array, result_array = arrays
        depth = cgutils.unpack_tuple(builder, w_array.shape)[1]
        emit = _TileEmitter(builder, panel_array.data, _row_pointers(builder, w_array.data, arguments[1], depth))
        next_rows = _row_pointers(builder, w_array.data, arguments[2], depth)
        whole = builder.sub(depth, builder.srem(depth, _INDEX(UNROLL)))
        sums = [ir.Constant(_VECTOR, [_FLOAT(0.0)] * LANES)] * ROWS
        sums = emit.loop(_INDEX(0), whole, UNROLL, sums, prefetch=next_rows)
        sums = emit.loop(whole, depth, 1, sums, prefetch=[])
        for r, total in enumerate(sums):
            builder.store(total, _vector_at(builder, result_array.data, _INDEX(r * LANES)), align=4)
        return context.get_dummy_value()

    return types.void(w, types.intp, types.intp, panel, result), codegen


def _element(builder, pointer, index):
    return builder.gep(pointer, [index], source_etype=_FLOAT)


def _vector_at(builder, pointer, index):
    return builder.bitcast(_element(builder, pointer, index), _VECTOR.as_pointer())


def _row_pointers(builder, data, first_row, depth):
    return [_element(builder, data, builder.mul(builder.add(first_row, _INDEX(r)), depth)) for r in range(ROWS)]


class _TileEmitter:
    """Writes the LLVM instructions of one tile: the sums are phi nodes, so they live in registers across the loop."""

    def __init__(self, builder, panel, rows):
        self.builder, self.panel, self.rows = builder, panel, rows
        fma_type = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        self.fma = cgutils.get_or_insert_function(builder.module, fma_type, f"llvm.fma.v{LANES}f32")
        prefetch_type = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _INT, _INT, _INT])
        self.prefetch = builder.module.declare_intrinsic("llvm.prefetch", [_BYTE_POINTER], prefetch_type)

    def loop(self, start, stop, step, sums, prefetch):
        builder = self.builder
        before = builder.block
        head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        k = builder.phi(_INDEX)
        phis = [builder.phi(_VECTOR) for _ in sums]
        builder.cbranch(builder.icmp_signed("<", k, stop), body, after)
        builder.position_at_end(body)
        for row in prefetch:
            address = builder.bitcast(_element(builder, row, k), _BYTE_POINTER)
            builder.call(self.prefetch, [address, _INT(0), _INT(2), _INT(1)])  # to read, into the second cache, data
        results = phis
        for offset in range(step):
            results = self.accumulate(builder.add(k, _INDEX(offset)), results)
        for phi, first, last in zip([k, *phis], [start, *sums], [builder.add(k, _INDEX(step)), *results], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(last, body)
        builder.branch(head)
        builder.position_at_end(after)
        return phis

    def accumulate(self, k, sums):
        builder = self.builder
        x = builder.load(_vector_at(builder, self.panel, builder.mul(k, _INDEX(LANES))), typ=_VECTOR, align=4)
        return [builder.call(self.fma, [self.splat(row, k), x, total]) for row, total in zip(self.rows, sums, strict=True)]

    def splat(self, row, k):
        builder, undefined = self.builder, ir.Constant(_VECTOR, ir.Undefined)
        scalar = builder.load(_element(builder, row, k), typ=_FLOAT)
        first = builder.insert_element(undefined, scalar, _INT(0))
        return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_INT, LANES), [_INT(0)] * LANES))


@njit(cache=True, parallel=True, fastmath={"reassoc", "nsz", "arcp", "contract"}, error_model="numpy")
def _one_row(x, w, out):
    for n in prange(w.shape[0]):
        total = np.float32(0.0)
        for k in range(x.shape[1]):
            total += w[n, k] * x[0, k]
        out[0, n] = total


@njit(cache=True, parallel=True, error_model="numpy")
def _pack(x, first, panels):
    """panels[p, k, lane] = x[first + p * LANES + lane, k], and 0 where x has no such row."""
    for k in prange(x.shape[1]):
        for p in range(panels.shape[0]):
            for lane in range(LANES):
                m = first + p * LANES + lane
                panels[p, k, lane] = x[m, k] if m < x.shape[0] else np.float32(0.0)


@njit(cache=True, parallel=True, error_model="numpy")
def _some_rows(x, w, panels, first, out):
    """Rows ``first`` and on, as many as the panels hold."""
    width = w.shape[0]
    last_tile = max(0, width - ROWS)
    for tile in prange(width // ROWS):
        n = tile * ROWS
        result = np.empty((ROWS, LANES), np.float32)
        for p in range(panels.shape[0]):
            _tile(w, n, min(n + ROWS, last_tile), panels[p], result)
            start = first + p * LANES
            for lane in range(min(LANES, x.shape[0] - start)):
                for r in range(ROWS):
                    out[start + lane, n + r] = result[r, lane]
    for n in range(width - width % ROWS, width):
        for m in range(first, min(first + panels.shape[0] * LANES, x.shape[0])):
            total = np.float32(0.0)
            for k in range(x.shape[1]):
                total += w[n, k] * x[m, k]
            out[m, n] = total


@njit(cache=True, error_model="numpy")
def matmul(x, w, out):
    """out[m, n] = sum_k x[m, k] * w[n, k]. x float32 [rows, depth], w float32 [width, depth], out [rows, width], C-contiguous."""
    rows = x.shape[0]
    if rows == 1:
        _one_row(x, w, out)
        return
    for first in range(0, rows, ROWS_OF_X_AT_A_TIME):
        num_panels = (min(ROWS_OF_X_AT_A_TIME, rows - first) + LANES - 1) // LANES
        panels = np.empty((num_panels, x.shape[1], LANES), np.float32)
        _pack(x, first, panels)
        _some_rows(x, w, panels, first, out)

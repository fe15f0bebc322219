"""float32 matrix products x @ w.T for a CPU: numba around one hand-written tile, since LLVM does not keep such a tile in registers.

The tile takes four rows of w and sixteen rows of x. Every product sum runs over k in order, one fused multiply-add after the other,
so the result for a row of x has the same bits whatever other rows there are. The exception is a single row, which is read and
summed as one stream: memory gives that a fifth more bytes a second.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange, types
from numba.extending import intrinsic

from engine.attention.emit import Emitter, constant

ROWS, LANES, UNROLL = 4, 16, 16
ROWS_OF_X_AT_A_TIME = 64  # four panels of up to 1,536 columns stay in a core's own cache


@intrinsic
def _tile(typing_context, w, n, ahead, panel, result):
    """result[r, lane] = sum_k w[n + r, k] * panel[k, lane], and fetch rows ``ahead`` of w into the second cache meanwhile.

    w float32 [out, depth], panel float32 [depth, LANES], result float32 [ROWS, LANES], all C-contiguous.
    """

    def codegen(context, builder, signature, arguments):
        emit = Emitter(context, builder, signature, arguments)
        depth = emit.length(0, 1)
        rows, next_rows = (_rows(emit, arguments[first], depth) for first in (1, 2))
        panel, result = emit.pointer(3), emit.pointer(4)

        def step(k, sums):
            x = emit.load(emit.at(panel, emit.mul(k, LANES)), LANES)
            return [emit.fma(emit.splat(emit.at(row, k), LANES), x, total) for row, total in zip(rows, sums, strict=True)]

        def steps(k, sums):
            for row in next_rows:
                emit.prefetch(emit.at(row, k), 2)
            for offset in range(UNROLL):
                sums = step(emit.add(k, offset), sums)
            return sums

        whole = emit.whole(depth, UNROLL)
        sums = emit.loop(0, whole, UNROLL, [constant(0.0, LANES)] * ROWS, steps)
        sums = emit.loop(whole, depth, 1, sums, step)
        for r, total in enumerate(sums):
            emit.store(total, emit.at(result, r * LANES))
        return context.get_dummy_value()

    return types.void(w, types.intp, types.intp, panel, result), codegen


def _rows(emit, first_row, depth):
    return [emit.at(emit.pointer(0), emit.mul(emit.add(first_row, r), depth)) for r in range(ROWS)]


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

"""Writes LLVM instructions for numba intrinsics: vectors, fused multiply-adds, and loops whose running values stay in registers.

For inner loops that LLVM does not keep in registers by itself, and without numba's test of every index for being negative, which
halves the bytes a second that a loop reads. Knows float32 and bytes, and nothing of what the loops compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba.core import cgutils

FLOAT, INT, INDEX, BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8)
_BYTE_POINTER = BYTE.as_pointer()


class Emitter:
    """Emits at the builder's present place. Pointers are to float32 unless ``element`` says BYTE; offsets are in elements."""

    def __init__(self, context, builder, signature, arguments):
        self.builder = builder
        self._context, self._types, self._arguments = context, signature.args, arguments

    def pointer(self, array, offset=None, element=FLOAT):
        """The address of argument number ``array``, a contiguous array of such elements, plus argument number ``offset``."""
        data = self._context.make_array(self._types[array])(self._context, self.builder, self._arguments[array]).data
        return data if offset is None else self.at(data, self._arguments[offset], element)

    def length(self, array, axis):
        shaped = self._context.make_array(self._types[array])(self._context, self.builder, self._arguments[array])
        return cgutils.unpack_tuple(self.builder, shaped.shape)[axis]

    def at(self, pointer, index, element=FLOAT):
        return self.builder.gep(pointer, [as_index(index)], source_etype=element)

    def add(self, a, b):
        return self.builder.add(as_index(a), as_index(b))

    def mul(self, a, b):
        return self.builder.mul(as_index(a), as_index(b))

    def whole(self, count, step):
        """``count`` rounded down to a multiple of ``step``."""
        return self.builder.sub(count, self.builder.srem(count, as_index(step)))

    def load(self, pointer, lanes):
        return self.builder.load(self._as_vector(pointer, lanes), typ=ir.VectorType(FLOAT, lanes), align=4)

    def load_bytes(self, pointer, lanes):
        """Bytes as 32-bit integers from 0 to 255."""
        bytes_type = ir.VectorType(BYTE, lanes)
        codes = self.builder.load(self.builder.bitcast(pointer, bytes_type.as_pointer()), typ=bytes_type, align=1)
        return self.builder.zext(codes, ir.VectorType(INT, lanes))

    def to_float(self, numbers):
        return self.builder.sitofp(numbers, ir.VectorType(FLOAT, numbers.type.count))

    def store(self, value, pointer):
        self.builder.store(value, self._as_vector(pointer, value.type.count), align=4)

    def _as_vector(self, pointer, lanes):
        return self.builder.bitcast(pointer, ir.VectorType(FLOAT, lanes).as_pointer())

    def splat(self, pointer, lanes):
        """The number at ``pointer`` in every lane."""
        return self.spread(self.builder.load(pointer, typ=FLOAT), lanes)

    def spread(self, number, lanes):
        """A float32 in every lane."""
        undefined = ir.Constant(ir.VectorType(FLOAT, lanes), ir.Undefined)
        first = self.builder.insert_element(undefined, number, INT(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(INT, lanes), [INT(0)] * lanes))

    def fma(self, a, b, c):
        vector = a.type
        kind = ir.FunctionType(vector, [vector] * 3)
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.fma.v{vector.count}f32"), [a, b, c]
        )

    def floor(self, a):
        kind = ir.FunctionType(a.type, [a.type])
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.floor.v{a.type.count}f32"), [a]
        )

    def maximum(self, a, b):
        """The greater one in each lane; a NaN in ``a`` passes."""
        return self.builder.select(self.builder.fcmp_unordered(">", a, b), a, b)

    def prefetch(self, pointer, level):
        """Ask for the cache line at ``pointer``, to read, into the first (3) or the second (2) cache. Any address is harmless."""
        kind = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, INT, INT, INT])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", [_BYTE_POINTER], kind)
        self.builder.call(function, [self.builder.bitcast(pointer, _BYTE_POINTER), INT(0), INT(level), INT(1)])

    def loop(
        self, start, stop, step: int, values: Sequence[ir.Value], body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]]
    ):
        """for k in range(start, stop, step): values = body(k, values). Returns the last values."""
        builder, before = self.builder, self.builder.block
        head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        k = builder.phi(INDEX)
        phis = [builder.phi(value.type) for value in values]
        builder.cbranch(builder.icmp_signed("<", k, as_index(stop)), inside, after)
        builder.position_at_end(inside)
        results = body(k, phis)
        following = self.add(k, step)
        for phi, first, last in zip([k, *phis], [as_index(start), *values], [following, *results], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(last, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        return phis


def constant(value: float, lanes: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(FLOAT, lanes), [FLOAT(value)] * lanes)


def integers(value: int, lanes: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(INT, lanes), [INT(value)] * lanes)


def as_index(value):
    return INDEX(value) if isinstance(value, int) else value

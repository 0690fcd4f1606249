"""The two pieces of attention that numba cannot express: a register-blocked matrix product and a transpose, both as
LLVM instructions over `engine.vectors`. All elements are float32, all strides are bytes."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from engine.jit import part
from engine.vectors import LANES, PANEL_ROWS, PANEL_VECTORS, emit_multiply_add, emit_pointer, emit_splat, written

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _transpose(builder: Any, rows: Any, offset: Any, target: Any, stride: Any) -> None:
    """Butterfly: round k exchanges bit k of the row's number with bit k of the lane's."""

    def at(address: Any, by: Any) -> Any:
        return emit_pointer(builder, builder.add(address, by), _VECTOR)

    vectors = []
    for row in range(LANES):
        start = builder.load(emit_pointer(builder, builder.add(rows, ir.Constant(_LONG, 8 * row)), _LONG))
        vectors.append(builder.load(at(start, offset), align=4))
    bit = LANES // 2
    while bit:
        for row in (row for row in range(LANES) if not row & bit):
            one, other = vectors[row], vectors[row | bit]
            low = [lane if not lane & bit else LANES + (lane ^ bit) for lane in range(LANES)]
            high = [lane | bit if not lane & bit else LANES + lane for lane in range(LANES)]
            for place, mask in ((row, low), (row | bit, high)):
                vectors[place] = builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_INT, LANES), mask))
        bit //= 2
    for row, vector in enumerate(vectors):
        builder.store(vector, at(target, builder.mul(stride, ir.Constant(_LONG, row))), align=4)


# The LANES floats from `offset` on of each row in a list of LANES addresses, written as columns.
transpose_block = written(types.void, (types.int64,) * 4, _transpose)


def _panel(vectors: int) -> Any:
    """Of at most PANEL_ROWS rows and exactly `vectors` vectors of columns: c = a b, or c += a b. The rows of b are
    given as a list of addresses, so they may lie anywhere; `column` is where in them to start, in bytes."""

    def emit(builder: Any, a: Any, a_stride: Any, b: Any, column: Any, c: Any, c_stride: Any, *sizes: Any) -> None:
        rows, depth, adds = sizes
        after = builder.append_basic_block("after")
        switch = builder.switch(builder.trunc(rows, _INT), after)
        for count in range(1, PANEL_ROWS + 1):
            block = builder.append_basic_block(f"rows{count}")
            switch.add_case(ir.Constant(_INT, count), block)
            builder.position_at_end(block)
            _product(builder, count, vectors, (a, a_stride), (b, column), (c, c_stride), depth, adds)
            builder.branch(after)
        builder.position_at_end(after)

    return written(types.void, (types.int64,) * 9, emit)


def _product(
    builder: Any, rows: int, vectors: int, a: Any, b: Any, c: Any, depth: Any, adds: Any
) -> None:  # all sums stay in registers
    a_rows = [builder.add(a[0], builder.mul(a[1], ir.Constant(_LONG, row))) for row in range(rows)]
    places = [
        emit_pointer(
            builder,
            builder.add(c[0], builder.add(builder.mul(c[1], ir.Constant(_LONG, row)), ir.Constant(_LONG, 4 * LANES * v))),
            _VECTOR,
        )
        for row in range(rows)
        for v in range(vectors)
    ]
    sums = [cgutils.alloca_once(builder, _VECTOR) for _ in places]
    with builder.if_else(builder.icmp_signed("!=", adds, ir.Constant(_LONG, 0))) as (then, otherwise):
        with then:
            for one, place in zip(sums, places, strict=True):
                builder.store(builder.load(place, align=4), one)
        with otherwise:
            for one in sums:
                builder.store(ir.Constant(_VECTOR, [0.0] * LANES), one)
    with cgutils.for_range(builder, depth, intp=_LONG) as loop:
        at = builder.load(emit_pointer(builder, builder.add(b[0], builder.mul(loop.index, ir.Constant(_LONG, 8))), _LONG))
        at = builder.add(at, b[1])
        columns = [
            builder.load(emit_pointer(builder, builder.add(at, ir.Constant(_LONG, 4 * LANES * v)), _VECTOR), align=4)
            for v in range(vectors)
        ]
        step = builder.mul(loop.index, ir.Constant(_LONG, 4))
        for row in range(rows):
            factor = emit_splat(builder, builder.load(emit_pointer(builder, builder.add(a_rows[row], step), _FLOAT)))
            for v in range(vectors):
                one = sums[row * vectors + v]
                builder.store(emit_multiply_add(builder, factor, columns[v], builder.load(one)), one)
    for one, place in zip(sums, places, strict=True):
        builder.store(builder.load(one), place, align=4)


_wide, _narrow = _panel(PANEL_VECTORS), _panel(1)


@part
def multiply(
    a: int, a_stride: int, b: int, c: int, c_stride: int, rows: int, depth: int, columns: int, adds: int
) -> None:
    """c [rows, columns] = a [rows, depth] b [depth, columns], added to what c holds if `adds`; `b` is a list of the
    addresses of its rows, `columns` a multiple of LANES. Every element is one chain of multiply-adds in the order of
    `depth`, so it does not depend on how many rows there are."""
    wide = 4 * LANES * PANEL_VECTORS
    column = 0
    while column < 4 * columns:
        is_wide = column + wide <= 4 * columns
        for row in range(0, rows, PANEL_ROWS):
            left = min(PANEL_ROWS, rows - row)
            one, place = a + row * a_stride, c + row * c_stride + column
            if is_wide:
                _wide(one, a_stride, b, column, place, c_stride, left, depth, adds)
            else:
                _narrow(one, a_stride, b, column, place, c_stride, left, depth, adds)
        column += wide if is_wide else 4 * LANES

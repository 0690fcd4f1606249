"""The two pieces of attention that numba cannot express: a register-blocked matrix product and a transpose, both as
LLVM instructions over `engine.vectors`. All elements are float32, all strides are bytes."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from engine.jit import part
from engine.vectors import LANES, PANEL_ROWS, PANEL_VECTORS, emit_multiply_add, emit_pointer, emit_splat, written

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _exchanged(builder: Any, one: Any, other: Any, bit: int) -> tuple[Any, Any]:
    """Two rows of a matrix whose numbers differ in `bit`, after a round of the butterfly that transposes it: that bit
    of the row's number and of the lane's change places."""
    low = [lane if not lane & bit else LANES + (lane ^ bit) for lane in range(LANES)]
    high = [lane | bit if not lane & bit else LANES + lane for lane in range(LANES)]
    masks = (ir.Constant(ir.VectorType(_INT, LANES), mask) for mask in (low, high))
    first, second = (builder.shuffle_vector(one, other, mask) for mask in masks)
    return first, second


def _vector_at(builder: Any, address: Any, offset: Any) -> Any:
    return emit_pointer(builder, builder.add(address, offset), _VECTOR)


def _addresses(builder: Any, rows: Any) -> list[Any]:
    """Of the LANES rows in a list."""
    places = [builder.add(rows, ir.Constant(_LONG, 8 * row)) for row in range(LANES)]
    return [builder.load(emit_pointer(builder, place, _LONG)) for place in places]


def _transpose(builder: Any, rows: Any, offset: Any, target: Any, stride: Any) -> None:
    starts = _addresses(builder, rows)
    vectors = [builder.load(_vector_at(builder, start, offset), align=4) for start in starts]
    bit = LANES // 2
    while bit:
        for row in (row for row in range(LANES) if not row & bit):
            vectors[row], vectors[row | bit] = _exchanged(builder, vectors[row], vectors[row | bit], bit)
        bit //= 2
    for row, vector in enumerate(vectors):
        builder.store(vector, _vector_at(builder, target, builder.mul(stride, ir.Constant(_LONG, row))), align=4)


def _dot(builder: Any, rows: Any, query: Any, size: Any, target: Any) -> None:
    starts = _addresses(builder, rows)
    sums = [cgutils.alloca_once(builder, _VECTOR) for _ in starts]
    for one in sums:
        builder.store(ir.Constant(_VECTOR, [0.0] * LANES), one)
    with cgutils.for_range(builder, builder.sdiv(size, ir.Constant(_LONG, LANES)), intp=_LONG) as loop:
        offset = builder.mul(loop.index, ir.Constant(_LONG, 4 * LANES))
        factor = builder.load(_vector_at(builder, query, offset), align=4)
        for start, one in zip(starts, sums, strict=True):
            key = builder.load(_vector_at(builder, start, offset), align=4)
            builder.store(emit_multiply_add(builder, factor, key, builder.load(one)), one)
    vectors = [builder.load(one) for one in sums]
    bit = LANES // 2
    while bit:  # half as many vectors a round, each with the sums of two
        vectors = [builder.fadd(*_exchanged(builder, vectors[row], vectors[row + bit], bit)) for row in range(bit)]
        bit //= 2
    builder.store(vectors[0], emit_pointer(builder, target, _VECTOR), align=4)


# The LANES floats from `offset` on of each row in a list of LANES addresses, written as columns.
transpose_block = written(types.void, (types.int64,) * 4, _transpose)
# The products of one row of `size` floats, whole vectors, with each row in a list of LANES addresses.
dot_block = written(types.void, (types.int64,) * 4, _dot)


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
            builder.add(
                c[0], builder.add(builder.mul(c[1], ir.Constant(_LONG, row)), ir.Constant(_LONG, 4 * LANES * v))
            ),
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
        at = builder.load(
            emit_pointer(builder, builder.add(b[0], builder.mul(loop.index, ir.Constant(_LONG, 8))), _LONG)
        )
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

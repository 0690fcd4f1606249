"""The parts of attention that numba cannot express, as LLVM instructions: register-blocked products, dot products and
a transpose. Elements are float32 unless a function has an argument `code` for their type. Strides are in bytes."""

from collections.abc import Iterable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from engine.cpu.attention_tiles import fetch
from engine.cpu.jit import part
from engine.cpu.simd import (
    CODES,
    FLOAT32,
    LANES,
    PANEL_ROWS,
    PANEL_VECTORS,
    cases,
    emit_fetch,
    emit_load,
    emit_multiply_add,
    emit_pointer,
    emit_splat,
    written,
)

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _exchanged(builder: Any, one: Any, other: Any, bit: int) -> tuple[Any, Any]:
    """Return two rows of a matrix after one round of a butterfly transpose. The indices of the two rows differ only in
    the bit `bit`. For each element, the round swaps this bit of the row index with the same bit of the lane index."""
    low = [lane if not lane & bit else LANES + (lane ^ bit) for lane in range(LANES)]
    high = [lane | bit if not lane & bit else LANES + lane for lane in range(LANES)]
    masks = (ir.Constant(ir.VectorType(_INT, LANES), mask) for mask in (low, high))
    first, second = (builder.shuffle_vector(one, other, mask) for mask in masks)
    return first, second


def _vector_at(builder: Any, address: Any, offset: Any) -> Any:
    return emit_pointer(builder, builder.add(address, offset), _VECTOR)


def _bytes_of(builder: Any, vectors: Any, code: int) -> Any:
    return builder.mul(vectors, ir.Constant(_LONG, (4 if code == FLOAT32 else 2) * LANES))


def _listed(builder: Any, rows: Any, index: Any) -> Any:
    """Load element `index` of a list of addresses that begins at `rows`."""
    return builder.load(emit_pointer(builder, builder.add(rows, builder.mul(index, ir.Constant(_LONG, 8))), _LONG))


def _first_listed(builder: Any, rows: Any, count: int) -> list[Any]:
    return [_listed(builder, rows, ir.Constant(_LONG, row)) for row in range(count)]


def _transpose(builder: Any, rows: Any, offset: Any, target: Any, stride: Any) -> None:
    starts = _first_listed(builder, rows, LANES)
    vectors = [builder.load(_vector_at(builder, start, offset), align=4) for start in starts]
    bit = LANES // 2
    while bit:
        for row in (row for row in range(LANES) if not row & bit):
            vectors[row], vectors[row | bit] = _exchanged(builder, vectors[row], vectors[row | bit], bit)
        bit //= 2
    for row, vector in enumerate(vectors):
        builder.store(vector, _vector_at(builder, target, builder.mul(stride, ir.Constant(_LONG, row))), align=4)


def _dot(builder: Any, code: int, rows: Any, query: Any, size: Any, target: Any, ahead: Any, lines: Any) -> None:
    starts = _first_listed(builder, rows, LANES)
    sums = [cgutils.alloca_once(builder, _VECTOR) for _ in starts]
    for one in sums:
        builder.store(ir.Constant(_VECTOR, [0.0] * LANES), one)
    with cgutils.for_range(builder, builder.sdiv(size, ir.Constant(_LONG, LANES)), intp=_LONG) as loop:
        emit_fetch(builder, ahead, loop.index, lines)
        factor = builder.load(_vector_at(builder, query, _bytes_of(builder, loop.index, FLOAT32)), align=4)
        offset = _bytes_of(builder, loop.index, code)
        for start, one in zip(starts, sums, strict=True):
            key = emit_load(builder, builder.add(start, offset), LANES, code)
            builder.store(emit_multiply_add(builder, factor, key, builder.load(one)), one)
    vectors = [builder.load(one) for one in sums]
    bit = LANES // 2
    while bit:  # each round halves the number of vectors
        vectors = [builder.fadd(*_exchanged(builder, vectors[row], vectors[row + bit], bit)) for row in range(bit)]
        bit //= 2
    builder.store(vectors[0], emit_pointer(builder, target, _VECTOR), align=4)


# (rows, offset, target, stride): copy LANES floats at `offset` from each address in `rows` to a column of `target`.
transpose_block = written(types.void, (types.int64,) * 4, _transpose)


def _dots(builder: Any, rows: Any, code: Any, *given: Any) -> None:
    for kind in cases(builder, code, CODES.values()):
        _dot(builder, kind, rows, *given)


# (rows, code, query, size, target, ahead, lines): compute the dot products of `query` (`size` floats, a multiple of
# LANES) and LANES rows, whose addresses `rows` lists. `code` is the type of the rows' elements. For each vector of the
# query, also prefetch the next `lines` cache lines, beginning at `ahead`.
dots = written(types.void, (types.int64,) * 7, _dots)


def _panel(vectors: int, codes: Iterable[int], fetches: bool) -> Any:
    """Return a function that computes c += a b for at most PANEL_ROWS rows and `vectors` vectors of columns. The
    function's first argument is the code for the type of b's elements, one of `codes`. The rows of b are given as a
    list of addresses. Reading begins at the byte offset `column` of each row."""

    def emit(
        builder: Any, code: Any, a: Any, a_stride: Any, a_step: Any, b: Any, column: Any, c: Any, *rest: Any
    ) -> None:
        c_stride, rows, depth, *fetched = rest

        def row_of_b(index: Any) -> Any:
            return builder.add(_listed(builder, b, index), column)

        for kind in cases(builder, code, codes):
            for count in cases(builder, rows, range(1, PANEL_ROWS + 1)):
                a_rows = [builder.add(a, builder.mul(a_stride, ir.Constant(_LONG, row))) for row in range(count)]
                _product(builder, vectors, (a_rows, a_step), row_of_b, (c, c_stride), depth, True, kind, fetched)

    return written(types.void, (types.int64,) * (12 if fetches else 10), emit)


def _panel_of_listed(vectors: int) -> Any:
    """Return a function that computes c = a b. A list has the addresses of a's rows; b's rows are evenly spaced."""

    def emit(builder: Any, a: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, rows: Any, depth: Any) -> None:
        def row_of_b(index: Any) -> Any:
            return builder.add(b, builder.mul(index, b_stride))

        for count in cases(builder, rows, range(1, PANEL_ROWS + 1)):
            a_rows = (_first_listed(builder, a, count), ir.Constant(_LONG, 4))
            _product(builder, vectors, a_rows, row_of_b, (c, c_stride), depth, False, FLOAT32, [])

    return written(types.void, (types.int64,) * 7, emit)


def _product(
    builder: Any, vectors: int, a: Any, row_of_b: Any, c: Any, depth: Any, adds: bool, code: int, fetched: Any
) -> None:
    """Emit c = a b, or c += a b if `adds`, for the rows of a and `vectors` vectors of columns. Sums stay in registers.

    `a` is a pair: the addresses of the rows of a, and the bytes between two elements of a row. `row_of_b(index)` emits
    the address of a row of b, whose elements have the type `code`. `c` is a pair: the address of c, and the bytes
    between two rows of c. `fetched` is empty, or has the arguments `ahead` and `lines` of `emit_fetch`.
    """
    a_rows, a_step = a
    rows = len(a_rows)
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
    for one, place in zip(sums, places, strict=True):
        builder.store(builder.load(place, align=4) if adds else ir.Constant(_VECTOR, [0.0] * LANES), one)
    with cgutils.for_range(builder, depth, intp=_LONG) as loop:
        if fetched:
            emit_fetch(builder, fetched[0], loop.index, fetched[1])
        at = row_of_b(loop.index)
        columns = [
            emit_load(builder, builder.add(at, _bytes_of(builder, ir.Constant(_LONG, v), code)), LANES, code)
            for v in range(vectors)
        ]
        step = builder.mul(loop.index, a_step)
        for row, start in enumerate(a_rows):
            factor = emit_splat(builder, builder.load(emit_pointer(builder, builder.add(start, step), _FLOAT)))
            for v in range(vectors):
                one = sums[row * vectors + v]
                builder.store(emit_multiply_add(builder, factor, columns[v], builder.load(one)), one)
    for one, place in zip(sums, places, strict=True):
        builder.store(builder.load(one), place, align=4)


_wide_listed, _narrow_listed = (_panel_of_listed(vectors) for vectors in (PANEL_VECTORS, 1))
_wide, _narrow = (_panel(vectors, (FLOAT32,), fetches=False) for vectors in (PANEL_VECTORS, 1))
_wide_fetching, _narrow_fetching = (_panel(vectors, CODES.values(), fetches=True) for vectors in (PANEL_VECTORS, 1))


@part
def listed_times(
    a: int, b: int, b_stride: int, c: int, c_stride: int, rows: int, depth: int, columns: int, ahead: int,
    rows_ahead: int, row_bytes: int,
) -> None:  # fmt: skip
    """Compute c [rows, columns] = a [rows, depth] b [depth, columns]. The matrix a is given as a list of the addresses
    of its rows. `columns` is a multiple of LANES. Each element of c is one chain of multiply-adds along the depth, so
    its value does not depend on `rows`. Also prefetch `rows_ahead` rows of `row_bytes` bytes, listed in `ahead`."""
    wide = 4 * LANES * PANEL_VECTORS
    column = 0
    while column < 4 * columns:
        is_wide = column + wide <= 4 * columns
        for row in range(0, rows, PANEL_ROWS):
            left, left_ahead = min(PANEL_ROWS, rows - row), rows_ahead - row
            one, at, place = a + 8 * row, b + column, c + row * c_stride + column
            if column == 0:  # with the last rows of a, prefetch all remaining rows
                fetch(ahead + 8 * row, min(left, left_ahead) if left < rows - row else left_ahead, row_bytes)
            if is_wide:
                _wide_listed(one, at, b_stride, place, c_stride, left, depth)
            else:
                _narrow_listed(one, at, b_stride, place, c_stride, left, depth)
        column += wide if is_wide else 4 * LANES


@part
def add_times_listed(
    a: int, a_stride: int, a_step: int, b: int, b_from: int, c: int, c_stride: int, rows: int, depth: int, columns: int
) -> None:
    """Compute c [rows, columns] += a [rows, depth] b [depth, columns]. The matrix `b` is given as a list of its rows'
    addresses. In a row of the matrix `a`, adjacent elements are `a_step` bytes apart."""
    wide = 4 * LANES * PANEL_VECTORS
    column = 0
    while column < 4 * columns:
        is_wide = column + wide <= 4 * columns
        for row in range(0, rows, PANEL_ROWS):
            left = min(PANEL_ROWS, rows - row)
            one, place = a + row * a_stride, c + row * c_stride + column
            if is_wide:
                _wide(FLOAT32, one, a_stride, a_step, b, b_from + column, place, c_stride, left, depth)
            else:
                _narrow(FLOAT32, one, a_stride, a_step, b, b_from + column, place, c_stride, left, depth)
        column += wide if is_wide else 4 * LANES


@part
def add_product(
    a: int, a_stride: int, b: int, code: int, b_from: int, c: int, c_stride: int, rows: int, depth: int, columns: int,
    ahead: int, lines: int,
) -> None:  # fmt: skip
    """Do the same as `add_times_listed` for rows of b whose elements have the type `code`. When a row of b is read for
    the first time, also prefetch the next `lines` cache lines, beginning at `ahead`."""
    item = 4 if code == FLOAT32 else 2
    column = 0
    while column < columns:
        is_wide = column + LANES * PANEL_VECTORS <= columns
        for row in range(0, rows, PANEL_ROWS):
            left = min(PANEL_ROWS, rows - row)
            one, at, place = a + row * a_stride, b_from + item * column, c + row * c_stride + 4 * column
            if is_wide:
                _wide_fetching(code, one, a_stride, 4, b, at, place, c_stride, left, depth, ahead, lines)
            else:
                _narrow_fetching(code, one, a_stride, 4, b, at, place, c_stride, left, depth, ahead, lines)
            lines = 0
        column += LANES * PANEL_VECTORS if is_wide else LANES

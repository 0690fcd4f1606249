"""Numba kernel that multiplies rows by a matrix of grouped 4-bit codes. Importing this module compiles the kernel or
loads it from disk.

A panel holds PANEL columns. For each group of inputs, a panel has the columns' scales, the columns' zero points (if the
matrix has zero points), and 32-bit integers. Each integer has the codes of one column for eight inputs. A permute
instruction looks up the weights of codes in a table that is held in a register. The sums of a group are multiplied by
the scales, and the groups are added in order, so no bit of a row's result depends on the other rows.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from engine.cpu.jit import cpu_features, kernel, num_threads, part, thread_number, wait_for_all
from engine.cpu.matmul_kernels import (
    BLOCK_ROWS,
    FETCHED_AHEAD,
    LINE,
    PANEL,
    TILE_ROWS,
    cost_of_experts,
    own_panels,
)
from engine.cpu.simd import (
    FLOAT32,
    LANES,
    PANEL_VECTORS,
    address_at,
    cases,
    emit_load,
    emit_multiply_add,
    emit_pointer,
    emit_prefetch,
    emit_splat,
    load,
    put_number,
    splat,
    total,
    written,
)

CODES_PER_WORD = 8
_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_ROW_BYTES = 4 * PANEL
PERMUTES = LANES == 16 or "avx2" in cpu_features()


def _number(value: int) -> Any:
    return ir.Constant(_LONG, value)


def _all(value: int) -> Any:
    return ir.Constant(_INTS, [value] * LANES)


def _at(builder: Any, base: Any, *offsets: int) -> Any:
    return builder.add(base, _number(sum(offsets)))


def _permuted(builder: Any, table: Any, indices: Any) -> Any:
    name = f"llvm.x86.{'avx512.permvar.sf.512' if LANES == 16 else 'avx2.permps'}"
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _INTS])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, [table, indices])


def _weights(builder: Any, table: Any, halves: list[Any], indices: Any) -> Any:
    """Look up the low 4 bits of each index in the table. `halves` are the vectors of the table, in registers."""
    if LANES == 16:
        return _permuted(builder, halves[0], indices)  # the instruction uses only the low 4 bits
    if PERMUTES:
        low, high = (_permuted(builder, half, indices) for half in halves)  # uses only the low 3 bits
        return builder.select(builder.icmp_unsigned("!=", builder.and_(indices, _all(8)), _all(0)), high, low)
    found = ir.Constant(_FLOATS, ir.Undefined)
    for lane in range(LANES):
        index = builder.and_(builder.extract_element(indices, ir.Constant(_INT, lane)), ir.Constant(_INT, 15))
        at = builder.add(table, builder.shl(builder.zext(index, _LONG), _number(2)))
        value = builder.load(emit_pointer(builder, at, _FLOAT))
        found = builder.insert_element(found, value, ir.Constant(_INT, lane))
    return found


def _emit_tiles(builder: Any, *given: Any) -> None:
    for rows in cases(builder, given[-1], range(1, TILE_ROWS + 1)):
        _emit_tile(builder, rows, *given[:-1])


def _emit_tile(
    builder: Any, rows: int, x: Any, x_stride: Any, weights: Any, groups: Any, words: Any, has_zeros: Any, start: Any,
    result: Any, result_stride: Any, sums: Any, table: Any,
) -> None:  # fmt: skip
    cells = [(row, vector) for row in range(rows) for vector in range(PANEL_VECTORS)]
    halves = [emit_load(builder, _at(builder, table, 4 * LANES * half), LANES, FLOAT32) for half in range(16 // LANES)]
    totals = {cell: cgutils.alloca_once(builder, _FLOATS) for cell in cells}
    parts = {cell: cgutils.alloca_once(builder, _FLOATS) for cell in cells}
    for (_, vector), one in totals.items():
        builder.store(emit_load(builder, _at(builder, start, 4 * LANES * vector), LANES, FLOAT32), one)
    head_bytes = builder.mul(builder.add(has_zeros, _number(1)), _number(_ROW_BYTES))
    group_bytes = builder.add(head_bytes, builder.mul(words, _number(_ROW_BYTES)))
    x_rows = [builder.add(x, builder.mul(x_stride, _number(row))) for row in range(rows)]
    with cgutils.for_range(builder, groups, intp=_LONG) as group:
        base = builder.add(weights, builder.mul(group.index, group_bytes))
        for one in parts.values():
            builder.store(ir.Constant(_FLOATS, [0.0] * LANES), one)
        with builder.if_then(builder.icmp_signed("!=", has_zeros, _number(0))):
            for (row, vector), one in parts.items():
                place = builder.add(builder.mul(groups, _number(row)), group.index)
                inputs = builder.load(emit_pointer(builder, builder.add(sums, builder.mul(place, _number(4))), _FLOAT))
                zeros = emit_load(builder, _at(builder, base, _ROW_BYTES, 4 * LANES * vector), LANES, FLOAT32)
                factor = emit_splat(builder, builder.fneg(inputs))
                builder.store(builder.fmul(factor, zeros), one)
        codes = builder.add(base, head_bytes)
        with cgutils.for_range(builder, words, intp=_LONG) as word:
            here = builder.add(codes, builder.mul(word.index, _number(_ROW_BYTES)))
            for line in range(0, _ROW_BYTES, LINE):
                emit_prefetch(builder, _at(builder, here, FETCHED_AHEAD, line))
            packed = [
                builder.load(emit_pointer(builder, _at(builder, here, 4 * LANES * vector), _INTS), align=4)
                for vector in range(PANEL_VECTORS)
            ]
            step = builder.add(builder.mul(group.index, words), word.index)
            for code in range(CODES_PER_WORD):
                columns = [
                    _weights(builder, table, halves, builder.lshr(one, _all(4 * code)) if code else one)
                    for one in packed
                ]
                offset = builder.add(builder.shl(step, _number(5)), _number(4 * code))
                factors = [
                    emit_splat(builder, builder.load(emit_pointer(builder, builder.add(row, offset), _FLOAT)))
                    for row in x_rows
                ]
                for (row, vector), one in parts.items():
                    builder.store(emit_multiply_add(builder, factors[row], columns[vector], builder.load(one)), one)
        for (row, vector), one in totals.items():
            scales = emit_load(builder, _at(builder, base, 4 * LANES * vector), LANES, FLOAT32)
            group_sum = builder.load(parts[row, vector])
            builder.store(emit_multiply_add(builder, group_sum, scales, builder.load(one)), one)
    for (row, vector), one in totals.items():
        at = builder.add(result, builder.mul(result_stride, _number(row)))
        at = _at(builder, at, 4 * LANES * vector)
        builder.store(builder.load(one), emit_pointer(builder, at, _FLOATS), align=4)


_multiply = written(types.void, (types.int64,) * 12, _emit_tiles)


@part
def sum_groups(rows: int, x: int, x_stride: int, groups: int, group_bytes: int, sums: int) -> None:
    """For each row of this thread, store the sum of each group's inputs in `sums`, float32 [rows, groups]."""
    for row in range(thread_number(), rows, num_threads()):
        for group in range(groups):
            added, begin = splat(0.0), x + row * x_stride + group * group_bytes
            for at in range(0, group_bytes, 4 * LANES):
                added = added + load(begin + at)
            put_number(total(added), sums + 4 * (row * groups + group))


@part
def multiply_grouped_panel(
    first: int, last: int, x: int, x_stride: int, weights: int, groups: int, words: int, has_zeros: int, start: int,
    result: int, stride: int, sums: int, table: int,
) -> None:  # fmt: skip
    """Multiply rows first <= i < last of x by one panel. `weights` and `start` are the addresses of the panel's weights
    and bias. `result` is the address of the panel's columns in the result's first row. `sum_groups` stored `sums`."""
    tiles = (last - first + TILE_ROWS - 1) // TILE_ROWS
    for tile in range(tiles):
        row = first + (last - first) * tile // tiles
        count = first + (last - first) * (tile + 1) // tiles - row
        _multiply(
            x + row * x_stride, x_stride, weights, groups, words, has_zeros, start, result + row * stride, stride,
            sums + 4 * row * groups, table, count,
        )  # fmt: skip


@kernel
def grouped_product(values: Any) -> None:
    """Multiply rows by a matrix. The code below names the `values`. From `groups` on, they are constants of the matrix.
    `sums` is memory for `sum_groups`, `words` is the number of words per group, and `has_zeros` is 1 if the matrix has
    zero points. Each thread multiplies a contiguous range of pairs (block of rows, panel), ordered by block."""
    rows, x, x_stride, result, stride, sums = values[0], values[1], values[2], values[3], values[4], values[5]
    groups, words, has_zeros, panels = values[6], values[7], values[8], values[9]
    weights, bias, table = values[10], values[11], values[12]
    if has_zeros:
        sum_groups(rows, x, x_stride, groups, words * CODES_PER_WORD * 4, sums)
        wait_for_all()
    panel_bytes = groups * (1 + has_zeros + words) * PANEL * 4
    blocks = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    work, threads, thread = blocks * panels, num_threads(), thread_number()
    for item in range(work * thread // threads, work * (thread + 1) // threads):
        block, panel = item // panels, item % panels
        first, last = rows * block // blocks, rows * (block + 1) // blocks
        multiply_grouped_panel(
            first, last, x, x_stride, weights + panel * panel_bytes, groups, words, has_zeros,
            bias + panel * PANEL * 4, result + panel * PANEL * 4, stride, sums, table,
        )  # fmt: skip


@kernel
def expert_grouped_product(values: Any) -> None:
    """Multiply rows that are sorted by expert. `values` are those of `grouped_product`, except that `matrices` (a list
    of two addresses per expert: weights and bias) replaces `weights`, `counts` (the number of rows of each expert)
    replaces `bias`, and the number of experts comes last."""
    rows, x, x_stride, result, stride, sums = values[0], values[1], values[2], values[3], values[4], values[5]
    groups, words, has_zeros, panels = values[6], values[7], values[8], values[9]
    matrices, counts, table, experts = values[10], values[11], values[12], values[13]
    if has_zeros:
        sum_groups(rows, x, x_stride, groups, words * CODES_PER_WORD * 4, sums)
        wait_for_all()
    panel_bytes = groups * (1 + has_zeros + words) * PANEL * 4
    total_cost, done, row = cost_of_experts(experts, counts, panels), 0, 0
    for expert in range(experts):
        count = address_at(counts + 8 * expert)
        if count == 0:
            continue
        low, high = own_panels(count + TILE_ROWS, panels, done, total_cost)
        weights, bias = address_at(matrices + 16 * expert), address_at(matrices + 16 * expert + 8)
        for first in range(row, row + count, BLOCK_ROWS):
            for panel in range(low, high):
                multiply_grouped_panel(
                    first, min(first + BLOCK_ROWS, row + count), x, x_stride, weights + panel * panel_bytes, groups,
                    words, has_zeros, bias + panel * PANEL * 4, result + panel * PANEL * 4, stride, sums, table,
                )  # fmt: skip
        done, row = done + panels * (count + TILE_ROWS), row + count

"""Numba kernels that multiply rows by a matrix stored in panels. Importing this module compiles the kernels or loads
them from disk.

A panel holds the weights of PANEL columns of the result. A product runs in steps along the depth, the inner dimension.
The weights of a panel are stored in the order of these steps, so a product reads memory sequentially. The sums of a
tile (up to TILE_ROWS rows of a panel) stay in registers over all steps, as in BLIS (Goto and van de Geijn). While one
panel is multiplied, the next one is prefetched, a few cache lines every few steps, to overlap with the arithmetic.

The terms of each sum are always added in the same order, so no bit of a row's result depends on the other rows.
"""

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, types

from engine.cpu.int8 import LEVELS, SMALLEST, ZERO_POINT
from engine.cpu.jit import cpu_features, kernel, num_threads, part, thread_number, wait_for_all
from engine.cpu.simd import (
    BFLOAT16,
    CODES,
    FLOAT16,
    FLOAT32,
    LANES,
    PANEL_ROWS,
    PANEL_VECTORS,
    address_at,
    cases,
    emit_fetch,
    emit_load,
    emit_multiply_add,
    emit_pointer,
    emit_splat,
    larger,
    largest,
    load_some,
    multiply_add,
    put_low_bytes,
    put_number,
    splat,
    total,
    written,
)

TILE_ROWS = PANEL_ROWS
PANEL = LANES * PANEL_VECTORS
INT8 = 3  # a further code like those in CODES; each step along the depth takes four int8 weights of each column
HAS_INT8 = LANES == 16 and "avx512vnni" in cpu_features()
CACHED_STEPS = 1024  # steps of a panel of float weights that fit into the core's second-level cache
FETCHED_AHEAD = 1024  # distance in bytes from reading to prefetching, if a panel is read only once
# Every tile prefetches a part of the next panel. If only the first tiles did so, they would wait for memory. To
# save time, a tile prefetches once per 2^PACE steps. With two tiles, memory limits the speed, so every step prefetches.
PACE = 2
# Rows that a thread multiplies at a time. More rows would exceed the first-level cache and would leave threads idle.
BLOCK_ROWS = 64 * TILE_ROWS
LINE = 64
ROUNDER = 12582912.0  # 1.5 * 2**23: in the sum of this and a small number x, the low bits are x rounded to an integer

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)


def _number(value: int) -> Any:
    return ir.Constant(_LONG, value)


def _size(code: int) -> int:
    """Return the size in bytes of a vector of weights."""
    return LANES * (2 if code in (BFLOAT16, FLOAT16) else 4)


def _emit_tiles(builder: Any, code: Any, *given: Any) -> None:
    for kind in cases(builder, code, (*CODES.values(), *([INT8] if HAS_INT8 else []))):
        for rows in cases(builder, given[-1], range(1, TILE_ROWS + 1)):
            _emit_tile(builder, kind, rows, *given[:-1])


def _emit_tile(
    builder: Any, code: int, rows: int, x: Any, x_stride: Any, weights: Any, steps: Any, start: Any, start_stride: Any,
    result: Any, result_stride: Any, row_scales: Any, ahead: Any, pace: Any, lines: Any,
) -> None:  # fmt: skip
    kind = _INTS if code == INT8 else _FLOATS
    cells = [(row, vector) for row in range(rows) for vector in range(PANEL_VECTORS)]

    def cell_at(base: Any, stride: Any, row: int, vector: int) -> Any:
        return builder.add(base, builder.add(builder.mul(stride, _number(row)), _number(4 * LANES * vector)))

    sums = {cell: cgutils.alloca_once(builder, kind) for cell in cells}
    for cell, one in sums.items():
        builder.store(builder.load(emit_pointer(builder, cell_at(start, start_stride, *cell), kind), align=4), one)
    x_rows = [builder.add(x, builder.mul(x_stride, _number(row))) for row in range(rows)]
    with cgutils.for_range(builder, steps, intp=_LONG) as loop:
        due = builder.and_(loop.index, builder.sub(builder.shl(_number(1), pace), _number(1)))
        with builder.if_then(builder.icmp_signed("==", due, _number(0))):
            emit_fetch(builder, ahead, builder.lshr(loop.index, pace), lines)
        at = builder.add(weights, builder.mul(loop.index, _number(_size(code) * PANEL_VECTORS)))
        columns = [
            _emit_weights(builder, code, builder.add(at, _number(_size(code) * v))) for v in range(PANEL_VECTORS)
        ]
        offset = builder.shl(loop.index, _number(2))
        factors = [_emit_factor(builder, code, builder.add(row, offset)) for row in x_rows]
        for (row, vector), one in sums.items():
            builder.store(_emit_add(builder, code, factors[row], columns[vector], builder.load(one)), one)
    for (row, vector), one in sums.items():
        value = builder.load(one)
        if code == INT8:
            value = _emit_scaled(builder, value, start, row_scales, row, vector)
        builder.store(value, emit_pointer(builder, cell_at(result, result_stride, row, vector), _FLOATS), align=4)


def _emit_weights(builder: Any, code: int, at: Any) -> Any:
    if code == INT8:
        return builder.load(emit_pointer(builder, at, _INTS), align=4)
    return emit_load(builder, at, LANES, code)


def _emit_factor(builder: Any, code: int, at: Any) -> Any:
    """Load an activation (for INT8, four activations of 8 bits) into every lane."""
    factor = emit_splat(builder, builder.load(emit_pointer(builder, at, _FLOAT)))
    return builder.bitcast(factor, _INTS) if code == INT8 else factor


def _emit_add(builder: Any, code: int, factor: Any, weights: Any, added: Any) -> Any:
    if code != INT8:
        return emit_multiply_add(builder, factor, weights, added)
    instruction = "vpdpbusd $2, $1, $0"  # adds products of unsigned activations and signed weights, exactly
    return builder.asm(ir.FunctionType(_INTS, [_INTS] * 3), instruction, "=v,v,v,0", [factor, weights, added], False)


def _emit_scaled(builder: Any, value: Any, start: Any, row_scales: Any, row: int, vector: int) -> Any:
    """Convert an exact sum of products to float, multiply it by the scales of its row and column, and add the bias."""
    at = builder.add(start, _number(4 * (PANEL + LANES * vector)))
    scales, bias = (
        builder.load(emit_pointer(builder, builder.add(at, _number(4 * PANEL * index)), _FLOATS), align=4)
        for index in range(2)
    )
    row_scale = builder.load(emit_pointer(builder, builder.add(row_scales, _number(4 * row)), _FLOAT))
    product = builder.fmul(builder.sitofp(value, _FLOATS), scales)
    return emit_multiply_add(builder, product, emit_splat(builder, row_scale), bias)


if HAS_INT8:
    llvmlite.binding.initialize_native_asmparser()
# Multiplies a tile. The sums begin with the values at `start`, which are the same for all rows if `start_stride` is 0.
# Once per 2^pace steps, the function prefetches the next `lines` cache lines, beginning at `ahead`.
_multiply = written(types.void, (types.int64,) * 14, _emit_tiles)


@part
def round_rows(rows: int, size: int, source: int, source_stride: int, target: int, stride: int, scales: int) -> None:
    """Round this thread's rows to 8 bits. Store the results in `target`, in rows of `stride` bytes (a multiple of
    LANES, at least `size`), and the rows' scales in `scales`. If a row has an infinity or NaN, its scale and products
    are NaN."""
    zero, rounder = splat(0.0), splat(ROUNDER + ZERO_POINT)
    for row in range(thread_number(), rows, num_threads()):
        x, to = source + row * source_stride, target + row * stride
        most, broken = zero, zero
        for at in range(0, size, LANES):
            here = load_some(x + 4 * at, size - at, FLOAT32)
            most = larger(most, larger(here, zero - here))
            broken = multiply_add(here, zero, broken)
        scale = max(largest(most), SMALLEST) / LEVELS
        put_number(scale + total(broken), scales + 4 * row)
        inverse = splat(1.0 / scale)
        for at in range(0, size, LANES):
            put_low_bytes(multiply_add(load_some(x + 4 * at, size - at, FLOAT32), inverse, rounder), to + at)


@part
def multiply_panel(
    first: int, last: int, x: int, x_stride: int, weights: int, start: int, result: int, stride: int, row_scales: int,
    code: int, steps: int,
) -> None:  # fmt: skip
    """Multiply rows first <= i < last of x by one panel. `weights` and `start` are the addresses of the panel's weights
    and initial sums, and `result` is the address of the panel's columns in the first row of the result. `steps` is the
    number of steps along the depth. `row_scales` has the scales of rows that are rounded to 8 bits (INT8)."""
    step_bytes = PANEL * (2 if code in (BFLOAT16, FLOAT16) else 4)
    cached = steps if code == INT8 else CACHED_STEPS
    tiles = (last - first + TILE_ROWS - 1) // TILE_ROWS
    pace = 0 if tiles == 2 else PACE
    lines = ((step_bytes << pace) // LINE + tiles - 1) // tiles
    for step in range(0, steps, cached):
        depth = min(cached, steps - step)
        here = weights + step * step_bytes
        for tile in range(tiles):
            row = first + (last - first) * tile // tiles
            count = first + (last - first) * (tile + 1) // tiles - row
            fetches = (depth + (1 << pace) - 1) >> pace
            ahead = here + (FETCHED_AHEAD if tiles == 1 else depth * step_bytes + tile * fetches * lines * LINE)
            due = lines if tile * lines * LINE < step_bytes << pace else 0
            target = result + row * stride
            begin, begin_stride = (start, 0) if step == 0 else (target, stride)
            _multiply(
                code, x + row * x_stride + 4 * step, x_stride, here, depth, begin, begin_stride, target, stride,
                row_scales + 4 * row, ahead, pace, due, count,
            )  # fmt: skip


@part
def own_panels(cost: int, panels: int, done: int, total: int) -> tuple[int, int]:
    """Return the range of an expert's panels that this thread multiplies.

    `total`, the cost of all experts' panels, is divided equally among the threads. A thread multiplies the panels that
    begin in its share. A panel of this expert costs `cost`, and all panels of earlier experts cost `done`."""
    threads, thread = num_threads(), thread_number()
    begin, end = total * thread // threads - done, total * (thread + 1) // threads - done
    return max(0, (begin + cost - 1) // cost), min(panels, (end + cost - 1) // cost)


@part
def cost_of_experts(experts: int, counts: int, panels: int) -> int:
    """Return the cost of multiplying all experts' rows. A panel costs its expert's number of rows, plus TILE_ROWS for
    reading its weights. An expert without rows costs nothing."""
    cost = 0
    for expert in range(experts):
        if address_at(counts + 8 * expert):
            cost += panels * (address_at(counts + 8 * expert) + TILE_ROWS)
    return cost


@kernel
def product(values: Any) -> None:
    """Multiply rows by a matrix. The code below names the `values`. From `code` on, they are constants of the matrix.

    `row_scales` is memory for the rows' scales and the rows rounded to 8 bits (INT8 only). `size` is the depth. For
    each panel, `columns` has `column_bytes` bytes: the initial sums and, with INT8, also the scales and the bias. Each
    thread multiplies a contiguous range of pairs (block of rows, panel), ordered by block."""
    rows, x, x_stride, result, stride, row_scales = values[0], values[1], values[2], values[3], values[4], values[5]
    code, size, steps, panels, weights, columns = values[6], values[7], values[8], values[9], values[10], values[11]
    column_bytes = values[12]
    if code == INT8:
        levels, levels_stride = row_scales + 4 * rows, (size + LANES - 1) // LANES * LANES
        round_rows(rows, size, x, x_stride, levels, levels_stride, row_scales)
        wait_for_all()
        x, x_stride = levels, levels_stride
    panel_bytes = steps * PANEL * (2 if code in (BFLOAT16, FLOAT16) else 4)
    blocks = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    work, threads, thread = blocks * panels, num_threads(), thread_number()
    for item in range(work * thread // threads, work * (thread + 1) // threads):
        block, panel = item // panels, item % panels
        first, last = rows * block // blocks, rows * (block + 1) // blocks
        multiply_panel(
            first, last, x, x_stride, weights + panel * panel_bytes, columns + panel * column_bytes,
            result + panel * 4 * PANEL, stride, row_scales, code, steps,
        )  # fmt: skip


@kernel
def expert_product(values: Any) -> None:
    """Multiply rows that are sorted by expert. `values` are those of `product`, except that `matrices` (a list of two
    addresses per expert: weights and columns) replaces `weights`, `counts` (the number of rows of each expert) replaces
    `columns`, and the number of experts comes last."""
    rows, x, x_stride, result, stride, row_scales = values[0], values[1], values[2], values[3], values[4], values[5]
    code, size, steps, panels, matrices, counts = values[6], values[7], values[8], values[9], values[10], values[11]
    column_bytes, experts = values[12], values[13]
    if code == INT8:
        levels, levels_stride = row_scales + 4 * rows, (size + LANES - 1) // LANES * LANES
        round_rows(rows, size, x, x_stride, levels, levels_stride, row_scales)
        wait_for_all()
        x, x_stride = levels, levels_stride
    panel_bytes = steps * PANEL * (2 if code in (BFLOAT16, FLOAT16) else 4)
    total_cost, done, row = cost_of_experts(experts, counts, panels), 0, 0
    for expert in range(experts):
        count = address_at(counts + 8 * expert)
        if count == 0:
            continue
        low, high = own_panels(count + TILE_ROWS, panels, done, total_cost)
        weights, columns = address_at(matrices + 16 * expert), address_at(matrices + 16 * expert + 8)
        for first in range(row, row + count, BLOCK_ROWS):
            for panel in range(low, high):
                multiply_panel(
                    first, min(first + BLOCK_ROWS, row + count), x, x_stride, weights + panel * panel_bytes,
                    columns + panel * column_bytes, result + panel * 4 * PANEL, stride, row_scales, code, steps,
                )  # fmt: skip
        done, row = done + panels * (count + TILE_ROWS), row + count

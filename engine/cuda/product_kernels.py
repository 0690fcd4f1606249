# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: N803 (Triton's compile-time constants have capital letters)
"""Triton kernel that multiplies rows by a matrix of grouped 4-bit codes, or by the matrices of a layer's experts."""

import triton
import triton.language as tl


@triton.jit
def _tile_of(counts, number, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert to which tile `number` belongs, the tile's first row, and the end of the expert's rows.

    The tiles are numbered in the order of the experts. If tile `number` does not exist, the end is 0.
    """
    experts = tl.arange(0, BLOCK_E)
    held = tl.load(counts + experts, mask=experts < EXPERTS, other=0).to(tl.int32)
    tiles = tl.cdiv(held, BLOCK_M)
    last = tl.cumsum(tiles, 0)
    expert = tl.sum((last <= number).to(tl.int32), 0)
    own = experts == expert
    end = tl.sum(tl.where(own, tl.cumsum(held, 0), 0), 0)
    first = end - tl.sum(tl.where(own, held - (number - last + tiles) * BLOCK_M, 0), 0)
    return expert, first, end


@triton.jit(do_not_specialize=["count"])
def product(
    rows, row_stride,
    weights,  # [experts, out, WIDTH]; if GROUP > 0, 4-bit codes, uint8 [experts, out, WIDTH / 2] (`GroupedWeight`)
    table,  # float32 [16]
    scales,  # float32 [experts, out, groups]; `zeros` has the same shape
    zeros,
    order,  # int64 [experts, WIDTH]: index of the input that each column multiplies; used if ORDERED
    bias,  # [experts, out]
    counts,  # int64 [experts]: how many rows each expert has; rows are sorted by expert
    result, count, out,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ORDERED: tl.constexpr,
    EXPERTS: tl.constexpr,  # 0 if all rows use a single matrix
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply `rows` by weights, in the rows' dtype. Grid: tiles of outputs x tiles of rows. BLOCK_K divides GROUP.

    With experts, the number of row tiles in the grid is an upper bound, computed from shapes alone. The host therefore
    does not wait for the counts, and a CUDA graph may contain the launch. Surplus programs end at once.
    """
    expert, first, end = 0, tl.program_id(1) * BLOCK_M, count
    if EXPERTS > 0:
        expert, first, end = _tile_of(counts, tl.program_id(1), EXPERTS, BLOCK_E, BLOCK_M)
        if first >= end:
            return
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = first + tl.arange(0, BLOCK_M)
    in_columns, in_rows = column < out, row < end
    place = tl.arange(0, BLOCK_K)
    half = tl.arange(0, BLOCK_K // 2)
    output = tl.cast(expert, tl.int64) * out + column  # row in the stacked weights of all experts
    inputs = rows + row.to(tl.int64)[:, None] * row_stride
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        inside = start + place < WIDTH
        if GROUP > 0:
            bytes_at = weights + output[:, None] * (WIDTH // 2) + start // 2 + half[None, :]
            packed = tl.load(bytes_at, mask=in_columns[:, None], other=0).to(tl.int32)
            both = tl.join(packed & 15, packed >> 4).reshape(BLOCK_N, BLOCK_K)
            matrix = tl.load(table + both)
            group = output * (WIDTH // GROUP) + start // GROUP
            if HAS_ZEROS:
                matrix -= tl.load(zeros + group, mask=in_columns, other=0.0)[:, None]
            matrix *= tl.load(scales + group, mask=in_columns, other=0.0)[:, None]
        else:
            held = in_columns[:, None] & inside[None, :] if WIDTH % BLOCK_K > 0 else in_columns[:, None]
            matrix = tl.load(weights + output[:, None] * WIDTH + start + place[None, :], mask=held, other=0.0)
        source = start + place
        if ORDERED:
            source = tl.load(order + tl.cast(expert, tl.int64) * WIDTH + source)
        held = in_rows[:, None] & inside[None, :] if WIDTH % BLOCK_K > 0 else in_rows[:, None]
        values = tl.load(inputs + source[None, :], mask=held, other=0.0)
        sums = tl.dot(values, tl.trans(matrix.to(values.dtype)), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    kept = in_rows[:, None] & in_columns[None, :]
    tl.store(result + row.to(tl.int64)[:, None] * out + column[None, :], sums.to(result.dtype.element_ty), mask=kept)

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: N803 (Triton's compile-time constants have capital letters)
"""Triton kernel that multiplies rows by a matrix of grouped 4-bit codes."""

import triton
import triton.language as tl


@triton.jit
def grouped_product(
    rows, row_stride,
    codes,  # uint8 [out, in / 2], the code of the even input in the low bits
    table,  # float32 [16]
    scales,  # float32 [out, groups]; `zeros` has the same shape
    zeros, bias, result, count, out,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of outputs, tiles of rows. BLOCK_K divides GROUP. A weight is rounded to the dtype of `rows`."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_columns, in_rows = column < out, row < count
    place = tl.arange(0, BLOCK_K)
    half = tl.arange(0, BLOCK_K // 2)
    far = column.to(tl.int64)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        bytes_at = codes + far[:, None] * (WIDTH // 2) + start // 2 + half[None, :]
        packed = tl.load(bytes_at, mask=in_columns[:, None], other=0).to(tl.int32)
        both = tl.join(packed & 15, packed >> 4).reshape(BLOCK_N, BLOCK_K)
        weights = tl.load(table + both)
        group = far * (WIDTH // GROUP) + start // GROUP
        if HAS_ZEROS:
            weights -= tl.load(zeros + group, mask=in_columns, other=0.0)[:, None]
        weights *= tl.load(scales + group, mask=in_columns, other=0.0)[:, None]
        inputs = rows + row.to(tl.int64)[:, None] * row_stride + start + place[None, :]
        values = tl.load(inputs, mask=in_rows[:, None], other=0.0)
        sums = tl.dot(values, tl.trans(weights.to(values.dtype)), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    kept = in_rows[:, None] & in_columns[None, :]
    tl.store(result + row.to(tl.int64)[:, None] * out + column[None, :], sums.to(result.dtype.element_ty), mask=kept)

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: N803 (Triton's compile-time constants have capital letters)
"""Triton kernels for recurrent layers: the convolution, the factors of each token, the recurrence, and its norm.

A program computes the tokens of a slice one after another, with its part of the state in registers. The result does not
depend on how a prompt is chunked, but a long chunk uses few multiprocessors. The chunked forms of the delta rule (Yang
et al. 2024) and of Mamba-2 (Dao and Gu 2024) would be faster for prompts, but are not implemented.
"""

import triton
import triton.language as tl


@triton.jit
def _span(cu_q, index):
    """Return the first row of a slice and its number of tokens."""
    start = tl.load(cu_q + index)
    return start.to(tl.int64), tl.load(cu_q + index + 1) - start


@triton.jit
def _place(rows, which_stride, units, num_units, row_size, state_rows, which, index, unit):
    """Return the pool offset of a unit (one head's part of a state), or -1 if slice `index` has no such state.

    `which` is 0 for the state that the slice reads, 1 for the state that it writes, and 2 for the state that it saves.
    """
    row = tl.load(rows + which * which_stride + index * state_rows + tl.load(units + unit))
    return tl.where(row < 0, row, row * row_size + tl.load(units + num_units + unit))


@triton.jit
def _input(inputs, stride, pool, past, token, count, span, held, size, KEPT: tl.constexpr):
    """Return the convolution's inputs [N, span] at the indices `token` [N]. Negative indices precede the slice."""
    here = (token >= 0) & (token < count)
    found = tl.load(inputs + token.to(tl.int64)[:, None] * stride + span, mask=here[:, None] & held, other=0.0)
    known = (token < 0) & (token >= tl.where(past < 0, 0, -KEPT))
    before = tl.load(pool + past + (token + KEPT)[:, None] * size + span, mask=known[:, None] & held, other=0.0)
    return tl.where(token[:, None] < 0, before, found.to(tl.float32))


@triton.jit(do_not_specialize=["which_stride", "first_unit"])
def convolve(
    mixed,  # float32 [T, channels]
    inputs, input_stride,
    weight,  # float32 [CONV, channels]
    bias, pool, rows, which_stride, save_at, units, num_units, row_size, state_rows, cu_q,
    channels, first_unit,
    HEADS_0: tl.constexpr, SIZE_0: tl.constexpr, HEADS_1: tl.constexpr, SIZE_1: tl.constexpr, SIZE_2: tl.constexpr,
    CONV: tl.constexpr, DELTA: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the convolution and its activation for one head of one part. If DELTA, normalize queries and keys. Store
    the last CONV - 1 inputs in the slice's states. Grid: heads of all parts x programs per slice x slices."""
    unit, program, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, count = _span(cu_q, index)
    if count == 0:
        return
    in_0, in_1 = unit < HEADS_0, unit < HEADS_0 + HEADS_1
    size = tl.where(in_0, SIZE_0, tl.where(in_1, SIZE_1, SIZE_2))
    second, third = HEADS_0 * SIZE_0, HEADS_0 * SIZE_0 + HEADS_1 * SIZE_1
    rest = tl.where(in_1, second + (unit - HEADS_0) * SIZE_1, third + (unit - HEADS_0 - HEADS_1) * SIZE_2)
    column = tl.where(in_0, unit * SIZE_0, rest)
    past = _place(rows, which_stride, units, num_units, row_size, state_rows, 0, index, first_unit + unit)
    span = tl.arange(0, BLOCK_C)[None, :]
    held = span < size
    inputs += start * input_stride + column
    for first in range(program * BLOCK_T, count, tl.num_programs(1) * BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + column + span, mask=held, other=0.0)
        for tap in tl.static_range(CONV):
            factor = tl.load(weight + tap * channels + column + span, mask=held, other=0.0)
            at = token + tap - (CONV - 1)
            total += factor * _input(inputs, input_stride, pool, past, at, count, span, held, size, CONV - 1)
        result = total * tl.sigmoid(total)
        if DELTA:
            scale = tl.rsqrt(tl.sum(result * result, 1) + 1e-6) * tl.where(in_0, SIZE_0**-0.5, 1.0)
            result *= tl.where(in_1, scale, 1.0)[:, None]
        target = mixed + (start + token)[:, None] * channels + column + span
        tl.store(target, result, mask=(token < count)[:, None] & held)
    place = tl.arange(0, BLOCK_K)
    kept = (place < CONV - 1)[:, None] & held
    for which in tl.static_range(1, 3):
        end = count if which == 1 else tl.load(save_at + index).to(tl.int32)
        target = _place(rows, which_stride, units, num_units, row_size, state_rows, which, index, first_unit + unit)
        if (program == 0) & (target >= 0) & (end > 0):
            last = _input(inputs, input_stride, pool, past, end - (CONV - 1) + place, count, span, held, size, CONV - 1)
            tl.store(pool + target + place[:, None] * size + span, last, mask=kept)


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)). Use a series if exp(x) is small, because 1 + exp(x) would then lose digits."""
    power = tl.exp(tl.where(x > 20.0, 20.0, x))
    small = power * (1.0 - power * (0.5 - power * (1.0 / 3.0 - 0.25 * power)))
    return tl.where(x > 20.0, x, tl.where(power < 0.01, small, tl.log(1.0 + power)))


@triton.jit(do_not_specialize=["num_tokens"])
def factors(
    result,  # float32 [T, HEADS, 2]
    steps,  # [T, HEADS], or [T, 2 * HEADS] if DELTA
    step_stride, rates, step_bias, num_tokens, HEADS: tl.constexpr, DELTA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the factors that multiply state and update, for each token and head. Grid: tiles of tokens and heads."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, head = place // HEADS, place % HEADS
    held = token < num_tokens
    steps += token.to(tl.int64) * step_stride + head
    step = tl.load(steps + (HEADS if DELTA else 0), mask=held, other=0.0).to(tl.float32)
    size = _softplus(step + tl.load(step_bias + head))
    tl.store(result + 2 * place, tl.exp(size * tl.load(rates + head)), mask=held)
    if DELTA:
        size = tl.sigmoid(tl.load(steps, mask=held, other=0.0).to(tl.float32))
    tl.store(result + 2 * place + 1, size, mask=held)


@triton.jit(do_not_specialize=["which_stride", "first_unit"])
def recur(
    out,  # float32 [T, HEADS * VALUE_DIM]
    mixed,  # float32 [T, channels]: the result of `convolve`
    given,  # float32 [T, HEADS, 2]: the result of `factors`
    skips, pool, rows, which_stride, save_at, units, num_units, row_size,
    state_rows, cu_q, channels, first_unit,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERY_AT: tl.constexpr, KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr, DELTA: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gated delta rule or the selective state space. Grid: value heads x tiles of columns x slices.

    The columns of a recurrent matrix are independent of each other, so each program computes BLOCK_V columns.
    """
    head, index = tl.program_id(0), tl.program_id(2)
    start, count = _span(cu_q, index)
    if count == 0:
        return
    row, column = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_rows, in_columns = row < KEY_DIM, column < VALUE_DIM
    cells, held = row[:, None] * VALUE_DIM + column[None, :], in_rows[:, None] & in_columns[None, :]
    read = _place(rows, which_stride, units, num_units, row_size, state_rows, 0, index, first_unit + head)
    write = _place(rows, which_stride, units, num_units, row_size, state_rows, 1, index, first_unit + head)
    save = _place(rows, which_stride, units, num_units, row_size, state_rows, 2, index, first_unit + head)
    saved = tl.where(save >= 0, tl.load(save_at + index), 0)
    known = (row < tl.where(read < 0, 0, KEY_DIM))[:, None] & in_columns[None, :]
    state = tl.load(pool + read + cells, mask=known, other=0.0)
    skip, one = tl.load(skips + head), tl.arange(0, 1)
    # The loads of the next tokens are issued while a token is computed. They load float32, which Triton can pipeline.
    for token in tl.range(0, count, num_stages=STAGES):
        place = (start + token) * HEADS + head
        inputs, factor = mixed + (start + token) * channels, given + 2 * place
        query = tl.load(inputs + QUERY_AT + head // SHARED * KEY_DIM + row, mask=in_rows, other=0.0)
        key = tl.load(inputs + KEY_AT + head // SHARED * KEY_DIM + row, mask=in_rows, other=0.0)
        value = tl.load(inputs + VALUE_AT + head * VALUE_DIM + column, mask=in_columns, other=0.0)
        state *= tl.load(factor + one)[:, None]
        update = value - tl.sum(state * key[:, None], 0) if DELTA else value
        state += key[:, None] * (update * tl.load(factor + 1 + one))[None, :]
        result = tl.sum(state * query[:, None], 0) + skip * value
        tl.store(out + place * VALUE_DIM + column, result, mask=in_columns)
        if token + 1 == saved:
            tl.store(pool + save + cells, state, mask=held)
    if write >= 0:
        tl.store(pool + write + cells, state, mask=held)


@triton.jit
def norm_gated(
    rows, gates, gate_stride, weight, out, eps, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    GATES_FIRST: tl.constexpr,
):  # fmt: skip
    """Compute the RMS norm of each group of columns, and multiply it by silu(gate). Grid: rows x groups.

    If GATES_FIRST, the columns are instead multiplied by silu(gate) before the norm.
    """
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUP
    column = tl.arange(0, BLOCK)
    held = column < GROUP
    values = tl.load(rows + token * WIDTH + first + column, mask=held, other=0.0)
    gate = tl.load(gates + token * gate_stride + first + column, mask=held, other=0.0).to(tl.float32)
    gate *= tl.sigmoid(gate)
    if GATES_FIRST:
        values *= gate
    values *= tl.rsqrt(tl.sum(values * values, 0) / GROUP + eps)
    values *= tl.load(weight + first + column, mask=held, other=0.0)
    if not GATES_FIRST:
        values *= gate
    tl.store(out + token * WIDTH + first + column, values.to(out.dtype.element_ty), mask=held)

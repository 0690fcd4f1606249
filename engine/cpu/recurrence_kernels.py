"""Numba kernels for recurrent layers on float32 rows: the convolution, the recurrence and the norm of its result.

A recurrence runs token by token. The division of a prompt into chunks does not change the order of the operations, so
it changes no bit of results and states. The columns of a recurrent matrix are independent of each other. A thread
computes many tokens for the columns that fit into the first-level cache, and then the same tokens for the next columns.
"""

import math
from typing import Any

from engine.cpu.jit import inlined, kernel, num_threads, part, thread_number
from engine.cpu.layer_kernels import norm_row
from engine.cpu.simd import (
    FLOAT32,
    LANES,
    address_at,
    exponential,
    index_at,
    larger,
    load,
    load_some,
    multiply_add,
    number_at,
    prefetch,
    splat,
    store,
    store_some,
    total,
    where_less,
)

VECTORS = 2  # vectors of columns in a tile: a tile with 128 rows fits into half of the first-level cache
TILE = VECTORS * LANES
PIECE = 64  # tokens of a head that fit into the second-level cache together with the state of the head
FETCHED_AHEAD = 8  # distance in tokens from the computed token to the token whose inputs are prefetched


@inlined
def silu(x: Any) -> Any:
    one = splat(1.0)
    return x / (one + exponential(splat(0.0) - x))


@inlined
def softplus(x: Any) -> Any:
    """Return log(1 + e**x) (relative error: 2e-7)."""
    y = exponential(where_less(x, splat(0.0), x, splat(0.0) - x))
    # log(1 + y) = 2 artanh(s), where s is at most 1/3
    s = y / (y + splat(2.0))
    square = s * s
    series = splat(2 / 13)
    series = multiply_add(series, square, splat(2 / 11))
    series = multiply_add(series, square, splat(2 / 9))
    series = multiply_add(series, square, splat(2 / 7))
    series = multiply_add(series, square, splat(2 / 5))
    series = multiply_add(series, square, splat(2 / 3))
    return multiply_add(multiply_add(series, square, splat(2.0)), s, larger(splat(0.0), x))


@part
def gate_row(row: int, gates: int, size: int) -> None:
    """Multiply a row by silu of the gates."""
    for at in range(0, size, LANES):
        left = size - at
        x = load_some(row + 4 * at, left, FLOAT32) * silu(load_some(gates + 4 * at, left, FLOAT32))
        store_some(x, row + 4 * at, left, FLOAT32)


@part
def input_at(inputs: int, stride: int, past: int, kept: int, size: int, token: int) -> int:
    """Return the address of a token's convolution input. If `token` is negative, the token precedes the slice, and
    its input is one of the last `kept` inputs before the slice, which are at `past`."""
    return inputs + 4 * stride * token if token >= 0 else past + 4 * size * (kept + token)


@part
def keep_inputs(inputs: int, stride: int, past: int, kept: int, size: int, count: int, target: int) -> None:
    """Store the convolution's inputs for the last `kept` tokens before token `count`."""
    for place in range(kept):
        source = input_at(inputs, stride, past, kept, size, count - kept + place)
        for at in range(0, size, LANES):
            store_some(load_some(source + 4 * at, size - at, FLOAT32), target + 4 * (place * size + at), size - at, 0)


@part
def keep_all_inputs(
    inputs: int, stride: int, past: int, kept: int, size: int, count: int, pool: int, write: int, save: int,
    save_at: int,
) -> None:  # fmt: skip
    """Store the last inputs of a slice of `count` tokens. If a state is saved within the slice, also store the last
    inputs at that point."""
    if address_at(save_at) > 0 and address_at(save) >= 0:
        keep_inputs(inputs, stride, past, kept, size, address_at(save_at), pool + 4 * address_at(save))
    if address_at(write) >= 0:
        keep_inputs(inputs, stride, past, kept, size, count, pool + 4 * address_at(write))


@part
def norm_head(head: int, size: int, scale: float) -> None:
    """Divide a head by its Euclidean norm, and multiply it by `scale`."""
    squares = splat(0.0)
    for at in range(0, size, LANES):
        x = load_some(head + 4 * at, size - at, FLOAT32)
        squares = multiply_add(x, x, squares)
    factor = splat(scale / math.sqrt(total(squares) + 1e-6))
    for at in range(0, size, LANES):
        store_some(load_some(head + 4 * at, size - at, FLOAT32) * factor, head + 4 * at, size - at, FLOAT32)


@part
def convolve_strip(
    begin: int, end: int, inputs: int, stride: int, past: int, size: int, weight: int, bias: int, channels: int,
    to: int, to_stride: int,
) -> None:  # fmt: skip
    """Compute two vectors of columns of `convolve_head` for four taps. Weights and earlier inputs stay in registers."""
    more, tap, zero = 4 * LANES, 4 * channels, splat(0.0)
    w0, w1, w2, w3 = load(weight), load(weight + tap), load(weight + 2 * tap), load(weight + 3 * tap)
    weight += more
    v0, v1, v2, v3 = load(weight), load(weight + tap), load(weight + 2 * tap), load(weight + 3 * tap)
    b0, b1 = zero, zero
    if bias:
        b0, b1 = load(bias), load(bias + more)
    first = input_at(inputs, stride, past, 3, size, begin - 3)
    second = input_at(inputs, stride, past, 3, size, begin - 2)
    third = input_at(inputs, stride, past, 3, size, begin - 1)
    x0, x1, x2 = load(first), load(second), load(third)
    y0, y1, y2 = load(first + more), load(second + more), load(third + more)
    source, row = inputs + 4 * stride * begin, to
    for _ in range(end - begin):
        prefetch(source + 4 * stride * FETCHED_AHEAD)
        prefetch(source + 4 * stride * FETCHED_AHEAD + more)
        x3, y3 = load(source), load(source + more)
        x = multiply_add(w3, x3, multiply_add(w2, x2, multiply_add(w1, x1, multiply_add(w0, x0, b0))))
        y = multiply_add(v3, y3, multiply_add(v2, y2, multiply_add(v1, y1, multiply_add(v0, y0, b1))))
        store(silu(x), row)
        store(silu(y), row + more)
        x0, x1, x2, y0, y1, y2 = x1, x2, x3, y1, y2, y3
        source, row = source + 4 * stride, row + to_stride


@part
def convolve_head(
    begin: int, end: int, inputs: int, stride: int, past: int, kept: int, size: int, weight: int, bias: int,
    channels: int, to: int, to_stride: int, kind: int,
) -> None:  # fmt: skip
    """Convolve one head, apply silu, and store the results for tokens begin <= token < end. If the head is a query
    (`kind` 1) or a key (`kind` 2), also normalize it."""
    done = 0
    if kept == 3:
        done = size // (2 * LANES) * (2 * LANES)
        for at in range(0, 4 * done, 8 * LANES):
            convolve_strip(
                begin, end, inputs + at, stride, past + at, size, weight + at, bias + at if bias else 0, channels,
                to + at, to_stride,
            )  # fmt: skip
    for token in range(begin, end):
        row = to + to_stride * (token - begin)
        for at in range(done, size, LANES):
            left = size - at
            prefetch(inputs + 4 * (stride * (token + FETCHED_AHEAD) + at))
            x = splat(0.0)
            if bias:
                x = load_some(bias + 4 * at, left, FLOAT32)
            for tap in range(kept + 1):
                source = input_at(inputs, stride, past, kept, size, token - kept + tap)
                factor = load_some(weight + 4 * (tap * channels + at), left, FLOAT32)
                x = multiply_add(factor, load_some(source + 4 * at, left, FLOAT32), x)
            store_some(silu(x), row + 4 * at, left, FLOAT32)
        if kind:
            norm_head(row, size, size**-0.5 if kind == 1 else 1.0)


@kernel
def convolve(values: Any) -> None:
    """Convolve all heads. The code below names the `values`. `weight` is [width, channels]. `bias` may be 0 (none).
    `read`, `write` and `save` have `units` entries per slice. This convolution uses `num` of them, from entry `first`
    on. `table` has the column and the size of each of these units. A slice without a state reads `zeros`."""
    slices, cu_q, inputs, stride, target, channels = values[0], values[1], values[2], values[3], values[4], values[5]
    width, weight, bias, pool, read, write = values[6], values[7], values[8], values[9], values[10], values[11]
    save, save_at, units, first, num, table = values[12], values[13], values[14], values[15], values[16], values[17]
    zeros = values[18]
    kept = width - 1
    for item in range(thread_number(), slices * num, num_threads()):
        index, unit = item // num, item % num
        column, size = address_at(table + 16 * unit), address_at(table + 16 * unit + 8)
        start = index_at(cu_q + 4 * index)
        count = index_at(cu_q + 4 * index + 4) - start
        place = 8 * (index * units + first + unit)
        past = zeros if address_at(read + place) < 0 else pool + 4 * address_at(read + place)
        own = inputs + 4 * (start * stride + column)
        convolve_head(
            0, count, own, stride, past, kept, size, weight + 4 * column, bias + 4 * column if bias else 0, channels,
            target + 4 * (start * channels + column), 4 * channels, 0,
        )  # fmt: skip
        keep_all_inputs(own, stride, past, kept, size, count, pool, write + place, save + place, save_at + 8 * index)


@kernel
def step_sizes(values: Any) -> None:
    """Compute two factors for each token and head: the first multiplies the update, the second multiplies the state.
    The code below names the `values`. `target` is [rows, 2, heads]. `is_delta` is 1 if the layer has the delta rule."""
    rows, heads, steps, stride, rates, biases, target = (
        values[0], values[1], values[2], values[3], values[4], values[5], values[6]
    )  # fmt: skip
    is_delta, one = values[7], splat(1.0)
    for row in range(thread_number(), rows, num_threads()):
        for head in range(0, heads, LANES):
            at, to, left = steps + 4 * (row * stride + head), target + 4 * (2 * row * heads + head), heads - head
            x = load_some(at + 4 * heads if is_delta else at, left, FLOAT32)
            size = softplus(x + load_some(biases + 4 * head, left, FLOAT32))
            strength = size
            if is_delta:
                strength = one / (one + exponential(splat(0.0) - load_some(at, left, FLOAT32)))
            store_some(strength, to, left, FLOAT32)
            store_some(exponential(size * load_some(rates + 4 * head, left, FLOAT32)), to + 4 * heads, left, FLOAT32)


@part
def fetch_tile(source: int, tile: int, rows: int, stride: int, left: int) -> None:
    """Copy the first min(`left`, TILE) columns of a matrix, whose rows have `stride` elements, to a contiguous tile."""
    for row in range(rows):
        for vector in range(VECTORS):
            at, to = 4 * LANES * vector, tile + 4 * TILE * row + 4 * LANES * vector
            store(load_some(source + 4 * stride * row + at, max(0, left - LANES * vector), FLOAT32), to)


@part
def clear_tile(tile: int, rows: int) -> None:
    for vector in range(rows * VECTORS):
        store(splat(0.0), tile + 4 * LANES * vector)


@part
def keep_tile(tile: int, target: int, rows: int, stride: int, left: int) -> None:
    """Copy a tile to the first min(`left`, TILE) columns of a matrix whose rows have `stride` elements."""
    for row in range(rows):
        for vector in range(VECTORS):
            at, source = 4 * LANES * vector, tile + 4 * TILE * row + 4 * LANES * vector
            store_some(load(source), target + 4 * stride * row + at, max(0, left - LANES * vector), FLOAT32)


@inlined
def known_values(tile: int, key: int, size: int) -> Any:
    """Return the product of the tile and a key."""
    found0, found1 = splat(0.0), splat(0.0)
    for row in range(size):
        at, x = tile + 4 * TILE * row, splat(number_at(key + 4 * row))
        found0, found1 = multiply_add(load(at), x, found0), multiply_add(load(at + 4 * LANES), x, found1)
    return found0, found1


@inlined
def update(tile: int, query: int, key: int, next_key: int, value: int, to: int, size: int, left: int, known: Any,
           strength: float, decay: float, skip: float) -> Any:  # fmt: skip
    """Compute one token: decay the tile, add the update, and store the product of the tile and the query.

    `known` is the product of the tile before the update and this token's key. Return the product of the updated tile
    and the next token's key."""
    decays, strengths, skips, rest = splat(decay), splat(strength), splat(skip), max(0, left - LANES)
    v0, v1 = load_some(value, left, FLOAT32), load_some(value + 4 * LANES, rest, FLOAT32)
    o0, o1, next0, next1 = v0 * skips, v1 * skips, splat(0.0), splat(0.0)
    v0, v1 = (v0 - known[0] * decays) * strengths, (v1 - known[1] * decays) * strengths
    for row in range(size):
        at, x, y = tile + 4 * TILE * row, splat(number_at(key + 4 * row)), splat(number_at(query + 4 * row))
        z = splat(number_at(next_key + 4 * row))
        s0, s1 = multiply_add(x, v0, load(at) * decays), multiply_add(x, v1, load(at + 4 * LANES) * decays)
        store(s0, at)
        store(s1, at + 4 * LANES)
        o0, o1 = multiply_add(s0, y, o0), multiply_add(s1, y, o1)
        next0, next1 = multiply_add(s0, z, next0), multiply_add(s1, z, next1)
    store_some(o0, to, left, FLOAT32)
    store_some(o1, to + 4 * LANES, rest, FLOAT32)
    return next0, next1


@part
def recur_tokens(
    tile: int, count: int, query: int, key: int, value: int, stride: int, to: int, to_stride: int, sizes: int,
    heads: int, size: int, left: int, skip: float, is_delta: int, saved: int, target: int, width: int,
    ahead: int, ahead_stride: int, ahead_size: int,
) -> None:  # fmt: skip
    """Compute `count` tokens with one tile of a state. If `saved` is not 0, also copy the tile to `target`,
    in a matrix of `width` columns, after the first `saved` tokens. For each token, also prefetch a row of `ahead_size`
    numbers, beginning at `ahead`, because memory would otherwise be idle during the computation."""
    known = splat(0.0), splat(0.0)
    if is_delta:
        known = known_values(tile, key, size)
    for token in range(count):
        at, step = stride * token, sizes + 8 * heads * token
        for line in range(0, 4 * ahead_size, 64):
            prefetch(ahead + ahead_stride * token + line)
        following = update(
            tile, query + at, key + at, key + at + stride if token + 1 < count else key, value + at,
            to + to_stride * token, size, left, known, number_at(step), number_at(step + 4 * heads), skip,
        )  # fmt: skip
        if is_delta:
            known = following
        if token + 1 == saved:
            keep_tile(tile, target, size, width, left)


@part
def fetch_or_clear(pool: int, place: int, column: int, tile: int, rows: int, width: int) -> None:
    """Copy columns of a state to a tile. `place` is the state's position in the pool. If `place` is -1, store zeros."""
    if place < 0:
        clear_tile(tile, rows)
    else:
        fetch_tile(pool + 4 * (place + column), tile, rows, width, width - column)


@kernel
def recur(values: Any) -> None:
    """Compute the recurrence of a state space. The code below names the `values`. `shared` is the number of value heads
    per key head. `query_at`, `key_at` and `value_at` are the first columns of queries, keys and values in `mixed`.
    `read`, `write` and `save` are as in `convolve`. The last value is memory for a tile per thread."""
    slices, cu_q, mixed, channels, sizes, heads = values[0], values[1], values[2], values[3], values[4], values[5]
    shared, key_dim, value_dim, query_at, key_at = values[6], values[7], values[8], values[9], values[10]
    value_at, target, pool, read, write, save = values[11], values[12], values[13], values[14], values[15], values[16]
    save_at, units, first, skips = values[17], values[18], values[19], values[20]
    tile = values[21] + 4 * TILE * key_dim * thread_number()
    for item in range(thread_number(), slices * heads, num_threads()):
        index, head = item // heads, item % heads
        start = index_at(cu_q + 4 * index)
        count = index_at(cu_q + 4 * index + 4) - start
        place = 8 * (index * units + first + head)
        row, keys, kept = mixed + 4 * start * channels, head // shared * key_dim, address_at(save + place)
        for column in range(0, value_dim, TILE):
            fetch_or_clear(pool, address_at(read + place), column, tile, key_dim, value_dim)
            recur_tokens(
                tile, count, row + 4 * (query_at + keys), row + 4 * (key_at + keys),
                row + 4 * (value_at + head * value_dim + column), 4 * channels,
                target + 4 * ((start * heads + head) * value_dim + column), 4 * heads * value_dim,
                sizes + 4 * (2 * start * heads + head), heads, key_dim, value_dim - column,
                number_at(skips + 4 * head), 0, address_at(save_at + 8 * index) if kept >= 0 else 0,
                pool + 4 * (kept + column), value_dim, 0, 0, 0,
            )  # fmt: skip
            if address_at(write + place) >= 0:
                keep_tile(tile, pool + 4 * (address_at(write + place) + column), key_dim, value_dim, value_dim - column)


@part
def input_head(
    head: int, key_head: int, key_heads: int, shared: int, key_dim: int, value_dim: int
) -> tuple[int, int, int]:
    """Return the unit, the first column and the size of a convolution head. `head` is 0 for the query of `key_head`, 1
    for the key, and 2 or more for the values of its value heads."""
    if head < 2:
        unit = head * key_heads + key_head
        return unit, unit * key_dim, key_dim
    number = key_head * shared + head - 2
    return 2 * key_heads + number, 2 * key_heads * key_dim + number * value_dim, value_dim


@part
def convolve_piece(
    begin: int, end: int, count: int, inputs: int, stride: int, channels: int, kept: int, weight: int, zeros: int,
    pool: int, read: int, write: int, save: int, save_at: int, key_head: int, key_heads: int, shared: int,
    key_dim: int, value_dim: int, rows: int, row_bytes: int,
) -> None:  # fmt: skip
    """Store the query, the key and the values of a key head for tokens begin <= token < end of a slice of `count`
    tokens. At the end of the slice, also store its last inputs. `read`, `write` and `save` list offsets in the pool."""
    to = rows
    for head in range(2 + shared):
        unit, column, size = input_head(head, key_head, key_heads, shared, key_dim, value_dim)
        place = address_at(read + 8 * unit)
        past, own = zeros if place < 0 else pool + 4 * place, inputs + 4 * column
        kind = head + 1 if head < 2 else 0
        convolve_head(begin, end, own, stride, past, kept, size, weight + 4 * column, 0, channels, to, row_bytes, kind)
        if end == count:
            keep_all_inputs(own, stride, past, kept, size, count, pool, write + 8 * unit, save + 8 * unit, save_at)
        to += 4 * size


@part
def fetch_states(pool: int, places: int, heads: int, key_dim: int, value_dim: int, tile: int) -> None:
    """Copy the states of adjacent heads to tiles."""
    for head in range(heads):
        for column in range(0, value_dim, TILE):
            fetch_or_clear(pool, address_at(places + 8 * head), column, tile, key_dim, value_dim)
            tile += 4 * TILE * key_dim


@part
def keep_states(pool: int, places: int, heads: int, key_dim: int, value_dim: int, tile: int) -> None:
    """Copy tiles back to the states of adjacent heads. Skip a head if its place is -1."""
    for head in range(heads):
        place = address_at(places + 8 * head)
        for column in range(0, value_dim, TILE):
            if place >= 0:
                keep_tile(tile, pool + 4 * (place + column), key_dim, value_dim, value_dim - column)
            tile += 4 * TILE * key_dim


@part
def norm_piece(
    count: int, row: int, stride: int, norms: int, gate: int, gate_stride: int, to: int, to_stride: int, size: int,
    epsilon: float,
) -> None:  # fmt: skip
    """Normalize `count` results of a head, multiply them by silu of the gates, and store them at `to`."""
    for _ in range(count):
        for at in range(0, size, LANES):
            prefetch(gate + gate_stride * FETCHED_AHEAD + 4 * at)
            prefetch(to + to_stride * FETCHED_AHEAD + 4 * at)
        norm_row(row, norms, to, size, epsilon)
        gate_row(to, gate, size)
        row, gate, to = row + stride, gate + gate_stride, to + to_stride


@kernel
def delta(values: Any) -> None:
    """Compute a layer with the delta rule. The code below names the `values`. `weight` is [width, channels], `sizes` is
    the result of `step_sizes`, `shared` is the number of value heads per key head, and `norms` is the weight of the
    norm. `read`, `write`, `save` and `zeros` are as in `convolve`. The last two values are the threads' scratch memory
    and its size per thread in bytes.

    A thread computes PIECE tokens of a key head and its value heads at a time, from the convolution to the norm, so
    that intermediate results stay in the thread's caches."""
    slices, cu_q, inputs, stride, gates, gate_stride = values[0], values[1], values[2], values[3], values[4], values[5]
    channels, width, weight, sizes, key_heads = values[6], values[7], values[8], values[9], values[10]
    shared, key_dim, value_dim, target, norms = values[11], values[12], values[13], values[14], values[15]
    epsilon, pool, read, write, save = number_at(values[16]), values[17], values[18], values[19], values[20]
    save_at, units, first, zeros = values[21], values[22], values[23], values[24]
    heads, row_bytes = key_heads * shared, 4 * (2 * key_dim + shared * value_dim)
    states = values[25] + values[26] * thread_number()
    head_bytes = (value_dim + TILE - 1) // TILE * 4 * TILE * key_dim
    rows = states + shared * head_bytes
    for item in range(thread_number(), slices * key_heads, num_threads()):
        index, key_head = item // key_heads, item % key_heads
        start = index_at(cu_q + 4 * index)
        count, saved = index_at(cu_q + 4 * index + 4) - start, address_at(save_at + 8 * index)
        place = 8 * (index * units + first)
        matrices = place + 8 * (2 * key_heads + heads + key_head * shared)
        fetch_states(pool, read + matrices, shared, key_dim, value_dim, states)
        for begin in range(0, count, PIECE):
            end = min(count, begin + PIECE)
            convolve_piece(
                begin, end, count, inputs + 4 * start * stride, stride, channels, width - 1, weight, zeros, pool,
                read + place, write + place, save + place, save_at + 8 * index, key_head, key_heads, shared, key_dim,
                value_dim, rows, row_bytes,
            )  # fmt: skip
            num_fetched, next_head, next_token = 0, key_head, end
            if end == count:
                next_head, next_token = key_head + num_threads(), 0
            for head in range(shared):
                number, row = key_head * shared + head, start + begin
                kept_at = address_at(save + matrices + 8 * head)
                here = saved - begin if kept_at >= 0 and begin < saved <= end else 0
                own = rows + 4 * (2 * key_dim + head * value_dim)  # results overwrite the values
                for column in range(0, value_dim, TILE):
                    if num_fetched < 2 + shared and column + TILE < value_dim:  # prefetch the next inputs
                        _, strip, ahead_size = input_head(
                            num_fetched, next_head, key_heads, shared, key_dim, value_dim
                        )  # fmt: skip
                        ahead, ahead_stride = inputs + 4 * ((start + next_token) * stride + strip), 4 * stride
                        num_fetched += 1
                    else:
                        ahead, ahead_stride = gates + 4 * (row * gate_stride + number * value_dim), 4 * gate_stride
                        ahead_size = value_dim
                    recur_tokens(
                        states + head * head_bytes + 4 * column * key_dim, end - begin, rows, rows + 4 * key_dim,
                        own + 4 * column, row_bytes, own + 4 * column, row_bytes,
                        sizes + 4 * (2 * row * heads + number), heads, key_dim,
                        value_dim - column, 0.0, 1, here, pool + 4 * (kept_at + column), value_dim,
                        ahead, ahead_stride, ahead_size,
                    )  # fmt: skip
                norm_piece(
                    end - begin, own, row_bytes, norms + 4 * number * value_dim,
                    gates + 4 * (row * gate_stride + number * value_dim), 4 * gate_stride,
                    target + 4 * (row * heads + number) * value_dim, 4 * heads * value_dim, value_dim, epsilon,
                )  # fmt: skip
        keep_states(pool, write + matrices, shared, key_dim, value_dim, states)


@kernel
def gated_norm(values: Any) -> None:
    """Multiply rows by silu of the gates, and normalize each group of `group` columns, in place. The first lines name
    the `values`. `size` is the size of a row."""
    target, rows, size, gates, stride, weight = values[0], values[1], values[2], values[3], values[4], values[5]
    group, epsilon = values[6], number_at(values[7])
    for row in range(thread_number(), rows, num_threads()):
        own = target + 4 * row * size
        gate_row(own, gates + 4 * row * stride, size)
        for at in range(0, size, group):
            norm_row(own + 4 * at, weight + 4 * at, own + 4 * at, group, epsilon)


@kernel
def sigmoid_mul(values: Any) -> None:
    """Multiply rows by the sigmoid of the gates, in place. `values`: number of rows, size of a row, rows, gates."""
    rows, size, source, gates = values[0], values[1], values[2], values[3]
    one = splat(1.0)
    for row in range(thread_number(), rows, num_threads()):
        for at in range(4 * row * size, 4 * (row + 1) * size, 4 * LANES):
            left = (4 * (row + 1) * size - at) // 4
            gate = load_some(gates + at, left, FLOAT32)
            x = load_some(source + at, left, FLOAT32) / (one + exponential(splat(0.0) - gate))
            store_some(x, source + at, left, FLOAT32)

"""Numba kernels for recurrent layers on float32 rows: the convolution, the recurrence and the norm of its result.

A recurrence runs token by token, with the same operations in the same order regardless of how a prompt is chunked, so
results and states have the same bits. The columns of a recurrent matrix are independent: a thread keeps some of them in
its cache for all tokens of a slice.
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
    load,
    load_some,
    multiply_add,
    number_at,
    put_number,
    splat,
    store,
    store_some,
    total,
)

VECTORS = 2  # vectors of columns that a thread keeps: with 128 rows, they fit into half of the first cache
TILE = VECTORS * LANES


@inlined
def silu(x: Any) -> Any:
    one = splat(1.0)
    return x / (one + exponential(splat(0.0) - x))


@part
def input_at(inputs: int, stride: int, past: int, kept: int, size: int, token: int) -> int:
    """Return the address of an input of the convolution. Negative tokens precede the slice."""
    return inputs + 4 * stride * token if token >= 0 else past + 4 * size * (kept + token)


@part
def keep_inputs(inputs: int, stride: int, past: int, kept: int, size: int, count: int, target: int) -> None:
    """Store the last `kept` inputs of the convolution before token `count`."""
    for place in range(kept):
        source = input_at(inputs, stride, past, kept, size, count - kept + place)
        for at in range(0, size, LANES):
            store_some(load_some(source + 4 * at, size - at, FLOAT32), target + 4 * (place * size + at), size - at, 0)


@part
def norm_head(head: int, size: int, scale: float) -> None:
    """Divide a head by its Euclidean norm, and multiply it by `scale`."""
    squares = splat(0.0)
    for at in range(0, size, LANES):
        x = load_some(head + 4 * at, size - at, FLOAT32)
        squares = multiply_add(x, x, squares)
    factor = splat(scale * (total(squares) + 1e-6) ** -0.5)
    for at in range(0, size, LANES):
        store_some(load_some(head + 4 * at, size - at, FLOAT32) * factor, head + 4 * at, size - at, FLOAT32)


@kernel
def convolve(values: Any) -> None:
    """`values`: slices, cu_q, inputs and their stride, target, channels, width, weight [width, channels], bias or 0,
    pool, read, write, save, save_at, units, first unit, the number of units and, for each, its column, size and kind
    (1: a query, 2: a key, to be normed; 0: neither), and zeros."""
    slices, cu_q, inputs, stride, target, channels = values[0], values[1], values[2], values[3], values[4], values[5]
    width, weight, bias, pool, read, write = values[6], values[7], values[8], values[9], values[10], values[11]
    save, save_at, units, first, num, table = values[12], values[13], values[14], values[15], values[16], values[17]
    zeros = values[18]
    kept = width - 1
    for item in range(thread_number(), slices * num, num_threads()):
        index, unit = item // num, item % num
        column, size = address_at(table + 24 * unit), address_at(table + 24 * unit + 8)
        kind = address_at(table + 24 * unit + 16)
        start = index_at(cu_q + 4 * index)
        count = index_at(cu_q + 4 * index + 4) - start
        place = 8 * (index * units + first + unit)
        past = zeros if address_at(read + place) < 0 else pool + 4 * address_at(read + place)
        own, to = inputs + 4 * (start * stride + column), target + 4 * (start * channels + column)
        for token in range(count):
            for at in range(0, size, LANES):
                left = size - at
                x = splat(0.0)
                if bias:
                    x = load_some(bias + 4 * (column + at), left, FLOAT32)
                for tap in range(width):
                    source = input_at(own, stride, past, kept, size, token - kept + tap)
                    factor = load_some(weight + 4 * (tap * channels + column + at), left, FLOAT32)
                    x = multiply_add(factor, load_some(source + 4 * at, left, FLOAT32), x)
                store_some(silu(x), to + 4 * (token * channels + at), left, FLOAT32)
        if kind:
            for token in range(count):
                norm_head(to + 4 * token * channels, size, size**-0.5 if kind == 1 else 1.0)
        if address_at(save_at + 8 * index) > 0 and address_at(save + place) >= 0:
            keep_inputs(
                own, stride, past, kept, size, address_at(save_at + 8 * index), pool + 4 * address_at(save + place)
            )
        if address_at(write + place) >= 0:
            keep_inputs(own, stride, past, kept, size, count, pool + 4 * address_at(write + place))


@kernel
def step_sizes(values: Any) -> None:
    """`values`: rows, heads, steps and their stride, rates, biases, target [rows, heads, 2] for the factor of a token's
    update and that of the state, and whether this is a delta rule."""
    rows, heads, steps, stride, rates, biases, target = (
        values[0], values[1], values[2], values[3], values[4], values[5], values[6]
    )  # fmt: skip
    is_delta = values[7]
    for row in range(thread_number(), rows, num_threads()):
        for head in range(heads):
            at = steps + 4 * (row * stride + head)
            x = float(number_at(at + 4 * heads if is_delta else at)) + float(number_at(biases + 4 * head))
            size = x if x > 20.0 else math.log1p(math.exp(x))
            to = target + 8 * (row * heads + head)
            put_number(1.0 / (1.0 + math.exp(-float(number_at(at)))) if is_delta else size, to)
            put_number(math.exp(size * float(number_at(rates + 4 * head))), to + 4)


@part
def fetch_tile(source: int, tile: int, rows: int, stride: int, left: int) -> None:
    """Copy up to TILE columns of a matrix to a contiguous tile."""
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
    """Copy a tile back to a matrix."""
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
    """Compute one token: decay the tile, add the update, and store the product with the query.

    `known` is the product with this token's key before the update; the result is the product with the next token's
    key."""
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


@kernel
def recur(values: Any) -> None:
    """`values`: slices, cu_q, mixed inputs, channels, step sizes, value heads, value heads per key head, key_dim,
    value_dim, columns of queries, keys and values, target, pool, read, write, save, save_at, units, first unit, skip,
    whether this is a delta rule, and a tile per thread."""
    slices, cu_q, mixed, channels, sizes, heads = values[0], values[1], values[2], values[3], values[4], values[5]
    shared, key_dim, value_dim, query_at, key_at = values[6], values[7], values[8], values[9], values[10]
    value_at, target, pool, read, write, save = values[11], values[12], values[13], values[14], values[15], values[16]
    save_at, units, first, skips, is_delta = values[17], values[18], values[19], values[20], values[21]
    tile = values[22] + 4 * TILE * key_dim * thread_number()
    for item in range(thread_number(), slices * heads, num_threads()):
        index, head = item // heads, item % heads
        start = index_at(cu_q + 4 * index)
        count = index_at(cu_q + 4 * index + 4) - start
        place = 8 * (index * units + first + head)
        source, saved = address_at(read + place), address_at(save_at + 8 * index)
        skip = number_at(skips + 4 * head)
        for column in range(0, value_dim, TILE):
            left = value_dim - column
            if source < 0:
                clear_tile(tile, key_dim)
            else:
                fetch_tile(pool + 4 * (source + column), tile, key_dim, value_dim, left)
            known = splat(0.0), splat(0.0)
            if is_delta:
                known = known_values(tile, mixed + 4 * (start * channels + key_at + head // shared * key_dim), key_dim)
            for token in range(count):
                row = mixed + 4 * (start + token) * channels
                step = sizes + 8 * ((start + token) * heads + head)
                query = row + 4 * (query_at + head // shared * key_dim)
                key = row + 4 * (key_at + head // shared * key_dim)
                following = update(
                    tile, query, key, key + 4 * channels if token + 1 < count else key,
                    row + 4 * (value_at + head * value_dim + column),
                    target + 4 * (((start + token) * heads + head) * value_dim + column), key_dim, left, known,
                    number_at(step), number_at(step + 4), skip,
                )  # fmt: skip
                if is_delta:
                    known = following
                if token + 1 == saved and address_at(save + place) >= 0:
                    keep_tile(tile, pool + 4 * (address_at(save + place) + column), key_dim, value_dim, left)
            if address_at(write + place) >= 0:
                keep_tile(tile, pool + 4 * (address_at(write + place) + column), key_dim, value_dim, left)


@kernel
def norm_gated(values: Any) -> None:
    """`values`: rows (normed in place), their number and size, gates and their stride, weight, size of a group,
    the address of epsilon, and whether rows are multiplied by silu(gate) before the norm instead of after it."""
    target, rows, size, gates, stride, weight = values[0], values[1], values[2], values[3], values[4], values[5]
    group, epsilon, gates_first = values[6], number_at(values[7]), values[8]
    for row in range(thread_number(), rows, num_threads()):
        own, gate = target + 4 * row * size, gates + 4 * row * stride
        for moment in range(2):
            if moment == (0 if gates_first else 1):
                for at in range(0, size, LANES):
                    left = size - at
                    x = load_some(own + 4 * at, left, FLOAT32) * silu(load_some(gate + 4 * at, left, FLOAT32))
                    store_some(x, own + 4 * at, left, FLOAT32)
            else:
                for at in range(0, size, group):
                    norm_row(own + 4 * at, weight + 4 * at, own + 4 * at, group, epsilon)


@kernel
def sigmoid_mul(values: Any) -> None:
    """`values`: number and size of rows, source (updated in place) and gates."""
    rows, size, source, gates = values[0], values[1], values[2], values[3]
    one = splat(1.0)
    for row in range(thread_number(), rows, num_threads()):
        for at in range(4 * row * size, 4 * (row + 1) * size, 4 * LANES):
            left = (4 * (row + 1) * size - at) // 4
            gate = load_some(gates + at, left, FLOAT32)
            x = load_some(source + at, left, FLOAT32) / (one + exponential(splat(0.0) - gate))
            store_some(x, source + at, left, FLOAT32)

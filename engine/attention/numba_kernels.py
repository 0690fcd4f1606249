"""Attention over the paged pool as machine code for this CPU. Importing it compiles, or loads what was compiled before.

Flash attention (Dao et al.): keys and values are taken a tile at a time with an online softmax, the query heads that
share a key head folded into rows (so a key is read once for all of them), a decode being a tile with one query. Long
contexts may be cut in pieces that are merged afterwards (Flash-Decoding).
"""

import math
from typing import Any

from engine.attention.numba_panels import dot_block, multiply, transpose_block
from engine.jit import kernel, part, thread_number
from engine.vectors import (
    FLOAT32,
    LANES,
    address_at,
    exponential,
    index_at,
    keep_range,
    larger,
    largest,
    load,
    load_some,
    multiply_add,
    number_at,
    prefetch,
    put_address,
    put_number,
    splat,
    store,
    store_some,
    take_next,
    total,
)

TILE = 64  # tokens
FEW_ROWS = 8  # of a decode: as many query heads as share a key head
PAGE, LINE = 4096, 64  # bytes
UNSEEN = -1e30  # the running maximum before anything was seen: finite, so that differences are numbers
FIELDS = 7  # of an item: see `numba_backend.Work`
# Bytes of a block and of a token, tokens of a block, the code of the pool's dtype, and the dimensions of a head.
Sizes = tuple[int, int, int, int, int]
AREAS = 9  # of a thread's working memory: see `numba_backend.Memory`


@part
def gather(table: int, low: int, count: int, base: int, sizes: Sizes, keys: int, values: int, wide: int) -> None:
    """Lists the addresses of `count` keys and values from position `low` on. What is not float32 in whole vectors is
    widened into `wide` first, with zeros after it."""
    block_bytes, token_bytes, block_tokens, code, head_dim = sizes
    item = 4 if code == FLOAT32 else 2
    padded = (head_dim + LANES - 1) // LANES * LANES
    direct = code == FLOAT32 and padded == head_dim
    token = 0
    while token < count:
        position = low + token
        inside = position % block_tokens
        row = base + index_at(table + 4 * (position // block_tokens)) * block_bytes + inside * token_bytes
        for _ in range(min(block_tokens - inside, count - token)):
            key, value = row, row + head_dim * item
            if not direct:
                key, value = wide + 8 * padded * token, wide + 8 * padded * token + 4 * padded
                for at in range(0, head_dim, LANES):
                    store(load_some(row + at * item, head_dim - at, code), key + 4 * at)
                    store(load_some(row + (head_dim + at) * item, head_dim - at, code), value + 4 * at)
            put_address(key, keys + 8 * token)
            put_address(value, values + 8 * token)
            row += token_bytes
            token += 1


@part
def reach(table: int, low: int, high: int, base: int, sizes: Sizes, step: int) -> None:
    """Fetches keys and values of positions low to high that will be wanted soon: every `step` bytes and the last. All
    pages first, and at once: a block of one layer is small, nearly each means another page, and looking those up one
    by one took longer than reading. Then the lines, a few at a time, so that memory is read while the CPU computes."""
    block_bytes, token_bytes, block_tokens, _, _ = sizes
    while low < high:
        inside = low % block_tokens
        row = base + index_at(table + 4 * (low // block_tokens)) * block_bytes + inside * token_bytes
        tokens = min(block_tokens - inside, high - low)
        for at in range(0, tokens * token_bytes, step):
            prefetch(row + at)
        prefetch(row + tokens * token_bytes - 1)
        low += tokens


@part
def softmax(scores: int, low: int, high: int, columns: int, most_at: int, sum_at: int, sums: int, padded: int) -> None:
    """One row of scores, of which columns low <= i < high are seen: turns them into weights relative to the largest
    seen so far, and what was summed before with the smaller one is scaled down."""
    before = number_at(most_at)
    top = splat(before)
    hidden = splat(-math.inf)
    for at in range(0, columns, LANES):
        x = load(scores + 4 * at)
        if at < low or at + LANES > high:
            x = keep_range(x, low - at, high - at, hidden)
            store(x, scores + 4 * at)
        top = larger(x, top)
    most = largest(top)
    added = splat(0.0)
    for at in range(0, columns, LANES):
        weight = exponential(load(scores + 4 * at) - splat(most))
        added = added + weight
        store(weight, scores + 4 * at)
    so_far = number_at(sum_at)
    if most > before:
        scale = exponential(splat(before - most))
        so_far *= largest(scale)
        for at in range(0, padded, LANES):
            store(load(sums + 4 * at) * scale, sums + 4 * at)
        put_number(most, most_at)
    put_number(so_far + total(added), sum_at)


@part
def prepare(q: int, to: int, most: int, summed: int, sums: int, shape: tuple[int, int, int, int, int, int]) -> None:
    """Copies the queries of an item for one key head, scaled and filled up with zeros; nothing was seen yet."""
    row, rows, head, kv_heads, group, head_dim = shape
    padded = (head_dim + LANES - 1) // LANES * LANES
    scale = splat(1.0 / math.sqrt(head_dim))
    for r in range(rows):
        source = q + 4 * head_dim * (((row + r // group) * kv_heads + head) * group + r % group)
        for at in range(0, head_dim, LANES):
            x = load_some(source + 4 * at, head_dim - at, FLOAT32)
            store(x * scale, to + 4 * (r * padded + at))
            store(splat(0.0), sums + 4 * (r * padded + at))
        put_number(UNSEEN, most + 4 * r)
        put_number(0.0, summed + 4 * r)


@part
def score(
    rows_q: int, rows: int, keys: int, tokens: int, padded: int, scores: int, flipped: int, flipped_rows: int
) -> None:
    """Products of all rows with a tile's keys, filled up to whole vectors with the row of zeros before `flipped`."""
    columns = (tokens + LANES - 1) // LANES * LANES
    for token in range(tokens, columns):
        put_address(flipped - 4 * padded, keys + 8 * token)
    for token in range(0, columns, LANES):
        if rows <= FEW_ROWS:  # a decode: turning the keys round would take longer than using them
            for r in range(rows):
                dot_block(keys + 8 * token, rows_q + 4 * padded * r, padded, scores + 4 * (TILE * r + token))
        else:
            for at in range(0, padded, LANES):
                transpose_block(keys + 8 * token, 4 * at, flipped + 4 * (at * TILE + token), 4 * TILE)
    if rows > FEW_ROWS:
        multiply(rows_q, 4 * padded, flipped_rows, scores, 4 * TILE, rows, padded, columns, 0)


@part
def finish(sums: int, sum_at: int, most_at: int, target: int, head_dim: int, is_part: bool) -> None:
    """Writes one row's answer, or, of a part, what the merge needs: the weighted sum, the largest and the sum."""
    divisor = splat(1.0) if is_part else splat(number_at(sum_at))
    for at in range(0, head_dim, LANES):
        store_some(load(sums + 4 * at) / divisor, target + 4 * at, head_dim - at, FLOAT32)
    if is_part:
        put_number(number_at(most_at), target + 4 * head_dim)
        put_number(number_at(sum_at), target + 4 * head_dim + 4)


@kernel
def attend(values: Any) -> None:
    """A unit of work is an item (queries of one slice over a part of its context) for one key head. Threads take
    units in order; `values[0]` counts them."""
    units, items, q, out, pool, parts = values[1], values[2], values[3], values[4], values[5], values[6]
    table, table_width, block_bytes, head_bytes = values[7], values[8], values[9], values[10]
    block_tokens, code, kv_heads, group, head_dim, window = (
        values[11], values[12], values[13], values[14], values[15], values[16]
    )  # fmt: skip
    area = values[17] + 8 * AREAS * thread_number()
    rows_q, scores, sums, most, summed = (
        address_at(area), address_at(area + 8), address_at(area + 16), address_at(area + 24), address_at(area + 32)
    )  # fmt: skip
    keys, flipped, flipped_rows, wide = (
        address_at(area + 40), address_at(area + 48), address_at(area + 56), address_at(area + 64)
    )  # fmt: skip
    weights = keys + 8 * TILE  # the addresses of the values, after those of the keys
    item_bytes = 4 if code == FLOAT32 else 2
    sizes = (block_bytes, 2 * head_dim * item_bytes, block_tokens, code, head_dim)
    padded = (head_dim + LANES - 1) // LANES * LANES
    row_bytes = 4 * head_dim  # of q and out
    unit = take_next(values)
    while unit < units:
        head = unit % kv_heads
        item = items + 4 * FIELDS * (unit // kv_heads)
        slice_, row, count, start = index_at(item), index_at(item + 4), index_at(item + 8), index_at(item + 12)
        low, high, place = index_at(item + 16), index_at(item + 20), index_at(item + 24)
        rows = count * group
        prepare(q, rows_q, most, summed, sums, (row, rows, head, kv_heads, group, head_dim))
        blocks, base = table + 4 * slice_ * table_width, pool + head * head_bytes
        while low < high:
            tokens = min(TILE, high - low)
            columns = (tokens + LANES - 1) // LANES * LANES
            ahead = low + TILE
            reach(blocks, ahead, min(high, ahead + TILE), base, sizes, PAGE)
            gather(blocks, low, tokens, base, sizes, keys, weights, wide)
            score(rows_q, rows, keys, tokens, padded, scores, flipped, flipped_rows)
            for r in range(rows):
                if rows <= FEW_ROWS and r < 4:
                    reach(blocks, ahead + 8 * r, min(high, ahead + 8 * r + 8), base, sizes, LINE)
                position = start + r // group
                seen_from = max(0, position + 1 - window - low) if window else 0
                softmax(
                    scores + 4 * TILE * r, seen_from, min(tokens, position + 1 - low), columns,
                    most + 4 * r, summed + 4 * r, sums + 4 * padded * r, padded,
                )  # fmt: skip
            if rows <= FEW_ROWS:
                reach(blocks, ahead + 32, min(high, ahead + TILE), base, sizes, LINE)
            multiply(scores, 4 * TILE, weights, sums, 4 * padded, rows, tokens, padded, 1)
            low += TILE
        for r in range(rows):
            at_q = ((row + r // group) * kv_heads + head) * group + r % group
            target = out + at_q * row_bytes
            if place >= 0:
                target = parts + (place + head * rows + r) * (row_bytes + 8)
            finish(sums + 4 * padded * r, summed + 4 * r, most + 4 * r, target, head_dim, place >= 0)
        unit = take_next(values)


@kernel
def merge(values: Any) -> None:
    """The parts of items, head by head, into the answers of its rows."""
    units, items, out, parts = values[1], values[2], values[3], values[4]
    kv_heads, group, head_dim = values[5], values[6], values[7]
    part_bytes = 4 * head_dim + 8
    unit = take_next(values)
    while unit < units:
        head = unit % kv_heads
        item = items + 4 * FIELDS * (unit // kv_heads)
        row, count, place, num_parts = index_at(item), index_at(item + 4), index_at(item + 8), index_at(item + 12)
        rows = count * group
        for r in range(rows):
            source = parts + (place + head * rows + r) * part_bytes
            step = kv_heads * rows * part_bytes
            most = splat(UNSEEN)
            for index in range(num_parts):
                most = larger(splat(number_at(source + index * step + 4 * head_dim)), most)
            summed = splat(0.0)
            for index in range(num_parts):
                scale = exponential(splat(number_at(source + index * step + 4 * head_dim)) - most)
                summed = multiply_add(scale, splat(number_at(source + index * step + 4 * head_dim + 4)), summed)
            target = out + (((row + r // group) * kv_heads + head) * group + r % group) * 4 * head_dim
            for at in range(0, head_dim, LANES):
                x = splat(0.0)
                for index in range(num_parts):
                    scale = exponential(splat(number_at(source + index * step + 4 * head_dim)) - most)
                    x = multiply_add(scale, load_some(source + index * step + 4 * at, head_dim - at, FLOAT32), x)
                store_some(x / summed, target + 4 * at, head_dim - at, FLOAT32)
        unit = take_next(values)

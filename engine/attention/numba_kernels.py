"""Attention over the paged pool as machine code for this CPU. Importing it compiles, or loads what was compiled before.

Flash attention (Dao et al.): keys and values are taken a tile at a time with an online softmax, the query heads that
share a key head folded into rows (so a key is read once for all of them), a decode being a tile with one query. Long
contexts may be cut in pieces that are merged afterwards (Flash-Decoding).
"""

import math
from typing import Any

from engine.attention.numba_panels import add_product, dots, multiply, transpose_block
from engine.attention.numba_tiles import (
    FEW_ROWS,
    FIELDS,
    LINE,
    TILE,
    fetch,
    fill_up,
    first_tile,
    locate,
    shares,
    tile_of,
    touch,
    widen,
)
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
    put_number,
    splat,
    store,
    store_some,
    take_next,
    total,
)

UNSEEN = -1e30  # the running maximum before anything was seen: finite, so that differences are numbers
AREAS = 9  # of a thread's working memory: see `numba_backend.Memory`


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
def weigh(
    scores: int, rows: int, group: int, start: int, tokens: int, columns: int, window: int, most: int, summed: int,
    sums: int, padded: int,
) -> None:  # fmt: skip
    """`softmax` of every row of a tile; `start` is where the first query is, counted from the tile's first token."""
    for r in range(rows):
        end = start + r // group + 1
        softmax(
            scores + 4 * TILE * r, max(0, end - window) if window else 0, min(tokens, end), columns,
            most + 4 * r, summed + 4 * r, sums + 4 * padded * r, padded,
        )  # fmt: skip


@part
def score_many(
    rows_q: int, rows: int, keys: int, columns: int, padded: int, scores: int, flipped: int, flipped_rows: int
) -> None:
    """Products of the rows of a chunk with a tile's keys, in float32."""
    for token in range(0, columns, LANES):
        for at in range(0, padded, LANES):
            transpose_block(keys + 8 * token, 4 * at, flipped + 4 * (at * TILE + token), 4 * TILE)
    multiply(rows_q, 4 * padded, flipped_rows, 0, scores, 4 * TILE, rows, padded, columns, 0)


@part
def score(
    rows_q: int, rows: int, keys: int, code: int, columns: int, padded: int, scores: int, ahead: int,
    tokens_ahead: int, lines: int,
) -> None:  # fmt: skip
    """Products of the few rows of a decode with a tile's keys: turning the keys round would take longer than this."""
    for token in range(0, columns, LANES):
        beside = lines if token < tokens_ahead else 0
        fetched = address_at(ahead + 8 * token)
        for r in range(rows):
            one, target = rows_q + 4 * padded * r, scores + 4 * (TILE * r + token)
            dots(keys + 8 * token, code, one, padded, target, fetched, beside)
            fetched += LINE * lines * padded // LANES


@part
def add_values(
    scores: int, rows: int, keys: int, code: int, value_from: int, tokens: int, sums: int, padded: int, ahead: int,
    tokens_ahead: int, lines: int, after: int,
) -> None:  # fmt: skip
    """Adds a tile's values, weighted, to the sums of the few rows of a decode. What is fetched lies `after` bytes
    behind the beginning of each group of tokens."""
    for token in range(0, tokens, LANES):
        add_product(
            scores + 4 * token, 4 * TILE, keys + 8 * token, code, value_from, sums, 4 * padded, rows,
            min(LANES, tokens - token), padded,
            address_at(ahead + 8 * token) + after, lines if token < tokens_ahead else 0,
        )  # fmt: skip


@part
def finish(
    sums: int, summed: int, most: int, target: int, shape: tuple[int, int, int, int, int, int], is_part: bool
) -> None:
    """Writes the rows' answers into `target`, or, of a part, what the merge needs: of each row the weighted sum, the
    largest and the sum."""
    row, rows, head, kv_heads, group, head_dim = shape
    padded = (head_dim + LANES - 1) // LANES * LANES
    for r in range(rows):
        to = target + 4 * head_dim * (((row + r // group) * kv_heads + head) * group + r % group)
        divisor = splat(number_at(summed + 4 * r))
        if is_part:
            to, divisor = target + (4 * head_dim + 8) * r, splat(1.0)
            put_number(number_at(most + 4 * r), to + 4 * head_dim)
            put_number(number_at(summed + 4 * r), to + 4 * head_dim + 4)
        for at in range(0, head_dim, LANES):
            x = load(sums + 4 * (r * padded + at))
            store_some(x / divisor, to + 4 * at, head_dim - at, FLOAT32)


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
    rows_q, scores, sums, most, summed, found, flipped, flipped_rows, wide = (
        address_at(area), address_at(area + 8), address_at(area + 16), address_at(area + 24), address_at(area + 32),
        address_at(area + 40), address_at(area + 48), address_at(area + 56), address_at(area + 64),
    )  # fmt: skip
    ahead, widened = found + 8 * TILE, found + 16 * TILE
    sizes = (block_bytes, 2 * head_dim * (4 if code == FLOAT32 else 2), block_tokens, code, head_dim)
    padded = (head_dim + LANES - 1) // LANES * LANES
    unit = take_next(values)
    tokens_ahead = first_tile(unit, units, items, table, table_width, pool, head_bytes, kv_heads, group, sizes, ahead)
    fetch(ahead, tokens_ahead, sizes[1])
    while unit < units:
        following = take_next(values)  # early, so that its first tile can be fetched while this unit's last is computed
        head = unit % kv_heads
        item = items + 4 * FIELDS * (unit // kv_heads)
        slice_, row, count, start = index_at(item), index_at(item + 4), index_at(item + 8), index_at(item + 12)
        low, high, place = index_at(item + 16), index_at(item + 20), index_at(item + 24)
        rows, tile, few = count * group, tile_of(count * group), count * group <= FEW_ROWS
        shape = (row, rows, head, kv_heads, group, head_dim)
        prepare(q, rows_q, most, summed, sums, shape)
        blocks, base = table + 4 * slice_ * table_width, pool + head * head_bytes
        while low < high:
            found, ahead, tokens = ahead, found, tokens_ahead
            columns = (tokens + LANES - 1) // LANES * LANES
            if low + tile < high:
                tokens_ahead = locate(blocks, low + tile, min(high, low + 2 * tile), base, sizes, ahead)
            else:
                tokens_ahead = first_tile(
                    following, units, items, table, table_width, pool, head_bytes, kv_heads, group, sizes, ahead
                )
            keys, kind, value_from = found, code, sizes[1] // 2
            if padded != head_dim or (code != FLOAT32 and not few):
                widen(found, tokens, sizes, wide, widened)
                keys, kind, value_from = widened, FLOAT32, 4 * padded
            fill_up(keys, tokens, columns, flipped - 4 * padded)
            by_keys, by_values = shares(rows, padded, sizes[1])
            if few:
                score(rows_q, rows, keys, kind, columns, padded, scores, ahead, tokens_ahead, by_keys)
                fetch(ahead + 8 * columns, tokens_ahead - columns, sizes[1])
            else:
                touch(ahead, tokens_ahead)
                score_many(rows_q, rows, keys, columns, padded, scores, flipped, flipped_rows)
            weigh(scores, rows, group, start - low, tokens, columns, window, most, summed, sums, padded)
            if few:
                add_values(
                    scores, rows, keys, kind, value_from, tokens, sums, padded, ahead, tokens_ahead, by_values,
                    LINE * by_keys * rows * padded // LANES,
                )  # fmt: skip
            else:
                multiply(scores, 4 * TILE, keys, value_from, sums, 4 * padded, rows, tokens, padded, 1)
            low += tile
        target = out if place < 0 else parts + (place + head * rows) * (4 * head_dim + 8)
        finish(sums, summed, most, target, shape, place >= 0)
        unit = following


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

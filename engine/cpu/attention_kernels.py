"""Numba kernels of attention over the paged pool. Importing this module compiles the kernels or loads them.

The algorithm is flash attention (Dao et al.): keys and values are read a tile at a time, with an online softmax. Query
heads that share a key head are computed together, so that each key is read only once. The keys are not transposed.
For a decode, the kernel computes dot products of queries and keys. For a chunk, it transposes the queries. Long
contexts may be divided into parts, whose results are merged afterwards (Flash-Decoding).
"""

import math
from typing import Any

import numpy as np

from engine.cpu.attention_panels import add_product, add_times_listed, dots, listed_times, transpose_block
from engine.cpu.attention_tiles import (
    FEW_ROWS,
    FIELDS,
    LINE,
    TILE,
    UNSEEN,
    fetch,
    fill_up,
    first_tile,
    locate,
    shares,
    tile_of,
    weigh,
    weigh_columns,
    widen,
)
from engine.cpu.jit import inlined, kernel, part, thread_number
from engine.cpu.simd import (
    FLOAT32,
    LANES,
    address_at,
    index_at,
    larger,
    load,
    load_some,
    multiply_add,
    number_at,
    put_address,
    put_number,
    splat,
    store,
    store_some,
    take_next,
    two_to_the,
)

AREAS = 9  # number of areas in a thread's working memory: see `engine.cpu.attention.WorkingMemory`


@part
def copy_queries(q: int, to: int, shape: tuple[int, int, int, int, int, int]) -> None:
    """Copy an item's queries for one key head, padded with zeros and scaled for a softmax with base 2."""
    row, rows, head, kv_heads, group, head_dim = shape
    padded = (head_dim + LANES - 1) // LANES * LANES
    scale = splat(math.log2(math.e) / math.sqrt(head_dim))
    for r in range(rows):
        source = q + 4 * head_dim * (((row + r // group) * kv_heads + head) * group + r % group)
        for at in range(0, head_dim, LANES):
            x = load_some(source + 4 * at, head_dim - at, FLOAT32)
            store(x * scale, to + 4 * (r * padded + at))


@part
def turn(rows_q: int, rows: int, group: int, padded: int, to: int, stride: int, listed: int, ends: int) -> None:
    """Transpose a chunk's queries, which are rows at `rows_q`, into columns at `to`. If the number of rows is not a
    multiple of LANES, copies of the last row fill the last vector. At `ends`, also store how many tokens each row sees,
    counted from the position of the first query. `listed` is working memory for LANES addresses."""
    for row in range(0, rows, LANES):
        for lane in range(LANES):
            r = min(row + lane, rows - 1)
            put_address(rows_q + 4 * padded * r, listed + 8 * lane)
            put_number(float(r // group + 1), ends + 4 * (row + lane))
        for at in range(0, padded, LANES):
            transpose_block(listed, 4 * at, to + at * stride + 4 * row, stride)


@part
def begin(
    q: int, few: bool, rows_q: int, turned: int, stride: int, listed: int, ends: int, most: int, summed: int, sums: int,
    shape: tuple[int, int, int, int, int, int],
) -> None:  # fmt: skip
    """Prepare an item for one key head: store the queries as rows (decode) or columns (chunk), and clear the sums."""
    _, rows, _, _, group, head_dim = shape
    padded = (head_dim + LANES - 1) // LANES * LANES
    copy_queries(q, rows_q if few else sums, shape)  # the memory of `sums` is unused until it is cleared below
    if not few:
        turn(sums, rows, group, padded, turned, stride, listed, ends)
    for r in range(0, rows, LANES):
        store(splat(UNSEEN), most + 4 * r)
        store(splat(0.0), summed + 4 * r)
    for at in range(0, rows * padded, LANES):
        store(splat(0.0), sums + 4 * at)


@part
def score(
    rows_q: int, rows: int, keys: int, code: int, columns: int, padded: int, scores: int, ahead: int,
    tokens_ahead: int, lines: int,
) -> None:  # fmt: skip
    """Compute the scores of a decode: multiply each row of queries by each key of a tile. For each vector of a row,
    also prefetch `lines` cache lines of the next tile. `ahead` lists the addresses of the next tile's tokens."""
    for token in range(0, columns, LANES):
        due = lines if token < tokens_ahead else 0
        fetched = address_at(ahead + 8 * token)
        for r in range(rows):
            one, target = rows_q + 4 * padded * r, scores + 4 * (TILE * r + token)
            dots(keys + 8 * token, code, one, padded, target, fetched, due)
            fetched += LINE * lines * padded // LANES


@part
def add_values(
    scores: int, rows: int, keys: int, code: int, value_from: int, tokens: int, sums: int, padded: int, ahead: int,
    tokens_ahead: int, lines: int, after: int,
) -> None:  # fmt: skip
    """Add a tile's weighted values to the sums of a decode's rows. Also prefetch `lines` cache lines of the next
    tile per value. In each group of LANES tokens, begin at byte `after`: `score` has prefetched the bytes before."""
    for token in range(0, tokens, LANES):
        add_product(
            scores + 4 * token, 4 * TILE, keys + 8 * token, code, value_from, sums, 4 * padded, rows,
            min(LANES, tokens - token), padded,
            address_at(ahead + 8 * token) + after, lines if token < tokens_ahead else 0,
        )  # fmt: skip


@inlined
def sink_of(sinks: int, head: int) -> Any:
    """Return a head's sink (a score that has no value vector), scaled for a softmax with base 2."""
    return splat(number_at(sinks + 4 * head) * np.float32(math.log2(math.e)))


@part
def finish(
    sums: int, summed: int, most: int, target: int, shape: tuple[int, int, int, int, int, int], is_part: bool,
    sinks: int,
) -> None:  # fmt: skip
    """Write the rows' results to `target`. For a part of a context, write the input of `merge` instead: each row's
    weighted sum, its largest score and the sum of its weights."""
    row, rows, head, kv_heads, group, head_dim = shape
    padded = (head_dim + LANES - 1) // LANES * LANES
    for r in range(rows):
        to = target + 4 * head_dim * (((row + r // group) * kv_heads + head) * group + r % group)
        divisor, scale = splat(number_at(summed + 4 * r)), splat(1.0)
        if is_part:
            to, divisor = target + (4 * head_dim + 8) * r, splat(1.0)
            put_number(number_at(most + 4 * r), to + 4 * head_dim)
            put_number(number_at(summed + 4 * r), to + 4 * head_dim + 4)
        elif sinks:
            sink, top = sink_of(sinks, head * group + r % group), splat(number_at(most + 4 * r))
            scale = two_to_the(top - larger(top, sink))
            divisor = multiply_add(divisor, scale, two_to_the(sink - larger(top, sink)))
        for at in range(0, head_dim, LANES):
            x = load(sums + 4 * (r * padded + at)) * scale
            store_some(x / divisor, to + 4 * at, head_dim - at, FLOAT32)


@kernel
def attend(values: Any) -> None:
    """Compute attention. A unit of work is one item (see `engine.cpu.attention_items.AttentionWork`) for one key head.
    Threads take units in order. `values[0]` counts the units that threads have taken."""
    units, items, q, out, pool, parts = values[1], values[2], values[3], values[4], values[5], values[6]
    table, table_width, block_bytes, head_bytes, block_tokens, code, kv_heads, group, head_dim, window = (
        values[7], values[8], values[9], values[10], values[11], values[12], values[13], values[14], values[15],
        values[16]
    )  # fmt: skip
    value_at, token_bytes, sinks, softcap = values[17], values[18], values[20], values[21]
    area = values[19] + 8 * AREAS * thread_number()
    rows_q, scores, sums, most, summed, found, turned, ends, wide = (
        address_at(area), address_at(area + 8), address_at(area + 16), address_at(area + 24), address_at(area + 32),
        address_at(area + 40), address_at(area + 48), address_at(area + 56), address_at(area + 64),
    )  # fmt: skip
    ahead, widened, listed = found + 8 * TILE, found + 16 * TILE, found + 24 * TILE
    sizes = (block_bytes, token_bytes, block_tokens, code, head_dim, value_at)
    padded = (head_dim + LANES - 1) // LANES * LANES
    unit = take_next(values)
    tokens_ahead = first_tile(unit, units, items, table, table_width, pool, head_bytes, kv_heads, group, sizes, ahead)
    fetch(ahead, tokens_ahead, sizes[1])
    while unit < units:
        following = take_next(values)  # taken now, to prefetch its first tile during the current unit's last tile
        head = unit % kv_heads
        item = items + 4 * FIELDS * (unit // kv_heads)
        slice_, row, count, start = index_at(item), index_at(item + 4), index_at(item + 8), index_at(item + 12)
        low, high, place = index_at(item + 16), index_at(item + 20), index_at(item + 24)
        rows, tile, few = count * group, tile_of(count * group), count * group <= FEW_ROWS
        shape = (row, rows, head, kv_heads, group, head_dim)
        width = (rows + LANES - 1) // LANES * LANES
        # The stride is in bytes. With an odd number of vectors, the rows are distributed over all sets of the cache.
        stride = 4 * LANES * (width // LANES | 1)
        begin(q, few, rows_q, turned, stride, listed, ends, most, summed, sums, shape)
        blocks, base = table + 4 * slice_ * table_width, pool + head * head_bytes
        while low < high:
            found, ahead, tokens = ahead, found, tokens_ahead
            if low + tile < high:
                tokens_ahead = locate(blocks, low + tile, min(high, low + 2 * tile), base, sizes, ahead)
            else:
                tokens_ahead = first_tile(
                    following, units, items, table, table_width, pool, head_bytes, kv_heads, group, sizes, ahead
                )
            keys, kind, value_from = found, code, value_at * (4 if code == FLOAT32 else 2)
            if padded != head_dim or (code != FLOAT32 and not few):
                widen(found, tokens, sizes, wide, widened)
                keys, kind, value_from = widened, FLOAT32, 4 * padded if value_at else 0
            if few:
                columns = (tokens + LANES - 1) // LANES * LANES
                by_keys, by_values = shares(rows, padded, sizes[1])
                fill_up(keys, tokens, columns, turned - 4 * padded)
                score(rows_q, rows, keys, kind, columns, padded, scores, ahead, tokens_ahead, by_keys)
                fetch(ahead + 8 * columns, tokens_ahead - columns, sizes[1])
                weigh(scores, rows, group, start - low, tokens, columns, window, softcap, most, summed, sums, padded)
                add_values(
                    scores, rows, keys, kind, value_from, tokens, sums, padded, ahead, tokens_ahead, by_values,
                    LINE * by_keys * rows * padded // LANES,
                )  # fmt: skip
            else:
                listed_times(keys, turned, stride, scores, stride, tokens, padded, width, ahead, tokens_ahead, sizes[1])
                weigh_columns(
                    scores, stride, rows, start - low, tokens, window, softcap, ends, most, summed, sums, padded, listed
                )
                add_times_listed(scores, 4, stride, keys, value_from, sums, 4 * padded, rows, tokens, padded)
            low += tile
        target = out if place < 0 else parts + (place + head * rows) * (4 * head_dim + 8)
        finish(sums, summed, most, target, shape, place >= 0, sinks)
        unit = following


@kernel
def merge(values: Any) -> None:
    """For each divided item and each key head, merge the parts' partial results into one result per row."""
    units, items, out, parts = values[1], values[2], values[3], values[4]
    kv_heads, group, head_dim, sinks = values[5], values[6], values[7], values[8]
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
            if sinks:
                sink = sink_of(sinks, head * group + r % group)
                most = larger(sink, most)
                summed = two_to_the(sink - most)
            for index in range(num_parts):
                scale = two_to_the(splat(number_at(source + index * step + 4 * head_dim)) - most)
                summed = multiply_add(scale, splat(number_at(source + index * step + 4 * head_dim + 4)), summed)
            target = out + (((row + r // group) * kv_heads + head) * group + r % group) * 4 * head_dim
            for at in range(0, head_dim, LANES):
                x = splat(0.0)
                for index in range(num_parts):
                    scale = two_to_the(splat(number_at(source + index * step + 4 * head_dim)) - most)
                    x = multiply_add(scale, load_some(source + index * step + 4 * at, head_dim - at, FLOAT32), x)
                store_some(x / summed, target + 4 * at, head_dim - at, FLOAT32)
        unit = take_next(values)

"""Functions for the tiles in which attention kernels read a context. They find a tile's rows in the KV pool, prefetch
them, and turn the tile's scores into weights by an online softmax. Weights are powers of 2 instead of e, so queries are
multiplied by log2(e)."""

import math

import numpy as np

from engine.cpu.jit import part
from engine.cpu.simd import (
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
    number_at,
    prefetch,
    put_address,
    put_number,
    splat,
    store,
    total,
    two_to_the,
    where_less,
)

TILE = 96  # tokens in a tile for a chunk's queries, a multiple of PANEL_ROWS
FEW_ROWS = 8  # an item with at most this many rows (queries times query heads per key head) is computed as a decode
FEW_TILE = 32  # tokens in a tile for a decode: the current and the next tile fit into the first two levels of cache
LINE = 64  # bytes of a cache line
FIELDS = 7  # number of fields of an item: see `engine.cpu.attention_items.AttentionWork`
# In order: bytes per block, bytes per token, tokens per block, code of the pool's dtype, elements per key, and distance
# in elements from a token's key to its value. The distance is 0 for latents, which are both key and value.
Sizes = tuple[int, int, int, int, int, int]
UNSEEN = -1e30  # initial value of the running maximum: finite, so that the difference of two maxima is not NaN


@part
def tile_of(rows: int) -> int:
    return FEW_TILE if rows <= FEW_ROWS else TILE


@part
def locate(table: int, low: int, high: int, base: int, sizes: Sizes, rows: int) -> int:
    """Store in `rows` the address of each token's key and value, for positions [low, high). Return the token count."""
    block_bytes, token_bytes, block_tokens, _, _, _ = sizes
    count = high - low
    token = 0
    while token < count:
        position = low + token
        inside = position % block_tokens
        row = base + index_at(table + 4 * (position // block_tokens)) * block_bytes + inside * token_bytes
        for _ in range(min(block_tokens - inside, count - token)):
            put_address(row, rows + 8 * token)
            row += token_bytes
            token += 1
    return count


@part
def fetch(rows: int, tokens: int, token_bytes: int) -> None:
    """Prefetch the keys and values of `tokens` tokens, whose addresses `rows` lists."""
    for token in range(tokens):
        row = address_at(rows + 8 * token)
        for at in range(0, token_bytes, LINE):
            prefetch(row + at)


@part
def fill_up(rows: int, tokens: int, columns: int, zeros: int) -> None:
    """Extend the list `rows` from `tokens` to `columns` addresses by appending `zeros`, the address of zeros."""
    for token in range(tokens, columns):
        put_address(zeros, rows + 8 * token)


@part
def widen(rows: int, count: int, sizes: Sizes, wide: int, widened: int) -> None:
    """Copy the keys and values of `count` tokens, whose addresses `rows` lists, to `wide` as float32, padded with zeros
    to whole vectors. List their new addresses at `widened`."""
    _, _, _, code, head_dim, value_at = sizes
    item = 4 if code == FLOAT32 else 2
    padded = (head_dim + LANES - 1) // LANES * LANES
    for token in range(count):
        row, to = address_at(rows + 8 * token), wide + 8 * padded * token
        put_address(to, widened + 8 * token)
        for at in range(0, head_dim, LANES):
            store(load_some(row + at * item, head_dim - at, code), to + 4 * at)
            if value_at:
                store(load_some(row + (value_at + at) * item, head_dim - at, code), to + 4 * (padded + at))


@part
def shares(rows: int, padded: int, token_bytes: int) -> tuple[int, int]:
    """Return how many cache lines `score` prefetches per vector of a row, and `add_values` prefetches per value.

    The prefetches are spread over the current tile, because the CPU would wait for memory after a burst of prefetches.
    The LANES tokens of a group are assumed to be contiguous. If they are not, the kernel is slower, but correct."""
    by_values = max(1, token_bytes // (4 * LINE))
    left = LANES * max(0, token_bytes // LINE - by_values)
    steps = rows * padded // LANES
    return (left + steps - 1) // steps, by_values


@part
def first_tile(
    unit: int, units: int, items: int, table: int, table_width: int, pool: int, head_bytes: int, kv_heads: int,
    group: int, sizes: Sizes, rows: int,
) -> int:  # fmt: skip
    """List the addresses of the tokens in a unit's first tile. Return their number, or 0 if there is no such unit."""
    if unit >= units:
        return 0
    item = items + 4 * FIELDS * (unit // kv_heads)
    blocks, base = table + 4 * index_at(item) * table_width, pool + unit % kv_heads * head_bytes
    low, high = index_at(item + 16), index_at(item + 20)
    return locate(blocks, low, min(high, low + tile_of(group * index_at(item + 8))), base, sizes, rows)


@part
def softmax(scores: int, low: int, high: int, columns: int, most_at: int, sum_at: int, sums: int, padded: int) -> None:
    """Replace one row of scores by weights relative to the largest score so far. Only columns low <= i < high are
    visible. `most_at`, `sum_at` and `sums` are the addresses of the row's largest score, sum of weights and sum of
    weighted values. If the largest score grows, the sums so far are scaled down."""
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
        weight = two_to_the(load(scores + 4 * at) - splat(most))
        added = added + weight
        store(weight, scores + 4 * at)
    so_far = number_at(sum_at)
    if most > before:
        scale = two_to_the(splat(before - most))
        so_far *= largest(scale)
        for at in range(0, padded, LANES):
            store(load(sums + 4 * at) * scale, sums + 4 * at)
        put_number(most, most_at)
    put_number(so_far + total(added), sum_at)


@part
def cap(scores: int, rows: int, row_bytes: int, columns: int, softcap: float) -> None:
    """Replace each score x by c * tanh(x / c), where c is `softcap` * log2(e), since the softmax has base 2."""
    limit, one = softcap * np.float32(math.log2(math.e)), splat(1.0)
    steps, twice = splat(np.float32(2.0) / limit), splat(np.float32(2.0) * limit)
    for row in range(rows):
        for at in range(scores + row * row_bytes, scores + row * row_bytes + 4 * columns, 4 * LANES):
            # tanh(y) = 1 - 2 / (exp(2 y) + 1)
            store(splat(limit) - twice / (exponential(load(at) * steps) + one), at)


@part
def weigh(
    scores: int, rows: int, group: int, start: int, tokens: int, columns: int, window: int, softcap: int, most: int,
    summed: int, sums: int, padded: int,
) -> None:  # fmt: skip
    """Apply `softmax` to every row of a tile. `softcap` is the address of a soft cap that is applied first, or 0.
    `start` is the first query's position relative to the tile's start."""
    if softcap:
        cap(scores, rows, 4 * TILE, columns, number_at(softcap))
    for r in range(rows):
        end = start + r // group + 1
        softmax(
            scores + 4 * TILE * r, max(0, end - window) if window else 0, min(tokens, end), columns,
            most + 4 * r, summed + 4 * r, sums + 4 * padded * r, padded,
        )  # fmt: skip


@part
def weigh_columns(
    scores: int, stride: int, rows: int, start: int, tokens: int, window: int, softcap: int, ends: int, most: int,
    summed: int, sums: int, padded: int, scales: int,
) -> None:  # fmt: skip
    """Do the same as `weigh` for transposed scores, which have a row for each token and a column for each row of
    queries. LANES columns are processed at once, without operations across lanes. `ends` has the number of tokens that
    each row of queries sees, counted from the first query's position. `scales` is working memory for one vector."""
    if softcap:
        cap(scores, tokens, stride, (rows + LANES - 1) // LANES * LANES, number_at(softcap))
    for row in range(0, rows, LANES):
        column = scores + 4 * row
        if start + number_at(ends + 4 * row) < tokens or (
            window and start + number_at(ends + 4 * (row + LANES - 1)) > window
        ):
            hide(column, stride, tokens, ends + 4 * row, start, window)
        before = load(most + 4 * row)
        top, other = before, before  # two independent chains of operations, for speed
        for token in range(0, tokens - 1, 2):
            top = larger(load(column + token * stride), top)
            other = larger(load(column + (token + 1) * stride), other)
        top = larger(larger(load(column + (tokens - 1) * stride), top), other)
        added = splat(0.0)
        for token in range(tokens):
            weight = two_to_the(load(column + token * stride) - top)
            added = added + weight
            store(weight, column + token * stride)
        scale = two_to_the(before - top)
        store(load(summed + 4 * row) * scale + added, summed + 4 * row)
        if largest(where_less(before, top, splat(1.0), splat(0.0))) > 0.0:
            store(top, most + 4 * row)
            store(scale, scales)
            scale_down(sums + 4 * row * padded, min(LANES, rows - row), padded, scales)


@part
def hide(column: int, stride: int, tokens: int, ends: int, start: int, window: int) -> None:
    """For each of LANES rows, store a score of -inf for every token that the row does not see."""
    end, hidden = load(ends) + splat(start), splat(-math.inf)
    low = end - splat(float(window) if window else math.inf)
    for token in range(tokens):
        place = splat(token)
        x = where_less(place, end, load(column + token * stride), hidden)
        store(where_less(place, low, hidden, x), column + token * stride)


@part
def scale_down(sums: int, rows: int, padded: int, scales: int) -> None:
    """Multiply each row's sums by the scale of the row, which is 1 for most rows."""
    for r in range(rows):
        scale = number_at(scales + 4 * r)
        if scale != 1.0:
            for at in range(4 * r * padded, 4 * (r + 1) * padded, 4 * LANES):
                store(load(sums + at) * splat(scale), sums + at)

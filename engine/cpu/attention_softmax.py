"""The online softmax of the attention kernels: a tile's scores become weights relative to the largest score so far.

Weights are powers of 2 instead of e; the queries are scaled accordingly.
"""

import math

from engine.cpu.attention_tiles import TILE
from engine.cpu.jit import part
from engine.cpu.simd import (
    LANES,
    keep_range,
    larger,
    largest,
    load,
    number_at,
    put_number,
    splat,
    store,
    total,
    two_to_the,
    where_less,
)

UNSEEN = -1e30  # initial running maximum: finite, so that differences are not NaN


@part
def softmax(scores: int, low: int, high: int, columns: int, most_at: int, sum_at: int, sums: int, padded: int) -> None:
    """Replace one row of scores by weights relative to the largest score so far. Only columns low <= i < high are
    visible. If the maximum grows, earlier sums are scaled down."""
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
def weigh(
    scores: int, rows: int, group: int, start: int, tokens: int, columns: int, window: int, most: int, summed: int,
    sums: int, padded: int,
) -> None:  # fmt: skip
    """Apply `softmax` to every row of a tile. `start` is the first query's position relative to the tile's start."""
    for r in range(rows):
        end = start + r // group + 1
        softmax(
            scores + 4 * TILE * r, max(0, end - window) if window else 0, min(tokens, end), columns,
            most + 4 * r, summed + 4 * r, sums + 4 * padded * r, padded,
        )  # fmt: skip


@part
def weigh_columns(
    scores: int, stride: int, rows: int, start: int, tokens: int, window: int, ends: int, most: int, summed: int,
    sums: int, padded: int, scales: int,
) -> None:  # fmt: skip
    """Do the same as `weigh` for transposed scores: a row for each token, and a column for each of the `rows`. LANES
    columns are processed at once, without operations across lanes. `ends` has, for each of the `rows`, the number of
    tokens that it sees, counted from the first query's position. `scales` is space for a vector."""
    for row in range(0, rows, LANES):
        column = scores + 4 * row
        if start + number_at(ends + 4 * row) < tokens or (
            window and start + number_at(ends + 4 * (row + LANES - 1)) > window
        ):
            hide(column, stride, tokens, ends + 4 * row, start, window)
        before = load(most + 4 * row)
        top, other = before, before  # two independent chains
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
    """Set scores to -inf if the row does not see the token. Processes LANES rows."""
    end, hidden = load(ends) + splat(start), splat(-math.inf)
    low = end - splat(float(window) if window else math.inf)
    for token in range(tokens):
        place = splat(token)
        x = where_less(place, end, load(column + token * stride), hidden)
        store(where_less(place, low, hidden, x), column + token * stride)


@part
def scale_down(sums: int, rows: int, padded: int, scales: int) -> None:
    """Multiply each row's sums by its scale, which is 1 for most rows."""
    for r in range(rows):
        scale = number_at(scales + 4 * r)
        if scale != 1.0:
            for at in range(4 * r * padded, 4 * (r + 1) * padded, 4 * LANES):
                store(load(sums + at) * splat(scale), sums + at)

"""Numba kernels that choose the experts of tokens, order rows by expert, and add the outputs of experts."""

from typing import Any

import numpy as np

from engine.cpu.jit import kernel, num_threads, part, thread_number
from engine.cpu.simd import (
    FLOAT32,
    LANES,
    address_at,
    exponential,
    load_some,
    multiply_add,
    number_at,
    put_address,
    put_number,
    splat,
    store_some,
    total,
)

SOFTMAX, SIGMOID, CHOSEN = 0, 1, 2  # how scores are computed from logits: see `MoeSpec`


@part
def score(logits: int, scores: int, count: int, kind: int) -> None:
    """Store the scores of one token for all experts."""
    highest = number_at(logits)
    for at in range(1, count):
        highest = max(highest, number_at(logits + 4 * at))
    summed = np.float32(0.0)
    for at in range(0, count, LANES):
        left, x = count - at, load_some(logits + 4 * at, count - at, FLOAT32)
        if kind == SIGMOID:
            x = splat(1.0) / (splat(1.0) + exponential(splat(0.0) - x))
        elif kind == SOFTMAX:
            x = exponential(x - splat(highest))
        store_some(x, scores + 4 * at, left, FLOAT32)
        summed += total(load_some(scores + 4 * at, left, FLOAT32))
    if kind == SOFTMAX:
        for at in range(0, count, LANES):
            x = load_some(scores + 4 * at, count - at, FLOAT32) / splat(summed)
            store_some(x, scores + 4 * at, count - at, FLOAT32)


@part
def choose(candidates: int, count: int, top_k: int, chosen: int) -> None:
    """Store the indices of the `top_k` largest candidates, best first, and replace these candidates by -inf.

    Among equal candidates, the lowest index comes first. If values are NaN, indices may occur twice, but they are in
    range.
    """
    for place in range(top_k):
        best, most = 0, number_at(candidates)
        for at in range(1, count):
            if number_at(candidates + 4 * at) > most:
                best, most = at, number_at(candidates + 4 * at)
        put_address(best, chosen + 8 * place)
        put_number(np.float32(-np.inf), candidates + 4 * best)


@kernel
def route(values: Any) -> None:
    """Choose experts. The code below names the first ten `values`. The last two are the addresses of the weights and of
    the chosen experts. `stride` is in bytes, `memory` holds each token's scores and candidates, `correction` may be 0
    (none), `factors` multiply weights, and `renormalizes` is 1 if weights are divided by their sum."""
    tokens, experts, top_k, logits, stride, memory = values[0], values[1], values[2], values[3], values[4], values[5]
    correction, factors, kind, renormalizes = values[6], values[7], values[8], values[9]
    for token in range(thread_number(), tokens, num_threads()):
        scores, candidates = memory + 8 * experts * token, memory + 8 * experts * token + 4 * experts
        weights, chosen = values[10] + 4 * top_k * token, values[11] + 8 * top_k * token
        score(logits + stride * token, scores, experts, kind)
        for at in range(experts):
            added = number_at(correction + 4 * at) if correction else np.float32(0.0)
            put_number(number_at(scores + 4 * at) + added, candidates + 4 * at)
        choose(candidates, experts, top_k, chosen)
        for place in range(top_k):
            put_number(number_at(scores + 4 * address_at(chosen + 8 * place)), weights + 4 * place)
        if kind == CHOSEN:
            score(weights, weights, top_k, SOFTMAX)
        summed = np.float32(0.0)
        for place in range(top_k):
            summed += number_at(weights + 4 * place)
        for place in range(top_k):
            weight = number_at(weights + 4 * place)
            weight = weight / summed if renormalizes else weight
            put_number(weight * number_at(factors + 4 * address_at(chosen + 8 * place)), weights + 4 * place)


@kernel
def sort_by_expert(values: Any) -> None:
    """Sort rows by expert, on one thread. `values`: the numbers of tokens, of experts and of experts per token, and the
    addresses of `chosen` and of three results: each row's token, each choice's row, each expert's number of rows."""
    choices, experts, top_k, chosen = values[0] * values[2], values[1], values[2], values[3]
    sources, places, counts = values[4], values[5], values[6]
    if thread_number() > 0:
        return
    for expert in range(experts):
        put_address(0, counts + 8 * expert)
    for choice in range(choices):
        at = counts + 8 * address_at(chosen + 8 * choice)
        put_address(address_at(at) + 1, at)
    row = 0
    for expert in range(experts):  # `counts` temporarily has the next free row of each expert
        count = address_at(counts + 8 * expert)
        put_address(row, counts + 8 * expert)
        row += count
    for choice in range(choices):
        at = counts + 8 * address_at(chosen + 8 * choice)
        put_address(choice // top_k, sources + 8 * address_at(at))
        put_address(address_at(at), places + 8 * choice)
        put_address(address_at(at) + 1, at)
    for expert in range(experts - 1, 0, -1):  # `counts` now has the end of each expert's rows
        end = address_at(counts + 8 * expert)
        put_address(end - address_at(counts + 8 * (expert - 1)), counts + 8 * expert)


@kernel
def gather(values: Any) -> None:
    """Copy row sources[i] of `rows` to row i of `target`. `values`: number of rows of `target`, size of a row, and the
    addresses of `rows`, `sources` and `target`."""
    size, rows, sources, target = values[1], values[2], values[3], values[4]
    for row in range(thread_number(), values[0], num_threads()):
        source = rows + 4 * size * address_at(sources + 8 * row)
        for at in range(0, size, LANES):
            x = load_some(source + 4 * at, size - at, FLOAT32)
            store_some(x, target + 4 * (size * row + at), size - at, FLOAT32)


@kernel
def combine(values: Any) -> None:
    """Add the weighted outputs of each token's experts. `values`: number of tokens, outputs per token, size of a row,
    and the addresses of outputs, places, weights and target."""
    tokens, top_k, size, outputs, places = values[0], values[1], values[2], values[3], values[4]
    weights, target = values[5], values[6]
    for token in range(thread_number(), tokens, num_threads()):
        for at in range(0, size, LANES):
            left, added = size - at, splat(0.0)
            for index in range(token * top_k, (token + 1) * top_k):
                row = outputs + 4 * size * address_at(places + 8 * index)
                factor = splat(number_at(weights + 4 * index))
                added = multiply_add(load_some(row + 4 * at, left, FLOAT32), factor, added)
            store_some(added, target + 4 * (token * size + at), left, FLOAT32)

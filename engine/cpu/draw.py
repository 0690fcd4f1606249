# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,arg-type,attr-defined,assignment"
"""The draw of `engine.sampling` as a numba kernel, in which one thread draws the token of a row. Importing this module
compiles the kernel or loads it from disk.

The kernel does not sort. It computes a cheap upper bound of each token's noise, and the exact noise only for tokens
that may still be chosen. For top_p, the kernel draws from all candidates, and accepts the drawn token if top_p keeps
this token. Otherwise, the kernel drops the drawn token and all tokens that are at most as likely, and draws again
(rejection with a rising pivot, as in FlashInfer's sorting-free sampling).
"""

import math

import numpy as np
import torch
from llvmlite import ir
from numba import carray
from numba.core import types
from torch import Tensor

from engine.counter_rng import BROKEN, GOLDEN, NOTHING_ALLOWED, WORDS
from engine.cpu.jit import inlined, kernel, thread_number
from engine.cpu.simd import (
    FLOAT32,
    LANES,
    address_at,
    exponential,
    larger,
    largest,
    load,
    load_some,
    number_at,
    pointer_to,
    put_address,
    splat,
    store_some,
    take_next,
    total,
    where_less,
    written,
)
from engine.token_masks import TokenMasks
from shared.limits import GREEDY_BELOW

WORK = 4  # elementary operations per logit; their total is compared with `engine.cpu.jit.PARALLEL_WORK`
WEIGHED = 64 * LANES  # number of weights that are summed in float32 before their sum is added in float64
RUN = 32  # scores per run in `nth_score`
TILE = 32  # number of tokens whose noise bounds are computed together
LN2 = math.log(2)
# numba converts operands to float64 if one is int64 and the other uint64, so all constants of the noise are unsigned.
_GOLDEN, _ONE, _EXPONENT = np.uint64(GOLDEN), np.uint64(1), np.uint64(1023 << 52)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _12 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(12)

_double = written(types.float64, (types.uint64,), lambda b, bits: b.bitcast(bits, ir.DoubleType()))
_bits = written(types.int64, (types.float64,), lambda b, number: b.bitcast(number, ir.IntType(64)))
_parameter = written(types.float64, (types.int64,), lambda b, at: b.load(b.inttoptr(at, ir.DoubleType().as_pointer())))


@inlined
def sum_of(row, count):
    whole = count - count % LANES
    summed = splat(0.0)
    for at in range(0, whole, LANES):
        summed = summed + load(row + 4 * at)
    return total(summed + load_some(row + 4 * whole, count - whole, FLOAT32))


@inlined
def most_likely(row, count):
    """Return the largest score of a row and the first token that has it."""
    whole = count - count % LANES
    vector = splat(-math.inf)
    for at in range(0, whole, LANES):
        vector = larger(load(row + 4 * at), vector)
    best = largest(vector)
    for at in range(whole, count):
        best = max(best, number_at(row + 4 * at))
    token = 0
    while token < count - 1 and number_at(row + 4 * token) != best:
        token += 1
    return best, token


@inlined
def divide(row, count, by, scores):
    """Divide the row by `by`. Store the result in `scores`, followed by LANES values of -inf."""
    for at in range(0, count, LANES):
        store_some(load_some(row + 4 * at, count - at, FLOAT32) / splat(by), scores + 4 * at, count - at, FLOAT32)
    end(carray(pointer_to(scores), count + LANES, np.float32), count)


@inlined
def end(scores, count):
    for at in range(count, count + LANES):
        scores[at] = -math.inf


@inlined
def keep(area, scores, tokens, count, above, least):
    """Keep only scores that are larger than `above` and at least `least`. Return their number."""
    kept = 0
    for first in range(0, count, LANES):
        top = largest(load(area + 4 * first))
        if top > above and top >= least:
            for at in range(first, min(count, first + LANES)):
                score, token = scores[at], tokens[at]
                scores[kept], tokens[kept] = score, token
                kept += (score > above) & (score >= least)
    end(scores, kept)
    return kept


@inlined
def weight(scores, count, above, best):
    """Return the sum of exp(score - best) over the scores that are larger than `above`."""
    summed = 0.0
    for first in range(0, count, WEIGHED):
        part = splat(0.0)
        for at in range(first, min(count, first + WEIGHED), LANES):
            score = load(scores + 4 * at)
            part = part + where_less(splat(above), score, exponential(score - splat(best)), splat(0.0))
        summed += total(part)
    return summed


@inlined
def nth_largest(values, count, nth):
    """Return the nth largest value, counted from 0, by Hoare's selection, which reorders `values`."""
    low, high = 0, count - 1
    while low < high:
        pivot, left, right = values[(low + high) >> 1], low, high
        while left <= right:
            while values[left] > pivot:
                left += 1
            while values[right] < pivot:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left += 1
                right -= 1
        if nth <= right:
            high = right
        elif nth >= left:
            low = left
        else:
            break
    return values[nth]


@inlined
def rest_of_one(key, token):
    """Return exactly 1 - u, where u is the token's uniform number in `engine.counter_rng`."""
    mixed = key + (np.uint64(token) + _ONE) * _GOLDEN
    mixed = (mixed ^ (mixed >> _30)) * _FACTORS[0]
    mixed = (mixed ^ (mixed >> _27)) * _FACTORS[1]
    mixed = (mixed ^ (mixed >> _31)) >> _12
    return 2.0 - _double(mixed | _EXPONENT) - 2.0**-53


@inlined
def winner(scores, tokens, count, key):
    """Return the index of the token with the largest sum of score and noise. The noise is -log(-log(u)).

    The noise of TILE tokens is computed only if an upper bound of the noise allows one of them to win. The bound uses
    two facts: the noise is at most -log(1 - u), and log2(m * 2**e) is at least e + m - 1 for 1 <= m < 2."""
    best, where = -math.inf, 0
    for first in range(0, count, TILE):
        last, hopeful = min(count, first + TILE), 0
        for at in range(first, last):
            power = np.float64(_bits(rest_of_one(key, tokens[at]))) * 2.0**-52
            hopeful += np.float64(scores[at]) + (1023 + 1e-9 - power) * LN2 > best
        if hopeful:
            for at in range(first, last):
                noisy = np.float64(scores[at]) - math.log(-math.log(1.0 - rest_of_one(key, tokens[at])))
                if noisy > best:
                    best, where = noisy, at
    return where


@inlined
def nth_score(area, scores, ranked, count, nth):
    """Return the nth largest score, counted from 0.

    The scores are divided into runs of RUN scores. The nth largest of the runs' maxima is a lower bound of the result,
    so scores below this bound are ignored."""
    runs, least = count // RUN, np.float32(-math.inf)
    if nth < runs:
        for run in range(runs):
            top = load(area + 4 * run * RUN)
            for at in range(run * RUN + LANES, (run + 1) * RUN, LANES):
                top = larger(top, load(area + 4 * at))
            ranked[run] = largest(top)
        least = nth_largest(ranked, runs, nth)
    candidates = 0
    for first in range(0, count, LANES):
        if largest(load(area + 4 * first)) >= least:
            for at in range(first, min(count, first + LANES)):
                ranked[candidates] = scores[at]
                candidates += scores[at] >= least
    return nth_largest(ranked, candidates, nth)


@inlined
def allowed(row, count, words, by, scores, tokens):
    """Store the tokens whose bits in `words` are set, and their scores: logits divided by `by`. Return their number."""
    kept = np.uint64(0)  # unsigned, because numba's code for a signed index also handles negative values
    for index in range(np.uint64(min(len(words), (count + 31) >> 5))):
        word, first = words[index], np.uint64(32) * index
        if word:
            for at in range(first, min(np.uint64(count), first + np.uint64(32))):
                scores[kept], tokens[kept] = row[at] / by, at
                kept += np.uint64((word >> np.uint32(at - first)) & np.uint32(1))
    kept = np.int64(kept)
    end(scores, kept)
    return kept


@inlined
def gather(row, count, mask, num_words, by, area):
    """Store the tokens that the mask, if any, allows, and their scores: logits divided by `by`. Return their number."""
    room = count + LANES
    tokens = carray(pointer_to(area + 4 * room), room, np.int32)
    if mask:
        words, scores = carray(pointer_to(mask), num_words, np.uint32), carray(pointer_to(area), room, np.float32)
        return allowed(carray(pointer_to(row), count, np.float32), count, words, by, scores, tokens)
    divide(row, count, by, area)
    for token in range(count):
        tokens[token] = token
    return count


@inlined
def draw_one(row, count, parameters, area, mask, num_words):
    temperature = np.float32(_parameter(parameters))
    is_greedy = _parameter(parameters) < GREEDY_BELOW
    top_p, min_p, top_k = _parameter(parameters + 8), _parameter(parameters + 16), address_at(parameters + 24)
    room = count + LANES
    scores = carray(pointer_to(area), room, np.float32)
    tokens = carray(pointer_to(area + 4 * room), room, np.int32)
    ranked = carray(pointer_to(area + 8 * room), room, np.float32)
    count = gather(row, count, mask, num_words, np.float32(1) if is_greedy else temperature, area)
    best, at = most_likely(area, count)
    if mask and best == -math.inf:  # this is also true if the mask allows no token
        return NOTHING_ALLOWED
    if is_greedy or not math.isfinite(best):  # not finite: a tiny penalty or temperature made the division overflow
        return tokens[at]
    least, held = np.float32(-math.inf), 0.0  # `held`: total weight of the tokens that top_k keeps
    if min_p > 0:
        least = best + np.float32(math.log(np.float32(min_p)))
        count = keep(area, scores, tokens, count, np.float32(-math.inf), least)
    if 0 < top_k < count:
        least = nth_score(area, scores, ranked, count, top_k - 1)
        count = keep(area, scores, tokens, count, np.float32(-math.inf), least)
        if top_p < 1:
            over = 0
            for at in range(count):
                over += scores[at] > least
            held = weight(area, count, least, best) + (top_k - over) * math.exp(least - best)
    elif top_p < 1:
        held = weight(area, count, np.float32(-math.inf), best)
    while True:
        at = winner(scores, tokens, count, np.uint64(address_at(parameters + 32)))
        score = scores[at]
        if top_p >= 1 or score == best or weight(area, count, score, best) < top_p * held:
            return tokens[at]
        count = keep(area, scores, tokens, count, score, score)


@kernel
def _draw(values):
    """Draw the tokens of all rows. Threads take the rows in order. `values`, in order: counter, number of rows, size of
    the vocabulary; addresses of logits, adjusted logits, parameters, result and the threads' memory; bytes of memory
    per thread; address of a list of the rows' masks (an address or 0 for each row); number of words of a mask."""
    area = values[7] + values[8] * np.int64(thread_number())
    rows, vocab = values[1], values[2]
    while True:
        index = take_next(values)
        if index >= rows:
            return
        row, parameters = values[4] + 4 * vocab * index, values[5] + 8 * WORDS * index
        mask = address_at(values[9] + 8 * index)
        best, token = most_likely(row, vocab)
        if not math.isfinite(sum_of(values[3] + 4 * vocab * index, vocab)):
            token = BROKEN
        elif best == -math.inf:
            token = NOTHING_ALLOWED
        elif mask or _parameter(parameters) >= GREEDY_BELOW:
            token = draw_one(row, vocab, parameters, area, mask, values[10])
        put_address(np.int64(token), values[6] + 8 * index)


def draw(logits: Tensor, adjusted: Tensor, parameters: Tensor, masks: TokenMasks | None = None) -> list[int]:
    """Return each row's token, or the row's error code: `BROKEN` or `NOTHING_ALLOWED`.

    `logits` and `adjusted` are float32 [R, vocab]. `adjusted` has the logits after bans, bias and penalties, and may be
    the same tensor as `logits`. `parameters` is int64 [R, WORDS], as packed by `engine.sampling.parameters_of`. In
    the rows that `masks` lists, only the allowed tokens can be drawn.
    """
    rows, vocab = logits.shape
    logits, adjusted = logits.contiguous(), adjusted.contiguous()
    chosen, addresses, num_words = np.empty(rows, np.int64), np.zeros(rows, np.int64), 0
    if masks is not None:
        words, num_words = np.ascontiguousarray(masks.words), masks.words.shape[1]
        addresses[masks.rows] = words.ctypes.data + 4 * num_words * np.arange(len(masks.rows))
    areas = torch.empty((torch.get_num_threads(), 3, vocab + LANES), dtype=torch.float32)
    _draw(
        rows * vocab * WORK, 0, rows, vocab, logits.data_ptr(), adjusted.data_ptr(), parameters.data_ptr(),
        chosen.ctypes.data, areas.data_ptr(), areas.stride(0) * 4, addresses.ctypes.data, num_words,
    )  # fmt: skip
    return chosen.tolist()

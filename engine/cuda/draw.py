# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: N803 (Triton's compile-time constants have capital letters)
"""Draws tokens like `engine.sampling`, but on a GPU: in four launches, without sorting or waiting for the device.

The filters of a row (min_p, top_k and top_p) keep all scores at or above a threshold. A search over all float32
values finds the threshold: each round counts and weighs the scores above a few pivots. A round reads only the parts of
the vocabulary whose highest score is above the current lower bound of the threshold. If a few tokens are much likelier
than the others, only a few parts are read. Gumbel noise is then added to the scores that are kept.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine import counter_rng
from engine.counter_rng import GOLDEN
from shared.limits import GREEDY_BELOW

WORDS = tl.constexpr(counter_rng.WORDS)
GREEDY = tl.constexpr(GREEDY_BELOW)
GOLDEN_RATIO = tl.constexpr(GOLDEN)
BROKEN = tl.constexpr(counter_rng.BROKEN)
NOTHING_ALLOWED = tl.constexpr(counter_rng.NOTHING_ALLOWED)
LARGEST = tl.constexpr(3.4028234663852886e38)  # float32
PART = 4096  # number of tokens that each program of `draw_part` reads
SEARCHED = 2048  # number of tokens whose scores the search reads at once


def draw(logits: Tensor, parameters: Tensor, adjusted: Tensor | None = None) -> Tensor:
    """Return each row's token, int64 [R], or an error code: -1 if a logit is not finite, -2 if no token is allowed.

    `logits` is float32 [R, vocab], and `parameters` is packed by `parameters_of`. `adjusted` contains the logits after
    bans, bias and penalties, or is None if no row has bans, bias or penalties. Draws the same tokens as
    `engine.sampling.draw`, with one exception, because exponentials are float32 here. If the tokens that are likelier
    than a token have a total probability within 1e-6 of top_p, the two functions may disagree about this token.
    """
    rows, vocab = logits.shape
    scores = logits if adjusted is None else adjusted
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return chosen
    least = torch.empty(rows, dtype=torch.float32, device=logits.device)
    searched = triton.cdiv(vocab, SEARCHED)
    highest = torch.empty((rows, searched), dtype=torch.float32, device=logits.device)
    find_highest[(rows, searched)](scores, parameters, highest, scores.stride(0), vocab, BLOCK=SEARCHED, num_warps=8)
    find_least[(rows,)](
        scores, parameters, highest, least, scores.stride(0), vocab, searched,
        PARTS=triton.next_power_of_2(searched), BLOCK=SEARCHED, PIVOTS=4, num_warps=16,
    )  # fmt: skip
    parts = triton.cdiv(vocab, PART)
    best = torch.empty((rows, parts), dtype=torch.float64, device=logits.device)
    tokens = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    draw_part[(rows, parts)](
        logits, scores, parameters, least, best, tokens, logits.stride(0), scores.stride(0), vocab,
        PART=PART, BLOCK=1024, ADJUSTED=adjusted is not None, num_warps=8,
    )  # fmt: skip
    choose_part[(rows,)](best, tokens, chosen, parts, BLOCK=triton.next_power_of_2(parts), num_warps=1)
    return chosen


@triton.jit
def _number(parameters, row, word):
    return tl.load(parameters + row * WORDS + word).to(tl.float64, bitcast=True)


@triton.jit
def _scores(logits, first, vocab, temperature, BLOCK: tl.constexpr):
    """Return scores, float32 [BLOCK]. The division is rounded as in IEEE 754, because another rounding could change the
    order of scores."""
    column = first + tl.arange(0, BLOCK)
    return tl.div_rn(tl.load(logits + column, mask=column < vocab, other=float("-inf")), temperature)


@triton.jit
def _ordered(scores):
    """Map each score to an int32 key, so that keys are ordered like scores. The mapping of bits is its own inverse."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # map -0.0 to 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _next(highest, after, low, PARTS: tl.constexpr):
    """Return the first part after `after` that has a key above `low`, or PARTS if there is none. `highest` has the
    highest key of each part."""
    part = tl.arange(0, PARTS)
    return tl.min(tl.where((part > after) & (highest > low), part, PARTS), 0)


@triton.jit
def _search(
    logits, vocab, temperature, best, highest, low, high, top_k, mass,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr, WEIGHS: tl.constexpr,
):  # fmt: skip
    """Return the lowest key in [low, high] such that fewer than top_k scores have a higher key. If WEIGHS, the sum of
    these scores' weights must also be less than `mass`."""
    number = tl.arange(0, PIVOTS) + 1
    while low < high:
        span = high - low
        pivots = (low + span * number // (PIVOTS + 1)).to(tl.int32)
        counts = tl.zeros([BLOCK, PIVOTS], tl.int32)
        weights = tl.zeros([BLOCK, PIVOTS], tl.float64)
        part = _next(highest, -1, low, PARTS)
        while part < PARTS:
            scores = _scores(logits, part * BLOCK, vocab, temperature, BLOCK)
            above = _ordered(scores)[:, None] > pivots[None, :]
            counts += above.to(tl.int32)
            if WEIGHS:
                weights += tl.where(above, tl.exp(scores - best)[:, None], 0.0)
            part = _next(highest, part, low, PARTS)
        misses = ((tl.sum(counts, 0) >= top_k) | (tl.sum(weights, 0) >= mass)).to(tl.int32)
        missed = tl.sum(misses, 0)  # pivots ascend, so the first `missed` pivots are too low
        high = tl.where(missed < PIVOTS, low + span * (missed + 1) // (PIVOTS + 1), high)
        low = tl.where(missed > 0, low + span * missed // (PIVOTS + 1) + 1, low)
    return low


@triton.jit
def _has_filters(parameters, row, vocab):
    top_k = tl.load(parameters + row * WORDS + 3)
    chooses = (top_k > 0) & (top_k < vocab) | (_number(parameters, row, 1) < 1.0) | (_number(parameters, row, 2) > 0.0)
    return chooses & (_number(parameters, row, 0) >= GREEDY)


@triton.jit
def find_highest(logits, parameters, highest, row_stride, vocab, BLOCK: tl.constexpr):
    """Store each part's highest score, if the row has filters. Grid: rows x parts of BLOCK tokens."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _has_filters(parameters, row, vocab):
        divisor = _number(parameters, row, 0).to(tl.float32)
        scores = _scores(logits + row * row_stride, part * BLOCK, vocab, divisor, BLOCK)
        tl.store(highest + row * tl.num_programs(1) + part, tl.max(scores, 0))


@triton.jit
def find_least(
    logits, parameters, highest, least, row_stride, vocab, parts,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Store the lowest score that min_p, top_k and top_p keep, or -inf for a row without filters. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    floor = tl.full([], float("-inf"), tl.float32)
    if _has_filters(parameters, row, vocab):
        divisor, min_p = _number(parameters, row, 0).to(tl.float32), _number(parameters, row, 2)
        top_p, top_k = _number(parameters, row, 1), tl.load(parameters + row * WORDS + 3)
        top_k = tl.where(top_k > 0, tl.minimum(top_k, vocab), vocab)
        logits += row * row_stride
        part = tl.arange(0, PARTS)
        peaks = tl.load(highest + row * parts + part, mask=part < parts, other=float("-inf"))
        # Keep `best` finite, so that the search also ends in rows that are broken or have no allowed token.
        best = tl.minimum(tl.maximum(tl.max(peaks, 0), -LARGEST), LARGEST)
        peaks = _ordered(peaks)
        if min_p > 0.0:
            floor = best + tl.log(min_p).to(tl.float32)
        low, high = _ordered(floor).to(tl.int64), _ordered(best).to(tl.int64)
        if top_k < vocab:
            # The k-th highest of the parts' highest scores (k = top_k) is a lower bound: at least k scores reach it.
            descending = tl.sort(peaks, descending=True)
            bound = tl.sum(tl.where(part == top_k - 1, descending, 0), 0).to(tl.int64)
            low = tl.where(top_k <= parts, tl.minimum(tl.maximum(low, bound), high), low)
            low = _search(
                logits, vocab, divisor, best, peaks, low, high, top_k, float("inf"), PARTS, BLOCK, PIVOTS, False
            )
        if top_p < 1.0:
            total = _mass(logits, vocab, divisor, best, peaks, low, top_k, PARTS, BLOCK)
            # The weights of all scores below this bound sum to less than (1 - top_p) * total: top_p keeps none of them.
            bound = best + tl.log(tl.maximum((1.0 - top_p) * total / vocab, 1e-300)).to(tl.float32) - 1e-3
            low = tl.minimum(tl.maximum(low, _ordered(bound).to(tl.int64)), high)
            low = _search(
                logits, vocab, divisor, best, peaks, low, high, vocab + 1, top_p * total, PARTS, BLOCK, PIVOTS, True
            )
        bits = low.to(tl.int32)
        floor = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(least + row, floor)


@triton.jit
def _mass(logits, vocab, temperature, best, highest, least, top_k, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the total weight of the top_k highest scores, except scores with a key (`_ordered`) below `least`."""
    above, count = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.int32)
    alike, weight = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float32)
    part = _next(highest, -1, least - 1, PARTS)
    while part < PARTS:
        scores = _scores(logits, part * BLOCK, vocab, temperature, BLOCK)
        key, share = _ordered(scores), tl.exp(scores - best)
        above += tl.where(key > least, share, 0.0)
        count += (key > least).to(tl.int32)
        alike += (key == least).to(tl.int32)
        weight = tl.maximum(weight, tl.where(key == least, share, 0.0))
        part = _next(highest, part, least - 1, PARTS)
    let_in = tl.minimum(tl.sum(alike, 0), top_k - tl.sum(count, 0))
    return tl.sum(above, 0) + let_in.to(tl.float64) * tl.max(weight, 0)


@triton.jit
def _gumbel(key, tokens):
    """Compute `engine.counter_rng.gumbel` with unsigned integers."""
    value = key + (tokens + 1).to(tl.uint64) * GOLDEN_RATIO
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    value = value ^ (value >> 31)
    uniform = ((value >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2 ** -52
    return -tl.log(-tl.log(uniform))


@triton.jit
def draw_part(
    given, logits, parameters, least, best, tokens, given_stride, row_stride, vocab,
    PART: tl.constexpr, BLOCK: tl.constexpr, ADJUSTED: tl.constexpr,
):  # fmt: skip
    """Store each part's best score, and the token with this score or BROKEN. Grid: rows x parts of the vocabulary."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = _number(parameters, row, 0)
    greedy = temperature < GREEDY
    divisor = tl.where(greedy, 1.0, temperature).to(tl.float32)
    key = tl.load(parameters + row * WORDS + 4).to(tl.uint64, bitcast=True)
    floor = tl.load(least + row)
    value = tl.full([BLOCK], float("-inf"), tl.float64)
    token = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for first in range(part * PART, tl.minimum(vocab, (part + 1) * PART), BLOCK):
        column = first + tl.arange(0, BLOCK)
        scores = _scores(logits + row * row_stride, first, vocab, divisor, BLOCK)
        raw = scores
        if ADJUSTED:
            raw = tl.load(given + row * given_stride + column, mask=column < vocab, other=0.0)
        broken |= ((column < vocab) & ((tl.abs(raw) < float("inf")) == 0)).to(tl.int32)
        ranked = scores.to(tl.float64)
        kept = (scores >= floor) & (scores > float("-inf"))
        if (greedy == 0) & (tl.max(kept.to(tl.int32), 0) > 0):  # skip the expensive noise if no token here is kept
            ranked += _gumbel(key, column)
        ranked = tl.where(kept, ranked, float("-inf"))
        better = ranked > value
        value = tl.where(better, ranked, value)
        token = tl.where(better, column, token)
    top = tl.max(value, 0)
    chosen = tl.min(tl.where(value == top, token, vocab), 0)  # the first of equal scores, as in torch's argmax on a CPU
    place = row * tl.num_programs(1) + part
    tl.store(best + place, top)
    tl.store(tokens + place, tl.where(tl.max(broken, 0) > 0, BROKEN, chosen))


@triton.jit
def choose_part(best, tokens, chosen, parts, BLOCK: tl.constexpr):
    """Store the token of the best part of each row, or an error code. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    value = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
    token = tl.load(tokens + row * parts + part, mask=part < parts, other=2147483647)
    top = tl.max(value, 0)
    first = tl.min(tl.where(value == top, token, 2147483647), 0)
    first = tl.where(top == float("-inf"), NOTHING_ALLOWED, first)
    tl.store(chosen + row, tl.where(tl.min(token, 0) == BROKEN, BROKEN, first).to(tl.int64))

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: N803 (Triton's compile-time constants have capital letters)
"""Triton kernels that choose the experts of each token, and sort rows by expert, without work on the host."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)


@triton.jit
def route(
    logits,  # float32 [T, EXPERTS]
    correction, factors, weights, chosen,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORE: tl.constexpr, CORRECTS: tl.constexpr, RENORMALIZES: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_SCORES: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Compute `StepKernels.route`. Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    expert, choice, groups = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_G)
    real = expert < EXPERTS
    x = tl.load(logits + token * EXPERTS + expert, mask=real, other=float("-inf"))
    scores = x
    if SCORE == "softmax":
        powers = tl.exp(x - tl.max(x, 0))
        scores = powers / tl.sum(powers, 0)
    elif SCORE == "sigmoid":
        scores = tl.sigmoid(x)
    candidates = scores
    if CORRECTS:
        candidates += tl.load(correction + expert, mask=real, other=0.0)
    # A NaN must not select an expert that does not exist. The weights of the token remain NaN.
    candidates = tl.where(real, tl.where(candidates > LOWEST, candidates, LOWEST), float("-inf"))
    if GROUPS > 1:
        group = expert // (EXPERTS // GROUPS)
        totals = tl.full([BLOCK_G], float("-inf"), tl.float32)
        for number in range(GROUPS):
            own, total = tl.where(group == number, candidates, float("-inf")), 0.0
            for _ in tl.static_range(GROUP_SCORES):
                total += tl.max(own, 0)
                own = tl.where(expert == tl.argmax(own, 0), float("-inf"), own)
            totals = tl.where(groups == number, total, totals)
        kept = expert < 0
        for _ in range(TOP_GROUPS):
            best = tl.argmax(totals, 0)
            kept = kept | (group == best)
            totals = tl.where(groups == best, float("-inf"), totals)
        candidates = tl.where(kept, candidates, float("-inf"))
    values = tl.full([BLOCK_K], float("-inf") if SCORE == "chosen" else 0.0, tl.float32)
    experts = tl.zeros([BLOCK_K], tl.int64)
    for place in range(TOP_K):
        best = tl.argmax(candidates, 0)
        values = tl.where(choice == place, tl.sum(tl.where(expert == best, scores, 0.0), 0), values)
        experts = tl.where(choice == place, best.to(tl.int64), experts)
        candidates = tl.where(expert == best, float("-inf"), candidates)
    if SCORE == "chosen":
        values = tl.exp(values - tl.max(values, 0))
    if RENORMALIZES:
        values /= tl.sum(values, 0)
    used = choice < TOP_K
    values *= tl.load(factors + experts, mask=used, other=0.0)
    tl.store(weights + token * TOP_K + choice, values, mask=used)
    tl.store(chosen + token * TOP_K + choice, experts, mask=used)


@triton.jit(do_not_specialize=["count"])
def sort_by_expert(
    chosen, sources, places, counts, count, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute `StepKernels.by_expert` for `count` choices by comparing all pairs of choices.

    The place of a choice is the number of choices that come before it: those of experts with lower numbers, and earlier
    choices of the same expert. Grid: blocks of items. The items are the choices, then the experts.
    """
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_choice = item < count
    expert = tl.load(chosen + item, mask=is_choice, other=0).to(tl.int32)
    expert = tl.where(is_choice, expert, item - count)  # the items after the choices are the experts
    total = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        other = first + tl.arange(0, BLOCK)
        theirs = tl.load(chosen + other, mask=other < count, other=EXPERTS + BLOCK).to(tl.int32)
        same = theirs[None, :] == expert[:, None]
        before = (theirs[None, :] < expert[:, None]) | (same & (other[None, :] < item[:, None]))
        total += tl.sum(tl.where(is_choice[:, None], before, same).to(tl.int32), 1)
    tl.store(places + item, total.to(tl.int64), mask=is_choice)
    tl.store(sources + total, (item // TOP_K).to(tl.int64), mask=is_choice)
    tl.store(counts + item - count, total.to(tl.int64), mask=(item >= count) & (item < count + EXPERTS))

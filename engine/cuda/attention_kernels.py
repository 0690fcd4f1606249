# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: N803 (Triton's compile-time constants have capital letters)
"""Triton kernels for paged attention: `attend` computes tiles of prompts and decodes, `merge` combines splits.

The queries of a tile, for all heads that share a KV head (GQA), are the rows of one matrix. Keys and values are
therefore read once for all these rows. The softmax is FlashAttention's (Dao 2022), and contexts are split as in
FlashDecoding (Dao 2023).
"""

import triton
import triton.language as tl


@triton.jit
def _blocks(table, first, context, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the block numbers of the BLOCK_N positions that begin at `first`, or one number if they share a block."""
    seen = first
    if PAGE % BLOCK_N > 0:
        seen = first + tl.arange(0, BLOCK_N)
    return tl.load(table + seen // PAGE, mask=seen < context, other=0).to(tl.int64)


@triton.jit
def _absorb(
    acc,  # float32 [BLOCK_M, BLOCK_D]: sum of the weighted values so far
    peak,  # float32 [BLOCK_M]: highest score so far; scores are log2 of weights
    total,  # float32 [BLOCK_M]: sum of the weights
    q, keys, values,
    table,  # this slice's row of the block table
    blocks,  # the result of `_blocks` for `first`
    first,  # the first of the BLOCK_N positions to process
    at,  # int32 [BLOCK_M]: positions of the queries
    floor,  # the first position in the window of any query; used if WINDOWED
    context, window, scale, softcap, block_stride, token_stride,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    q_rope,  # [BLOCK_M, BLOCK_R]: the rotated part of the queries, if ROPE > 0 (latent attention)
    ROPE: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, BLOCK_D)
    span = tl.arange(0, BLOCK_N)
    seen = first + span
    # The addresses of keys and values depend on the block numbers. Reading the block numbers one iteration ahead allows
    # the loads of keys and values to be pipelined.
    following = _blocks(table, first + BLOCK_N, context, PAGE, BLOCK_N)
    rows = blocks * block_stride + (seen % PAGE) * token_stride
    if PAGE % BLOCK_N == 0:  # evenly spaced rows
        rows = blocks * block_stride + (first % PAGE + span) * token_stride
    places = rows[:, None] + dims[None, :]
    # Never load memory beyond the context or before the window: it may contain a NaN, and 0 * NaN is NaN.
    inside = seen < context
    if WINDOWED:
        inside = inside & (seen >= floor)
    if MASKED:
        held = inside[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(keys + places, mask=held, other=0.0)
        v = k if ROPE > 0 else tl.load(values + places, mask=held, other=0.0)
    elif BLOCK_D != HEAD_DIM:
        held = (dims < HEAD_DIM)[None, :]
        k = tl.load(keys + places, mask=held, other=0.0)
        v = k if ROPE > 0 else tl.load(values + places, mask=held, other=0.0)
    else:
        k = tl.load(keys + places)
        v = k if ROPE > 0 else tl.load(values + places)
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if ROPE > 0:  # the rotated key follows the latent
        turned = tl.arange(0, BLOCK_R)
        known = inside[:, None] & (turned < ROPE)[None, :]
        r = tl.load(keys + HEAD_DIM + rows[:, None] + turned[None, :], mask=known, other=0.0)
        scores += tl.dot(q_rope, tl.trans(r.to(q.dtype)), input_precision="ieee")
    if CAPPED:  # tanh
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scale * scores) - 1.0)
    if MASKED:
        allowed = seen[None, :] <= at[:, None]
        if WINDOWED:
            allowed = allowed & (seen[None, :] > at[:, None] - window)
        scores = tl.where(allowed, scores, float("-inf"))
    factor = 1.0 if CAPPED else scale  # the factor is positive, so it can scale the maximum instead of every score
    higher = tl.maximum(peak, tl.max(scores, 1) * factor)
    shift = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weights = tl.exp2(scores * factor - shift[:, None])
    fade = tl.exp2(peak - shift)
    acc = acc * fade[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
    return acc, higher, total * fade + tl.sum(weights, 1), following


@triton.jit
def attend(
    out,  # [T, heads, HEAD_DIM]; with SPLIT, float32 [items, kv_heads, splits, QUERIES * GROUP, HEAD_DIM]
    weight_of,  # float32 [items, kv_heads, splits, QUERIES * GROUP]: log2 of a split's softmax denominator, if SPLIT
    q,  # [T, heads, HEAD_DIM]
    keys, values,
    sinks,  # float32 [heads]: score of one more term in the softmax's denominator; used if SINKS
    work,  # int32 [items, 2]: index of the slice, and first query that the item computes
    cu_q, kv_len, block_table, window,
    scale,  # head_dim ** -0.5 * log2(e), or, if CAPPED, head_dim ** -0.5 / soft cap
    softcap,  # the soft cap * log2(e)
    value_scale,  # the result is multiplied by this factor
    q_token_stride, q_head_stride, out_token_stride, out_head_stride, table_stride, block_stride, head_stride,
    token_stride,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,  # queries per item; QUERIES * GROUP <= BLOCK_M
    SHARE: tl.constexpr,  # number of programs that use the same KV head
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ROPE: tl.constexpr,  # rotated dimensions after the HEAD_DIM dimensions of a latent; 0 without latents
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute attention. Grid: items of the work list x groups of heads x splits.

    The grid depends only on shapes, so a CUDA graph may contain the launch. The number of splits is not a compile-time
    constant: otherwise, the kernel would be compiled again for each number, while requests wait.
    """
    item, heads, split, splits = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    which, first_query = tl.load(work + 2 * item), tl.load(work + 2 * item + 1)
    start = tl.load(cu_q + which)
    count = tl.load(cu_q + which + 1) - start
    context = tl.load(kv_len + which)
    fold, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query = first_query + fold // GROUP
    real = (fold < QUERIES * GROUP) & (query < count)
    at = context - count + query
    token = (start + query).to(tl.int64)
    head = heads * GROUP + fold % GROUP
    held = real[:, None] & (dims < HEAD_DIM)[None, :]
    rows = tl.load(q + (token * q_token_stride + head * q_head_stride)[:, None] + dims[None, :], mask=held, other=0.0)
    turned = rows
    if ROPE > 0:
        part = tl.arange(0, BLOCK_R)
        places = (token * q_token_stride + head * q_head_stride + HEAD_DIM)[:, None] + part[None, :]
        turned = tl.load(q + places, mask=real[:, None] & (part < ROPE)[None, :], other=0.0)
    shared = (heads // SHARE).to(tl.int64) * head_stride
    keys, values = keys + shared, values + shared
    table = block_table + which.to(tl.int64) * table_stride

    lowest = context - count + first_query  # position of the item's first query, which sees the fewest positions
    floor = tl.maximum(0, lowest + 1 - window) if WINDOWED else 0
    low = floor // BLOCK_N * BLOCK_N if WINDOWED else 0
    high = tl.minimum(context, lowest + QUERIES)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BLOCK_N), splits) * BLOCK_N
        low += split * share
        high = tl.minimum(high, low + share)
    whole = low  # every query of the item sees all positions in [low, whole)
    if not WINDOWED:
        whole = tl.maximum(low, tl.minimum(lowest + 1, high) // BLOCK_N * BLOCK_N)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0) * 1.4426950408889634
        peak, total = tl.where(split == 0, sink, peak), tl.where(split == 0, 1.0, total)
    blocks = _blocks(table, low, context, PAGE, BLOCK_N)
    for first in range(low, whole, BLOCK_N):
        acc, peak, total, blocks = _absorb(
            acc, peak, total, rows, keys, values, table, blocks, first, at, floor, context, window, scale, softcap,
            block_stride, token_stride, PAGE, HEAD_DIM, BLOCK_N, BLOCK_D, False, WINDOWED, CAPPED, turned, ROPE,
            BLOCK_R,
        )  # fmt: skip
    for first in range(whole, high, BLOCK_N):
        acc, peak, total, blocks = _absorb(
            acc, peak, total, rows, keys, values, table, blocks, first, at, floor, context, window, scale, softcap,
            block_stride, token_stride, PAGE, HEAD_DIM, BLOCK_N, BLOCK_D, True, WINDOWED, CAPPED, turned, ROPE,
            BLOCK_R,
        )  # fmt: skip

    # For an empty context (a row of padding), store zeros instead of NaN.
    divisor = tl.where(total == 0.0, 1.0, total)
    acc = acc / divisor[:, None] * value_scale
    if SPLIT:
        row = ((item * tl.num_programs(1) + heads) * splits + split) * (QUERIES * GROUP) + fold
        tl.store(out + (row * HEAD_DIM)[:, None] + dims[None, :], acc, mask=held)
        tl.store(weight_of + row, tl.where(total == 0.0, float("-inf"), peak + tl.log2(divisor)), mask=real)
    else:
        places = (token * out_token_stride + head * out_head_stride)[:, None] + dims[None, :]
        tl.store(out + places, acc.to(out.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["splits"])
def merge(
    out,  # [T, heads, HEAD_DIM]
    parts,  # `parts` and `weight_of` are the results of `attend`
    weight_of, work, cu_q, out_token_stride, out_head_stride, splits,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Average the splits of each query and head, weighted by softmax denominator. Grid: items x heads x queries."""
    item, head, query, queries = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    which, first_query = tl.load(work + 2 * item), tl.load(work + 2 * item + 1)
    start = tl.load(cu_q + which) + first_query
    if start + query < tl.load(cu_q + which + 1):
        split, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
        first = (item * (tl.num_programs(1) // GROUP) + head // GROUP) * splits
        row = (first + split) * (queries * GROUP) + query * GROUP + head % GROUP
        weight = tl.load(weight_of + row, mask=split < splits, other=float("-inf"))
        peak = tl.max(weight, 0)
        share = tl.exp2(weight - tl.where(peak == float("-inf"), 0.0, peak))
        held = (split < splits)[:, None] & (dims < HEAD_DIM)[None, :]
        part = tl.load(parts + (row * HEAD_DIM)[:, None] + dims[None, :], mask=held, other=0.0)
        total = tl.sum(share, 0)
        mean = tl.sum(part * share[:, None], 0) / tl.where(total == 0.0, 1.0, total)
        place = (start + query).to(tl.int64) * out_token_stride + head * out_head_stride
        tl.store(out + place + dims, mean.to(out.dtype.element_ty), mask=dims < HEAD_DIM)

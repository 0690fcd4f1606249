# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: N803 (Triton's compile-time constants have capital letters)
"""Triton kernels for the element-wise work of a layer. They read and write each row once and compute in float32."""

import triton
import triton.language as tl

from engine.kernels import SWIGLU_ALPHA, SWIGLU_LIMIT
from engine.kv_pool import FLOAT8_LIMIT

ALPHA, LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)
LARGEST = tl.constexpr(FLOAT8_LIMIT)


@triton.jit
def norm_rows(
    rows,
    update,  # if ADDS, `update` is first added to `rows` in place
    weight, out, eps, row_stride, update_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Compute the RMS norm (Zhang and Sennrich 2019). Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    held = column < WIDTH
    values = tl.load(rows + row * row_stride + column, mask=held, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(update + row * update_stride + column, mask=held, other=0.0).to(tl.float32)
        # Compute the norm of the rounded sum, because the rounded sum is stored.
        kept = values.to(rows.dtype.element_ty)
        tl.store(rows + row * row_stride + column, kept, mask=held)
        values = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    scaled = values * scale * tl.load(weight + column, mask=held, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, scaled.to(out.dtype.element_ty), mask=held)


@triton.jit
def _turned(places, held, weight, half, cosine, sine, eps, HEAD_DIM: tl.constexpr, NORMED: tl.constexpr):
    """Load heads, normalize them if NORMED, rotate them, and return both halves. `places` points to the left halves."""
    left = tl.load(places, mask=held, other=0.0).to(tl.float32)
    right = tl.load(places + HEAD_DIM // 2, mask=held, other=0.0).to(tl.float32)
    if NORMED:
        inside = half < HEAD_DIM // 2
        scale = tl.rsqrt(tl.sum(left * left + right * right, 1) / HEAD_DIM + eps)[:, None]
        left *= scale * tl.load(weight + half, mask=inside, other=0.0).to(tl.float32)[None, :]
        right *= scale * tl.load(weight + HEAD_DIM // 2 + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    return left * cosine - right * sine, right * cosine + left * sine


@triton.jit
def _stored(values, factor, FLOAT8: tl.constexpr):
    """Return the values as the pool stores them (see `KVPool.stored`), before the conversion to its dtype."""
    if FLOAT8:
        values = values.to(tl.float32) * factor
        values = tl.where(values > LARGEST, LARGEST, tl.where(values < -LARGEST, -LARGEST, values))
    return values


@triton.jit
def rotate_and_store(
    qkv,  # [T, (heads + 2 * kv_heads) * HEAD_DIM]; the queries are rotated in place
    q_norm, k_norm,
    keys,  # [num_blocks, kv_heads, PAGE, HEAD_DIM], strided; `values` has the same strides
    values, positions, slots, frequencies, magnitudes, eps, key_factor, value_factor, qkv_stride, block_stride,
    head_stride, token_stride,
    GROUP: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr,
    NORMED: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Rotate one key head and its query heads, and store the key and the value. Grid: tokens x KV heads."""
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_heads = tl.num_programs(1)
    half = tl.arange(0, BLOCK_H)
    inside = half < HEAD_DIM // 2
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + half, mask=inside, other=0.0)
    magnitude = tl.load(magnitudes + half, mask=inside, other=0.0)
    cosine, sine = (tl.cos(angle) * magnitude)[None, :], (tl.sin(angle) * magnitude)[None, :]
    row = qkv + token * qkv_stride

    member = tl.arange(0, BLOCK_G)
    places = row + ((kv_head * GROUP + member) * HEAD_DIM)[:, None] + half[None, :]
    held = (member < GROUP)[:, None] & inside[None, :]
    left, right = _turned(places, held, q_norm, half, cosine, sine, eps, HEAD_DIM, NORMED)
    tl.store(places, left.to(qkv.dtype.element_ty), mask=held)
    tl.store(places + HEAD_DIM // 2, right.to(qkv.dtype.element_ty), mask=held)

    slot = tl.load(slots + token).to(tl.int64)
    only = tl.arange(0, 1)[:, None]
    held = (only + slot >= 0) & inside[None, :]  # a slot of -1 means a padding token
    places = row + (kv_heads * GROUP + kv_head) * HEAD_DIM + only + half[None, :]
    left, right = _turned(places, held, k_norm, half, cosine, sine, eps, HEAD_DIM, NORMED)
    block, offset = slot // PAGE, slot % PAGE
    target = block * block_stride + kv_head.to(tl.int64) * head_stride + offset * token_stride + only + half[None, :]
    kept = keys.dtype.element_ty
    tl.store(keys + target, _stored(left, key_factor, FLOAT8).to(kept), mask=held)
    tl.store(keys + target + HEAD_DIM // 2, _stored(right, key_factor, FLOAT8).to(kept), mask=held)
    places += kv_heads * HEAD_DIM
    left, right = tl.load(places, mask=held), tl.load(places + HEAD_DIM // 2, mask=held)
    tl.store(values + target, _stored(left, value_factor, FLOAT8).to(kept), mask=held)
    tl.store(values + target + HEAD_DIM // 2, _stored(right, value_factor, FLOAT8).to(kept), mask=held)


@triton.jit
def gated(gates, ups, out, gate_stride, up_stride, WIDTH, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """Compute activation(gate) * up. Grid: rows x pieces of BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < WIDTH
    gate = tl.load(gates + row * gate_stride + column, mask=held, other=0.0).to(tl.float32)
    up = tl.load(ups + row * up_stride + column, mask=held, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu_tanh":  # 0.5 * (1 + tanh(x)) = sigmoid(2 * x)
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif ACTIVATION == "clamped_swiglu":  # unlike tl.clamp, this keeps NaN
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        active = gate * tl.sigmoid(gate * ALPHA)
    elif ACTIVATION == "sigmoid":
        active = tl.sigmoid(gate)
    else:
        active = gate * tl.sigmoid(gate)
    tl.store(out + row * WIDTH + column, (active * up).to(out.dtype.element_ty), mask=held)


@triton.jit
def combine(outputs, places, weights, out, WIDTH, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Add a token's weighted expert outputs, in the order of `places`. Grid: tokens x pieces of BLOCK columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for which in range(TOP_K):
        row = tl.load(places + token * TOP_K + which)
        weight = tl.load(weights + token * TOP_K + which)
        total += weight * tl.load(outputs + row * WIDTH + column, mask=held, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=held)

"""Numba kernels for the element-wise work of a layer on float32 rows.

Importing this module compiles the kernels or loads them from disk. With n threads, thread i computes rows i, i + n,
i + 2n, and so on.
"""

from typing import Any

from engine.cpu.jit import inlined, kernel, num_threads, part, thread_number
from engine.cpu.simd import (
    FLOAT32,
    LANES,
    address_at,
    exponential,
    load_some,
    multiply_add,
    number_at,
    splat,
    store_some,
    total,
    where_less,
)
from engine.kernels import SWIGLU_ALPHA, SWIGLU_LIMIT

ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")


@part
def norm_row(source: int, weight: int, target: int, size: int, epsilon: float) -> None:
    """Store the RMS norm (Zhang and Sennrich 2019) of one row."""
    squares = splat(0.0)
    for at in range(0, size, LANES):
        x = load_some(source + 4 * at, size - at, FLOAT32)
        squares = multiply_add(x, x, squares)
    scale = splat((total(squares) / size + epsilon) ** -0.5)
    for at in range(0, size, LANES):
        left = size - at
        x = load_some(source + 4 * at, left, FLOAT32) * scale
        store_some(x * load_some(weight + 4 * at, left, FLOAT32), target + 4 * at, left, FLOAT32)


@kernel
def norm(values: Any) -> None:
    """Normalize rows. `values`: number and size of rows, and the addresses of epsilon, source, weight and target."""
    rows, size, source, weight, target = values[0], values[1], values[3], values[4], values[5]
    epsilon = number_at(values[2])
    for row in range(thread_number(), rows, num_threads()):
        norm_row(source + 4 * row * size, weight, target + 4 * row * size, size, epsilon)


@kernel
def add_norm(values: Any) -> None:
    """Add `update` to `hidden`, in place, and store the RMS norm of each sum in `target`. `values`: number of rows,
    size of a row, and the addresses of epsilon, hidden, update, weight and target."""
    rows, size, hidden, update, weight, target = values[0], values[1], values[3], values[4], values[5], values[6]
    epsilon = number_at(values[2])
    for row in range(thread_number(), rows, num_threads()):
        skipped = 4 * row * size
        for at in range(0, size, LANES):
            here, left = hidden + skipped + 4 * at, size - at
            x = load_some(here, left, FLOAT32) + load_some(update + skipped + 4 * at, left, FLOAT32)
            store_some(x, here, left, FLOAT32)
        norm_row(hidden + skipped, weight, target + skipped, size, epsilon)


@inlined
def activated(gate: Any, up: Any, code: int) -> Any:
    """Return activation(gate) * up. `code` is an index of ACTIVATIONS. Every activation is gate / (1 + exp(-y))."""
    one, limit, y = splat(1.0), splat(SWIGLU_LIMIT), gate
    if code == 1:  # the tanh form of GELU: 0.5 (1 + tanh(y / 2)) = 1 / (1 + exp(-y))
        y = gate * multiply_add(gate * gate, splat(0.0713548162716), splat(1.5957691216057))
    if code == 2:
        gate = where_less(limit, gate, limit, gate)
        least = splat(-SWIGLU_LIMIT)
        up = where_less(limit, up, limit, where_less(up, least, least, up)) + one
        y = gate * splat(SWIGLU_ALPHA)
    return gate / (one + exponential(splat(0.0) - y)) * up


@kernel
def gated(values: Any) -> None:
    """Store activation(gate) * up for each row. `values`: number of rows, half the size of a row, the addresses of
    source [rows, 2 * size] and target, and the code of the activation."""
    rows, size, source, target, code = values[0], values[1], values[2], values[3], values[4]
    for row in range(thread_number(), rows, num_threads()):
        gate, up, to = source + 8 * row * size, source + 8 * row * size + 4 * size, target + 4 * row * size
        for at in range(0, size, LANES):
            left = size - at
            x, y = load_some(gate + 4 * at, left, FLOAT32), load_some(up + 4 * at, left, FLOAT32)
            store_some(activated(x, y, code), to + 4 * at, left, FLOAT32)


@inlined
def rotate(head: int, cosine: int, sine: int, half: int, target: int, code: int) -> None:
    """Rotate one head and store it. Dimensions i and i + half are rotated together, as in Hugging Face's Llama."""
    width = 4 if code == FLOAT32 else 2
    for at in range(0, half, LANES):
        left = half - at
        x, y = load_some(head + 4 * at, left, FLOAT32), load_some(head + 4 * (half + at), left, FLOAT32)
        c, s = load_some(cosine + 4 * at, left, FLOAT32), load_some(sine + 4 * at, left, FLOAT32)
        store_some(x * c - y * s, target + width * at, left, code)
        store_some(y * c + x * s, target + width * (half + at), left, code)


@kernel
def rotate_and_store(values: Any) -> None:
    """Store each token's rotated queries in `target`, and its rotated keys and its values in its slot of the pool. If a
    slot is negative, the token's keys and values are not stored. If heads are normalized, `qkv` is overwritten."""
    rows, qkv, target, cosines, sines, slots = values[0], values[1], values[2], values[3], values[4], values[5]
    heads, kv_heads, head_dim, q_norm, k_norm = values[6], values[7], values[8], values[9], values[10]
    pool, block_bytes, head_bytes, block_tokens, code = values[11], values[12], values[13], values[14], values[15]
    epsilon = number_at(values[16])
    half, width = head_dim // 2, 4 if code == FLOAT32 else 2
    row_bytes = 4 * (heads + 2 * kv_heads) * head_dim
    for row in range(thread_number(), rows, num_threads()):
        cosine, sine = cosines + 4 * half * row, sines + 4 * half * row
        source = qkv + row * row_bytes
        for head in range(heads):
            at = source + 4 * head_dim * head
            if q_norm:
                norm_row(at, q_norm, at, head_dim, epsilon)
            rotate(at, cosine, sine, half, target + 4 * head_dim * (row * heads + head), FLOAT32)
        slot = address_at(slots + 8 * row)
        if slot < 0:
            continue
        place = pool + slot // block_tokens * block_bytes + slot % block_tokens * 2 * head_dim * width
        for head in range(kv_heads):
            at, value = source + 4 * head_dim * (heads + head), source + 4 * head_dim * (heads + kv_heads + head)
            if k_norm:
                norm_row(at, k_norm, at, head_dim, epsilon)
            to = place + head * head_bytes
            rotate(at, cosine, sine, half, to, code)
            for i in range(0, head_dim, LANES):
                x = load_some(value + 4 * i, head_dim - i, FLOAT32)
                store_some(x, to + width * (head_dim + i), head_dim - i, code)

"""Activations rounded to 8 bits, each row by a scale of its own, as machine code for this CPU. Importing it compiles,
or loads what was compiled before."""

from typing import Any

from engine.jit import kernel, num_threads, thread_number
from engine.vectors import (
    FLOAT32,
    LANES,
    larger,
    largest,
    load_some,
    multiply_add,
    put_low_bytes,
    put_number,
    splat,
    total,
)

LEVELS = 127  # of an activation, on each side of 0
ZERO_POINT = 128  # it is multiplied as an unsigned byte
SMALLEST = 1e-30  # of a row's largest value: a row of zeros is not divided by 0
ROUNDER = 12582912.0  # 1.5 * 2**23: added to a small number it leaves the rounded integer in the low bits


@kernel
def rounded(values: Any) -> None:
    """values: rows, size, x, its stride, target, its stride (a multiple of LANES, not below size), scales of rows.

    An infinity or NaN makes the row's scale one, and so all of the row's products."""
    rows, size, source, source_stride = values[0], values[1], values[2], values[3]
    target, stride, scales = values[4], values[5], values[6]
    zero, rounder = splat(0.0), splat(ROUNDER + ZERO_POINT)
    for row in range(thread_number(), rows, num_threads()):
        x, to = source + row * source_stride, target + row * stride
        most, broken = zero, zero
        for at in range(0, size, LANES):
            here = load_some(x + 4 * at, size - at, FLOAT32)
            most = larger(most, larger(here, zero - here))
            broken = multiply_add(here, zero, broken)
        scale = max(largest(most), SMALLEST) / LEVELS
        put_number(scale + total(broken), scales + 4 * row)
        inverse = splat(1.0 / scale)
        for at in range(0, size, LANES):
            put_low_bytes(multiply_add(load_some(x + 4 * at, size - at, FLOAT32), inverse, rounder), to + at)

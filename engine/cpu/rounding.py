"""Activations rounded to 8 bits, each row by a scale of its own: a part of a kernel."""

from engine.cpu.jit import num_threads, part, thread_number
from engine.cpu.simd import (
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
from engine.linear.int8 import LEVELS, SMALLEST, ZERO_POINT

ROUNDER = 12582912.0  # 1.5 * 2**23: added to a small number it leaves the rounded integer in the low bits


@part
def round_rows(rows: int, size: int, source: int, source_stride: int, target: int, stride: int, scales: int) -> None:
    """A thread's share of the rows: their levels to `target`, `stride` (a multiple of LANES, not below size) bytes
    apart, their scales to `scales`. An infinity or NaN makes the row's scale one, and so all of the row's products."""
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

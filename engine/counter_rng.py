"""Noise without a state: splitmix64 (Steele, Lea and Flood 2014) over seed, position and token, as Gumbel numbers."""

from torch import Tensor

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """splitmix64's finalizer over Python's integers, for the two numbers a row has."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def _signed(value: int) -> int:
    """The int64 with the same bits: torch has no arithmetic on uint64."""
    return value - 2**64 if value >= 2**63 else value


def key_of(seed: int, position: int) -> int:
    """An int64 that stands for one draw; `seed` counts modulo 2**64."""
    return _signed(_mix(_mix(seed + GOLDEN & MASK) + position * GOLDEN & MASK))


def _shifted(values: Tensor, bits: int) -> Tensor:
    """A right shift that brings in zeros, where int64's own repeats the sign."""
    return values.bitwise_right_shift(bits).bitwise_and(2 ** (64 - bits) - 1)


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, a function of the key (int64, of seed and position) and the token alone.

    Keys and tokens are broadcast against each other. On a CPU this costs 10 ns a number.
    """
    values = keys + (tokens + 1) * _signed(GOLDEN)
    values = (values ^ _shifted(values, 30)) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ _shifted(values, 27)) * _signed(0x94D049BB133111EB)
    values = values ^ _shifted(values, 31)
    # 52 bits and a half: exact in float64, so neither end of (0, 1) is ever reached.
    uniform = (_shifted(values, 12).double() + 0.5) * 2.0**-52
    return -(-uniform.log()).log()

"""Definitions that all implementations of sampling share: error codes, the size of a row of parameters, and the noise.

The Gumbel noise needs no state: it comes from a hash (splitmix64, Steele et al. 2014) of seed, position and token.
"""

from torch import Tensor

BROKEN, NOTHING_ALLOWED = -1, -2  # returned instead of a token: see `engine.sampling.draw`
WORDS = 5  # number of 8-byte words in a row of parameters, packed by `engine.sampling.parameters_of`
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """Apply splitmix64's finalizer to a Python integer."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def _signed(value: int) -> int:
    """Convert an unsigned integer to the int64 with the same bits, because torch has no arithmetic on uint64."""
    return value - 2**64 if value >= 2**63 else value


def key_of(seed: int, position: int) -> int:
    """Return the int64 key for the noise of one draw. `seed` is taken modulo 2**64."""
    return _signed(_mix(_mix(seed + GOLDEN & MASK) + position * GOLDEN & MASK))


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros. The right shift of int64 in torch copies the sign bit."""
    return values.bitwise_right_shift(bits).bitwise_and(2 ** (64 - bits) - 1)


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return standard Gumbel noise, float64, which depends only on the key and the token.

    `keys` (int64, from `key_of`) and `tokens` (int64) are broadcast against each other. Takes 10 ns per number.
    """
    values = keys + (tokens + 1) * _signed(GOLDEN)
    values = (values ^ _shifted(values, 30)) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ _shifted(values, 27)) * _signed(0x94D049BB133111EB)
    values = values ^ _shifted(values, 31)
    # The sum of a 52-bit integer and 0.5 is exact in float64, so the uniform number is never 0 or 1.
    uniform = (_shifted(values, 12).double() + 0.5) * 2.0**-52
    return -(-uniform.log()).log()

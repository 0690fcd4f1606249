"""Rotary position embedding as in Hugging Face's Llama: dimension i is rotated with dimension i + head_dim / 2.

If a model rotates only a part of each head, the loader brings the dimensions of queries and keys into this order. The
dimensions that do not rotate have a frequency of 0.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.spec import Rope


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of each pair of dimensions: frequency (radians per position) and magnitude, float32 [head_dim / 2].

    `is_scaled` is false if all magnitudes are 1. If tokens have positions on three axes, `axes`, int64 [head_dim / 2],
    has the axis of each pair. Otherwise, it is None.
    """

    frequencies: Tensor
    magnitudes: Tensor
    axes: Tensor | None = None
    is_scaled: bool = False

    @classmethod
    def of(cls, rope: Rope | None, head_dim: int, device: torch.device) -> "Rotation":
        frequencies, magnitudes = torch.zeros(head_dim // 2), torch.ones(head_dim // 2)
        if rope is not None:
            rotated = (rope.dims or head_dim) // 2
            frequencies[:rotated] = inverse_frequencies(rope, 2 * rotated)
            magnitudes[:rotated] = rope.magnitude
        axes = axes_of(rope, head_dim // 2).to(device) if rope is not None and rope.sections else None
        return cls(frequencies.to(device), magnitudes.to(device), axes, bool((magnitudes != 1).any()))

    def angles(self, positions: Tensor, on_axes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for `positions` [T], scaled by `magnitudes`. Both are float32 [T, 1, head_dim / 2].

        `on_axes`, int64 [3, T], are the positions on three axes, or None if each token's three positions are equal.
        """
        if on_axes is None or self.axes is None:
            turned = positions[:, None, None].float() * self.frequencies
        else:
            turned = (on_axes[self.axes].T.contiguous().float() * self.frequencies)[:, None]
        cosine, sine = turned.cos(), turned.sin()
        return (cosine * self.magnitudes, sine * self.magnitudes) if self.is_scaled else (cosine, sine)


def axes_of(rope: Rope, pairs: int) -> Tensor:
    """Return the axis of each pair of dimensions, int64 [pairs]."""
    _, vertical, horizontal = rope.sections
    axes = torch.zeros(pairs, dtype=torch.int64)
    if rope.interleaved:
        axes[1 : 3 * vertical : 3], axes[2 : 3 * horizontal : 3] = 1, 2
    else:
        axes[: sum(rope.sections)] = torch.arange(3).repeat_interleave(torch.tensor(rope.sections))
    return axes


def inverse_frequencies(rope: Rope, dims: int) -> Tensor:
    """Return the radians per position of each pair of dimensions, float32 [dims / 2]."""
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "proportional":
        return frequencies / rope.factor * (torch.arange(dims // 2) < rope.pairs)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.factors) * rope.theta**exponents)
    if rope.kind == "llama3":
        turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)  # turns in the original context
        # 0 for low frequencies, which are divided by the factor; 1 for high frequencies, which are kept.
        keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    elif rope.kind == "yarn":
        keep = _yarn_share(rope, dims)
    else:
        return frequencies
    return frequencies * (keep + (1 - keep) / rope.factor)


def _yarn_share(rope: Rope, dims: int) -> Tensor:
    """Return, for each pair of dimensions, the share of its frequency that YaRN keeps."""

    def place(turns: float) -> float:
        """Return the pair that makes this number of turns in the original context."""
        return (
            dims * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = place(rope.beta_fast), place(rope.beta_slow)
    if rope.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    high = high if high != low else low + 0.001
    return 1 - ((torch.arange(dims // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate `heads` [T, heads, head_dim] by each token's angles."""
    left, right = heads.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)

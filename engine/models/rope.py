"""Rotary position embedding as in Hugging Face's Llama: dimension i is rotated with dimension i + head_dim / 2."""

import math

import torch
from torch import Tensor

from engine.models.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return radians per position, float32 [head_dim / 2]. "llama3" is Meta's scaling for long contexts."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind != "llama3":
        return frequencies
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)  # in the original context
    # 0 for low frequencies, which are divided by the factor; 1 for high ones, which are kept; interpolated in between.
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / rope.factor)


def angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the rotation angles, each float32 [T, 1, head_dim / 2]."""
    turned = positions[:, None, None].float() * frequencies
    return turned.cos(), turned.sin()


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate `heads` [T, heads, head_dim] by each token's angles."""
    left, right = heads.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)

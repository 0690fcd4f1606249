"""Rows to draw from, and what `engine.sampling.draw` on a CPU draws from them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine import sampling
from engine.sampling import Row
from shared.messages import Sampling

FILTERS = [
    Sampling(temperature=0.0),
    Sampling(),
    Sampling(top_k=1),
    Sampling(top_k=3),
    Sampling(top_k=10**9),
    Sampling(top_p=0.9),
    Sampling(top_p=1e-9),
    Sampling(min_p=0.1),
    Sampling(min_p=1.0),
    Sampling(temperature=0.4, top_k=5, top_p=0.8),
    Sampling(temperature=2.0, top_k=40, min_p=0.02),
    Sampling(temperature=1.3, top_p=0.97, min_p=0.01),
    Sampling(seed=2**63 + 5, top_p=0.5),
]


def logits_of(rows: int, vocab: int, scale: float, device: torch.device) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).mul(scale).to(device)


def rows_of(samplings: Sequence[Sampling], positions: Sequence[int] | None = None) -> list[Row]:
    return [Row(one, (), 0, at) for one, at in zip(samplings, positions or [7] * len(samplings), strict=True)]


def parameters_of(rows: Sequence[Row], device: torch.device) -> Tensor:
    return torch.from_numpy(sampling.parameters_of(rows)).to(device)


def expected(logits: Tensor, rows: list[Row]) -> list[int]:
    return sampling.draw(logits.cpu(), logits.cpu(), rows)

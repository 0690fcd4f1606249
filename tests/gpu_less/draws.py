"""Rows to draw tokens from, and the tokens that `engine.sampling.draw` draws from them on a CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine import sampling
from engine.sampling import SamplingRow
from shared.rpc.messages import SamplingParams

FILTERS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_k=1),
    SamplingParams(top_k=3),
    SamplingParams(top_k=10**9),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=1e-9),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=0.4, top_k=5, top_p=0.8),
    SamplingParams(temperature=2.0, top_k=40, min_p=0.02),
    SamplingParams(temperature=1.3, top_p=0.97, min_p=0.01),
    SamplingParams(seed=2**63 + 5, top_p=0.5),
]


def logits_of(rows: int, vocab: int, scale: float, device: torch.device) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).mul(scale).to(device)


def rows_of(samplings: Sequence[SamplingParams], positions: Sequence[int] | None = None) -> list[SamplingRow]:
    return [SamplingRow(one, (), 0, at) for one, at in zip(samplings, positions or [7] * len(samplings), strict=True)]


def parameters_of(rows: Sequence[SamplingRow], device: torch.device) -> Tensor:
    return torch.from_numpy(sampling.parameters_of(rows)).to(device)


def expected(logits: Tensor, rows: list[SamplingRow]) -> list[int]:
    return sampling.draw(logits.cpu(), logits.cpu(), rows)

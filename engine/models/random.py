"""Decoders of any shape with random weights, made on the device itself: for benchmarks, where no checkpoint is."""

import torch
from torch import Tensor

from engine.linear.interface import LinearFormat
from engine.linear.plain import Plain
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, assemble

STANDARD_DEVIATION = 0.02  # of a Llama before training


class RandomTensors:
    """Stands in for a checkpoint: the same seed gives the same weights on the same kind of device."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int, deviation: float) -> None:
        self._dtype = dtype
        self._device = device
        self._deviation = deviation
        self._generator = torch.Generator(device).manual_seed(seed)

    def take(self, name: str, *shape: int) -> Tensor:
        """Norms are all ones; every other tensor is normal around 0."""
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if name.endswith("norm.weight"):
            return tensor.fill_(1)
        return tensor.normal_(0, self._deviation, generator=self._generator)

    def skip(self, name: str) -> None:
        """There is nothing that is not asked for."""

    def finish(self) -> None:
        """As `skip`."""


def random_decoder(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    linear: LinearFormat | None = None,
    seed: int = 0,
    deviation: float = STANDARD_DEVIATION,
) -> Decoder:
    """A decoder of `config`'s shape; `linear` gets matrices of `dtype` and holds them plain by default."""
    return assemble(RandomTensors(dtype, device, seed, deviation), config, dtype, linear or Plain(dtype))

"""Decoders of any shape with random weights, generated on the device: for benchmarks without a checkpoint."""

import torch
from torch import Tensor

from engine.linear import LinearFormat, Plain
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, assemble

STANDARD_DEVIATION = 0.02  # as in an untrained Llama


class RandomTensors:
    """A source of random weights. Equal seeds give equal weights on the same kind of device."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int, deviation: float) -> None:
        self._dtype = dtype
        self._device = device
        self._deviation = deviation
        self._generator = torch.Generator(device).manual_seed(seed)

    def take(self, name: str, *shape: int) -> Tensor:
        """Return ones for a norm, and normally distributed numbers for any other tensor."""
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if name.endswith("norm.weight"):
            return tensor.fill_(1)
        return tensor.normal_(0, self._deviation, generator=self._generator)

    def skip(self, name: str) -> None:
        """Do nothing: there are no unused tensors."""

    def finish(self) -> None:
        """Do nothing: there are no unused tensors."""


def random_decoder(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    linear: LinearFormat | None = None,
    seed: int = 0,
    deviation: float = STANDARD_DEVIATION,
) -> Decoder:
    """Return a decoder with random weights in the shape of `config`. `linear` is their format, by default plain."""
    return assemble(RandomTensors(dtype, device, seed, deviation), config, dtype, linear or Plain(dtype))

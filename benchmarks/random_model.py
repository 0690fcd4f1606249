"""Decoders of any shape with random weights, generated on the device, for benchmarks without a checkpoint."""

import torch
from torch import Tensor

from engine.linear import LinearFormat, Plain
from engine.models.decoder import Decoder
from engine.models.load import assemble
from engine.models.spec import ModelConfig
from engine.models.weight_map import LLAMA, WeightMap

STANDARD_DEVIATION = 0.02  # as in an untrained Llama


def random_decoder(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    linear: LinearFormat | None = None,
    seed: int = 0,
    deviation: float = STANDARD_DEVIATION,
    names: WeightMap = LLAMA,
) -> Decoder:
    """Return a decoder with the shape of `config`. Its weights are normally distributed; the weights of norms are 1.

    `linear` is the weights' format, by default unquantized. Equal seeds give equal weights on the same kind of device.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def take(name: str, *shape: int) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith("norm.weight"):
            return tensor.fill_(1)
        return tensor.normal_(0, deviation, generator=generator)

    return assemble(take, config, dtype, linear or Plain(dtype), names)

"""The weights of recurrent layers in a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.spec import RecurrentSpec, SsmSpec
from engine.recurrence import RecurrentLayer


@dataclass(frozen=True, slots=True)
class InnerRows:
    """Rows of the joined projections of a recurrent layer.

    `inputs` has the indices of the rows for the convolution's inputs, then of the rows for the gate. `steps` has the
    indices of the other rows, in the order in which `StepKernels.recur` takes them. `sizes` has the number of rows of
    each projection.
    """

    sizes: list[int]
    inputs: Tensor
    steps: Tensor


def inner_rows(spec: RecurrentSpec, names: tuple[str, ...]) -> InnerRows:
    """Return the rows for a checkpoint with the projections `names`.

    Qwen3.5 has four projections: inputs, gate, strengths and steps. Qwen3-Next has two projections, in which the rows
    of a key head and of its value heads are adjacent. Mamba-2 has one projection: gate, inputs and steps.
    """
    channels, inner, heads = spec.channels, spec.inner, spec.value_heads
    every = torch.arange(channels + inner + (1 if len(names) == 1 else 2) * heads)
    if len(names) == 1:
        gate, inputs, steps = torch.split(every, [inner, channels, heads])
        return InnerRows([len(every)], torch.cat((inputs, gate)), steps)
    both, steps = torch.split(every, [channels + inner, 2 * heads])
    if len(names) == 4:
        return InnerRows([channels, inner, heads, heads], both, steps)
    shared, keys = heads // spec.key_heads, spec.key_dim
    sizes = [keys, keys, shared * spec.value_dim, shared * spec.value_dim]
    parts = torch.split(both.view(spec.key_heads, -1), sizes, dim=1)
    pairs = torch.split(steps.view(spec.key_heads, -1), [shared, shared], dim=1)
    inputs, ordered = (torch.cat([part.flatten() for part in some]) for some in (parts, pairs))
    return InnerRows([channels + inner, 2 * heads], inputs, ordered)


def recurrent_weights(take: Callable[..., Tensor], prefix: str, spec: RecurrentSpec, first_unit: int) -> RecurrentLayer:
    """Read the weights of a recurrent layer apart from its projections."""
    heads, is_ssm = spec.value_heads, isinstance(spec, SsmSpec)
    conv = take(f"{prefix}conv1d.weight", spec.channels, 1, spec.conv).float()
    bias = take(f"{prefix}conv1d.bias", spec.channels).float() if isinstance(spec, SsmSpec) and spec.conv_bias else None
    rates = -take(f"{prefix}A_log", heads).float().exp()
    norm = take(f"{prefix}norm.weight", spec.inner if is_ssm else spec.value_dim).float()
    return RecurrentLayer(
        spec,
        first_unit,
        conv[:, 0].T.contiguous(),
        bias,
        rates,
        take(f"{prefix}dt_bias", heads).float(),
        take(f"{prefix}D", heads).float() if is_ssm else torch.zeros_like(rates),
        norm if is_ssm else norm.repeat(heads),
        spec.inner // spec.key_heads if is_ssm else spec.value_dim,
    )

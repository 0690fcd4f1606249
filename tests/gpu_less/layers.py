"""Checks of the Triton kernels for recurrent layers and experts, on a device or under Triton's interpreter."""

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from engine.cuda.layer import TritonKernels
from engine.cuda.products import TritonExperts, TritonFormat
from engine.formats.forms import INTEGERS, GroupedWeight
from engine.kernels import StepKernels, TorchKernels
from engine.linear import Linear
from engine.models.spec import RecurrentSpec
from tests.engine.recurrent_scene import Scene
from tests.gpu_less.contract import TOLERANCE, batch_of, config_of, pool_of


def check_recurrence(
    spec: RecurrentSpec,
    device: torch.device,
    lengths: tuple[int, ...],
    steps: list[dict[int, int]],
    saved: dict[int, int],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Check that Triton kernels, also with padding, give the results, last states and saved states of torch kernels."""
    tolerance = max(1e-4, TOLERANCE[dtype])
    expected, found = (Scene(spec, kind, device, dtype, lengths) for kind in (TorchKernels, TritonKernels))
    wanted, last = expected.run(Random(0), steps, saved)
    given, _ = found.run(Random(0), steps, saved, padding=2)
    for request, (one, other) in enumerate(zip(given, wanted, strict=True)):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
        for which in {last[request], 2} if request in saved else {last[request]}:
            state = expected.state(request, which)
            assert bool(state.isfinite().all())
            torch.testing.assert_close(found.state(request, which), state, atol=1e-4, rtol=1e-4)


def triton_step(device: torch.device) -> StepKernels:
    """Return the kernels of a step, for checks that need no attention."""
    kernels = TritonKernels(config_of(16, 2, 1, 16), pool_of(1, 16, 4, torch.float32, 8, device))
    return kernels.begin(batch_of([(0, 1)], 4, 8, device))


def expert(kind: str, number: int, dtype: torch.dtype, device: torch.device) -> tuple[Linear, Tensor, Tensor]:
    """Return an expert, its weights in float64, and its bias."""
    random = torch.Generator().manual_seed(number)
    out, width = 21, 64
    bias, form = torch.randn(out, generator=random).to(device, dtype), TritonFormat(dtype)
    if kind == "plain":
        weight = torch.randn(out, 40, generator=random).to(device, dtype)
        return form.make(weight, bias), weight.double(), bias
    codes = torch.randint(0, 256, (out, width // 2), dtype=torch.uint8, generator=random).to(device)
    scales, zeros = torch.rand(2, out, width // 32, generator=random).to(device)
    order = torch.randperm(width, generator=random).to(device)
    some = kind == "codes, optional parts" and number % 2 == 0  # only some experts have the optional parts
    held = GroupedWeight(codes, INTEGERS, scales, zeros if some else None, order if some else None)
    return form.make_quantized(held, bias), held.dense().double(), bias


def check_experts(kind: str, dtype: torch.dtype, device: torch.device, every: Sequence[Sequence[int]]) -> None:
    """Check products of five experts. Each list in `every` has the number of rows of each expert."""
    each = [expert(kind, number, dtype, device) for number in range(5)]
    together = TritonFormat(dtype).of_experts([linear for linear, _, _ in each])
    assert isinstance(together, TritonExperts)
    for counts in every:
        rows = torch.randn(sum(counts), each[0][1].shape[1], generator=torch.Generator().manual_seed(1))
        rows = rows.to(device, dtype)
        found = together(rows, torch.tensor(counts, device=device)).double()
        parts = [
            part.double() @ weight.T + bias.double()
            for part, (_, weight, bias) in zip(rows.split(list(counts)), each, strict=True)
        ]
        wanted = torch.cat(parts)
        assert float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max()) <= TOLERANCE[dtype]

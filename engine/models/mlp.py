"""The gated MLP of a layer or of an expert."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import StepKernels
from engine.linear import Linear
from engine.models.spec import Activation

MLP_ROWS = 512  # rows computed at once on a CPU; more rows are not faster and need more memory


@dataclass(slots=True)
class Mlp:
    gate_up: Linear  # one matrix, for gate and up
    down: Linear
    activation: Activation

    def __call__(self, rows: Tensor, kernels: StepKernels) -> Tensor:
        """Return the MLP's output for `rows` [T, hidden_size]. May overwrite `rows`."""
        if len(rows) <= MLP_ROWS or rows.device.type != "cpu":
            return self.down(kernels.gated(self.gate_up(rows), self.activation))
        for some in torch.split(rows, MLP_ROWS):
            some.copy_(self.down(kernels.gated(self.gate_up(some), self.activation)))
        return rows

"""A recurrent layer with random weights, run in chosen chunks, for tests of each implementation."""

from collections.abc import Callable
from random import Random

import torch
from torch import Tensor

from engine.batch import BlockRows, StateBatch, build
from engine.kernels import Kernels
from engine.kv_pool import KVPool
from engine.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, ModelConfig, RecurrentSpec, SsmSpec
from engine.recurrence import RecurrentLayer
from scheduler.request import StateUse
from shared.kv.layout import KVLayout
from tests.engine.build import CPU, Blocks, in_one_piece, piece, state_size
from tests.gpu_less.contract import TensorMemory

LENGTHS = (23, 1, 9)
SPECS = {
    "delta": DeltaSpec(2, 4, 12, 20, 4),
    "delta, a head wider than a tile": DeltaSpec(1, 1, 40, 72, 4),
    "state space": SsmSpec(2, 6, 10, 40, 4),
    "state space, no bias": SsmSpec(1, 2, 16, 9, 3, conv_bias=False),
}


class Scene:
    """A recurrent layer with random weights, random inputs of three requests, and a pool filled with NaN."""

    def __init__(
        self,
        spec: RecurrentSpec,
        kernels: Callable[[ModelConfig, KVPool], Kernels],
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
        lengths: tuple[int, ...] = LENGTHS,
    ) -> None:
        random = torch.Generator().manual_seed(5)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(device)

        heads, is_ssm = spec.value_heads, isinstance(spec, SsmSpec)
        self.layer = RecurrentLayer(
            spec, 0, numbers(spec.conv, spec.channels), numbers(spec.channels) if isinstance(spec, SsmSpec) and spec.conv_bias else None,
            -numbers(heads).exp(), numbers(heads), numbers(heads) if is_ssm else torch.zeros(heads, device=device),
            numbers(spec.inner), spec.inner // spec.key_heads if is_ssm else spec.value_dim,
        )  # fmt: skip
        config = ModelConfig(
            "Test", 8, 9, (LayerSpec(spec, MlpSpec(8)), LayerSpec(AttentionSpec(1, 1, 8), MlpSpec(8))), 1e-6, False, 64
        )
        self.inputs = [
            [numbers(n, width).to(dtype) for width in (spec.channels, spec.inner, heads if is_ssm else 2 * heads)]
            for n in lengths
        ]
        self._blocks = sum(-(-length // 4) for length in lengths) + 1
        self._row_bytes = KVLayout(1, 1, 1, 4, 8, "float32").block_bytes
        self._size = state_size(config, self._row_bytes)
        layout = KVLayout(self._blocks + 3 * len(lengths) * self._size, 1, 1, 4, 8, "float32")
        self.pool = KVPool(layout, TensorMemory(layout, device), in_one_piece(config))
        self.pool.tensor.fill_(torch.nan)
        self.kernels = kernels(config, self.pool)
        self._numbers = int(self.pool.units[1, -1]) + spec.key_dim * spec.value_dim

    def row(self, request: int, which: int) -> int:
        """Return the first row of state number `which` of a request. A request computes with states 0 and 1.
        State 2 is its saved state."""
        return self._blocks + (3 * request + which) * self._size

    def state(self, request: int, which: int) -> Tensor:
        start = self.row(request, which) * self._row_bytes // 4
        return self.pool.floats[start : start + self._numbers].clone()

    def run(
        self, random: Random, steps: list[dict[int, int]], saved: dict[int, int], padding: int = 0
    ) -> tuple[list[Tensor], list[int]]:
        """Compute the requests. `steps` has, for each step, the number of tokens of each request. `saved` has, for some
        requests, the position at which their state is saved.

        As in a CUDA graph, each step is padded with `padding` slices that have neither tokens nor states. Return the
        results of each request, and the number of the state that each request wrote last.
        """
        blocks, device, rows = Blocks(self._blocks, 4), self.pool.tensor.device, BlockRows(self.pool.places)
        requests = [blocks.request(range(len(inputs)), max_tokens=0) for inputs, _, _ in self.inputs]
        found: list[list[Tensor]] = [[] for _ in requests]
        current = [random.randrange(2) for _ in requests]
        for step in steps:
            slices = [piece(requests[index], count) for index, count in step.items()]
            for index, one in zip(step, slices, strict=True):
                ends = one.start < (at := saved.get(index, 0)) <= one.end
                read = (self.row(index, current[index]),) if one.start else None
                write, save = (self.row(index, 1 - current[index]),), (self.row(index, 2),) if ends else ()
                one.state = StateUse(read, write, at if ends else 0, save)
            batch = build(slices, 4, device, rows=rows)
            assert batch.states is not None
            none = torch.full((3, padding, 1), -1)
            batch.states = StateBatch(
                torch.cat((batch.states.rows, none), dim=1).to(device),
                torch.cat((batch.states.save_at, none[0, :, 0] + 1)).to(device),
            )
            batch.cu_q = torch.cat((batch.cu_q, batch.cu_q[-1:].expand(padding)))
            parts = [
                [part[one.start : one.end] for part in self.inputs[index]]
                for index, one in zip(step, slices, strict=True)
            ]
            joined = [torch.cat(some) for some in zip(*parts, strict=True)]
            results = self.kernels.begin(batch).recur(self.layer, *joined)
            for index, one, result in zip(step, slices, results.split(batch.counts), strict=True):
                found[index].append(result)
                requests[index].num_computed = one.end
                current[index] = 1 - current[index]
        return [torch.cat(parts) for parts in found], current

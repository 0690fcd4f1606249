"""Forward passes captured as CUDA graphs.

Graphs are captured for some step sizes, and a step is padded to the next of these sizes. A step with only decodes
replays one graph. A small step with chunks replays several graphs and computes attention between the graphs, because
the kernel launches of attention depend on the step. A step above the largest size runs without a graph, because its
kernels take longer than their launches.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.attention import AttentionBackend, AttentionLayer, AttentionPlan, plan_tables
from engine.batch import Batch
from engine.cuda.graphs import CudaGraphPool, GraphRecording
from engine.cuda.staging import StepBuffers, StepShape
from engine.kernels import Kernels
from engine.models.decoder import AttentionDecoderLayer, Decoder
from engine.models.spec import LatentSpec

log = logging.getLogger("baton.engine")
# The numbers of tokens for which CUDA graphs are captured. The numbers for steps of decodes are the same as in vLLM.
# Steps with chunks (MIXED) have fewer sizes, because each size needs one graph per layer. Padding takes little time in
# steps of up to about 184 tokens. An H200 is compute-bound above this number.
DECODES = (1, 2, 4, *range(8, 257, 8), *range(320, 513, 64))
MIXED = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)


@dataclass(slots=True)
class Captured:
    """A pass captured at one size. If `decodes` is true, each slice has one token, and the graph includes attention."""

    shape: StepShape
    decodes: bool
    recording: GraphRecording
    hidden: Tensor


class BrokenAttention:
    """Attention that runs between captured graphs. Its inputs and outputs are in buffers of `Passes`, outside the
    memory of the graphs."""

    def __init__(self, passes: "Passes", tokens: int, pause: Callable[[Callable[[], None]], None]) -> None:
        self._passes = passes
        self._tokens = tokens
        self._pause = pause

    def attend(self, layer: AttentionLayer, q: Tensor) -> Tensor:
        passes, shape = self._passes, q.shape
        passes.queries_of(shape).copy_(q)
        self._pause(lambda: passes.attend(layer, shape))
        return passes.attended_of(layer, shape)


class Passes:
    """Runs the forward pass of each step, either by replaying a captured pass or without a graph.

    A captured pass has the size of the step or the next larger size. `CudaRunner` owns this object and calls it on the
    engine's thread. Until `capture` is called, every step runs without a graph. The hidden states are the same in both
    cases, and are valid until the next call of `run`.
    """

    def __init__(self, model: Decoder, kernels: Kernels, attention: AttentionBackend, buffers: StepBuffers) -> None:
        self._model, self._kernels, self._attention, self._buffers = model, kernels, attention, buffers
        self._decodes: list[Captured] = []  # the smallest first
        self._mixed: list[Captured] = []
        self._plan: AttentionPlan | None = None  # attention plan of the step being replayed
        self._num_tokens = 0
        self._queries = self._attended = torch.empty(0)

    # ---- running ---------------------------------------------------------------------------------------------------

    def choose(self, step: Batch) -> tuple[StepShape, Captured | None]:
        """Return the shape to which a step is padded, and the captured pass to replay (None: run without a graph)."""
        own = StepShape.of(step)
        if step.scored:  # a graph has a fixed number of logit rows, and scoring needs more
            return own, None
        if own.tokens == own.slices and (found := _least(self._decodes, own.tokens)) is not None:
            return found.shape, found
        if (found := _least(self._mixed, own.tokens)) is not None:
            return found.shape, found
        return own, None

    def run(self, step: Batch, captured: Captured | None) -> Tensor:
        """Run a step and return the result of `Decoder.forward`. The step's tensors are on the device and have no
        padding."""
        if captured is None:
            return self._model.forward(step, self._kernels.begin(step), self._planned(step))
        if not captured.decodes:
            self._plan, self._num_tokens = self._planned(step), len(step.tokens)
        captured.recording.replay()
        return captured.hidden[: len(step.logit_rows)]

    def _planned(self, step: Batch) -> AttentionPlan:
        return plan_tables(self._attention, self._kernels.pool, step)

    def queries_of(self, shape: torch.Size) -> Tensor:
        return self._queries[: shape.numel()].view(shape)

    def attended_of(self, layer: AttentionLayer, shape: torch.Size) -> Tensor:
        shape = torch.Size((*shape[:2], layer.latent or shape[2]))
        return self._attended[: shape.numel()].view(shape)

    def attend(self, layer: AttentionLayer, shape: torch.Size) -> None:
        """Compute attention for the current step's queries, which are padded to `shape`, and store the result. Skip the
        rows of padding."""
        assert self._plan is not None, "replayed without a plan"
        rows = slice(self._num_tokens)
        self.attended_of(layer, shape)[rows].copy_(self._plan.attend(layer, self.queries_of(shape)[rows]))

    # ---- capturing -------------------------------------------------------------------------------------------------

    def capture(self, pool: CudaGraphPool, slices: int, tokens: int) -> None:
        """Capture passes for steps of up to `slices` slices and `tokens` tokens.

        The largest pass is captured first, so that the other passes can reuse its memory.
        """
        began, model = time.monotonic(), self._model
        sizes = _sizes(MIXED, tokens)
        widest = max(
            one.heads * (one.width if isinstance(one, LatentSpec) else one.head_dim) for one in model.config.attention
        )
        self._queries, self._attended = torch.zeros(2, sizes[-1] * widest, dtype=model.dtype, device=model.device)
        self._mixed = [self._mixed_at(pool, size, min(size, slices)) for size in reversed(sizes)][::-1]
        if self._captures_attention:
            decodes = _sizes(DECODES, slices)
            self._decodes = [self._decodes_at(pool, size) for size in reversed(decodes)][::-1]
        seconds = time.monotonic() - began
        log.info("captured %d graphs for %s in %.1f s", self.num_graphs, self.describe(), seconds)

    @property
    def _captures_attention(self) -> bool:
        """Whether a graph may contain the attention of decodes. A graph cannot contain torch's reference attention.
        Without Triton, the reference attention computes the layers that flash-attn does not support."""
        plain = all(one.attention.is_plain for one in self._model.layers if isinstance(one, AttentionDecoderLayer))
        return self._attention.captures and (plain or self._kernels.captures_states)

    @property
    def num_graphs(self) -> int:
        return sum(captured.recording.num_graphs for captured in (*self._decodes, *self._mixed))

    def describe(self) -> str:
        """Return a description of the captured passes for logs."""
        if not self._mixed:
            return "none"
        mixed = f"steps of up to {self._mixed[-1].shape.tokens} tokens"
        return f"up to {self._decodes[-1].shape.tokens} decodes, {mixed}" if self._decodes else mixed

    def _decodes_at(self, pool: CudaGraphPool, size: int) -> Captured:
        shape = StepShape(size, size, size)
        batch = self._buffers.clear(shape)
        # The host fields of a captured batch have the largest values that later steps may have.
        most = self._buffers.most_tokens
        batch = replace(batch, starts=[most - 1] * size, kv_lens=[most] * size, sampled=list(range(size)))

        def work() -> Tensor:
            return self._model.forward(batch, self._kernels.begin(batch), self._planned(batch))

        recording = GraphRecording(pool)
        pool.run(work)  # compiles kernels and allocates permanent memory, which a capture may not do
        return Captured(shape, True, recording, recording.capture(work))

    def _mixed_at(self, pool: CudaGraphPool, size: int, rows: int) -> Captured:
        shape = StepShape(size, rows, rows)
        batch = self._buffers.clear(shape)

        def work(pause: Callable[[Callable[[], None]], None]) -> Tensor:
            return self._model.forward(batch, self._kernels.begin(batch), BrokenAttention(self, size, pause))

        recording = GraphRecording(pool)
        pool.run(lambda: work(lambda _: None))
        return Captured(shape, False, recording, recording.capture(lambda: work(recording.pause)))


def _sizes(sizes: Sequence[int], most: int) -> list[int]:
    """Limit `most` to the largest of the ascending `sizes`. Return the sizes below `most`, followed by `most`."""
    most = min(most, sizes[-1])
    return [*(size for size in sizes if size < most), most]


def _least(captured: list[Captured], tokens: int) -> Captured | None:
    """Return the smallest captured pass for at least `tokens` tokens, or None."""
    return next((one for one in captured if one.shape.tokens >= tokens), None)

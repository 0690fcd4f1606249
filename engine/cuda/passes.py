"""Forward passes at the sizes that are captured: steps are padded to one of them, or run as they are.

Decodes alone replay one graph. A small step with chunks in it replays a graph for each stretch between two
attentions, since how attention is laid out depends on the step. Larger steps keep the device busy without one.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend, AttentionPlan
from engine.batch import Batch
from engine.cuda.graphs import GraphPool, GraphRecording
from engine.cuda.staging import StepBuffers, StepShape
from engine.kernels.interface import Kernels
from engine.models.decoder import Decoder

log = logging.getLogger("baton.engine")
# vLLM's sizes for decodes. Mixed steps have fewer: each is a graph a layer, and up to the 184 tokens where an H200
# turns from bandwidth to arithmetic, padding costs next to nothing.
DECODES = (1, 2, 4, *range(8, 257, 8), *range(320, 513, 64))
MIXED = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)


@dataclass(slots=True)
class Captured:
    """A pass at one size. `decodes`: attention is part of its graph, so a step has one slice for each token."""

    shape: StepShape
    decodes: bool
    recording: GraphRecording
    hidden: Tensor


class BrokenAttention:
    """Attention between captured pieces, through buffers of its own: no piece's memory is held for it."""

    def __init__(self, passes: "Passes", tokens: int, pause: Callable[[Callable[[], None]], None]) -> None:
        self._passes = passes
        self._tokens = tokens
        self._pause = pause

    def attend(self, layer: int, q: Tensor, window: int) -> Tensor:
        passes = self._passes
        passes.queries[: self._tokens].copy_(q)
        self._pause(lambda: passes.attend(layer, window))
        return passes.attended[: self._tokens]


class Passes:
    """Without a call of `capture`, every step runs as it is."""

    def __init__(self, model: Decoder, kernels: Kernels, attention: AttentionBackend, buffers: StepBuffers) -> None:
        self._model, self._kernels, self._attention, self._buffers = model, kernels, attention, buffers
        self._decodes: list[Captured] = []  # by size
        self._mixed: list[Captured] = []
        self._plan: AttentionPlan | None = None  # of the step that is being replayed
        self._num_tokens = 0
        self.queries = self.attended = torch.empty(0)

    # ---- running ---------------------------------------------------------------------------------------------------

    def choose(self, step: Batch) -> tuple[StepShape, Captured | None]:
        """The shape that a step is padded to, and the pass to replay; None: it runs as it is."""
        own = StepShape.of(step)
        if step.scored:  # rows of logits without number
            return own, None
        if own.tokens == own.slices and (found := _least(self._decodes, own.tokens)) is not None:
            return found.shape, found
        if (found := _least(self._mixed, own.tokens)) is not None:
            return replace(found.shape, slices=own.slices), found
        return own, None

    def run(self, step: Batch, captured: Captured | None) -> Tensor:
        """`step`: on the device, without its padding. Returns hidden states as `Decoder.forward` does, valid until
        the next call."""
        if captured is None:
            return self._model.forward(step, self._kernels.begin(step), self._attention.plan(step))
        if not captured.decodes:
            self._plan, self._num_tokens = self._attention.plan(step), len(step.tokens)
        captured.recording.replay()
        return captured.hidden[: len(step.logit_rows)]

    def attend(self, layer: int, window: int) -> None:
        """Of the step under way, from `queries` to `attended`; rows of padding keep what was there."""
        assert self._plan is not None, "replayed without a plan"
        rows = slice(self._num_tokens)
        self.attended[rows].copy_(self._plan.attend(layer, self.queries[rows], window))

    # ---- capturing -------------------------------------------------------------------------------------------------

    def capture(self, pool: GraphPool, slices: int, tokens: int, captures_attention: bool) -> None:
        """For steps of up to so many slices and tokens; the largest first, so that the others fit into its memory.
        `captures_attention`: a plan of decodes depends on shapes alone, so that a graph may hold it."""
        began, config = time.monotonic(), self._model.config
        sizes = _sizes(MIXED, tokens)
        buffer = torch.zeros(
            (2, sizes[-1], config.num_heads, config.head_dim), dtype=self._model.dtype, device=self._model.device
        )
        self.queries, self.attended = buffer.unbind()
        self._mixed = [self._mixed_at(pool, size, min(size, slices)) for size in reversed(sizes)][::-1]
        if captures_attention:
            decodes = _sizes(DECODES, slices)
            self._decodes = [self._decodes_at(pool, size) for size in reversed(decodes)][::-1]
        seconds = time.monotonic() - began
        log.info("captured %d graphs for %s in %.1f s", self.num_graphs, self.describe(), seconds)

    @property
    def num_graphs(self) -> int:
        return sum(captured.recording.num_graphs for captured in (*self._decodes, *self._mixed))

    def describe(self) -> str:
        """What is captured, for people."""
        if not self._mixed:
            return "none"
        mixed = f"steps of up to {self._mixed[-1].shape.tokens} tokens"
        return f"up to {self._decodes[-1].shape.tokens} decodes, {mixed}" if self._decodes else mixed

    def _decodes_at(self, pool: GraphPool, size: int) -> Captured:
        shape = StepShape(size, size, size)
        batch = self._buffers.clear(shape)
        # What the host says of a captured batch are bounds that hold for every step to come.
        most = self._buffers.most_tokens
        batch = replace(batch, starts=[most - 1] * size, kv_lens=[most] * size, sampled=list(range(size)))

        def work() -> Tensor:
            return self._model.forward(batch, self._kernels.begin(batch), self._attention.plan(batch))

        recording = GraphRecording(pool)
        pool.prepare(work)
        return Captured(shape, True, recording, recording.capture(work))

    def _mixed_at(self, pool: GraphPool, size: int, rows: int) -> Captured:
        shape = StepShape(size, 0, rows)
        batch = self._buffers.clear(shape)

        def work(pause: Callable[[Callable[[], None]], None]) -> Tensor:
            return self._model.forward(batch, self._kernels.begin(batch), BrokenAttention(self, size, pause))

        recording = GraphRecording(pool)
        pool.prepare(lambda: work(lambda _: None))
        return Captured(shape, False, recording, recording.capture(lambda: work(recording.pause)))


def _sizes(sizes: Sequence[int], most: int) -> list[int]:
    """Those below `most`, and itself unless it is beyond them all."""
    most = min(most, sizes[-1])
    return [*(size for size in sizes if size < most), most]


def _least(captured: list[Captured], tokens: int) -> Captured | None:
    """The smallest that holds so many tokens."""
    return next((one for one in captured if one.shape.tokens >= tokens), None)

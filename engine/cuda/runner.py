"""Runs steps on a GPU. The host does not wait for the GPU between two steps.

A step is launched while the previous step runs. The tokens that the previous step draws stay on the device, where the
next step reads them. In tests, the same code runs synchronously on a CPU.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.attention import AttentionBackend
from engine.batch import Batch, build
from engine.counter_rng import BROKEN, NOTHING_ALLOWED
from engine.cuda.graphs import CudaGraphPool
from engine.cuda.passes import Passes
from engine.cuda.staging import StepBuffers, StepCapacity, StepShape
from engine.kernels import Kernels
from engine.kv_pool import KVPool
from engine.models.decoder import Decoder
from engine.runner import PendingStep, SliceOutput, TorchRunner, row_of
from engine.sampling import NO_TOKEN, NUMERICAL, SamplingRow, adjust, describe, draw
from engine.token_masks import TokenMasks
from scheduler.request import Request, Slice, Step
from shared.rpc.messages import SamplingParams

# Takes the logits (float32 [R, vocab]), the output of `parameters_of`, and the logits after bans, bias and penalties
# (None if no row has any of these). Returns tokens or error codes, int64 [R], without waiting for the device.
Sampler = Callable[[Tensor, Tensor, Tensor | None], Tensor]
ERRORS = {BROKEN: NUMERICAL, NOTHING_ALLOWED: NO_TOKEN}
CPU = torch.device("cpu")
# Sizes in the warm-up: the longest context, the tokens of a short chunk, and the maximum number of chunks in a step. A
# chunk of 8 tokens or fewer would count as a decode.
FAR, WARM_COUNT, MANY = 5120, 9, 160


@dataclass(slots=True)
class Launched:
    """A launched step. When the event `done` has occurred, `drawn` has the step's tokens. `outputs[i]` belongs to the
    slice order[i] of the step."""

    outputs: list[SliceOutput]
    order: list[int]
    sampled: list[int]
    drawn: Tensor  # int64, on the host
    done: "torch.cuda.Event | None"

    def wait(self) -> list[SliceOutput]:
        if self.done is not None:
            self.done.synchronize()
        for index, token in zip(self.sampled, self.drawn.tolist(), strict=True):
            output = self.outputs[index]
            if token < 0 and not output.error:
                output.logprobs, output.error = [], ERRORS[token]
            output.tokens = [] if output.error else [token]
        placed = self.outputs.copy()
        for place, output in zip(self.order, self.outputs, strict=True):
            placed[place] = output
        return placed


class CudaRunner(TorchRunner):
    """Runs a decoder on a GPU with static buffers. After `capture`, it replays captured CUDA graphs. Experimental.

    The engine's thread calls the runner, and at most one step is pending at a time. `sampler` draws all tokens on the
    device. If `sampler` is None and some rows are not greedy, `engine.sampling` draws the tokens and waits for the
    device. Penalties, biases, bans and logprobs need copies to or from the host, which also wait for the device.
    A row's token does not depend on other rows.
    """

    ahead = True

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        backend: AttentionBackend,
        kernels: Kernels,
        device: torch.device,
        capacity: StepCapacity,
        sampler: Sampler | None = None,
    ) -> None:
        super().__init__(model, pool, backend, kernels, device)
        self._capacity = capacity
        self._sampler = sampler
        self._buffers = StepBuffers(capacity, device)
        self.kernels = kernels
        self.passes = Passes(model, kernels, backend, self._buffers)
        self._tokens = torch.zeros(capacity.slices, dtype=torch.int64, device=device)  # tokens drawn by the last step
        self._cuda = cuda = device.type == "cuda"
        # Two buffers and events alternate between steps, because the previous step's tokens may not have been read yet.
        self._arrivals = [torch.zeros(capacity.slices, dtype=torch.int64, pin_memory=cuda) for _ in range(2)]
        self._events = [_event() if cuda else None for _ in range(2)]
        self._before: Sequence[Slice] = ()

    def capture(self, pool: CudaGraphPool) -> None:
        """Capture passes for steps up to the largest size that the scheduler may choose."""
        with self._here():
            self.passes.capture(pool, self._capacity.slices, self._capacity.tokens)

    def attributes(self) -> dict[str, str]:
        """Return the names of the runner's parts, which are shown to users."""
        return {
            "attention": self._backend.name,
            "kernels": self._kernels.name,
            "sampling": "torch" if self._sampler is None else "triton",
            "graphs": self.passes.describe(),
        }

    def warm_up(self) -> None:
        """Run steps with long and short contexts, few and many tokens and requests, with and without a logit bias.

        These steps differ from the largest step and from the captured steps. They compile kernels that a request could
        otherwise wait for: attention has different kernels for few, several and many decodes, for decodes of several
        tokens, and for few and many tiles of chunks. Graphs of decodes contain only the kernels for the longest
        context, but a step with a chunk may need any of these kernels. The KV of the warm-up steps is stored in the
        dummy block.
        """
        far = max(0, min(self._buffers.most_tokens, FAR) - WARM_COUNT)
        many = max(1, min(self._capacity.tokens // WARM_COUNT, self._capacity.slices, MANY))
        even = min(self._capacity.tokens // many, self._buffers.most_tokens)
        chunk = (0, WARM_COUNT)
        mixes = [[(far, WARM_COUNT)], [(0, even)] * many]
        for power in range(self._capacity.slices.bit_length() + 1):
            others = [(0, 1)] * (min(2**power, self._capacity.slices) - 1)
            mixes += [[*some, *others] for at in (0, far) for some in ([(at, 1)], [(at, 2)], [chunk, (at, 1)])]
        for spans in mixes:
            slices = [self._warm_slice(start, count) for start, count in spans[: self._capacity.slices]]
            self.run(Step(0, slices, []))

    def _warm_slice(self, start: int, count: int) -> Slice:
        sampling = SamplingParams(seed=0, top_p=0.9, logit_bias={0: 1.0} if start else {})
        request = Request("warm-up", [0] * (start + count), start + count, 1, sampling=sampling)
        return self._block_rows.use_dummy(Slice(request, start, count, True, 0), self._block_tokens)

    def run(self, step: Step) -> list[SliceOutput]:
        return self.launch(step)()

    def launch(self, step: Step, before: Step | None = None) -> PendingStep:
        if not step.slices:
            return lambda: []
        with self._here():
            return self._launch(step, self._before if before is not None else ()).wait

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Select the device and inference mode for this thread within the `with` block."""
        with torch.inference_mode(), torch.cuda.device(self._device) if self._cuda else nullcontext():
            yield

    def _launch(self, step: Step, before: Sequence[Slice]) -> Launched:
        order = sorted(range(len(step.slices)), key=lambda index: step.slices[index].count > 1)  # decodes first
        slices = [step.slices[index] for index in order]
        self._before = ()
        built = build(slices, self._block_tokens, CPU, before, self._block_rows)
        rows = [row_of(slices[index]) for index in built.sampled]
        masks = self._masks.start(rows)
        self._arrivals.reverse()
        self._events.reverse()
        buffers = self._buffers_for(built)
        if self.adapters is not None:
            self.adapters.rows.select(built, self._device)
        captures = buffers is self._buffers and not built.adapters  # graphs are captured without adapters
        shape, captured = self.passes.choose(built) if captures else (StepShape.of(built), None)
        batch, parameters = buffers.load(built, rows, shape, self._tokens)
        hidden = self.passes.run(batch, captured)
        done = self._events[0]
        launched = Launched([SliceOutput() for _ in slices], order, built.sampled, self._arrivals[0][: len(rows)], done)
        logits = self._model.logits(hidden[: len(rows)]) if rows else hidden
        if rows:
            self._draw(logits, rows, masks(), parameters, launched)
        self._pool_vectors(slices, built, logits, hidden, launched.outputs)
        self._score(replace(step, slices=slices), built, hidden[len(rows) :], launched.outputs)
        if done is not None:  # also if no token was drawn: `wait` must wait until the KV is stored
            done.record()
        self._before = slices
        return launched

    def _buffers_for(self, built: Batch) -> StepBuffers:
        if self._capacity.holds(built):
            return self._buffers
        slices, blocks = built.block_table.shape
        own = replace(self._capacity, slices=slices, tokens=len(built.tokens), blocks=blocks)
        return StepBuffers(own, self._device)

    def _draw(
        self,
        logits: Tensor,
        rows: list[SamplingRow],
        masks: TokenMasks | None,
        parameters: Tensor,
        launched: Launched,
    ) -> None:
        """Draw tokens, keep them on the device for the next step, and start copying them to the host."""
        adjusted = adjust(logits, rows, masks)
        if self._sampler is not None:
            drawn = self._sampler(logits, parameters, None if adjusted is logits else adjusted)
        elif all(row.is_greedy for row in rows):
            drawn = greedy(logits, adjusted)
        else:
            drawn = torch.tensor(draw(logits, adjusted, rows))
        tokens = self._tokens[: len(rows)]
        tokens.copy_(drawn)
        launched.drawn.copy_(tokens, non_blocking=True)
        wanted = [at for at, row in enumerate(rows) if row.sampling.logprobs is not None]
        if wanted:  # this waits for the device
            chosen = tokens.clamp(min=0).tolist()
            tops = [rows[at].sampling.logprobs or 0 for at in wanted]
            for at, entry in zip(wanted, describe(logits[wanted], [chosen[at] for at in wanted], tops), strict=True):
                launched.outputs[launched.sampled[at]].logprobs = [entry]


def _event() -> "torch.cuda.Event":
    """Return an event whose `synchronize` sleeps. A busy wait would occupy a core that other nodes need."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def greedy(logits: Tensor, adjusted: Tensor) -> Tensor:
    """Return the likeliest token of each row of `adjusted`, or an error code, int64 [R]."""
    best, chosen = adjusted.max(dim=1)
    chosen = torch.where(best == -math.inf, NOTHING_ALLOWED, chosen)
    return torch.where(logits.sum(dim=1).isfinite(), chosen, BROKEN)

"""Runs one step on a device and says what came out of each slice. What a step holds was decided elsewhere."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.batch import Batch, BlockRows, build
from engine.kernels.interface import Kernels
from engine.kv_pool import DUMMY_BLOCK, KVPool
from engine.logprobs import describe
from engine.models.decoder import Decoder
from engine.sampling import NUMERICAL, DrawResult, SamplingRow, is_penalized, sample
from scheduler.request import Request, Slice, Step, cdiv
from shared.rpc.messages import Logprobs, SamplingParams

MAX_SCORED_LOGITS = 2**24  # of prompt logprobs at once: 64 MiB, where a whole chunk of a large vocabulary takes GiBs
WARM_TOKENS = 128  # of the first pass: enough that all kernels are made, and over in a moment


@dataclass(slots=True)
class SliceOutput:
    """Of one slice. `error` is not empty when the request must end: "numerical" or "no_token"."""

    token: int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # entry i: of the token at slice.start + i + 1
    error: str = ""


class PendingStep(Protocol):
    """A step that was launched."""

    def wait(self) -> list[SliceOutput]:
        """Blocks until the step is done: one output a slice, in order. Raises what the step raised."""
        ...


@dataclass(slots=True)
class FinishedStep:
    """Of a runner that is done with a step when `launch` returns."""

    outputs: list[SliceOutput]

    def wait(self) -> list[SliceOutput]:
        return self.outputs


class Runner(Protocol):
    """Runs steps in the order in which they are given. Requests are read, never changed; running a step twice is
    harmless.

    `can_run_ahead`: one step may be launched while one earlier step is pending (never more). `ahead`: the engine does
    so; a runner sets it where that pays, `set_ahead` as the user wants it.
    """

    overruns: int = 0  # steps that an emulated device would have ended sooner
    can_run_ahead: bool = False
    ahead: bool = False

    def run(self, step: Step) -> list[SliceOutput]:
        """`launch` and `wait` in one, with nothing pending."""
        ...

    def launch(self, step: Step, before: Step | None = None) -> PendingStep:
        """Starts a step; what it reads of the requests (tokens, blocks) is read before this returns.

        `before`: the step that is pending, if one is. Where a slice's last token is still being sampled there,
        `engine.batch.build(..., before=before.slices)` says in `Batch.carried` which draw it is, and the runner puts
        it into `Batch.tokens` where it runs. When `before` fails, so does this step: its `wait` raises.
        """
        return FinishedStep(self.run(step))

    def warm_up(self) -> None:
        """Runs a little, in no request's blocks, so that none waits for what only the first pass does."""
        return


class WholePass(Protocol):
    """A faster way through the model for some batches, to the same logits."""

    def takes(self, batch: Batch) -> bool: ...

    def logits(self, batch: Batch) -> Tensor:
        """float32 [S, vocab_size] of a batch that it takes, whose slices all draw; stores the KV of all tokens."""
        ...


def set_ahead(runner: Runner, mode: str) -> None:
    """`mode`: "on" or "off" as `--async-scheduling` says; "auto" leaves what the runner chose. Raises ValueError for
    "on" where the runner cannot."""
    if mode == "on" and not runner.can_run_ahead:
        raise ValueError("--async-scheduling on: this runner takes one step at a time; use auto or off")
    runner.ahead = {"on": True, "off": False}.get(mode, runner.ahead)


def leads(step: Step) -> bool:
    """Whether the next step may be built before this one's tokens are known: not where the next draw of one of its
    requests depends on all tokens before it, as penalties do."""
    return not any(piece.samples and is_penalized(piece.request.sampling) for piece in step.slices)


@dataclass(slots=True)
class RunningStep:
    """A step on the runner's worker thread."""

    outputs: "Future[list[SliceOutput]]"

    def wait(self) -> list[SliceOutput]:
        return self.outputs.result()


class TorchRunner(Runner):
    """Runs a decoder over the paged pool. A request's payload is its `shared.rpc.messages.SamplingParams`.

    Running ahead, the passes have a thread of their own, which plays the device: torch lets go of the interpreter
    inside its kernels. The batch is still built by the caller.
    """

    can_run_ahead = True

    def __init__(
        self, model: Decoder, pool: KVPool, backend: AttentionBackend, kernels: Kernels, device: torch.device
    ) -> None:
        config, layout = model.config, pool.layout
        wanted = (config.num_layers, config.num_kv_heads, config.head_dim)
        if (layout.layers, layout.kv_heads, layout.head_dim) != wanted:
            raise ValueError(f"the KV pool is laid out for another model: {layout}, the model has {wanted}")
        self._model = model
        self._block_tokens = layout.block_tokens
        self._backend = backend
        self._kernels = kernels
        self._device = device
        self._whole_pass = _whole_pass(model, kernels, backend)
        self._block_rows = BlockRows()
        self._worker: ThreadPoolExecutor | None = None
        self._draws: list[DrawResult] | None = None  # of the step that ran last; None: it failed

    def run(self, step: Step) -> list[SliceOutput]:
        return self._pass(step, self._build(step))

    def launch(self, step: Step, before: Step | None = None) -> PendingStep:
        if not self.ahead:
            return FinishedStep(self.run(step))
        batch = self._build(step, before)
        self._worker = self._worker or ThreadPoolExecutor(1, "device")
        return RunningStep(self._worker.submit(self._pass, step, batch))

    def warm_up(self) -> None:
        """A chunk and a decode, on the thread that computes; their KV goes to the dummy block."""
        count = min(WARM_TOKENS, self._model.config.max_position_embeddings)
        request = Request("warm-up", [0] * count, count, 1, sampling=SamplingParams(seed=0))
        request.blocks = [DUMMY_BLOCK] * cdiv(count, self._block_tokens)
        for start in (0, count - 1):
            self.launch(Step(0, [Slice(request, start, count - start, True, 0)], [])).wait()

    def _build(self, step: Step, before: Step | None = None) -> Batch:
        slices = before.slices if before is not None else ()
        return build(step.slices, self._block_tokens, self._device, slices, self._block_rows)

    @torch.inference_mode()
    def _pass(self, step: Step, batch: Batch) -> list[SliceOutput]:
        outputs = [SliceOutput() for _ in step.slices]
        if not outputs:
            return outputs
        self._carry(batch)
        logits, scored = self._computed(batch)
        draws = sample(logits, [row_of(step.slices[index]) for index in batch.sampled])
        for index, draw in zip(batch.sampled, draws, strict=True):
            outputs[index] = SliceOutput(draw.token, draw.logprobs, error=draw.error)
        self._score(step, batch, scored, outputs)
        self._draws = draws
        return outputs

    def _computed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits of the slices that draw, and the hidden state of each row of `batch.scored`."""
        if self._whole_pass is not None and self._whole_pass.takes(batch):
            return self._whole_pass.logits(batch), torch.empty(0)
        attention, drawing = self._backend.plan(batch), batch.drawing()
        last = self._backend.plan(drawing) if drawing is not None else None
        hidden = self._model.forward(batch, self._kernels.begin(batch), attention, last)
        return self._model.logits(hidden[: len(batch.sampled)]), hidden[len(batch.sampled) :]

    def _carry(self, batch: Batch) -> None:
        """The draws of the step before become this one's tokens. Where a draw failed, its request is over."""
        draws, self._draws = self._draws, None
        if batch.carried and draws is None:
            raise RuntimeError("the step before, whose tokens this one reads, failed")
        for at, index in batch.carried:
            batch.tokens[at] = (draws or [])[index].token or 0

    def _score(self, step: Step, batch: Batch, hidden: Tensor, outputs: list[SliceOutput]) -> None:
        at_once = max(1, MAX_SCORED_LOGITS // self._model.config.vocab_size)
        row = 0
        for index, count in batch.scored:
            for start in range(0, count, at_once):
                rows = hidden[row + start : row + min(count, start + at_once)]
                self._score_rows(step.slices[index], start, rows, outputs[index])
            row += count

    def _score_rows(self, piece: Slice, start: int, hidden: Tensor, output: SliceOutput) -> None:
        """Appends the logprobs of the prompt tokens that follow the slice's tokens from `start` on."""
        logits = self._model.logits(hidden)
        if not bool(logits.sum(dim=1).isfinite().all()):
            output.token, output.logprobs, output.error = None, None, NUMERICAL
            return
        first = piece.start + start + 1
        following = piece.request.tokens[first : first + len(hidden)]
        num_top = piece.request.sampling.prompt_logprobs or 0
        output.prompt_logprobs += describe(logits, following, [num_top] * len(hidden))


def _whole_pass(model: Decoder, kernels: Kernels, backend: AttentionBackend) -> WholePass | None:
    """Where everything of a pass is our own kernels for a CPU."""
    if (kernels.name, backend.name) != ("numba", "numba"):
        return None
    from engine.cpu.fused_decode import fused_decode_of

    return fused_decode_of(model, kernels, backend)


def row_of(piece: Slice) -> SamplingRow:
    request = piece.request
    return SamplingRow(
        request.sampling, request.tokens, request.num_prompt, piece.end, request.stop_tokens, request.min_tokens
    )

"""Runs steps on a device and returns the output of each slice."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.attention import AttentionBackend, plan_tables
from engine.batch import Batch, BlockRows, build
from engine.kernels import Kernels
from engine.kv_pool import KVPool
from engine.lora.linear import ModelAdapters
from engine.media import NO_IMAGE, ImageEncoder, images_of
from engine.models.decoder import Decoder, LanguageModel
from engine.pooling import Pooler
from engine.sampling import (
    NUMERICAL,
    DrawResult,
    SamplingRow,
    depends_on_tokens,
    describe,
    distinct_prompt_ids,
    is_penalized,
    may_end_reasoning,
    sample,
)
from engine.token_masks import MaskFiller
from scheduler.request import Request, Slice, Step
from shared.rpc.messages import Logprobs, SamplingParams

if TYPE_CHECKING:  # numba may not be installed
    from engine.cpu.fused_decode import FusedDecode
    from engine.draft_head import DraftHead

MAX_SCORED_LOGITS = 2**24  # maximum number of prompt logits computed at once (64 MiB); a chunk's logits may take GiBs
WARM_TOKENS = 128  # prompt length in the warm-up: enough for all kernels to be compiled


@dataclass(slots=True)
class SliceOutput:
    """The output of one slice. If `error` is set ("numerical", "no_token", "no_image" or "internal"), the
    request must end.

    A runner draws at most one token. `engine.speculation` adds the tokens of right guesses.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)  # one for each token, or empty if not requested
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # entry i is for the token at slice.start + i + 1
    error: str = ""
    vector: bytes = b""  # float32, if the request is pooled


# A launched step. Calling it waits until the step ends, and returns one output per slice, in order, or raises the
# step's exception.
PendingStep = Callable[[], list[SliceOutput]]


class Runner(Protocol):
    """Runs steps in the given order. The engine's thread calls it.

    A runner changes nothing in requests except caches, so a step may run twice. If `can_run_ahead` is true, a step may
    be launched while one earlier step is pending. The engine does so if `ahead` is true. Each runner initially sets
    `ahead` to true if running ahead makes it faster, and `set_ahead` applies the user's choice.
    """

    overruns: int = 0  # number of steps that took longer than on the emulated device; 0 without emulation
    can_run_ahead: bool = False
    ahead: bool = False
    poolings: tuple[str, ...] = ("",)  # the values of `SamplingParams.pooling` that the runner supports
    adapters: ModelAdapters | None = None  # None if the model takes no LoRA adapters

    def run(self, step: Step) -> list[SliceOutput]:
        """Launch a step and wait for it. No step may be pending."""

    def launch(self, step: Step, before: Step | None = None) -> PendingStep:
        """Start a step. The tokens and blocks of its requests are read before this method returns.

        `before` is the pending step, if there is one. If `before` draws the last token of a slice of this step,
        `engine.batch.build` records this in `Batch.carried`, and the runner copies the drawn token into `Batch.tokens`
        on the device. If `before` fails, this step fails too.
        """
        outputs = self.run(step)
        return lambda: outputs

    def check(self) -> None:
        """Run small steps with KV in the dummy block. Raises an exception if the device does not work."""
        return

    def warm_up(self) -> None:
        """Run steps with KV in the dummy block, so that no request waits for one-time work like compilation."""
        self.check()


def set_ahead(runner: Runner, mode: str, *, speculates: bool = False) -> None:
    """Apply `--async-scheduling`, which is "on", "off", or "auto" (the runner decides).

    With speculative decoding (`speculates`), no step is planned ahead, because guesses need the tokens of the previous
    step. Raises ValueError if `mode` is "on" and the runner cannot run ahead.
    """
    if speculates:
        mode = "off"
    if mode == "on" and not runner.can_run_ahead:
        raise ValueError("--async-scheduling on: this --runner cannot plan a step while another runs; use auto or off")
    runner.ahead = {"on": True, "off": False}.get(mode, runner.ahead)


def leads(step: Step) -> bool:
    """Return whether the next step may be built before this step's tokens are known.

    The next step must wait in two cases. First, a request's next draw may depend on this step's token, because of
    penalties, bad words or a grammar, or because the reasoning may reach its budget. Second, if this step verifies
    guesses, the number of tokens that it yields is not known before it ends.
    """
    return not (step.work.draft_tokens or any(slice_.samples and _decides_next(slice_) for slice_ in step.slices))


def _decides_next(slice_: Slice) -> bool:
    """Return whether the request's next draw may depend on the token that this slice draws."""
    request, sampling = slice_.request, slice_.request.sampling
    ends = may_end_reasoning(sampling, request.num_prompt, slice_.end + 1)
    return request.matcher is not None or depends_on_tokens(sampling) or ends


class TorchRunner(Runner):
    """Runs a decoder over the paged KV pool. `Request.sampling` must be a `shared.rpc.messages.SamplingParams`.

    If `ahead` is true, passes run on a worker thread. The passes overlap with the caller's work, because torch's
    kernels release the interpreter lock. The caller's thread still builds the batch. Raises ValueError if the KV pool's
    layout does not match the model.
    """

    can_run_ahead = True

    def __init__(
        self, model: LanguageModel, pool: KVPool, backend: AttentionBackend, kernels: Kernels, device: torch.device
    ) -> None:
        config, layout = model.config, pool.layout
        wanted = (config.num_kv_layers, config.num_kv_heads, config.head_dim)
        if (pool.places.num_layers, layout.kv_heads, layout.head_dim) != wanted:
            raise ValueError(f"the KV pool has the layout of another model: {layout}; this model needs {wanted}")
        self._model = model
        self._block_tokens = layout.block_tokens
        self._backend = backend
        self._kernels = kernels
        self._device = device
        self._whole_pass = _whole_pass(model, kernels, backend)
        self._pool = pool
        self._block_rows = BlockRows(pool.places)
        self._masks = MaskFiller()
        self._worker: ThreadPoolExecutor | None = None
        self._draws: list[DrawResult] | None = None  # draws of the last step; None if it failed
        self._pooler = Pooler()
        self.poolings = ("", "logits") if config.has_head else ()
        self.poolings += ("last", "mean") if isinstance(model, Decoder) else ()
        self._encoder: ImageEncoder | None = None
        self._head: DraftHead | None = None

    def use_encoder(self, encoder: ImageEncoder) -> None:
        """Take the features of images from this encoder if a request does not have them."""
        self._encoder = encoder

    def use_head(self, head: "DraftHead") -> None:
        """Let a draft head observe the hidden states of all steps. From then on, no step may be planned ahead."""
        self._head = head

    def run(self, step: Step) -> list[SliceOutput]:
        step = step if self._head is None else self._head.extended(step)
        return self._pass(step, self._build(step))

    def launch(self, step: Step, before: Step | None = None) -> PendingStep:
        if not self.ahead:
            return super().launch(step)
        batch = self._build(step, before)
        self._worker = self._worker or ThreadPoolExecutor(1, "device")
        return self._worker.submit(self._pass, step, batch, before is not None).result

    def check(self) -> None:
        """Run a chunk and a decode on the thread that runs passes. Their KV is stored in the dummy block."""
        count = min(WARM_TOKENS, self._model.config.max_position_embeddings)
        request = Request("warm-up", [0] * count, count, 1, sampling=SamplingParams(seed=0))
        for start in (0, count - 1):
            slice_ = self._block_rows.use_dummy(Slice(request, start, count - start, True, 0), self._block_tokens)
            self.launch(Step(0, [slice_], []))()

    def _build(self, step: Step, before: Step | None = None) -> Batch:
        slices = before.slices if before is not None else ()
        return build(step.slices, self._block_tokens, self._device, slices, self._block_rows)

    @torch.inference_mode()
    def _pass(self, step: Step, batch: Batch, follows: bool = False) -> list[SliceOutput]:
        outputs = [SliceOutput() for _ in step.slices]
        if not outputs:
            return outputs
        self._carry(batch, follows)
        rows = [row_of(step.slices[index]) for index in batch.sampled]
        masks = self._masks.start(rows)
        batch.images, missing = images_of(step.slices, self._encoder)
        if self._head is not None:
            hidden = self._observed(step.slices, batch, self._head)
            logits = self._model.logits(hidden[: len(batch.sampled)])
        else:
            logits, hidden = self._computed(batch, needs_hidden=any(row.sampling.pooling for row in rows))
        draws = sample(logits, rows, masks())
        for index, draw in zip(batch.sampled, draws, strict=True):
            outputs[index] = output_of(draw)
        self._pool_vectors(step.slices, batch, logits, hidden, outputs)
        self._score(step, batch, hidden[len(batch.sampled) :], outputs)
        for index in missing:
            outputs[index] = SliceOutput(error=NO_IMAGE)
        self._draws = draws
        return outputs

    def _computed(self, batch: Batch, *, needs_hidden: bool) -> tuple[Tensor, Tensor]:
        """Return the logits of the slices that sample, and the hidden states of all logit rows. If a fused pass
        computes the batch, return an empty tensor in place of the hidden states."""
        if self.adapters is not None:
            self.adapters.rows.select(batch, self._device)
        fused = None if batch.adapters or batch.images is not None or needs_hidden else self._whole_pass
        if fused is not None and fused.takes(batch):
            return fused.logits(batch), torch.empty(0)
        attention, drawing = plan_tables(self._backend, self._pool, batch), batch.drawing()
        last = plan_tables(self._backend, self._pool, drawing) if drawing is not None else None
        hidden = self._model.forward(batch, self._kernels.begin(batch), attention, last)
        return self._model.logits(hidden[: len(batch.sampled)]), hidden

    def _observed(self, slices: Sequence[Slice], batch: Batch, head: "DraftHead") -> Tensor:
        """Compute the hidden states of all rows, pass them to the draft head, and return those of the logit rows."""
        captured = {layer: torch.empty(0) for layer in head.model.captured}
        rows = torch.arange(len(batch.tokens), device=self._device)
        every = replace(batch, logit_rows=rows, captured=captured)
        if self.adapters is not None:
            self.adapters.rows.select(every, self._device)
        attention = plan_tables(self._backend, self._pool, batch)
        hidden = self._model.forward(every, self._kernels.begin(every), attention)
        head.observe(slices, hidden, every.captured)
        return hidden[batch.logit_rows]

    def _carry(self, batch: Batch, follows: bool) -> None:
        """Copy the tokens that the previous step drew into this batch. If a draw failed, its request has ended, and the
        token is 0. If this step `follows` a step that failed, raise RuntimeError: the slices of the failed step will
        run again from recurrent states that this step would overwrite."""
        draws, self._draws = self._draws, None
        if follows and draws is None:
            raise RuntimeError("the previous step failed, and this step needs its results")
        for at, index in batch.carried:
            batch.tokens[at] = (draws or [])[index].token or 0

    def _pool_vectors(
        self, slices: Sequence[Slice], batch: Batch, logits: Tensor, hidden: Tensor, outputs: list[SliceOutput]
    ) -> None:
        if any(slice_.request.sampling.pooling for slice_ in slices):
            for index, vector in self._pooler.vectors(slices, batch, logits, hidden):
                outputs[index].vector = vector.cpu().numpy().tobytes()
                if not bool(vector.isfinite().all()):
                    outputs[index].error = NUMERICAL

    def _score(self, step: Step, batch: Batch, hidden: Tensor, outputs: list[SliceOutput]) -> None:
        at_once = max(1, MAX_SCORED_LOGITS // self._model.config.vocab_size)
        row = 0
        for index, count in batch.scored:
            if step.slices[index].request.sampling.pooling:
                row += count
                continue
            for start in range(0, count, at_once):
                rows = hidden[row + start : row + min(count, start + at_once)]
                self._score_rows(step.slices[index], start, rows, outputs[index])
            row += count

    def _score_rows(self, slice_: Slice, start: int, hidden: Tensor, output: SliceOutput) -> None:
        """Append to `output` the logprobs of the prompt token that follows each row of `hidden`. Row 0 is row `start`
        of the slice."""
        logits = self._model.logits(hidden)
        if not bool(logits.sum(dim=1).isfinite().all()):
            output.tokens, output.logprobs, output.error = [], [], NUMERICAL
            return
        first = slice_.start + start + 1
        following = slice_.request.tokens[first : first + len(hidden)]
        num_top = slice_.request.sampling.prompt_logprobs or 0
        output.prompt_logprobs += describe(logits, following, [num_top] * len(hidden))


def _whole_pass(model: LanguageModel, kernels: Kernels, backend: AttentionBackend) -> "FusedDecode | None":
    """Return the fused pass if the kernels and the attention are both numba's, and None otherwise."""
    if not isinstance(model, Decoder) or (kernels.name, backend.name) != ("numba", "numba"):
        return None
    from engine.cpu.fused_decode import fused_decode_of

    return fused_decode_of(model, kernels, backend)


def output_of(draw: DrawResult) -> SliceOutput:
    tokens = [] if draw.token is None else [draw.token]
    return SliceOutput(tokens, [] if draw.logprobs is None else [draw.logprobs], error=draw.error)


def row_of(slice_: Slice) -> SamplingRow:
    request = slice_.request
    if request.prompt_ids is None and is_penalized(request.sampling):
        request.prompt_ids = distinct_prompt_ids(request.sampling, request.tokens[: request.num_prompt])
    return SamplingRow(
        request.sampling,
        slice_.tokens,
        request.num_prompt,
        slice_.end,
        request.stop_tokens,
        request.min_tokens,
        request.matcher,
        request.prompt_ids,
    )

"""Runs one step on a device and says what came out of each slice. What a step holds was decided elsewhere."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.batch import Batch, build
from engine.kernels.interface import Kernels
from engine.kv_pool import KVPool
from engine.logprobs import describe
from engine.models.decoder import Decoder
from engine.sampling import NUMERICAL, Row, sample
from scheduler.request import Slice, Step
from shared.messages import Logprobs

MAX_SCORED_LOGITS = 2**24  # of prompt logprobs at once: 64 MiB, where a whole chunk of a large vocabulary takes GiBs


@dataclass(slots=True)
class Output:
    """Of one slice. `error` is not empty when the request must end: "numerical" or "no_token"."""

    token: int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # entry i: of the token at slice.start + i + 1
    error: str = ""


class Runner(Protocol):
    overruns: int = 0  # steps that an emulated device would have ended sooner

    def run(self, step: Step) -> list[Output]:
        """One output a slice, in order. Requests are read, never changed; running a step twice is harmless."""
        ...


class TorchRunner(Runner):
    """Runs a decoder over the paged pool. A request's payload is its `shared.messages.Sampling`."""

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

    @torch.inference_mode()
    def run(self, step: Step) -> list[Output]:
        outputs = [Output() for _ in step.slices]
        if not outputs:
            return outputs
        batch = build(step.slices, self._block_tokens, self._device)
        hidden = self._model.forward(batch, self._kernels.begin(batch), self._backend.plan(batch))
        sampled = hidden[: len(batch.sampled)]
        draws = sample(self._model.logits(sampled), [_row(step.slices[index]) for index in batch.sampled])
        for index, draw in zip(batch.sampled, draws, strict=True):
            outputs[index] = Output(draw.token, draw.logprobs, error=draw.error)
        self._score(step, batch, hidden[len(sampled) :], outputs)
        return outputs

    def _score(self, step: Step, batch: Batch, hidden: Tensor, outputs: list[Output]) -> None:
        at_once = max(1, MAX_SCORED_LOGITS // self._model.config.vocab_size)
        row = 0
        for index, count in batch.scored:
            for start in range(0, count, at_once):
                rows = hidden[row + start : row + min(count, start + at_once)]
                self._score_rows(step.slices[index], start, rows, outputs[index])
            row += count

    def _score_rows(self, piece: Slice, start: int, hidden: Tensor, output: Output) -> None:
        """Appends the logprobs of the prompt tokens that follow the slice's tokens from `start` on."""
        logits = self._model.logits(hidden)
        if not bool(logits.sum(dim=1).isfinite().all()):
            output.token, output.logprobs, output.error = None, None, NUMERICAL
            return
        first = piece.start + start + 1
        following = piece.request.tokens[first : first + len(hidden)]
        num_top = piece.request.payload.prompt_logprobs or 0
        output.prompt_logprobs += describe(logits, following, [num_top] * len(hidden))


def _row(piece: Slice) -> Row:
    request = piece.request
    return Row(request.payload, request.tokens, request.num_prompt, piece.end, request.stop_tokens, request.min_tokens)

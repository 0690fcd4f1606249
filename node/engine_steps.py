"""Receives and records the steps of a vLLM server. A plugin in the server (deploy/vllm_steps) sends each step to a
Unix socket."""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from engine.step_time_fit import CostFit, StepTiming
from node.recorder import SchedulerSnapshot, StepRecorder
from scheduler.blocks import Ledger
from scheduler.cost import CostModel, StepWork
from scheduler.request import Request, Slice, Step

log = logging.getLogger("baton.proxy")
MAX_BYTES = 4096
# Stands for the requests that did not come through this node.
UNKNOWN = Request("", [], 0, 0, arrival=2**31 - 1)
Number = Annotated[int, Field(strict=True, ge=0, lt=2**62)]


class EngineStep(BaseModel):
    """One step, as the plugin reports it.

    `cached_tokens` is, for the requests that began in this step, the number of tokens whose KV was in the prefix cache
    or came from another engine. `max_num_seqs` and `max_step_tokens` are limits of the server.
    """

    number: Number
    end_ns: Number  # Unix time
    elapsed_us: Number  # how long the engine waited for the device
    prefill_tokens: Number
    num_decodes: Number
    decode_tokens: Number
    running: Number  # number of running requests after the step
    waiting: Number
    cached_tokens: Number
    max_num_seqs: Number
    max_step_tokens: Number


def work_of(step: EngineStep, requests: Iterable[Request]) -> tuple[StepWork, list[Slice]]:
    """Return the work and the slices of a step. Advance `num_computed` of the requests.

    vLLM reports only totals. It computes prompts in the order of arrival, so the step's prompt tokens are assigned to
    `requests`, which must be in this order. The context of each decode is estimated as the mean context of the requests
    that decode.
    """
    work, prompts, decodes = StepWork(), list[Slice](), list[Slice]()
    left, cached, context = step.prefill_tokens, step.cached_tokens, 0
    for each in requests:
        is_decoding = each.num_tokens > each.num_prompt
        if is_decoding and len(decodes) < step.num_decodes:
            context += each.num_tokens
            decodes.append(Slice(each, each.num_tokens - 1, 1, samples=True, epoch=0))
        elif left and not is_decoding and each.num_computed < each.num_prompt:
            if not each.num_computed:
                each.num_computed = min(cached, each.num_prompt - 1)
                cached -= each.num_computed
            size = min(left, each.num_prompt - each.num_computed)
            work.add_chunk(each.num_computed, size)
            prompts.append(Slice(each, each.num_computed, size, samples=False, epoch=0))
            each.num_computed += size
            left -= size
    if left:
        work.add_chunk(0, left)
        prompts.append(Slice(UNKNOWN, 0, left, samples=False, epoch=0))
    work.num_decodes, work.draft_tokens = step.num_decodes, max(0, step.decode_tokens - step.num_decodes)
    work.decode_context = context * step.num_decodes // max(1, len(decodes))
    return work, prompts + decodes


class StepTracker:
    """Records the requests and steps of one incarnation of an engine, and fits the step-time model."""

    def __init__(self, recorder: StepRecorder) -> None:
        self.cost: CostModel | None = None
        self._recorder, self._fit = recorder, CostFit()
        self._before: EngineStep | None = None
        self._requests: dict[str, Request] = {}  # in the order of arrival
        self._arrivals = count()

    def begin(self, request_id: str, tokens: list[int]) -> None:
        """Record a request to continue `tokens`. The caller appends each generated token to `tokens`."""
        request = self._requests[request_id] = Request(request_id, tokens, len(tokens), 0, arrival=next(self._arrivals))
        self._recorder.event(request_id, "queued", serial=request.arrival, count=len(tokens))

    def end(self, request_id: str, reason: str) -> None:
        del self._requests[request_id]
        self._recorder.event(request_id, "ended", reason=reason)

    def add(self, step: EngineStep, free: int, owned: int) -> None:
        """Record a step. `free` and `owned` are the numbers of blocks in these states."""
        work, slices = work_of(step, self._requests.values())
        before, self._before = self._before, step
        host_us = 0
        if before is not None and before.number + 1 == step.number and before.running + before.waiting:
            host_us = max(0, (step.end_ns - before.end_ns) // 1000 - step.elapsed_us)
        predicted_s = self.cost.seconds(work) if self.cost is not None else 0.0
        self._fit.observe(work, (step.elapsed_us + host_us) / 1e6)
        self.cost = self._fit.model()
        done = Step(
            step.number, slices, [], work=work, budget=step.max_step_tokens, reason="engine", predicted_s=predicted_s
        )
        start_ns = max(0, step.end_ns - 1000 * step.elapsed_us)
        self._recorder.ran(StepTiming(done, start_ns, 1000 * step.elapsed_us, 1000 * host_us))
        ledger = Ledger(free, 0, owned, 0, 0, free + owned)
        self._recorder.turned(SchedulerSnapshot(ledger, step.running, step.waiting))


class StepSocket:
    """Receives the steps of a server at a Unix socket."""

    def __init__(self) -> None:
        self.latest: EngineStep | None = None
        self.on_step: Callable[[EngineStep], None] = lambda _: None
        self._socket: socket.socket

    @contextmanager
    def opened(self, path: Path) -> Iterator[None]:
        """Receive reports in the `with` block. The server may start before or after the socket is opened. Raises
        OSError if the path cannot be used."""
        if path.is_socket():
            path.unlink()
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as self._socket:
            self._socket.setblocking(False)
            self._socket.bind(str(path))
            loop.add_reader(self._socket, self._read)
            try:
                yield
            finally:
                loop.remove_reader(self._socket)
                path.unlink(missing_ok=True)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while True:
                try:
                    self.latest = EngineStep.model_validate_json(self._socket.recv(MAX_BYTES))
                except ValidationError as error:
                    first = error.errors(include_url=False, include_input=False)[0]
                    log.warning("ignored an invalid report of a step: %s", first)
                    continue
                self.on_step(self.latest)

"""Receives and records the steps of a vLLM server. A plugin in the server (deploy/vllm_steps) sends each step to a
Unix socket."""

import asyncio
import json
import logging
import socket
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from engine.step_time_fit import CostFit
from node.recorder import StepRecorder
from scheduler.cost import CostModel, StepWork
from shared.rpc.messages import StepRecord

log = logging.getLogger("baton.proxy")
MAX_BYTES = 4096
UNKNOWN = 2**31 - 1  # serial number for requests that did not come through this node


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One step, as the plugin reports it.

    `cached_tokens` is, for the requests that began in this step, the number of tokens whose KV was in the prefix cache
    or came from another engine. `max_num_seqs` and `max_step_tokens` are limits of the server.
    """

    number: int
    end_ns: int  # Unix time
    elapsed_us: int  # how long the engine waited for the device
    num_prefills: int
    prefill_tokens: int
    num_decodes: int
    decode_tokens: int
    running: int  # number of running requests after the step
    waiting: int
    cached_tokens: int
    max_num_seqs: int
    max_step_tokens: int


@dataclass(slots=True)
class RequestProgress:
    """How far the engine has computed a request."""

    serial: int
    num_prompt: int  # number of tokens that were sent to the engine
    num_tokens: int  # `num_prompt` plus the tokens that the engine has generated
    num_computed: int = 0  # number of prompt tokens whose KV was computed or found in the cache

    @property
    def is_decoding(self) -> bool:
        return self.num_tokens > self.num_prompt


def read_step(data: bytes) -> EngineStep:
    """Return the step that a datagram reports. Raises ValueError if the datagram is malformed."""
    try:
        found = json.loads(data)
        values = [found[each.name] for each in fields(EngineStep)]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"malformed: {error}") from None
    if any(type(value) is not int or not 0 <= value < 2**62 for value in values):
        raise ValueError("a number is out of range")
    return EngineStep(*values)


def work_of(step: EngineStep, requests: Iterable[RequestProgress]) -> tuple[StepWork, bytes]:
    """Return the work of a step, and the value of `StepRecord.members`. Advance the progress of `requests`.

    vLLM reports only totals. It computes prompts in the order of arrival, so the step's prompt tokens are assigned to
    `requests`, which must be in this order. The context of each decode is estimated as the mean context of the requests
    that decode.
    """
    work, prompts, decodes = StepWork(), array("i"), array("i")
    left, cached, context = step.prefill_tokens, step.cached_tokens, 0
    for each in requests:
        if each.is_decoding and len(decodes) < 3 * step.num_decodes:
            context += each.num_tokens
            decodes.extend((each.serial, each.num_tokens - 1, 1))
        elif left and not each.is_decoding and each.num_computed < each.num_prompt:
            if not each.num_computed:
                each.num_computed = min(cached, each.num_prompt - 1)
                cached -= each.num_computed
            count = min(left, each.num_prompt - each.num_computed)
            work.add_chunk(each.num_computed, count)
            prompts.extend((each.serial, each.num_computed, count))
            each.num_computed += count
            left -= count
    if left:
        work.add_chunk(0, left)
        prompts.extend((UNKNOWN, 0, left))
    work.num_decodes, work.draft_tokens = step.num_decodes, max(0, step.decode_tokens - step.num_decodes)
    work.decode_context = context * 3 * step.num_decodes // max(1, len(decodes))
    return work, (prompts + decodes).tobytes()


class StepTracker:
    """Records the steps of one incarnation of an engine, and fits the step-time model."""

    def __init__(self, recorder: StepRecorder) -> None:
        self.cost: CostModel | None = None
        self._recorder, self._fit = recorder, CostFit()
        self._before: EngineStep | None = None

    def add(self, step: EngineStep, requests: Iterable[RequestProgress], free: int, owned: int) -> None:
        """Record a step. `free` and `owned` are the numbers of blocks in these states."""
        work, members = work_of(step, requests)
        before, self._before = self._before, step
        host_us = 0
        if before is not None and before.number + 1 == step.number and before.running + before.waiting:
            host_us = max(0, (step.end_ns - before.end_ns) // 1000 - step.elapsed_us)
        predicted_s = self.cost.seconds(work) if self.cost is not None else 0.0
        self._fit.observe(work, (step.elapsed_us + host_us) / 1e6)
        self.cost = self._fit.model()
        self._recorder.record(
            StepRecord(
                number=step.number,
                start_ns=max(0, step.end_ns - 1000 * step.elapsed_us),
                duration_us=step.elapsed_us,
                host_us=host_us,
                predicted_us=round(1e6 * predicted_s),
                budget=step.max_step_tokens,
                reason="engine",
                num_prefills=work.num_prefills,
                prefill_tokens=work.prefill_tokens,
                prefill_pairs=work.prefill_pairs,
                num_decodes=work.num_decodes,
                decode_context=work.decode_context,
                running=step.running,
                waiting=step.waiting,
                blocks_free=free,
                blocks_owned=owned,
                members=members,
                draft_tokens=work.draft_tokens,
            )
        )


class StepSocket:
    """Receives the steps of a server at a Unix socket, from `open` to `close`.

    The server may start before or after the socket is opened.
    """

    def __init__(self, path: str) -> None:
        self.latest: EngineStep | None = None
        self.on_step: Callable[[EngineStep], None] = lambda _: None
        self._path = path
        self._socket: socket.socket

    def open(self) -> None:
        """Bind the socket, and start to receive reports. Raises OSError if the path cannot be used."""
        with suppress(FileNotFoundError):
            if Path(self._path).is_socket():
                Path(self._path).unlink()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        try:
            self._socket.bind(self._path)
        except OSError:
            self._socket.close()
            raise
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        Path(self._path).unlink(missing_ok=True)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while True:
                try:
                    self.latest = read_step(self._socket.recv(MAX_BYTES))
                except ValueError as error:
                    log.warning("ignored an invalid report of a step: %s", error)
                    continue
                self.on_step(self.latest)

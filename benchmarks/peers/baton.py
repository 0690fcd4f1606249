"""Worker for Baton, which runs a node's engine loop, with scheduling, batch building, sampling and publishing."""

import gc
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.peers.worker import serve
from engine.components import build
from engine.engine import Engine, EngineListener
from engine.options import BuildOptions
from engine.runner import SliceOutput
from engine.step_time_fit import StepTiming
from scheduler.request import Request, Step
from scheduler.scheduler import Scheduler, StepLimits, StepOutput
from shared.rpc.messages import Logprobs, SamplingParams

MAX_NUM_SEQS = 257
BUDGET_TOKENS = 2048  # maximum tokens per step; the same for all peers
TIMEOUT_S = 600.0
TOKEN = 7
GREEDY = SamplingParams(temperature=0)


class Stopwatch(EngineListener):
    """Records the end time and number of tokens of each step. Calls `write(blocks)` for requests that receive KV."""

    def __init__(self, write: Callable[[list[int]], None]) -> None:
        self._write = write
        self.first: dict[str, float] = {}  # when each request got its first token
        self.steps: list[tuple[float, int]] = []  # (end, tokens)
        self.finished: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()  # one entry per step
        self.engine: Engine | None = None
        self.logprobs: Logprobs | None = None  # those of the last token that has any

    def on_turn(self, scheduler: Scheduler) -> None: ...

    def on_scheduled(self, step: Step) -> None: ...

    def on_receiving(self, requests: list[Request]) -> None:
        def land(scheduler: Scheduler) -> None:
            for index, request in enumerate(requests):
                self._write(request.tables[0])
                scheduler.kv_received(request, TOKEN + index)  # different tokens, which choose different experts

        assert self.engine is not None
        self.engine.post(land)

    def on_step(self, step: Step, events: list[StepOutput], outputs: list[SliceOutput]) -> None:
        now_s = time.perf_counter()
        tokens = [event.request.id for event in events for _ in event.tokens]
        self.first = dict.fromkeys(tokens, now_s) | self.first
        self.steps.append((now_s, len(tokens)))
        self.logprobs = next((output.logprobs[-1] for output in outputs if output.logprobs), self.logprobs)
        self.finished.put(None)

    def on_timing(self, timing: StepTiming) -> None: ...

    def on_failure(self, error: BaseException) -> None:
        self.finished.put(error)

    def until(self, ready: Callable[[], bool]) -> None:
        """Wait until a step makes `ready()` true. Raises RuntimeError if the engine fails, queue.Empty on a timeout."""
        while not ready():
            if (error := self.finished.get(timeout=TIMEOUT_S)) is not None:
                raise RuntimeError(f"the engine died: {error}")


def _request(
    name: str, tokens: list[int], max_tokens: int, *, receives: bool = False, sampling: SamplingParams = GREEDY
) -> Request:
    return Request(name, tokens, len(tokens), max_tokens, receive_kv=receives, sampling=sampling)


def _add_all(scheduler: Scheduler, requests: list[Request]) -> None:
    for request in requests:
        scheduler.add(request)


class BatonEngine:
    """An engine with its model and KV pool, used as in a node. Each measurement creates a new scheduler.

    The methods run on the main thread of the worker; steps run on the engine's thread.
    """

    def __init__(self, model: str, threads: int, kv_gib: float = 0.5, **options: Any) -> None:
        """Build the engine; `options` are fields of BuildOptions."""
        sizes = {"max_num_seqs": MAX_NUM_SEQS, "max_step_tokens": BUDGET_TOKENS}
        self._parts = build(
            BuildOptions(model, threads=threads, kv_cache_memory=int(kv_gib * 2**30), **sizes, **options)  # type: ignore[arg-type]
        )
        layout = self._parts.layout
        self._rows = torch.from_numpy(self._parts.memory.rows).view(getattr(torch, layout.dtype))
        noise = np.random.default_rng(0).standard_normal(layout.block_bytes // self._rows.element_size(), np.float32)
        # Convert small parts, because an operator on a large tensor would start a second OpenMP team in this thread.
        self._noise = torch.cat([torch.from_numpy(part).to(self._rows.dtype) for part in np.array_split(noise, 64)])
        self._random = random.Random(0)
        self.facts = self._parts.attributes | {"kv_blocks": layout.num_blocks}
        gc.collect()
        gc.freeze()  # nodes do this too

    def prefill(self, tokens: int) -> float:
        """Return the seconds from a prompt's arrival to its first token."""
        return self._first(self.prompt(tokens), GREEDY)[1]

    def logprobs(self, tokens: list[int], top: int = 20) -> dict[str, float]:
        """Return the top logprobs of the next token. A peer with the same weights must return similar logprobs."""
        watch, _ = self._first(tokens, SamplingParams(temperature=0, logprobs=top))
        assert watch.logprobs is not None
        return dict(zip(map(str, watch.logprobs.top_tokens), watch.logprobs.top_logprobs, strict=True))

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Return how many seconds `steps` steps of `batch` decodes take. The prompts' KV is random."""
        requests = [_request(f"r{index}", self.prompt(context), steps + 4, receives=True) for index in range(batch)]
        return self.seconds(requests, steps)

    def seconds(self, requests: list[Request], steps: int) -> float:
        """Return how many seconds `steps` steps of all requests take. Their prompts' KV is random."""
        batch = len(requests)
        full = [ended_s for ended_s, tokens in self._decoded(requests, steps).steps if tokens == batch]
        return full[steps] - full[0]

    def _decoded(self, requests: list[Request], steps: int) -> Stopwatch:
        watch, engine = self._start()
        batch = len(requests)
        # Add all requests in one command. If they were added one at a time, the first could end before the last starts.
        engine.post(lambda scheduler: _add_all(scheduler, requests))
        watch.until(lambda: sum(tokens == batch for _, tokens in watch.steps) > steps)
        engine.stop()
        return watch

    def _first(self, prompt: list[int], sampling: SamplingParams) -> tuple[Stopwatch, float]:
        """Run a prompt until its first token. Return the stopwatch and the seconds that this took."""
        watch, engine = self._start()
        began_s = time.perf_counter()
        request = _request("prompt", prompt, 1, sampling=sampling)
        engine.post(lambda scheduler: scheduler.add(request))
        watch.until(lambda: "prompt" in watch.first)
        engine.stop()
        return watch, watch.first["prompt"] - began_s

    def _start(self) -> tuple[Stopwatch, Engine]:
        layout = self._parts.layout
        scheduler = Scheduler(StepLimits(BUDGET_TOKENS, MAX_NUM_SEQS), layout.num_blocks, layout.block_tokens)
        watch = Stopwatch(self._write)
        watch.engine = Engine(scheduler, self._parts.runner, watch)
        watch.engine.start()
        return watch, watch.engine

    def prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(3, min(2048, self._parts.vocab_size)) for _ in range(tokens)]

    def _write(self, blocks: list[int]) -> None:
        """Write the same values to each block. Speed depends on the addresses, not on the values."""
        self._rows[torch.tensor(blocks)] = self._noise


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    threading.current_thread().name = "worker"
    serve(BatonEngine)

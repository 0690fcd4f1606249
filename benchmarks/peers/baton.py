"""Worker for Baton: a node's engine loop, scheduler, batch building, sampling and publishing."""

import gc
import itertools
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
from engine.engine import Engine, EngineListener, StepTiming
from engine.options import BuildOptions
from engine.runner import SliceOutput
from scheduler.budget import budget_of
from scheduler.policy import POLICIES
from scheduler.request import Request, Step
from scheduler.scheduler import Scheduler, StepLimits, StepOutput
from shared.rpc.messages import Logprobs, SamplingParams

MAX_NUM_SEQS = 64
BUDGET_TOKENS = 2048  # per step unless the call gives another budget; the peers use the same
TIMEOUT_S = 600.0
NUM_STREAMS, STREAM_CONTEXT, SETTLE_TOKENS = 8, 16, 20
TOKEN = 7
GREEDY = SamplingParams(temperature=0)


class Stopwatch(EngineListener):
    """Records when each request received each token. `write` fills the blocks of requests that receive KV."""

    def __init__(self, write: Callable[[list[int]], None]) -> None:
        self._write = write
        self.times: dict[str, list[float]] = {}
        self.steps: list[tuple[float, int]] = []  # (end, tokens)
        self.finished: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()  # one entry per step
        self.engine: Engine | None = None
        self.logprobs: Logprobs | None = None  # of the last token that had them

    def on_turn(self, scheduler: Scheduler) -> None:
        pass

    def on_receiving(self, requests: list[Request]) -> None:
        def land(scheduler: Scheduler) -> None:
            for request in requests:
                self._write(request.blocks)
                scheduler.kv_received(request, TOKEN)

        assert self.engine is not None
        self.engine.post(land)

    def on_scheduled(self, step: Step) -> None:
        pass

    def on_step(self, step: Step, events: list[StepOutput], outputs: list[SliceOutput]) -> None:
        now_s = time.perf_counter()
        tokens = [event for event in events if event.token is not None]
        for event in tokens:
            self.times.setdefault(event.request.id, []).append(now_s)
        self.steps.append((now_s, len(tokens)))
        self.logprobs = next((output.logprobs for output in outputs if output.logprobs is not None), self.logprobs)
        self.finished.put(None)

    def on_timing(self, timing: StepTiming) -> None:
        pass

    def on_failure(self, error: BaseException) -> None:
        self.finished.put(error)

    def until(self, ready: Callable[[], bool]) -> None:
        """Wait for a step after which `ready()` holds. Raises RuntimeError or queue.Empty (timeout)."""
        while not ready():
            if (error := self.finished.get(timeout=TIMEOUT_S)) is not None:
                raise RuntimeError(f"the engine died: {error}")


class BatonEngine:
    """One engine with its model and KV pool, driven as a node drives it; each call runs a new scheduler over them.

    Called on the worker's main thread; steps run on the engine's own thread.
    """

    def __init__(self, model: str, threads: int, kv_gib: float = 0.5, **options: Any) -> None:
        """Build the engine; `options` are fields of BuildOptions."""
        self._computer = build(
            BuildOptions(
                model=model,
                threads=threads,
                max_num_seqs=MAX_NUM_SEQS,
                max_step_tokens=8192,
                kv_cache_memory=int(kv_gib * 2**30),
                **options,
            )
        )
        layout = self._computer.layout
        self._rows = torch.from_numpy(self._computer.memory.rows).view(getattr(torch, layout.dtype))
        noise = np.random.default_rng(0).standard_normal(layout.block_bytes // self._rows.element_size(), np.float32)
        # In small parts: an operator on a large tensor would start a second OpenMP team in this thread.
        self._noise = torch.cat([torch.from_numpy(part).to(self._rows.dtype) for part in np.array_split(noise, 64)])
        self._random = random.Random(0)
        self.facts = self._computer.attributes | {"kv_blocks": self._computer.layout.num_blocks}
        gc.collect()
        gc.freeze()  # as in a node

    def prefill(self, tokens: int, budget: int = BUDGET_TOKENS) -> float:
        """Return the seconds from a prompt's arrival to its first token."""
        watch, engine = self._start(budget)
        began_s = time.perf_counter()
        self._add(engine, "prompt", self._prompt(tokens), 1)
        watch.until(lambda: "prompt" in watch.times)
        engine.stop()
        return watch.times["prompt"][0] - began_s

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Return the seconds of `steps` steps of `batch` decodes. The prompts' KV is random."""
        watch, engine = self._start(BUDGET_TOKENS)
        for index in range(batch):
            self._add(engine, f"r{index}", self._prompt(context), steps + 4, lands=True)
        full: list[float] = []

        def ready() -> bool:
            full[:] = [ended_s for ended_s, tokens in watch.steps if tokens == batch]
            return len(full) > steps

        watch.until(ready)
        engine.stop()
        return full[steps] - full[0]

    def logprobs(self, tokens: list[int], top: int = 20) -> dict[str, float]:
        """Return the top logprobs of the next token, which a peer with the same weights must match."""
        watch, engine = self._start(BUDGET_TOKENS)
        self._add(engine, "prompt", tokens, 1, sampling=SamplingParams(temperature=0, logprobs=top))
        watch.until(lambda: "prompt" in watch.times)
        engine.stop()
        assert watch.logprobs is not None
        return dict(zip(map(str, watch.logprobs.top_tokens), watch.logprobs.top_logprobs, strict=True))

    def mixed(self, prompt: int, policy: str = "stall_free", budget: int = 512, slo_ms: float = 0) -> dict[str, float]:
        """Measure a long prompt's TTFT, and the worst gap of eight streams before it and until its first token."""
        watch, engine = self._start(budget, policy, slo_ms)
        for index in range(NUM_STREAMS):
            self._add(engine, f"s{index}", self._prompt(STREAM_CONTEXT), 10_000)
        streams = [f"s{index}" for index in range(NUM_STREAMS)]

        def wait_for(count: int) -> None:
            wanted = {name: len(watch.times.get(name, ())) + count for name in streams}
            watch.until(lambda: all(len(watch.times.get(name, ())) >= wanted[name] for name in streams))

        self._add(engine, "warm-up", self._prompt(prompt // 4), 1)
        watch.until(lambda: "warm-up" in watch.times)
        settled_s = time.perf_counter()
        wait_for(SETTLE_TOKENS)
        sent_s = time.perf_counter()
        self._add(engine, "prompt", self._prompt(prompt), 2)
        watch.until(lambda: len(watch.times.get("prompt", ())) == 2)
        wait_for(1)
        engine.stop()
        first_s = watch.times["prompt"][0]
        return {
            "idle_gap_s": max(_worst_gap(watch.times[name], settled_s, sent_s) for name in streams),
            "worst_gap_s": max(_worst_gap(watch.times[name], sent_s, first_s) for name in streams),
            "ttft_s": first_s - sent_s,
        }

    def _start(self, budget: int, policy: str = "stall_free", slo_ms: float = 0) -> tuple[Stopwatch, Engine]:
        layout = self._computer.layout
        scheduler = Scheduler(
            StepLimits(budget, MAX_NUM_SEQS),
            layout.num_blocks,
            layout.block_tokens,
            POLICIES[policy],
            budget_of(budget, slo_ms / 1000),
        )
        watch = Stopwatch(self._write)
        watch.engine = Engine(scheduler, self._computer.runner, watch)
        watch.engine.start()
        return watch, watch.engine

    def _add(
        self,
        engine: Engine,
        name: str,
        tokens: list[int],
        max_tokens: int,
        lands: bool = False,
        sampling: SamplingParams = GREEDY,
    ) -> None:
        request = Request(name, tokens, len(tokens), max_tokens, receive_kv=lands, sampling=sampling)
        engine.post(lambda scheduler: scheduler.add(request))

    def _prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(3, min(2048, self._computer.vocab_size)) for _ in range(tokens)]

    def _write(self, blocks: list[int]) -> None:
        """Write the same values to each block: only the different addresses matter for time."""
        self._rows[torch.tensor(blocks)] = self._noise


def _worst_gap(times: list[float], start_s: float, end_s: float) -> float:
    """Return the longest gap that overlaps [start_s, end_s]."""
    return max((b - a for a, b in itertools.pairwise(times) if b > start_s and a < end_s), default=0.0)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    threading.current_thread().name = "worker"
    serve(BatonEngine)

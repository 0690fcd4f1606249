"""Measure the host time of a decode step by part, next to the pass itself, and the gain of planning ahead.

   python -m benchmarks step_overhead

The parts run one after the other on one thread, through a node's own objects, on the 110M shape with random weights.
`pass` is the model with its head; `draw` is greedy, `sampled` draws the same rows at temperature 1 instead; `publish`
is the work of the engine's thread and the event loop until a router's message is encoded.
"""

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
import uvloop
from torch import Tensor

from benchmarks.models import checkpoint
from benchmarks.result import Cell, Result, Table, in_turn, median, parser
from engine.batch import Batch
from engine.components import build
from engine.engine import Engine, EngineListener, StepTiming
from engine.options import BuildOptions
from engine.runner import Runner, SliceOutput, TorchRunner, row_of
from engine.sampling import sample
from node.output_publisher import OutputListener, OutputPublisher, PrefillProgress
from node.recorder import StepRecorder
from scheduler.request import Request, Step
from scheduler.scheduler import Scheduler, StepLimits, StepOutput
from shared.lifecycle import freeze_gc
from shared.rpc.codec import encode
from shared.rpc.messages import NodeUpdate, SamplingParams, TokenDelta

T = TypeVar("T")
GREEDY = SamplingParams(temperature=0.0)
HOST = ("schedule", "build", "draw", "update", "publish", "records")
PARTS = ("pass", *HOST, "sampled")
SWITCH_S = 0.0005  # thread switch interval of every Baton process
GOAL = 0.05
BLOCK_TOKENS = 16


def decode(scheduler: Scheduler, count: int, context: int, steps: int) -> None:
    """Fill the scheduler with `count` requests that each decode for `steps` steps. Their prompts count as computed: the
    cost of a step does not depend on the values of its KV."""
    rows = []
    for index in range(count):
        tokens = [(7 * index + at) % 8000 for at in range(context)]
        rows.append(Request(f"router-{index}", tokens, context, steps + 2 * count, sampling=GREEDY))
        scheduler.add(rows[-1])
    while any(row.num_generated == 0 for row in rows):
        step = scheduler.schedule()
        scheduler.update(step, [5 if piece.samples else None for piece in step.slices])
    for row in rows:
        row.max_tokens = row.num_generated + steps


class Outputs(OutputListener):
    """Keeps the deltas of the last step."""

    deltas: list[TokenDelta]

    def on_admitted(self, request: Request) -> None: ...

    def on_outputs(self, deltas: list[TokenDelta], progress: list[PrefillProgress], at_ns: int) -> None:
        self.deltas = deltas

    def on_request_failed(self, request_id: str) -> None: ...

    def on_engine_failed(self, error: BaseException) -> None: ...


class StepParts:
    """Calls a node's objects in turn and records how long each call took, in microseconds."""

    def __init__(self, runner: TorchRunner, scheduler: Scheduler) -> None:
        self.publisher, self.outputs = OutputPublisher(scheduler, StepRecorder()), Outputs()
        self.publisher.subscribe(self.outputs)
        self.runner, self.scheduler = runner, scheduler
        self.taken: dict[str, list[float]] = {part: [] for part in PARTS}

    async def step(self) -> None:
        step = self.timed("schedule", self.scheduler.schedule)
        batch = self.timed("build", lambda: self.runner._build(step))
        logits = self.timed("pass", lambda: self._logits(batch))
        draws = self.timed("draw", lambda: sample(logits, [row_of(piece) for piece in step.slices]))
        warm = [replace(row_of(piece), sampling=SamplingParams(seed=at)) for at, piece in enumerate(step.slices)]
        self.timed("sampled", lambda: sample(logits, warm))
        outputs = [SliceOutput(draw.token, draw.logprobs, error=draw.error) for draw in draws]
        failed = [bool(output.error) for output in outputs]
        tokens = [output.token for output in outputs]
        events = self.timed("update", lambda: self.scheduler.update(step, tokens, failed))
        began = time.perf_counter()
        self.publisher.on_step(step, events, outputs)
        await asyncio.sleep(0)
        encode(NodeUpdate(self.outputs.deltas))
        self.taken["publish"].append(1e6 * (time.perf_counter() - began))
        self.timed("records", lambda: self._record(step))

    def timed(self, part: str, function: Callable[[], T]) -> T:
        began = time.perf_counter()
        found = function()
        self.taken[part].append(1e6 * (time.perf_counter() - began))
        return found

    def _record(self, step: Step) -> None:
        self.publisher.on_scheduled(step)
        self.publisher.on_timing(StepTiming(step, 1, 1000, 1000))
        self.publisher.on_turn(self.scheduler)

    @torch.inference_mode()
    def _logits(self, batch: Batch) -> Tensor:
        runner = self.runner
        return runner._computed(batch)[0]


class StepTimeline(EngineListener):
    """Records when each step was published, and when each request got its first token."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.engine = Engine(scheduler, runner, self)
        self.turns: list[float] = []
        self.first: dict[str, float] = {}
        self.ended = threading.Event()

    def on_turn(self, scheduler: Scheduler) -> None:
        if self.turns and not scheduler.requests:
            self.ended.set()

    def on_receiving(self, requests: list[Request]) -> None: ...

    def on_scheduled(self, step: Step) -> None: ...

    def on_step(self, step: Step, events: list[StepOutput], outputs: list[SliceOutput]) -> None:
        now = time.perf_counter()
        self.turns.append(now)
        for event in events:
            if event.token is not None:
                self.first.setdefault(event.request.id, now)

    def on_timing(self, timing: StepTiming) -> None: ...

    def on_failure(self, error: BaseException) -> None:
        self.ended.set()


def engine_run(runner: TorchRunner, count: int, context: int, steps: int, *, ahead: bool) -> dict[str, float]:
    """Return the milliseconds of a turn, and the TTFT of short prompts that arrive while the others decode."""
    runner.ahead = ahead
    scheduler = _scheduler(count + 1, context + steps)
    decode(scheduler, count, context, steps)
    timeline = StepTimeline(scheduler, runner)
    timeline.engine.start()
    waited = []
    for index in range(8):
        time.sleep(0.0421)  # not aligned with steps
        late = Request(f"late-{index}", [index] * 32, 32, 1, sampling=GREEDY)
        began = time.perf_counter()
        timeline.engine.post(lambda scheduler, late=late: scheduler.add(late))  # type: ignore[misc]
        while late.id not in timeline.first and not timeline.ended.is_set():
            time.sleep(0.0005)
        waited.append(1e3 * (timeline.first.get(late.id, began) - began))
    timeline.ended.wait(600)
    timeline.engine.stop()
    runner.ahead = False
    turns = timeline.turns[-steps // 3 :]  # without those of late arrivals
    gaps = [1e3 * (end - begin) for begin, end in pairwise(turns)]
    return {"turn_ms": median(gaps), "ttft_ms": median(waited)}


def _blocks(count: int, tokens: int) -> int:
    """Return the blocks needed by `count` requests that end at `tokens` tokens or a little later."""
    return 2 + count * (2 + (tokens + 2 * count) // BLOCK_TOKENS)


def _scheduler(count: int, tokens: int) -> Scheduler:
    return Scheduler(StepLimits(max(512, count), count), _blocks(count, tokens), BLOCK_TOKENS)


async def measure_parts(runner: TorchRunner, counts: Sequence[int], context: int, steps: int) -> list[dict[str, Any]]:
    found = []
    for count in counts:
        scheduler = _scheduler(count, context + steps)
        decode(scheduler, count, context, steps + 1)
        parts = StepParts(runner, scheduler)
        freeze_gc()
        for _ in range(steps):
            await parts.step()
        gc.unfreeze()
        found.append({"count": count} | {part: median(times[2:]) for part, times in parts.taken.items()})
    return found


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--counts", type=int, nargs="+", default=[1, 8, 32, 64, 256], help="decodes in a step")
    flags.add_argument("--context", type=int, default=512)
    flags.add_argument("--steps", type=int, default=60)
    flags.add_argument("--threads", type=int, default=0)
    args = flags.parse_args()
    sys.setswitchinterval(SWITCH_S)
    most = max(33, *args.counts)
    options = BuildOptions(
        str(checkpoint("110m")),
        num_blocks=_blocks(most, args.context + 6 * args.steps),
        block_size=BLOCK_TOKENS,
        threads=args.threads,
        max_num_seqs=most,
    )
    runner = build(options).runner
    assert isinstance(runner, TorchRunner)
    engine_run(runner, 4, 64, 40, ahead=False)  # compiles kernels and touches memory for the first time
    runs = uvloop.run(measure_parts(runner, args.counts, args.context, args.steps))
    arms = {
        name: lambda ahead=ahead: engine_run(runner, 32, args.context, 6 * args.steps, ahead=ahead)
        for name, ahead in (("one after the other", False), ("planned ahead", True))
    }
    turns = in_turn(arms, args.repeats)
    rows: list[list[Cell]] = []
    for run in runs:
        host = sum(run[part] for part in HOST)
        share = host / (host + run["pass"])
        goal = share <= GOAL if run["count"] == 32 else None
        rows.append([run["count"], *(run[part] for part in PARTS), host, 100 * share, goal])
    note = "Host: everything except pass and sampled. The goal is 5 % at 32 decodes."
    columns = ["decodes", *(f"{part}, µs" for part in PARTS), "host, µs", "host, % of a step", "≤ 5 %"]
    ahead_rows: list[list[Cell]] = [
        [name, *(median([run[key] for run in found]) for key in ("turn_ms", "ttft_ms"))]
        for name, found in turns.items()
    ]
    Result(
        "step_overhead",
        f"A decode step of the 110M shape, context {args.context}: host time by part, and the gain of planning ahead.",
        [
            Table("A step by part", columns, rows, note),
            Table("32 decodes", ["steps are", "turn, ms", "first token of an arrival, ms"], ahead_rows),
        ],
        {"parts": runs, "turns": turns},
    ).finish(args.out)


if __name__ == "__main__":
    main()

"""Measure speculative decoding by prompt lookup: tokens per second with and without it, on two kinds of text.

    python -m benchmarks speculation --model 110m

The engine computes every step of a model with random weights. Since such a model writes no meaningful text, the tokens
that it draws are replaced by those of given answers. The times are therefore those of the model, and the text
determines which guesses are right. "edits": the answer is the prompt with one word in fifteen replaced. "prose": the
answer is unrelated to the prompt. The texts are pages of docs/, tokenized for the demo model.
"""

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.models import CACHE, SHAPES, TOKENIZER, checkpoint
from benchmarks.peers.baton import BUDGET_TOKENS, Stopwatch
from benchmarks.process import ROOT
from benchmarks.result import MACHINE, RESULTS, Cell, Result, Table, in_turn, median, parser, ratio
from engine.components import build
from engine.engine import Engine
from engine.options import BuildOptions
from engine.runner import Runner, SliceOutput
from engine.startup import EngineComponents
from scheduler.drafters import Speculation
from scheduler.request import Request, RequestState, Step
from scheduler.scheduler import Scheduler, StepLimits
from shared.rpc.messages import SamplingParams

PROMPT, ANSWER = 384, 160  # tokens
CHANGED = 15  # in edits, one word in this many is replaced
BATCHES = (1, 8, 32)
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
GOALS = {("edits", 1): 1.6, **{("prose", batch): 0.97 for batch in BATCHES}}


@dataclass(frozen=True, slots=True)
class Script:
    prompt: list[int]
    answer: list[int]


def scripts_of(kind: str, count: int) -> list[Script]:
    """Return scripts from random passages of the texts. Prompts have PROMPT tokens, and answers have ANSWER tokens."""
    tokenizer, rng = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")), random.Random(0)
    pages = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]
    words = [[word for word in page.split() if word.isascii()] for page in pages]
    found: list[Script] = []
    for number in range(count):
        here, there = words[number % len(pages)], words[(number + 1) % len(pages)]
        start = rng.randrange(max(1, len(here) - PROMPT))
        passage = here[start : start + PROMPT]
        if kind == "edits":
            other = [rng.choice(there) if rng.randrange(CHANGED) == 0 else word for word in passage]
        else:
            other = there[rng.randrange(max(1, len(there) - ANSWER)) :]
        prompt, answer = (tokenizer.encode(" ".join(text)).ids for text in (passage, other))
        found.append(Script(prompt[:PROMPT], answer[:ANSWER]))
    return found


class ScriptedRunner(Runner):
    """Computes steps, and replaces drawn tokens by the tokens of the requests' scripts."""

    def __init__(self, runner: Runner) -> None:
        self.rows: dict[str, list[int]] = {}  # the prompt and the answer, by the id of the request
        self._runner = runner

    def run(self, step: Step) -> list[SliceOutput]:
        outputs = self._runner.run(step)
        for slice_, output in zip(step.slices, outputs, strict=True):
            if output.tokens:
                output.tokens = [self.rows[slice_.request.id][slice_.end]]
        return outputs


class ScriptedListener(Stopwatch):
    """Gives each request that receives KV the first token of its answer."""

    def __init__(self, rows: dict[str, list[int]]) -> None:
        super().__init__(lambda _: None)
        self._rows = rows

    def on_receiving(self, requests: list[Request]) -> None:
        def land(scheduler: Scheduler) -> None:
            for request in requests:
                scheduler.kv_received(request, self._rows[request.id][request.num_prompt])

        assert self.engine is not None
        self.engine.post(land)


class SpeculatingEngine:
    """An engine with or without speculation. It keeps its step-time model between measurements, as a node does."""

    def __init__(self, parts: EngineComponents, speculation: Speculation | None, clock: Clock) -> None:
        layout, self._clock = parts.layout, clock
        self._runner = ScriptedRunner(parts.runner)
        self._watch = ScriptedListener(self._runner.rows)
        self._scheduler = Scheduler(
            StepLimits(BUDGET_TOKENS), layout.num_blocks, layout.block_tokens, speculation=speculation
        )
        self._watch.engine = self._engine = Engine(self._scheduler, self._runner, self._watch)
        self._engine.start()
        for script in scripts_of("prose", 2):
            self.seconds([script], receives=False)  # compute a prompt, as each node does for some requests

    def seconds(self, scripts: Sequence[Script], *, receives: bool = True) -> float:
        """Return the seconds from the requests' arrival to the last token. With `receives`, no prompt is computed."""
        requests = []
        for number, script in enumerate(scripts):
            self._runner.rows[f"r{number}"] = script.prompt + script.answer
            more: dict[str, Any] = {"receive_kv": receives, "sampling": SamplingParams(temperature=0)}
            requests.append(Request(f"r{number}", list(script.prompt), len(script.prompt), len(script.answer), **more))
        began_s = self._clock()
        for request in requests:
            self._engine.post(partial(_add, request))
        self._watch.until(lambda: all(request.state is RequestState.DONE for request in requests))
        return self._clock() - began_s

    def acceptance(self) -> tuple[int, int]:
        """Return how many tokens were guessed, and how many of them were right."""
        return self._scheduler.counters.draft_tokens, self._scheduler.counters.accepted_tokens

    def close(self) -> None:
        self._engine.stop()


def _add(request: Request, scheduler: Scheduler) -> None:
    scheduler.add(request)


def measure(
    engines: Mapping[str, SpeculatingEngine], kind: str, batch: int, repeats: int
) -> tuple[list[Cell], dict[str, Any]]:
    """Return a row of the table, and the measurements."""
    scripts, before = scripts_of(kind, batch), engines["on"].acceptance()
    runs = in_turn({name: partial(engine.seconds, scripts) for name, engine in engines.items()}, repeats)
    drafted, accepted = (now - old for now, old in zip(engines["on"].acceptance(), before, strict=True))
    tokens = batch * (ANSWER - 1)
    rates = {name: [tokens / seconds for seconds in values] for name, values in runs.items()}
    gain, goal = ratio(rates["on"], rates["off"]), GOALS.get((kind, batch))
    row: list[Cell] = [
        f"{kind}, batch {batch}", median(rates["on"]), median(rates["off"]), gain,
        f"≥ {goal}" if goal else "", None if goal is None else gain >= goal,
        f"{accepted:,} of {drafted:,}",
    ]  # fmt: skip
    print(row, flush=True)
    return row, {"row": row[0], "tokens_per_s": rates, "drafted": drafted, "accepted": accepted}


def acceptance(engine: SpeculatingEngine, kind: str, batch: int) -> list[Cell]:
    """Return a row with two shares of right guesses: one for prompts whose KV is received, as on a decode node of a
    disaggregated cluster, and one for prompts that this engine computes, as on a co-located node."""
    shares: list[Cell] = []
    for receives in (True, False):
        before = engine.acceptance()
        engine.seconds(scripts_of(kind, batch), receives=receives)
        drafted, accepted = (now - old for now, old in zip(engine.acceptance(), before, strict=True))
        shares += [accepted / drafted if drafted else None, f"{accepted:,} of {drafted:,}"]
    return [f"{kind}, batch {batch}", *shares]


def engines_of(parts: EngineComponents, clock: Clock = time.perf_counter) -> dict[str, SpeculatingEngine]:
    return {
        name: SpeculatingEngine(parts, speculation, clock)
        for name, speculation in (("off", None), ("on", Speculation()))
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--model", choices=SHAPES, default="110m")
    made.add_argument("--threads", type=int, default=0)
    made.add_argument("--directory", type=Path, default=CACHE, help="directory of the generated model")
    made.add_argument("--rows", default="", help="only these rows, as in edits:1,prose:8")
    made.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: CPU seconds, for a machine that is not quiet"
    )
    flags = made.parse_args()
    path = str(checkpoint(flags.model, flags.directory))
    parts = build(BuildOptions(path, threads=flags.threads, kv_cache_memory=2**30, max_step_tokens=BUDGET_TOKENS))
    torch.set_grad_enabled(False)
    parts.runner.warm_up()
    wanted = (
        flags.rows.split(",") if flags.rows else [f"{kind}:{batch}" for kind in ("edits", "prose") for batch in BATCHES]
    )
    cases = [(kind, int(batch)) for kind, _, batch in (one.partition(":") for one in wanted)]
    engines = engines_of(parts, CLOCKS[flags.clock])
    measured = [measure(engines, kind, batch, flags.repeats) for kind, batch in cases]
    shares = [acceptance(engines["on"], kind, batch) for kind, batch in cases]
    for engine in engines.values():
        engine.close()
    columns = ["tokens/s", "with guesses", "without", "with / without", "goal", "", "guesses that were right"]
    modes = ["guesses that were right", "disaggregated", "", "co-located", ""]
    rows, runs = [row for row, _ in measured], [run for _, run in measured]
    what = "Speculative decoding by prompt lookup, in turn with and without it; medians of a whole batch."
    if flags.clock == "cpu":
        what += " Seconds are CPU seconds of the process, because the machine was not quiet."
    title = f"{flags.model}: prompt lookup"
    if flags.rows and (file := flags.out or RESULTS / "speculation.json").exists():  # keep the other rows
        old = json.loads(file.read_text())
        setting = {"processor": old["machine"]["processor"], "what": old["what"], "title": old["tables"][0]["title"]}
        if setting != {"processor": MACHINE["processor"], "what": what, "title": title}:
            made.error(f"{file} has rows of another machine, clock or model: give another --out")
        rows, shares = (_kept(table["rows"], new) for table, new in zip(old["tables"], (rows, shares), strict=True))
        runs = [run for run in old["runs"] if run["row"] not in {run["row"] for run in runs}] + runs
    tables = [Table(title, columns, rows), Table("Acceptance in both modes", modes, shares)]
    command = f"python -m benchmarks speculation --threads {flags.threads} --clock {flags.clock}"
    Result("speculation", what, tables, runs, command=command).finish(flags.out)


def _kept(old: list[list[Cell]], new: list[list[Cell]]) -> list[list[Cell]]:
    names = {row[0] for row in new}
    return [row for row in old if row[0] not in names] + new

"""Measure how long the demo model's steps take on this CPU, and write tests/data/recordings/step_times.json.

The measured steps are evenly spaced steps of the recordings (`python -m benchmarks recording`). Each step runs
--repeats times with one thread. The file has the median CPU time of each step, because other processes delay a step but
hardly change its CPU time.
"""

import gzip
import json
import time
from typing import Any

import numpy as np
import torch

from benchmarks.recording import DIRECTORY, RUNS
from benchmarks.result import MACHINE, Cell, Result, Table, parser
from compare.profiling.grid import slices_of
from engine.components import build
from engine.options import BuildOptions
from engine.step_time_fit import fit_cost
from scheduler.cost import StepWork
from scheduler.request import Step
from shared.model_files import DEMO_MODEL

FILE = DIRECTORY / "step_times.json"
STEPS = 150  # number of steps to measure from each recording
COLUMNS = ("num_prefills", "prefill_tokens", "prefill_pairs", "num_decodes", "decode_context", "us")
Members = list[tuple[int, int, int]]


def members() -> list[Members]:
    """Return the slices (request, start, count) of each step to measure."""
    found: list[Members] = []
    for name in RUNS:
        steps = json.loads(gzip.decompress((DIRECTORY / f"{name}.json.gz").read_bytes()))["steps"]
        found += [steps[int(place)][-1] for place in np.linspace(0, len(steps) - 1, STEPS)]
    return found


def work_of(slices: Members) -> StepWork:
    work = StepWork()
    for _, start, count in slices:
        if count == 1:
            work.add_decode(start + 1)
        else:
            work.add_chunk(start, count)
    return work


class StepTimer:
    """Runs steps of the demo model, which read arbitrary KV."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._components = build(BuildOptions(model=str(DEMO_MODEL), threads=1, max_step_tokens=2048))
        self._components.runner.warm_up()
        self._number = 0

    def seconds(self, slices: Members) -> float:
        """Return the CPU seconds of a step."""
        parts = self._components
        rows = slices_of([(start, count) for _, start, count in slices], parts.layout, parts.groups)
        self._number += 1
        step = Step(self._number, rows, [])
        began = time.process_time()
        self._components.runner.run(step)
        return time.process_time() - began


def held_out() -> tuple[Table, Any]:
    """Fit a cost model to every second step of FILE, and predict the other steps. Return a table with the mean and the
    95th percentile of the errors, and the relative error of each predicted step."""
    data = json.loads(FILE.read_text())
    works = [StepWork(*row[:-1]) for row in data["steps"]]
    seconds = np.array([row[-1] / 1e6 for row in data["steps"]])
    model = fit_cost(works[::2], seconds[::2].tolist())
    errors = np.array([model.seconds(work) for work in works[1::2]]) / seconds[1::2] - 1
    rows: list[list[Cell]] = []
    for name, chosen in {
        "all": [True for _ in works[1::2]],
        "only decodes": [not work.num_prefills for work in works[1::2]],
        "with prompts": [work.num_prefills > 0 for work in works[1::2]],
    }.items():
        own = 100 * np.abs(errors[chosen])
        rows.append([name, len(own), float(own.mean()), float(np.percentile(own, 95))])
    title, columns = "Step times of the demo model on a CPU", ["steps", "held out", "mean error %", "p95 error %"]
    note = f"CPU time with one thread, median of {data['repeats']} runs of each step, on {data['machine']}. {model}"
    return Table(title, columns, rows, note), errors


def main() -> None:
    given, timer, steps = parser(__doc__, repeats=100).parse_args(), StepTimer(), members()
    runs = [[timer.seconds(slices) for slices in steps] for _ in range(given.repeats + 1)][1:]
    rows = []
    for slices, us in zip(steps, 1e6 * np.median(runs, axis=0), strict=True):
        work = work_of(slices)
        rows.append([*(getattr(work, name) for name in COLUMNS[:-1]), round(us)])
    about = {"machine": MACHINE["processor"], "repeats": given.repeats, "columns": COLUMNS, "steps": rows}
    FILE.write_text(json.dumps(about, separators=(",", ":")) + "\n")
    what = "Errors of the cost model for every other step of the recordings, to which it was not fitted."
    Result("step_times", what, [held_out()[0]]).finish(given.out)

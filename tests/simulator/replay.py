"""Replay a recording of a live node (see `benchmarks/recording.py`) in the simulator."""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scheduler.budget import budget_of
from scheduler.cost import CostModel, StepWork
from scheduler.policy import POLICIES
from scheduler.request import Request, Step
from scheduler.scheduler import Scheduler, StepLimits, StepOutput
from simulator.events import EventQueue
from simulator.node import SimulatedNode, StepTimes, Stretch

DIRECTORY = Path(__file__).parents[1] / "data" / "recordings"
Members = list[tuple[int, int, int]]  # (number of the request, start, count) of each slice
RESERVED_ROWS = 1  # each pool reserves one row, to which padding is written
US = 1e-6


class RecordedStep:
    """A step of a live node: the number of requests that were added before it, its durations in seconds, its numbers of
    free, cached and owned blocks, and its slices."""

    def __init__(self, row: Sequence[Any]) -> None:
        self.num_added, device_us, host_us, *self.blocks, members = row
        self.device_s, self.host_s = device_us * US, host_us * US
        self.members: Members = [(number, start, count) for number, start, count in members]

    @property
    def work(self) -> StepWork:
        work = StepWork()
        for _, start, count in self.members:
            if count == 1:
                work.add_decode(start + 1)
            else:
                work.add_chunk(start, count)
        return work


class Recording:
    """A recording: the settings of the scheduler, the requests, and the steps."""

    def __init__(self, name: str) -> None:
        data = json.loads(gzip.decompress((DIRECTORY / f"{name}.json.gz").read_bytes()))
        self.settings: dict[str, Any] = data["settings"]
        self.steps = [RecordedStep(row) for row in data["steps"]]
        self._requests = data["requests"]

    def scheduler(self) -> Scheduler:
        settings = self.settings
        most, size = settings["max_num_batched_tokens"], settings["block_tokens"]
        limits = StepLimits(
            most,
            settings["max_num_seqs"],
            settings["long_prefill_token_threshold"],
            settings["max_num_partial_prefills"],
        )
        num_rows = RESERVED_ROWS + sum(self.steps[0].blocks)
        return Scheduler(limits, num_rows, size, POLICIES[settings["policy"]], budget_of(most, 0.0))

    def requests(self) -> Iterator[Request]:
        for number, (num_prompt, max_tokens, blocks) in enumerate(self._requests):
            request = Request(str(number), [0] * num_prompt, num_prompt, max_tokens)
            request.hashes = [b"%d" % name for name in blocks]
            yield request


class RecordedTimes(StepTimes):
    """The recorded durations, in the order of the steps."""

    def __init__(self, steps: Sequence[RecordedStep]) -> None:
        super().__init__(CostModel())
        self._steps = iter(steps)

    def of_step(self, work: StepWork) -> tuple[float, float]:
        step = next(self._steps)
        return step.device_s, step.host_s


class Replay:
    """A simulated node that gets each request before the same step as the live node did. `steps` has the simulated
    steps."""

    def __init__(self, recording: Recording) -> None:
        self.steps: list[tuple[Members, list[int]]] = []
        self._recorded, self._requests = recording.steps, recording.requests()
        self._events, self._members = EventQueue(), Members()
        scheduler, times = recording.scheduler(), RecordedTimes(recording.steps)
        self._node = SimulatedNode("node", self._events, scheduler, times, self, skips=False)

    def run(self) -> "Replay":
        self._events.at(0.0, self._add)
        self._events.run()
        assert self._node.scheduler.audit() == ""
        return self

    def _add(self) -> None:
        """Give the node the requests that were added before its next step."""
        if len(self.steps) < len(self._recorded):
            new = [next(self._requests) for _ in range(self._recorded[len(self.steps)].num_added)]
            self._node.post(lambda scheduler: [scheduler.add(request) for request in new])

    # ---- NodeListener -------------------------------------------------------------------------------------------

    def on_receiving(self, node: SimulatedNode, requests: list[Request]) -> None:
        raise AssertionError("a co-located node receives no KV")

    def on_scheduled(self, node: SimulatedNode, step: Step) -> None:
        self._members = [(int(piece.request.id), piece.start, piece.count) for piece in step.slices]

    def on_outputs(self, node: SimulatedNode, step: Step, outputs: Sequence[StepOutput]) -> None:
        free, cached, owned, *_ = node.scheduler.ledger()
        self.steps.append((self._members, [free, cached, owned]))
        self._add()

    def on_stretch(self, node: SimulatedNode, steps: Stretch) -> None:
        raise AssertionError("nothing is skipped")

    def on_ended(self, node: SimulatedNode, outputs: list[StepOutput]) -> None:
        raise AssertionError("nothing is skipped")

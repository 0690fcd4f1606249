"""Measures steps of a model on this machine, over a grid of prompt chunks, decodes, and both together."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice, product
from pathlib import Path

from engine.components import build
from engine.options import BuildOptions
from scheduler.cost import StepWork
from scheduler.geometry import Geometry, Group
from scheduler.request import Request, Slice, Step, cdiv
from shared.errors import ConfigError
from shared.kv.layout import KVLayout
from shared.rpc.messages import SamplingParams

DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (16, 128, 512, 2048, 8192, 32768)
CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
STARTS = (0, 512, 2048, 8192)
MIXED = tuple(product((64, 256, 1024, 4096), (0, 2048), (4, 16, 64), (128, 2048)))
LEAST_REPEATS, MOST_REPEATS = 3, 20
TOKEN = 7
GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True, slots=True)
class StepCase:
    """A step: a chunk of `count` prompt tokens from position `start`, and `decodes` decodes of `context` tokens."""

    count: int = 0
    start: int = 0
    decodes: int = 0
    context: int = 0

    @property
    def kv_tokens(self) -> int:
        return (self.start + self.count if self.count else 0) + self.decodes * self.context

    @property
    def work(self) -> StepWork:
        work = StepWork()
        if self.count:
            work.add_chunk(self.start, self.count)
        for _ in range(self.decodes):
            work.add_decode(self.context)
        return work


def grid(most: int, max_step_tokens: int, max_num_seqs: int, max_model_len: int, kv_tokens: int) -> list[StepCase]:
    """Return at most `most` cases that fit the limits. If more cases fit, return an evenly spaced selection."""
    cases = [StepCase(decodes=decodes, context=context) for decodes, context in product(DECODES, CONTEXTS)]
    cases += [StepCase(count, start) for count, start in product(CHUNKS, STARTS)]
    cases += [StepCase(*each) for each in MIXED]

    def fits(case: StepCase) -> bool:
        longest = max(case.start + case.count, case.context)
        is_small = case.count + case.decodes <= max_step_tokens and case.decodes <= max_num_seqs
        return is_small and longest < max_model_len and case.kv_tokens <= kv_tokens

    fitting = list(filter(fits, cases))
    stride = max(1.0, len(fitting) / most)
    return [fitting[int(place * stride)] for place in range(min(most, len(fitting)))]


class StepGrid:
    """Measures the steps of the grid with one node's settings.

    `measured` has the durations, in seconds, of the cases measured so far. They are saved in the file `partial`, so
    that an interrupted profile continues where it stopped.
    """

    def __init__(self, options: BuildOptions, most: int, seconds: float, partial: Path) -> None:
        """Build the model. `most` is the maximum number of cases, and `seconds` the time for each case. Raises
        ValueError if the model is not available, and ConfigError if it has recurrent layers."""
        self.components = build(options)
        layout = self.components.layout
        if any(group.kind == "state" for group in self.components.groups):
            raise ConfigError("--model: models with recurrent layers are not profiled")
        limits = options.max_step_tokens, options.most_requests, self.components.max_model_len
        geometry = Geometry(layout.block_tokens, self.components.groups)
        longest = geometry.capacity(layout.num_blocks, options.max_step_tokens, self.components.max_model_len)
        self.kv_tokens = longest * layout.block_tokens  # length of the longest request that the KV cache can hold
        self.cases = grid(most, *limits, self.kv_tokens)
        self._partial, self._seconds, self._numbers = partial, seconds, iter(range(1 << 60))
        self._head = {"fingerprint": self.components.fingerprint, "options": repr(options), "seconds": seconds}
        self.measured: dict[StepCase, list[float]] = dict(self._load())

    def _load(self) -> Iterator[tuple[StepCase, list[float]]]:
        """Yield the measurements of an earlier profile with the same settings."""
        try:
            kept = json.loads(self._partial.read_text())
        except (OSError, ValueError):
            return
        if kept.get("head") == self._head:
            yield from ((StepCase(**each["case"]), each["seconds"]) for each in kept["cases"])

    def run(self, say: Callable[[str], None]) -> None:
        """Measure all missing cases."""
        missing = [case for case in self.cases if case not in self.measured]
        if len(missing) < len(self.cases):
            say(f"continuing: {len(self.cases) - len(missing)} of {len(self.cases)} cases are in {self._partial}")
        if missing:
            self.components.runner.warm_up()
        began = time.monotonic()
        for number, case in enumerate(missing, 1):
            self.measured[case] = self._measure(case)
            rows = [{"case": asdict(each), "seconds": found} for each, found in self.measured.items()]
            self._partial.write_text(json.dumps({"head": self._head, "cases": rows}))
            left_s = (time.monotonic() - began) / number * (len(missing) - number)
            say(f"{number}/{len(missing)} {case}: {1000 * min(self.measured[case]):.2f} ms, {left_s:.0f} s left")

    def _measure(self, case: StepCase) -> list[float]:
        """Run a step repeatedly, on arbitrary KV. Return the durations of all runs except the first, a warm-up."""
        ranges = [(case.start, case.count)] * bool(case.count) + [(case.context - 1, 1)] * case.decodes
        slices = slices_of(ranges, self.components.layout, self.components.groups)
        found: list[float] = []
        self.components.runner.run(Step(next(self._numbers), slices, []))
        while len(found) < LEAST_REPEATS or (sum(found) < self._seconds and len(found) < MOST_REPEATS):
            began = time.perf_counter()
            self.components.runner.run(Step(next(self._numbers), slices, []))
            found.append(time.perf_counter() - began)
        return found


def slices_of(ranges: Iterable[tuple[int, int]], layout: KVLayout, groups: Sequence[Group]) -> list[Slice]:
    """Return a slice of a new request for each (start, count). A request has rows of arbitrary KV in each group."""
    slices, rows = [], cycle(range(1, layout.num_blocks))
    for number, (start, count) in enumerate(ranges):
        blocks = cdiv(start + count, layout.block_tokens)
        request = Request(f"r{number}", [TOKEN] * (start + count), start + count, 8, sampling=GREEDY)
        request.tables = [list(islice(rows, blocks * group.rows)) for group in groups]
        request.num_computed, request.num_scheduled = start, start + count
        slices.append(Slice(request, start, count, True, 0))
    return slices

"""What the router knows of one request: when it was accepted and told, where it was placed, what its nodes said.

A journey has a leg for each attempt of each sample. All times are Unix nanoseconds on the router's clock. Marks and
chunks are kept as plain tuples of numbers and strings: the garbage collector, whose pauses clients would see as gaps,
leaves those out.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_MARKS = 4096  # of one leg: a push each chunk, a preemption now and then


class TraceEvent(NamedTuple):
    """A `shared.rpc.messages.RequestEvent` on one node. It ends at `at_ns`, after `duration_ns`."""

    node: str
    kind: str
    at_ns: int
    duration_ns: int = 0
    num: int = 0  # blocks of a push, tokens of a row: see there
    bytes: int = 0
    peer: str = ""
    channel: str = ""
    reason: str = ""

    @property
    def start_ns(self) -> int:
        return self.at_ns - self.duration_ns


class PrefillChunk(NamedTuple):
    """A step that computed `tokens` of the prompt."""

    node: str
    number: int
    start_ns: int
    end_ns: int
    tokens: int


@dataclass(slots=True)
class AttemptSpan:
    """One attempt: where it was placed and why, what was predicted, and what happened there."""

    id: str
    prefill: str | None
    decode: str
    reason: str
    placed_ns: int
    local_s: float = 0.0
    remote_s: float = 0.0
    migrated: str = ""  # why it did not end there
    _events: list[tuple[Any, ...]] = field(default_factory=list)
    _chunks: list[tuple[Any, ...]] = field(default_factory=list)

    def add_event(self, mark: TraceEvent) -> bool:
        """Notes what happened. False: too much has happened to it already."""
        if len(self._events) >= MAX_MARKS:
            return False
        self._events.append(tuple(mark))
        return True

    def chunk(self, chunk: PrefillChunk) -> bool:
        """As `mark`."""
        if len(self._chunks) >= MAX_MARKS:
            return False
        self._chunks.append(tuple(chunk))
        return True

    @property
    def num_rows(self) -> int:
        return len(self._events) + len(self._chunks)

    @property
    def events(self) -> list[TraceEvent]:
        return [TraceEvent._make(row) for row in list(self._events)]

    @property
    def chunks(self) -> list[PrefillChunk]:
        return [PrefillChunk._make(row) for row in list(self._chunks)]

    @property
    def computes(self) -> str:
        """The node that computes its prompt."""
        return self.decode if self.prefill is None else self.prefill

    def find(self, kind: str, node: str | None = None) -> TraceEvent | None:
        """Its first mark of this kind, on this node or on any."""
        for row in self._events:
            if row[1] == kind and (node is None or row[0] == node):
                return TraceEvent._make(row)
        return None

    def pushes(self) -> list[TraceEvent]:
        return [TraceEvent._make(row) for row in list(self._events) if row[1] == "transfer"]

    @property
    def prefilled_ns(self) -> int | None:
        """When its prompt was computed: its first token was sampled there."""
        mark = self.find("first", self.computes)
        return None if mark is None else mark.at_ns


@dataclass(slots=True)
class RequestTrace:
    """One request as its client knows it. First and second token are those of its first sample."""

    id: str
    accepted_ns: int
    num_prompt: int = 0
    num_samples: int = 0
    traceparent: str = ""
    num_generated: int = 0
    num_first_sample: int = 0  # tokens told of sample 0
    first_ns: int | None = None
    second_ns: int | None = None
    last_ns: int | None = None
    ended_ns: int | None = None  # its last sample
    finish: str = ""  # how the last sample to end did, the worst of them where they differ
    num_ended: int = 0
    attempts: dict[str, AttemptSpan] = field(default_factory=dict)

    def output(self, sample: int, num_tokens: int, now_ns: int) -> None:
        self.num_generated += num_tokens
        self.last_ns = now_ns
        if sample == 0:
            self.num_first_sample += num_tokens
            if self.first_ns is None:
                self.first_ns = now_ns
            if self.second_ns is None and self.num_first_sample > 1:
                self.second_ns = now_ns

    def ended(self, how: str, now_ns: int) -> None:
        self.num_ended += 1
        if self.finish in {"", "stop", "length"}:
            self.finish = how
        if self.num_ended >= self.num_samples:
            self.ended_ns = now_ns

    @property
    def last_attempt(self) -> AttemptSpan | None:
        """The latest attempt of its first sample, which is placed before all others."""
        first = next(iter(self.attempts), "").rpartition(".")[0]
        return next((leg for name, leg in reversed(self.attempts.items()) if name.rpartition(".")[0] == first), None)

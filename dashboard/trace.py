"""The trace of one request, from which its summary, its phases and its spans are derived.

The history records when a request was accepted and answered, where its attempts were placed, and what their nodes
reported. All times are Unix nanoseconds on the router's clock. A request's duration is split into these phases:

router             from acceptance until the request is in the queue of the node that computes the prompt, and from the
                   last token until the end of the request at the router
prefill_queue      until the first chunk began
prefill            until the first token was sampled (chunks, and gaps between them)
transfer_exposed   until the KV had arrived on the decode node; pushes before the first token are hidden by the prefill
decode_queue       until the decode node's first step with the request began
decode             until the last token was sampled, without the interference
interference       the delay that prompts caused during the decode: the sum of `step_ring.interference_ns`
earlier_attempts   for a migrated request only: from the first placement to the last, which includes the time in which
                   the client got tokens of earlier attempts; the other phases are those of the last attempt

The phases are differences between times that never decrease, so they sum to the duration even if clocks jump. A request
has no phases if some of its nodes' records were lost.

Events are kept as plain tuples of numbers and strings, because the garbage collector does not track those. The pauses
of the garbage collector would otherwise delay tokens.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

from dashboard.step_ring import StepRing
from shared.errors import status_and_message

MAX_EVENTS = 4096  # maximum events of one attempt, which usually has a push per chunk and few preemptions
CHUNK = "chunk"  # kind of an event: a step that computed tokens of the prompt
GAP_NS = 500_000  # shorter gaps are overhead of the engine's loop
MAX_STALLS = 200  # maximum stalls in one timeline; later stalls are left out
PHASES = ("router", "prefill_queue", "prefill", "transfer_exposed", "decode_queue", "decode", "interference")
PREFILL_MARKS = ("queued", "admitted", "first")
# The queues of handoffs, with SGLang's names and meanings.
BOOTSTRAP, INFLIGHT = "num_prefill_bootstrap_queue_reqs", "num_prefill_inflight_queue_reqs"
PREALLOC, TRANSFER = "num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs"
# Maps finish reasons to states. Any other finish reason means "failed".
STATES = {"stop": "finished", "length": "finished", "abort": "cancelled", "refused": "refused"}

Rings = Callable[[str], StepRing | None]  # returns the recorded steps of a node
Span = dict[str, Any]


class TraceEvent(NamedTuple):
    """A `shared.rpc.messages.RequestEvent`, or a chunk of the prompt (`CHUNK`). The event ended at `at_ns`."""

    node: str
    kind: str
    at_ns: int
    duration_ns: int = 0
    num: int = 0  # blocks or tokens, depending on the kind
    bytes: int = 0
    peer: str = ""
    channel: str = ""
    reason: str = ""

    @property
    def start_ns(self) -> int:
        return self.at_ns - self.duration_ns


@dataclass(slots=True)
class AttemptSpan:
    """One attempt of a sample: its placement and the reason for it, the predicted times, and the nodes' reports."""

    id: str
    prefill: str | None
    decode: str
    reason: str
    placed_ns: int
    local_s: float = 0.0
    remote_s: float = 0.0
    num_before: int = 0  # tokens of the sample that were sent before this attempt
    before_ns: int = 0  # when the last token before this attempt arrived; 0 if unknown
    _events: list[tuple[Any, ...]] = field(default_factory=list)

    def add(self, event: TraceEvent) -> bool:
        """Record an event. Return False if the attempt already has MAX_EVENTS events."""
        if len(self._events) < MAX_EVENTS:
            self._events.append(tuple(event))
            return True
        return False

    @property
    def num_rows(self) -> int:
        return len(self._events)

    @property
    def events(self) -> list[TraceEvent]:
        return [TraceEvent._make(row) for row in list(self._events)]

    @property
    def computes(self) -> str:
        """The node that computes the prompt."""
        return self.decode if self.prefill is None else self.prefill

    @property
    def predicted_ms(self) -> dict[str, float | None]:
        """Predicted milliseconds to the second token with a local or remote prefill; None if unknown or infinite."""
        ways = {"local": self.local_s, "remote": self.remote_s}
        return {way: seconds * 1000 if seconds and math.isfinite(seconds) else None for way, seconds in ways.items()}

    def find(self, kind: str, node: str | None = None) -> TraceEvent | None:
        """Return the first event of this kind on `node`, or on any node if `node` is None."""
        rows = (row for row in self._events if row[1] == kind and node in {None, row[0]})
        return next((TraceEvent._make(row) for row in rows), None)

    def at(self, kind: str, node: str | None = None) -> int | None:
        """Return the time of the first event of this kind on `node`, by default the node that computes the prompt."""
        event = self.find(kind, self.computes if node is None else node)
        return None if event is None else event.at_ns

    def pushes(self) -> tuple[list[TraceEvent], list[tuple[int, int]]]:
        """Return the pushes, and the union of their intervals."""
        found = [event for event in self.events if event.kind == "transfer"]
        return found, union([(push.start_ns, push.at_ns) for push in found])

    def transfer(self) -> dict[str, object] | None:
        """Return the bytes and times of all pushes, or None if there were none.

        `busy_ms` is the time in which at least one push ran. `hidden_ms` is the part of this time within the prefill.
        `exposed_ms` is the time from the end of the prefill until all KV had arrived.
        """
        pushes, busy = self.pushes()
        if not pushes:
            return None
        began, end, received = self.at("admitted"), self.at("first"), self.at("received", self.decode)
        until = math.inf if end is None else end
        hidden = 0 if began is None else sum(max(0, int(min(b, until)) - max(a, began)) for a, b in busy)
        arrived = received if received is not None else busy[-1][1]
        return {
            "bytes": sum(push.bytes for push in pushes),
            "busy_ms": sum(b - a for a, b in busy) / 1e6,
            "hidden_ms": hidden / 1e6,
            "exposed_ms": 0.0 if end is None else max(0, arrived - end) / 1e6,
            "channel": pushes[-1].channel,
        }

    def queues(self) -> Iterator[tuple[str, str]]:
        """Yield the node and the name of each handoff queue that the attempt is in."""
        if self.prefill is None:
            return
        prefill, decode = ({row[1] for row in self._events if row[0] == node} for node in (self.prefill, self.decode))
        is_granted = "reserving" in prefill
        if "admitted" in prefill and "ended" not in prefill and (not is_granted or "first" in prefill):
            yield self.prefill, INFLIGHT if is_granted else BOOTSTRAP
        if "queued" in decode and not decode & {"received", "ended"}:
            yield self.decode, TRANSFER if is_granted else PREALLOC

    def spans(self, rings: Rings, num_generated: int, until_ns: int | None) -> Iterator[Span]:
        """Yield the spans. If a span has no end because the node was lost, it ends at `until_ns`."""
        queued, admitted = self.at("queued"), self.at("admitted")
        if queued is None:
            return
        left = next((at_ns for at_ns in (admitted, self.at("ended")) if at_ns is not None), until_ns)
        yield _span("queued", self.computes, queued, left, "prefill queue")
        yield from self._chunk_spans()
        if self.prefill is not None:
            yield from self._handoff_spans()
        began = self.at("first" if self.prefill is None else "admitted", self.decode)
        if began is None:
            return
        ended = self.at("ended", self.decode)
        end_ns = until_ns if ended is None else ended
        yield _span("decode", self.decode, began, end_ns, "", max(0, num_generated - 1))
        if (ring := rings(self.decode)) is not None:
            last = ring.num_ever if end_ns is None else ring.place(end_ns)
            stalls = (row for row in ring.rows(ring.place(began), last) if row.interference_ns > GAP_NS)
            for row in islice(stalls, MAX_STALLS):  # steps that took longer because of prompts
                cause = "behind a prompt chunk"
                yield _span("wait", self.decode, row.start_ns, row.end_ns, cause, row.prefill_tokens)

    def _chunk_spans(self) -> Iterator[Span]:
        chunks = [event for event in self.events if event.kind == CHUNK]
        preempted = [event.at_ns for event in self.events if event.kind == "preempted"]
        for before, chunk in zip([None, *chunks], chunks, strict=False):
            if before is not None and chunk.start_ns - before.at_ns > GAP_NS:
                is_preempted = any(before.start_ns <= at_ns <= chunk.start_ns for at_ns in preempted)
                cause = "preempted" if is_preempted else "behind other work"
                yield _span("wait", chunk.node, before.at_ns, chunk.start_ns, cause)
            yield _span(CHUNK, chunk.node, chunk.start_ns, chunk.at_ns, chunk.reason, chunk.num)

    def _handoff_spans(self) -> Iterator[Span]:
        """Yield spans for the pushes, and for the waits between the first token and the first decode step."""
        for push in self.pushes()[0]:
            yield _span("transfer", push.node, push.start_ns, push.at_ns, push.channel)
        end, received, granted = self.at("first"), self.at("received", self.decode), self.at("reserving")
        if end is None or received is None:
            return
        cuts = (end, min(received, max(end, granted or end)), received, self.at("admitted", self.decode) or received)
        for (start_ns, end_ns), cause in zip(
            pairwise(cuts), ("block reservation", "transfer", "decode queue"), strict=True
        ):
            if end_ns > start_ns:
                yield _span("wait", self.decode, start_ns, end_ns, cause)


@dataclass(slots=True)
class RequestTrace:
    """One request as its client sees it. Metrics, timelines and the Chrome trace are derived from it.

    The history owns the trace, and updates it on the event loop. The times of the first and second token belong to the
    first sample.
    """

    id: str
    accepted_ns: int
    num_prompt: int = 0
    num_samples: int = 0
    traceparent: str = ""
    num_generated: int = 0
    num_first_sample: int = 0  # number of tokens of sample 0 that were sent
    samples_per_prompt: int = 1
    num_of_sample: Counter[int] = field(default_factory=Counter)  # tokens of each sample, if there are several samples
    first_ns: int | None = None
    second_ns: int | None = None
    last_ns: int | None = None
    output_ns: int = 0  # when tokens of the first sample arrived most recently
    longest_gap_ns: int = 0  # the longest time between two arrivals of tokens of the first sample
    ended_ns: int | None = None  # when the last sample ended
    finish: str = ""  # reason of the first sample that was cut short; if none was, the reason of the last that ended
    num_ended: int = 0
    status: int | None = None  # HTTP status and message of the error if the request was refused or failed
    message: str = ""
    is_exact: bool = True  # False if the tokens after a retry may differ from those without the retry
    version: int = 0  # the history's version when the request last changed
    attempts: dict[str, AttemptSpan] = field(default_factory=dict)

    def output(self, sample: int, num_tokens: int, now_ns: int) -> None:
        self.num_generated += num_tokens
        self.last_ns = now_ns
        if self.num_samples > 1:
            self.num_of_sample[sample] += num_tokens
        if sample == 0:
            if now_ns - self.output_ns > self.longest_gap_ns and self.first_ns is not None:
                self.longest_gap_ns = now_ns - self.output_ns
            self.output_ns = now_ns
            self.num_first_sample += num_tokens
            if self.first_ns is None:
                self.first_ns = now_ns
            if self.second_ns is None and self.num_first_sample > 1:
                self.second_ns = now_ns

    def num_tokens(self, attempt: str) -> int:
        """Return how many tokens of an attempt's sample were sent. `attempt` has the form
        `{request}-{prompt}.{sample}.{number}`."""
        if self.num_samples <= 1:
            return self.num_generated
        generation, sample, _ = attempt.rsplit(".", 2)
        prompt = int(generation.removeprefix(f"{self.id}-")) if generation != self.id else 0
        return self.num_of_sample[prompt * self.samples_per_prompt + int(sample)]

    def ended(self, how: str, now_ns: int, error: Exception | None = None) -> None:
        self.num_ended += 1
        if error is not None:
            self.status, self.message = status_and_message(error)
        if self.finish in {"", "stop", "length"}:
            self.finish = how
        if self.num_ended >= self.num_samples:
            self.ended_ns = now_ns

    @property
    def current_attempts(self) -> list[AttemptSpan]:
        """The latest attempt of each sample, in the order in which the samples were placed."""
        return list({span.id.rpartition(".")[0]: span for span in list(self.attempts.values())}.values())

    @property
    def last_attempt(self) -> AttemptSpan | None:
        """The latest attempt of the first sample, which is placed before the other samples."""
        return next(iter(self.current_attempts), None)

    @property
    def earlier_attempts(self) -> list[AttemptSpan]:
        """The attempts of the first sample before its latest attempt, oldest first."""
        last = self.last_attempt
        sample = last.id.rpartition(".")[0] if last else ""
        spans = [span for span in list(self.attempts.values()) if span.id.rpartition(".")[0] == sample]
        return spans[:-1]

    @property
    def state(self) -> str:
        """The state of the request, derived from the nodes' reports and from the tokens. Tokens may arrive before the
        reports about them."""
        attempt = self.last_attempt
        if self.ended_ns is not None:
            return STATES.get(self.finish, "failed")
        # After a retry, it is unknown how many of the tokens are from the last attempt.
        num_tokens = self.num_first_sample if len(self.attempts) <= self.num_samples else 0
        if attempt is None or (not num_tokens and attempt.find("admitted") is None):
            return "queued"
        if not num_tokens and attempt.at("first") is None:
            return "prefill"
        is_decoding = num_tokens > 1 or attempt.prefill is None or attempt.at("admitted", attempt.decode) is not None
        return "decode" if is_decoding else "transfer"

    def summary(self, rings: Rings) -> dict[str, Any]:
        """Return the request as `/v1/requests` shows it. Times are Unix milliseconds."""
        attempt = self.last_attempt
        first = next(iter(self.earlier_attempts), attempt)
        admitted = first and first.find("admitted", first.computes)
        return {
            "id": self.id,
            "state": self.state,
            "prompt_tokens": self.num_prompt,
            "generated_tokens": self.num_generated,
            "cached_tokens": admitted.num if admitted else 0,
            "prefill": attempt and attempt.prefill,
            "decode": attempt and attempt.decode,
            "reason": attempt.reason if attempt else "",
            "predicted_ms": attempt.predicted_ms if attempt else {"local": None, "remote": None},
            "accepted_ms": _ms(self.accepted_ns),
            "first_token_ms": _ms(self.first_ns),
            "second_token_ms": _ms(self.second_ns),
            "last_token_ms": _ms(self.last_ns),
            "longest_gap_ms": self.longest_gap_ns / 1e6,
            "ended_ms": _ms(self.ended_ns),
            "finish": self.finish,
            "status": self.status,
            "message": self.message,
            "attempts": len(self.attempts),
            "exact": self.is_exact,
            "earlier_nodes": [[span.prefill, span.decode] for span in self.earlier_attempts],
            "transfer": attempt and attempt.transfer(),
            "phases_ms": self.phases(rings),
            "traceparent": self.traceparent,
        }

    def spans(self, rings: Rings) -> list[Span]:
        """Return the spans, ordered by start. A "wait" span states the cause of a gap. An open span has no end."""
        spans: list[Span] = []
        # For each sample: the time when the next attempt began, the number of tokens that were sent until then, and the
        # time when the last of these tokens arrived.
        following: dict[str, tuple[int | None, int, int]] = {}
        for attempt in reversed(list(self.attempts.values())):
            sample = attempt.id.rpartition(".")[0]
            num_sent = self.num_tokens(attempt.id)
            until_ns, num_generated, last_ns = following.get(sample, (self.ended_ns, num_sent, 0))
            num_tokens = num_generated - attempt.num_before
            spans += attempt.spans(rings, num_tokens, last_ns if last_ns and num_tokens else until_ns)
            following[sample] = attempt.placed_ns, attempt.num_before, attempt.before_ns
        return sorted(spans, key=lambda span: span["start_ms"])

    def phases(self, rings: Rings) -> dict[str, float] | None:
        """Return the milliseconds of each phase, which sum to the duration.

        Return None if the request still runs, failed, was cancelled or has several samples, or if records are missing.
        """
        cuts, attempt = self._cuts(), self.last_attempt
        if cuts is None or attempt is None:
            return None
        before, *between, decode, after = (b - a for a, b in pairwise(cuts))
        ring = rings(attempt.decode)
        interference = min(decode, ring.sums(cuts[5], cuts[6])[3]) if ring is not None else 0
        earlier = min(before, attempt.placed_ns - next(iter(self.attempts.values())).placed_ns)
        parts = (before + after - earlier, *between, decode - interference, interference)
        named = {name: part / 1e6 for name, part in zip(PHASES, parts, strict=True)}
        if len(self.attempts) == 1:
            return named
        return {"router": named["router"], "earlier_attempts": earlier / 1e6} | named

    def _cuts(self) -> list[int] | None:
        """Return the eight times that bound the phases, or None if one of them is not known.

        In order: accepted, queued, first chunk, first token, received, first decode step, last token sampled, ended.
        """
        attempt, end_ns = self.last_attempt, self.ended_ns
        if attempt is None or end_ns is None or self.num_samples != 1 or self.finish not in {"stop", "length"}:
            return None
        times = [attempt.at(kind) for kind in PREFILL_MARKS]
        received = None if attempt.prefill is None else attempt.at("received", attempt.decode)
        last = attempt.find("ended", attempt.computes if received is None else attempt.decode)
        if received is not None:
            times += [received, attempt.at("admitted", attempt.decode)]
        elif attempt.prefill is not None and last is not None and last.reason not in {"stop", "length", "aborted"}:
            return None  # the request was handed off, but the decode node's records are missing
        else:
            times += [times[-1], times[-1]]
        known = [at_ns for at_ns in [*times, last and last.at_ns] if at_ns is not None]
        if len(known) <= len(times):
            return None
        return [min(at_ns, end_ns) for at_ns in accumulate([self.accepted_ns, *known, end_ns], max)]


def union(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sorted, disjoint intervals that cover the same time as `intervals`."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _span(kind: str, node: str, start_ns: int, end_ns: int | None, cause: str, tokens: int = 0) -> Span:
    times = {"start_ms": _ms(start_ns), "end_ms": _ms(end_ns)}
    return {"kind": kind, "node": node, **times, "tokens": tokens, "cause": cause}


def _ms(at_ns: int | None) -> float | None:
    return None if at_ns is None else at_ns / 1e6

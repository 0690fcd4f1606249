"""The export of the history as a Chrome trace, for Perfetto and chrome://tracing.

Each node is shown as a process. The process has a thread for the steps, counters of the blocks and the queue, and one
asynchronous row for each push of KV, because pushes may overlap. Another process has one asynchronous row for each
request, with the request's spans. Times are microseconds since the trace began.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from dashboard.history import RequestHistory
from dashboard.step_ring import FIELDS, StepRing
from dashboard.trace import CHUNK, AttemptSpan, RequestTrace, Rings

Event = dict[str, Any]
MAX_STEPS = 200_000  # maximum steps of all nodes together; the earliest steps are left out
COUNTER_NS = 10_000_000  # minimum time between two samples of a counter
REQUESTS = 1  # pid of the process that shows the requests; the processes of the nodes have the next pids


def trace_events(history: RequestHistory, since_ns: int) -> Iterator[Event]:
    """Yield all events since `since_ns`."""
    rings = history.rings()
    yield _meta(REQUESTS, "process_name", name="requests")
    pids = {node: pid for pid, node in enumerate(rings, REQUESTS + 1)}
    for node, ring in rings.items():
        yield from _steps(pids[node], node, ring, since_ns, MAX_STEPS // len(rings))
    for trace in history.traces():
        if trace.ended_ns is None or trace.ended_ns >= since_ns:
            yield from _request(trace, rings.get, since_ns)
            for attempt in list(trace.attempts.values()):
                yield from _pushes(trace.id, attempt, pids, since_ns)


def _steps(pid: int, name: str, ring: StepRing, since_ns: int, max_steps: int) -> Iterator[Event]:
    """Yield a node's steps, and samples of its counters."""
    yield _meta(pid, "process_name", name=name)
    yield _meta(pid, "process_sort_index", sort_index=pid)
    yield _meta(pid, "thread_name", name="steps")
    counted_ns = 0
    for row in ring.rows(max(ring.place(since_ns), ring.num_ever - max_steps)):
        parts = (("prompt", row.prefill_tokens), ("decode", row.num_decodes))
        label = " + ".join(f"{what} {count}" for what, count in parts if count)
        arguments = dict(zip(FIELDS, ring.shown(row), strict=True))
        step = _event("X", label, pid, row.start_ns - since_ns, args=arguments)
        yield step | {"dur": row.duration_us, "cat": "step"}
        if row.start_ns - counted_ns >= COUNTER_NS:
            counted_ns = row.start_ns
            for what, names in (("blocks", ("owned", "reserved", "cached")), ("requests", ("running", "waiting"))):
                values = {name: arguments[name] for name in names}
                yield _event("C", what, pid, row.start_ns - since_ns, args=values)


def _request(trace: RequestTrace, rings: Rings, since_ns: int) -> Iterator[Event]:
    """Yield the events of a request's row: the request, its consecutive spans, and its events as instants."""

    def event(phase: str, name: str, at_ns: float, **arguments: object) -> Event:
        found = _event(phase, name, REQUESTS, max(0, at_ns - since_ns), args=arguments)
        return found | {"cat": "request", "id": trace.id}

    end_ns = trace.ended_ns
    yield event("b", trace.id, trace.accepted_ns, prompt_tokens=trace.num_prompt, traceparent=trace.traceparent)
    at_ns: float = max(trace.accepted_ns, since_ns)
    for span in trace.spans(rings):
        if span["kind"] == "transfer" or span["end_ms"] is None or span["end_ms"] * 1e6 <= at_ns:
            continue  # the span overlaps others, is open, or ended before the trace began
        start_ns, until_ns = max(at_ns, span["start_ms"] * 1e6), span["end_ms"] * 1e6
        at_ns = until_ns if end_ns is None else min(until_ns, end_ns)
        if start_ns < at_ns:
            yield event("b", span["kind"], start_ns, node=span["node"], cause=span["cause"])
            yield event("e", span["kind"], at_ns)
    for attempt in list(trace.attempts.values()):
        for each in attempt.events:
            if each.kind != CHUNK and each.at_ns >= since_ns and (end_ns is None or each.at_ns <= end_ns):
                yield event("n", each.kind, each.at_ns, node=each.node, attempt=attempt.id, reason=each.reason)
    if end_ns is not None:
        yield event("e", trace.id, end_ns, finish=trace.finish, tokens=trace.num_generated)


def _pushes(request: str, attempt: AttemptSpan, pids: Mapping[str, int], since_ns: int) -> Iterator[Event]:
    for number, push in enumerate(attempt.pushes()[0]):
        if push.start_ns < since_ns or push.node not in pids:
            continue
        arguments = {"request": request, "bytes": push.bytes, "blocks": push.num, "channel": push.channel}
        for phase, at_ns in (("b", push.start_ns), ("e", push.at_ns)):
            found = _event(phase, f"to {attempt.decode}", pids[push.node], at_ns - since_ns, args=arguments)
            yield found | {"cat": "transfer", "id": f"{attempt.id}-push-{number}"}


def _event(phase: str, name: str, pid: int, at_ns: float, *, args: dict[str, Any]) -> Event:
    return {"ph": phase, "name": name, "pid": pid, "tid": 0, "ts": at_ns / 1e3, "args": args}


def _meta(pid: int, what: str, **arguments: object) -> Event:
    return _event("M", what, pid, 0, args=arguments)

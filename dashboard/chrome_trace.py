"""Exports the history as a Chrome trace, for Perfetto and chrome://tracing.

Each node is shown as a process. Thread 0 has its steps, and further threads have its pushes of KV, because pushes may
overlap. Counters show its blocks and its queue. Another process has one asynchronous row for each request with its
phases. Arrows lead from a request's last chunk through its last push to its first decode step. Times are microseconds
since the trace began.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from dashboard.history import RequestHistory, Transfer
from dashboard.step_ring import FIELDS, StepRing
from dashboard.trace import AttemptSpan, RequestTrace, TraceEvent

Event = dict[str, Any]
MAX_STEPS = 200_000  # of all nodes together; the earliest steps of a longer trace are left out
COUNTER_NS = 10_000_000  # between two samples of a counter
REQUESTS = 1  # process id; nodes follow
PASSES, PUSHES = 0, 1  # thread ids


def trace_events(history: RequestHistory, since_ns: int) -> Iterator[Event]:
    """Yield all events since `since_ns`."""
    nodes = history.nodes()
    pids = {node: REQUESTS + 1 + number for number, node in enumerate(nodes)}
    yield _meta(REQUESTS, "process_name", name="requests")
    transfers = [push for push in history.transfers(since_ns) if push.event.start_ns >= since_ns]
    lanes: dict[TraceEvent, int] = {}
    for node, pid in pids.items():
        ring = history.ring(node)
        if ring is not None:
            yield from _steps(pid, node, ring, since_ns, MAX_STEPS // len(nodes))
            yield from _pushes(pid, [push for push in transfers if push.event.node == node], since_ns, lanes)
    for number, trace in enumerate(history.traces()):
        if trace.ended_ns is None or trace.ended_ns >= since_ns:
            yield from _request(trace, since_ns)
            for attempt in list(trace.attempts.values()):
                ends = _arrow(attempt, history, lanes)
                if ends is not None and ends[0][1] >= since_ns:
                    yield from _flow(f"{number}.{attempt.id}", ends, pids, since_ns)


def _steps(pid: int, name: str, ring: StepRing, since_ns: int, max_steps: int) -> Iterator[Event]:
    """Yield a node's steps, and samples of its counters."""
    yield _meta(pid, "process_name", name=name)
    yield _meta(pid, "process_sort_index", sort_index=pid)
    yield _meta(pid, "thread_name", PASSES, name="passes")
    counted_ns = 0
    for row in ring.rows(max(ring.place(since_ns), ring.num_ever - max_steps)):
        parts = (("prompt", row.prefill_tokens), ("decode", row.num_decodes))
        label = " + ".join(f"{what} {count}" for what, count in parts if count)
        arguments = dict(zip(FIELDS, ring.shown(row), strict=True))
        more = {"dur": row.duration_us, "cat": "pass", "args": arguments}
        yield _event("X", label, pid, PASSES, row.start_ns - since_ns) | more
        if row.start_ns - counted_ns >= COUNTER_NS:
            counted_ns = row.start_ns
            blocks = {"owned": row.blocks_owned, "reserved": row.blocks_reserved, "cached": row.blocks_cached}
            requests = {"running": row.running, "waiting": row.waiting}
            for what, values in (("blocks", blocks), ("requests", requests)):
                yield _event("C", what, pid, PASSES, row.start_ns - since_ns) | {"args": values}


def _pushes(pid: int, pushes: Sequence[Transfer], since_ns: int, lanes: dict[TraceEvent, int]) -> Iterator[Event]:
    """Yield each push on the first free thread, because events of one thread must not overlap. Add it to `lanes`."""
    free_ns: list[int] = []
    for push in sorted(pushes, key=lambda push: push.event.start_ns):
        event = push.event
        lane = next((lane for lane, until in enumerate(free_ns) if until <= event.start_ns), len(free_ns))
        if lane == len(free_ns):
            free_ns.append(0)
            yield _meta(pid, "thread_name", PUSHES + lane, name="pushes" if not lane else f"pushes {lane + 1}")
        free_ns[lane], lanes[event] = event.at_ns, PUSHES + lane
        arguments = {"request": push.request, "to": push.attempt.decode, "blocks": event.num, "bytes": event.bytes}
        arguments |= {"channel": event.channel, "exposed_ms": push.exposed_ns / 1e6}
        yield _event("X", f"to {push.attempt.decode}", pid, PUSHES + lane, event.start_ns - since_ns) | {
            "dur": event.duration_ns / 1e3,
            "cat": "transfer",
            "args": arguments,
        }


def _request(trace: RequestTrace, since_ns: int) -> Iterator[Event]:
    """Yield the events of a request's row: the request, the stages of its last attempt, and its events as instants."""

    def event(phase: str, name: str, at_ns: int, **arguments: object) -> Event:
        found = _event(phase, name, REQUESTS, 0, max(0, at_ns - since_ns))
        return found | {"cat": "request", "id": trace.id} | ({"args": arguments} if arguments else {})

    end_ns = trace.ended_ns
    yield event("b", trace.id, trace.accepted_ns, prompt_tokens=trace.num_prompt, traceparent=trace.traceparent)
    for name, start_ns, until_ns in _stages(trace):
        if until_ns >= since_ns:
            yield event("b", name, start_ns)
            yield event("e", name, until_ns)
    for attempt in list(trace.attempts.values()):
        for each in attempt.events:
            if each.at_ns >= since_ns and (end_ns is None or each.at_ns <= end_ns):
                yield event("n", each.kind, each.at_ns, node=each.node, attempt=attempt.id, reason=each.reason)
    if end_ns is not None:
        yield event("e", trace.id, end_ns, finish=trace.finish, tokens=trace.num_generated)


def _stages(trace: RequestTrace) -> Iterator[tuple[str, int, int]]:
    """Yield the name, start and end of the last attempt's finished stages, in order and within the request's time."""
    attempt = trace.last_attempt
    if attempt is None:
        return
    names = [
        ("queued", "queued"),
        ("prefill", "admitted"),
        ("decode" if attempt.prefill is None else "transfer", "first"),
    ]
    started = [(name, attempt.at(kind, attempt.computes)) for name, kind in names]
    if attempt.prefill is not None:
        started.append(("decode", attempt.at("admitted", attempt.decode)))
    known = [(name, at_ns) for name, at_ns in started if at_ns is not None]
    ended_ns = attempt.at("ended", attempt.decode)
    last = [ended_ns] if ended_ns is not None else []
    clip_ns = trace.ended_ns
    at_ns = trace.accepted_ns
    for (name, start_ns), until_ns in zip(known, [start for _, start in known[1:]] + last, strict=False):
        begin = max(at_ns, start_ns)
        at_ns = max(begin, until_ns if clip_ns is None else min(until_ns, clip_ns))
        if clip_ns is None or begin < clip_ns:
            yield name, begin, at_ns


End = tuple[str, int, int]  # node, time, thread


def _flow(identity: str, ends: Sequence[End], pids: dict[str, int], since_ns: int) -> Iterator[Event]:
    """Yield the events of an arrow. Each of its ends lies within a step or a push."""
    for phase, (node, at_ns, thread) in zip("stf", ends, strict=True):
        found = _event(phase, "handoff", pids[node], thread, at_ns - since_ns)
        yield found | {"cat": "handoff", "id": identity} | ({"bp": "e"} if phase == "f" else {})


def _arrow(attempt: AttemptSpan, history: RequestHistory, lanes: dict[TraceEvent, int]) -> list[End] | None:
    """Return the points of an arrow from the last chunk through the last push to the first decode step. Return None if
    one of them is not in the trace."""
    pushes, admitted = attempt.pushes, attempt.find("admitted", attempt.decode)
    ring = history.ring(attempt.decode)
    chunks = attempt.chunks
    if attempt.prefill is None or not chunks or not pushes or admitted is None or ring is None:
        return None
    place = ring.place(admitted.at_ns)
    if place >= ring.num_ever:
        return None
    chunk, push, decode = chunks[-1], max(pushes, key=lambda push: push.at_ns), ring.row(place)
    if push not in lanes:
        return None
    return [
        (chunk.node, chunk.start_ns, PASSES),
        (push.node, max(push.start_ns, chunk.start_ns), lanes[push]),
        (attempt.decode, max(decode.start_ns, push.start_ns), PASSES),
    ]


def _event(phase: str, name: str, pid: int, tid: int, at_ns: int) -> Event:
    return {"ph": phase, "name": name, "pid": pid, "tid": tid, "ts": at_ns / 1e3}


def _meta(pid: int, what: str, tid: int = 0, **arguments: object) -> Event:
    return _event("M", what, pid, tid, 0) | {"args": arguments}

"""A request's time, taken apart: its summary, the phases that sum to its duration, the spans and gaps of its life.

Pure functions of a `RequestTrace` and of its nodes' step rings. Definitions:

router             acceptance to the computing node's queue, and last token sampled to the end at the router
prefill_queue      until the first chunk began
prefill            until the first token was sampled (chunks, and gaps between them)
transfer_exposed   until the KV had landed on the decode node; what was pushed before the first token is hidden
decode_queue       until the decode node's first step with it began
decode             until the last token was sampled, less the interference
interference       of the decode node's steps in that time, what prompts made them longer: `step_ring.interference_ns`
retry              only of a request that had to move: first placement to the last one; the other phases are the
                   last attempt's

The phases are differences of cuts that only grow, so they sum to the duration whatever the clocks did; a request
whose nodes' records were lost in part has none.
"""

import math
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise

from router.history.step_ring import StepRing, interference_ns
from router.history.trace import AttemptSpan, PrefillChunk, RequestTrace, TraceEvent

Rings = Callable[[str], StepRing | None]
Span = dict[str, object]
GAP_NS = 500_000  # shorter gaps are the engine's own loop
MAX_STALLS = 200  # of one timeline: the first ones
PHASES = ("router", "prefill_queue", "prefill", "transfer_exposed", "decode_queue", "decode", "interference")


def summary(journey: RequestTrace, rings: Rings) -> dict[str, object]:
    """What `/v1/requests` shows of a request; times are Unix milliseconds."""
    leg = journey.last_attempt
    admitted = leg.find("admitted", leg.computes) if leg is not None else None
    return {
        "id": journey.id,
        "state": state(journey),
        "prompt_tokens": journey.num_prompt,
        "generated_tokens": journey.num_generated,
        "cached_tokens": admitted.num if admitted is not None else 0,
        "prefill": leg.prefill if leg is not None else None,
        "decode": leg.decode if leg is not None else None,
        "reason": leg.reason if leg is not None else "",
        "predicted_ms": _predicted(leg),
        "accepted_ms": _ms(journey.accepted_ns),
        "first_token_ms": _ms(journey.first_ns),
        "second_token_ms": _ms(journey.second_ns),
        "last_token_ms": _ms(journey.last_ns),
        "ended_ms": _ms(journey.ended_ns),
        "finish": journey.finish,
        "attempts": len(journey.attempts),
        "transfer": transfer(leg) if leg is not None else None,
        "phases_ms": phases(journey, rings),
        "traceparent": journey.traceparent,
    }


def state(journey: RequestTrace) -> str:
    if journey.ended_ns is not None:
        return {"stop": "finished", "length": "finished", "abort": "cancelled"}.get(journey.finish, "failed")
    leg = journey.last_attempt
    if leg is None or leg.find("admitted") is None:
        return "queued"
    if leg.prefilled_ns is None:
        return "prefill"
    if leg.prefill is None or leg.find("admitted", leg.decode) is not None:
        return "decode"
    return "transfer"


# ---- phases ------------------------------------------------------------------------------------------------------


def cuts(journey: RequestTrace) -> list[int] | None:
    """Accepted, queued, first chunk, first token, landed, first decode step, last token sampled, ended: eight times
    that only grow. None when one of them is not known."""
    leg, end_ns = journey.last_attempt, journey.ended_ns
    if leg is None or end_ns is None or journey.num_samples != 1 or journey.finish not in {"stop", "length"}:
        return None
    marks = [leg.find(kind, leg.computes) for kind in ("queued", "admitted", "first")]
    last_node = leg.computes
    if leg.prefill is not None and (landed := leg.find("landed", leg.decode)) is not None:
        marks += [landed, leg.find("admitted", leg.decode)]
        last_node = leg.decode
    else:
        marks += [marks[-1], marks[-1]]
    marks.append(leg.find("ended", last_node))
    if last_node == leg.prefill and marks[-1] is not None and marks[-1].reason not in {"stop", "length", "aborted"}:
        return None  # handed off, and the news from the decode node is not here
    known = [mark.at_ns for mark in marks if mark is not None]
    if len(known) < len(marks):
        return None
    return [min(at_ns, end_ns) for at_ns in accumulate([journey.accepted_ns, *known, end_ns], max)]


def phases(journey: RequestTrace, rings: Rings) -> dict[str, float] | None:
    """Milliseconds; they sum to ended less accepted. None while it runs, for several samples, and when records of it
    are missing."""
    found, leg = cuts(journey), journey.last_attempt
    if found is None or leg is None:
        return None
    before, queue, prefill, exposed, wait, decode, after = (b - a for a, b in pairwise(found))
    ring = rings(leg.decode)
    interference = min(decode, ring.sums(found[5], found[6])[3]) if ring is not None else 0
    retry = min(before, leg.placed_ns - next(iter(journey.attempts.values())).placed_ns)
    parts = (before + after - retry, queue, prefill, exposed, wait, decode - interference, interference)
    named = {name: part / 1e6 for name, part in zip(PHASES, parts, strict=True)}
    return named | ({"retry": retry / 1e6} if len(journey.attempts) > 1 else {})


def transfer(leg: AttemptSpan) -> dict[str, object] | None:
    """Of all pushes: bytes, time of their union (`busy`), how much of that lay within the prefill (`hidden`), and how
    long after the prefill's end all was there (`exposed`). None when nothing was pushed."""
    pushes = leg.pushes()
    if not pushes:
        return None
    began, end = leg.find("admitted", leg.computes), leg.prefilled_ns
    busy = union([(push.start_ns, push.at_ns) for push in pushes])
    hidden = 0
    if began is not None:
        until = math.inf if end is None else end
        hidden = sum(max(0, int(min(b, until)) - max(a, began.at_ns)) for a, b in busy)
    landed = leg.find("landed", leg.decode)
    there = landed.at_ns if landed is not None else max(push.at_ns for push in pushes)
    return {
        "bytes": sum(push.bytes for push in pushes),
        "busy_ms": sum(b - a for a, b in busy) / 1e6,
        "hidden_ms": hidden / 1e6,
        "exposed_ms": 0.0 if end is None else max(0, there - end) / 1e6,
        "channel": pushes[-1].channel,
    }


def union(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same time as disjoint intervals, in order."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


# ---- spans -------------------------------------------------------------------------------------------------------


def timeline(journey: RequestTrace, rings: Rings) -> dict[str, object]:
    """The summary and "spans": what it did, and "wait" spans with the cause of each gap, by their start. A span that
    goes on has no end."""
    spans = [span for leg in journey.attempts.values() for span in _spans(leg, journey, rings)]
    return summary(journey, rings) | {"spans": sorted(spans, key=_start)}


def _spans(leg: AttemptSpan, journey: RequestTrace, rings: Rings) -> Iterator[Span]:
    queued = leg.find("queued", leg.computes)
    if queued is None:
        return
    admitted, ended = leg.find("admitted", leg.computes), leg.find("ended", leg.computes)
    yield _span("queued", leg.computes, queued.at_ns, _first_of(admitted, ended), 0, "prefill queue")
    yield from _chunks(leg)
    if leg.prefill is not None:
        yield from _handoff(leg)
    began = leg.find("admitted", leg.decode) if leg.prefill is not None else leg.find("first", leg.decode)
    if began is not None:
        over = leg.find("ended", leg.decode)
        yield _span("decode", leg.decode, began.at_ns, over and over.at_ns, max(0, journey.num_generated - 1), "")
        ring = rings(leg.decode)
        if ring is not None:
            yield from _stalls(ring, leg.decode, began.at_ns, over.at_ns if over is not None else None)


def _chunks(leg: AttemptSpan) -> Iterator[Span]:
    before: PrefillChunk | None = None
    for chunk in leg.chunks:
        if before is not None and chunk.start_ns - before.end_ns > GAP_NS:
            preempted = any(
                mark.kind == "preempted" and before.start_ns <= mark.at_ns <= chunk.start_ns for mark in leg.events
            )
            cause = "preempted" if preempted else "behind other work"
            yield _span("wait", chunk.node, before.end_ns, chunk.start_ns, 0, cause)
        yield _span("chunk", chunk.node, chunk.start_ns, chunk.end_ns, chunk.tokens, f"step {chunk.number}")
        before = chunk


def _handoff(leg: AttemptSpan) -> Iterator[Span]:
    """Pushes, and what was waited for between the first token and the first decode step where nothing was pushed."""
    for push in leg.pushes():
        yield _span("transfer", push.node, push.start_ns, push.at_ns, 0, push.channel)
    end, landed = leg.prefilled_ns, leg.find("landed", leg.decode)
    if end is None or landed is None:
        return
    granted = leg.find("reserving")
    room_ns = min(landed.at_ns, max(end, granted.at_ns if granted is not None else end))
    if room_ns > end:
        yield _span("wait", leg.decode, end, room_ns, 0, "no room")
    moving = [(max(room_ns, a), b) for a, b in union([(push.start_ns, push.at_ns) for push in leg.pushes()])]
    edges = [(room_ns, room_ns), *((a, b) for a, b in moving if b > room_ns), (landed.at_ns, landed.at_ns)]
    for (_, done), (begins, _) in pairwise(edges):
        if begins > done:
            yield _span("wait", leg.decode, done, begins, 0, "transfer")
    admitted = leg.find("admitted", leg.decode)
    if admitted is not None and admitted.at_ns > landed.at_ns:
        yield _span("wait", leg.decode, landed.at_ns, admitted.at_ns, 0, "decode queue")


def _stalls(ring: StepRing, node: str, start_ns: int, end_ns: int | None) -> Iterator[Span]:
    """Steps that prompts made longer, while this request decoded."""
    found = 0
    last = ring.num_ever if end_ns is None else ring.place(end_ns)
    for row in ring.rows(ring.place(start_ns), last):
        if row.prefill_tokens and interference_ns(row, ring.model) > GAP_NS:
            yield _span("wait", node, row.start_ns, row.end_ns, row.prefill_tokens, "behind a prompt chunk")
            found += 1
            if found == MAX_STALLS:
                return


def _span(kind: str, node: str, start_ns: int, end_ns: int | None, tokens: int, cause: str) -> Span:
    return {
        "kind": kind,
        "node": node,
        "start_ms": _ms(start_ns),
        "end_ms": _ms(end_ns),
        "tokens": tokens,
        "cause": cause,
    }


def _first_of(*marks: TraceEvent | None) -> int | None:
    return next((mark.at_ns for mark in marks if mark is not None), None)


def _start(span: Span) -> float:
    start = span["start_ms"]
    assert isinstance(start, float)
    return start


def _ms(at_ns: int | None) -> float | None:
    return None if at_ns is None else at_ns / 1e6


def _predicted(leg: AttemptSpan | None) -> dict[str, float | None]:
    """Milliseconds either way; None where nothing was predicted, or no end to it."""
    ways = {"local": leg.local_s, "remote": leg.remote_s} if leg is not None else {"local": 0.0, "remote": 0.0}
    return {way: seconds * 1000 if seconds and math.isfinite(seconds) else None for way, seconds in ways.items()}

"""One period: one arm under one seed's traffic, from idle to idle, with what the client saw and the router recorded."""

import math
from dataclasses import dataclass, field

from compare.endpoint import SUMMARIES, Document, Endpoint, Unreachable
from compare.measures import gaps_s, ttft_s
from compare.outcome import Outcome, Recording, Slo
from compare.schedule import Turn

COOL_DOWN_S = 60.0
SLACK_MS = 1000.0  # between the client's and the router's first record of a period
COUNTED = ("handoffs", "blocks_moved", "bytes_moved", "handoffs_failed", "preemptions", "records_dropped")


@dataclass(slots=True)
class Period:
    """`problems` say why its figures must not be used; they are told all the same, marked."""

    turn: Turn
    recording: Recording = field(default_factory=Recording)
    summaries: dict[str, Document] = field(default_factory=dict)  # the router's, by request id
    steps: dict[str, list[Document]] = field(default_factory=dict)  # by node, oldest first
    costs: dict[str, list[float]] = field(default_factory=dict)  # step-time model by node, packed
    timelines: dict[str, Document] = field(default_factory=dict)  # of its worst requests, by their ids
    moved: dict[str, int] | None = None  # what the nodes counted during it; None: it could not be asked
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what its figures leave out, though they may be used


def check_moved(before: Document, after: Document, *, splits: bool | None) -> tuple[dict[str, int], list[str]]:
    """What the nodes counted between two statuses, and what is wrong with it.

    The proof that KV moved, or did not: bytes must be whole blocks handed off. `splits` says whether prompts are
    handed to a decode node always (True), never (False), or now and then (None).
    """
    was = {node["id"]: node for node in before["nodes"] if node["alive"]}
    now = {node["id"]: node for node in after["nodes"] if node["alive"]}
    problems = [f"node {name} was lost" for name in was.keys() - now.keys()]
    problems += [f"node {name} joined in mid-run" for name in now.keys() - was.keys()]
    moved = dict.fromkeys(COUNTED, 0)
    expected_bytes = 0
    for name in sorted(was.keys() & now.keys()):
        if now[name]["steps"] < was[name]["steps"]:
            problems.append(f"node {name} was started anew in mid-run")
            continue
        counts = {count: now[name].get(count, 0) - was[name].get(count, 0) for count in COUNTED}
        expected_bytes += counts["blocks_moved"] * now[name]["block_bytes"]
        moved = {count: moved[count] + counts[count] for count in COUNTED}
    if moved["bytes_moved"] != expected_bytes:
        problems.append(f"{moved['bytes_moved']} bytes of KV moved, and its blocks are {expected_bytes}")
    in_place = {"pool"} == {channel for node in now.values() for channel in node.get("channels", {}).values()}
    if splits and not (moved["handoffs"] and (moved["bytes_moved"] or in_place)):
        problems.append("disaggregated, and no KV was handed off")
    if splits is False and moved["handoffs"]:
        problems.append(f"co-located, and yet {moved['handoffs']} requests were handed off")
    retried = after["requests"].get("moved", 0) - before["requests"].get("moved", 0)
    if retried:
        problems.append(f"{retried} attempts failed and went on elsewhere")
    return moved, problems


class Watch:
    """Asks a Baton router about one period: `begin` before it, `end` after it."""

    def __init__(self, endpoint: Endpoint, splits: bool | None) -> None:
        self._endpoint = endpoint
        self._splits = splits
        self._before: Document = {}

    async def begin(self, period: Period) -> None:
        """Returns when the arm is idle. Raises Unreachable."""
        if not await self._endpoint.until_idle(COOL_DOWN_S):
            period.problems.append(f"the arm was not idle {COOL_DOWN_S:g} s after the period before")
        self._before = await self._endpoint.status()

    async def end(self, period: Period, slo: Slo, num_timelines: int) -> None:
        """Fills in what the router recorded, and the timelines of the worst requests.

        A router that is gone is the period's problem, and no error.
        """
        try:
            if not await self._endpoint.until_idle(COOL_DOWN_S):
                period.problems.append(f"requests or blocks are left {COOL_DOWN_S:g} s after the last answer")
            await self._ask(period)
            known = [outcome for outcome in period.recording.outcomes if outcome.id in period.summaries]
            known.sort(key=lambda outcome: excess_of(outcome, slo), reverse=True)
            for outcome in known[:num_timelines]:
                period.timelines[outcome.id] = await self._endpoint.timeline(outcome.id)
        except Unreachable as error:
            period.problems.append(f"the router was lost: {error}")

    async def _ask(self, period: Period) -> None:
        status = await self._endpoint.status()
        period.moved, problems = check_moved(self._before, status, splits=self._splits)
        period.problems += problems
        own = {outcome.id for outcome in period.recording.outcomes if outcome.id}
        period.summaries = {one["id"]: one for one in await self._endpoint.requests() if one["id"] in own}
        if lost := len(own) - len(period.summaries):
            period.notes.append(
                f"the router kept no record of {lost} of {len(own)} requests (it keeps {SUMMARIES} at most): phases,"
                " transfers and causes leave them out; a shorter --duration keeps all"
            )
        since_ms = max(0.0, period.recording.started_unix_ns / 1e6 - SLACK_MS)
        for node in status["nodes"]:
            period.steps[node["id"]] = await self._endpoint.steps(node["id"], since_ms)
            period.costs[node["id"]] = node.get("cost") or []


def excess_of(outcome: Outcome, slo: Slo) -> float:
    """How far a request is from its SLO, 1 being just kept: its TTFT or its longest gap, whichever is worse."""
    slo = outcome.slo or slo
    if not outcome.finished:
        return math.inf
    late = ttft_s(outcome) * 1000 / slo.ttft_ms if slo.ttft_ms else 0.0
    return max(late, max(gaps_s(outcome), default=0.0) * 1000 / slo.tbt_ms if slo.tbt_ms else 0.0)

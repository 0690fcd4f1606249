"""Watches one period of a Baton stack: from idle to idle, with what its router recorded."""

from compare.arms import Arm
from compare.endpoint import SUMMARIES, Document, Endpoint, EndpointError
from compare.load.outcome import LatencySlo
from compare.run.experiment import Period
from compare.stats.measures import slo_excess

COOL_DOWN_S = 60.0
SLACK_MS = 1000.0  # between the client's and the router's first record of a period
COUNTED = ("handoffs", "blocks_moved", "bytes_moved", "handoffs_failed", "preemptions", "records_dropped")


def splits_of(arm: Arm) -> bool | None:
    """Return whether the arm hands prompts to a decode node: always, never, or None for sometimes."""
    if arm.url:
        return None
    if not arm.prefill:
        return False
    return {"always": True, "never": False}.get(arm.settings["disaggregate"])


def check_counts(before: Document, after: Document, *, splits: bool | None) -> tuple[dict[str, int], list[str]]:
    """Return what the nodes counted between two statuses, and what is wrong with it.

    This proves whether KV moved: bytes must be whole blocks handed off. `splits` is that of `splits_of`.
    """
    was = {node["id"]: node for node in before["nodes"] if node["alive"]}
    now = {node["id"]: node for node in after["nodes"] if node["alive"]}
    problems = [f"node {name} was lost" for name in was.keys() - now.keys()]
    problems += [f"node {name} joined during the run" for name in now.keys() - was.keys()]
    counts = dict.fromkeys(COUNTED, 0)
    expected_bytes = 0
    for name in sorted(was.keys() & now.keys()):
        if now[name]["steps"] < was[name]["steps"]:
            problems.append(f"node {name} was restarted during the run")
            continue
        own = {count: now[name].get(count, 0) - was[name].get(count, 0) for count in COUNTED}
        expected_bytes += own["blocks_moved"] * now[name]["block_bytes"]
        counts = {count: counts[count] + own[count] for count in COUNTED}
    if counts["bytes_moved"] != expected_bytes:
        problems.append(f"{counts['bytes_moved']} bytes of KV moved, and its blocks are {expected_bytes}")
    shared_pool = {"pool"} == {channel for node in now.values() for channel in node.get("channels", {}).values()}
    if splits and not (counts["handoffs"] and (counts["bytes_moved"] or shared_pool)):
        problems.append("disaggregated, but no KV was handed off")
    if splits is False and counts["handoffs"]:
        problems.append(f"co-located, but {counts['handoffs']} requests were handed off")
    retried = after["requests"].get("moved", 0) - before["requests"].get("moved", 0)
    if retried:
        problems.append(f"{retried} attempts failed and were retried on another node")
    return counts, problems


class RouterWatch:
    """Asks a Baton router about one period: `begin` before it, `end` after it."""

    def __init__(self, endpoint: Endpoint, splits: bool | None) -> None:
        self._endpoint = endpoint
        self._splits = splits
        self._before: Document = {}

    async def begin(self, period: Period) -> None:
        """Wait until the arm is idle. Raises EndpointError."""
        if not await self._endpoint.until_idle(COOL_DOWN_S):
            period.problems.append(f"the arm was not idle {COOL_DOWN_S:g} s after the previous period")
        self._before = await self._endpoint.status()

    async def end(self, period: Period, slo: LatencySlo, num_timelines: int) -> None:
        """Add what the router recorded, and the timelines of the worst requests.

        A lost router is a problem of the period, not an error.
        """
        try:
            if not await self._endpoint.until_idle(COOL_DOWN_S):
                period.problems.append(f"requests or blocks are left {COOL_DOWN_S:g} s after the last answer")
            await self._fetch(period)
            known = [outcome for outcome in period.recording.outcomes if outcome.id in period.summaries]
            known.sort(key=lambda outcome: slo_excess(outcome, slo), reverse=True)
            for outcome in known[:num_timelines]:
                period.timelines[outcome.id] = await self._endpoint.timeline(outcome.id)
        except EndpointError as error:
            period.problems.append(f"the router was lost: {error}")

    async def _fetch(self, period: Period) -> None:
        status = await self._endpoint.status()
        period.counts, problems = check_counts(self._before, status, splits=self._splits)
        period.problems += problems
        own = {outcome.id for outcome in period.recording.outcomes if outcome.id}
        period.summaries = {row["id"]: row for row in await self._endpoint.requests() if row["id"] in own}
        if lost := len(own) - len(period.summaries):
            period.notes.append(
                f"the router kept no record of {lost} of {len(own)} requests (it keeps {SUMMARIES} at most): phases,"
                " transfers and causes leave them out; a shorter --duration keeps all"
            )
        since_ms = max(0.0, period.recording.started_unix_ns / 1e6 - SLACK_MS)
        for node in status["nodes"]:
            period.steps[node["id"]] = await self._endpoint.steps(node["id"], since_ms)
            period.costs[node["id"]] = node.get("cost") or []

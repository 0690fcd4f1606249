"""Evidence from a run: the logs of its processes, the timeline of a request and the blocks of its nodes."""

import contextlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tests.chaos.traffic import Outcome
from tests.cluster.harness import Cluster

FIRED = re.compile(r"failpoint (?P<site>[\w.]+) \(.*\): (?P<action>\S+)")


@dataclass(slots=True)
class Fault:
    """A fault that was injected into a process, with its Unix time."""

    name: str
    what: str
    at_ns: int


@dataclass(slots=True)
class Gap:
    """The longest time, in seconds, that one request waited for a token, and the parts of this time."""

    whole_s: float
    parts_s: dict[str, float]

    def shown(self) -> str:
        return ", ".join(f"{name} {1000 * part:.0f}" for name, part in self.parts_s.items() if part >= 0.001)


def at_rest(running: Cluster, timeout_s: float = 60.0) -> tuple[dict[str, Any], list[str]]:
    """Wait for two successive heartbeats without held blocks. Return the status, and one line per node that holds any.

    One heartbeat is not enough: a retransmitted call may reserve blocks after all requests have ended. These blocks are
    released when the prefill node stops the reservation, or at the latest when the lease expires.
    """
    deadline = time.monotonic() + timeout_s
    num_idle = 0
    while num_idle < 2 and time.monotonic() < deadline:
        time.sleep(0.6)  # longer than a heartbeat
        held = _held(status := running.status())
        num_idle = 0 if held else num_idle + 1
    return status, held


def _held(status: dict[str, Any]) -> list[str]:
    found = []
    for node in status["nodes"]:
        blocks = node["blocks"]
        if not node["alive"]:
            found.append(f"{node['id']} is not alive")
        elif any(blocks[kind] for kind in ("owned", "reserved", "quarantined")):
            found.append(f"{node['id']} holds {blocks}")
        elif blocks["free"] + blocks["cached"] != blocks["total"]:
            found.append(f"{node['id']} does not balance: {blocks}")
    return found


# ---- logs ------------------------------------------------------------------------------------------------------------


def lines(running: Cluster, name: str) -> list[dict[str, Any]]:
    """Return the JSON lines of a process's log. All starts of the process write to the same log."""
    found = []
    for line in (running.directory / f"{name}.log").read_text().splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def fired(running: Cluster) -> list[Fault]:
    """Return a fault for each failpoint that has fired."""
    found = []
    for name in list(running.processes):
        for line in lines(running, name):
            if match := FIRED.match(str(line.get("message"))):
                found.append(Fault(name, f"{match['site']}={match['action']}", _unix_ns(line)))
    return found


def detection_s(running: Cluster, faults: Sequence[Fault]) -> float | None:
    """Return the longest time between a node's fault and its removal by the router; None if no node was removed."""
    news = [(_unix_ns(line), str(line["message"])) for line in lines(running, "router") if "time" in line]
    found = []
    for fault in faults:
        about = re.compile(rf"node {re.escape(fault.name)}\b.*(lost|stuck)")
        later = [at for at, message in news if at >= fault.at_ns - 1_000_000 and about.search(message)]
        others = [other.at_ns for other in faults if other.name == fault.name and other.at_ns > fault.at_ns]
        if later and later[0] < min(others, default=later[0] + 1):
            found.append((later[0] - fault.at_ns) / 1e9)
    return max(found, default=None)


def _unix_ns(line: Mapping[str, Any]) -> int:
    return int(datetime.fromisoformat(line["time"]).timestamp() * 1e9)


def gap_of(running: Cluster, outcome: Outcome, faults: Sequence[Fault]) -> Gap:
    """Split a request's longest gap: before the fault, until a node queued the request again, queue, prefill, rest."""
    begin, end = (at / 1e6 for at in outcome.gap_ns)
    try:
        spans = running.get(f"/v1/requests/{outcome.id}/timeline")["spans"]
    except OSError:
        return Gap(outcome.gap_s, {})
    at = [fault.at_ns / 1e6 for fault in faults if begin < fault.at_ns / 1e6 < end]
    requeued = [span["start_ms"] for span in spans if span["kind"] == "queued" and begin < span["start_ms"] < end]
    cuts = [begin, min(at, default=begin), max(requeued, default=begin)]
    parts = {
        "before the fault": cuts[1] - begin,
        "until queued": max(0.0, cuts[2] - cuts[1]),
        "in the queue": _overlap(spans, "queued", max(cuts), end),
        "prefill": _overlap(spans, "chunk", max(cuts), end),
    }
    return Gap(
        outcome.gap_s,
        {name: part / 1e3 for name, part in parts.items()}
        | {"rest": max(0.0, end - begin - sum(parts.values())) / 1e3},
    )


def _overlap(spans: Sequence[Mapping[str, Any]], kind: str, begin: float, end: float) -> float:
    """Return the number of milliseconds between `begin` and `end` that spans of this kind cover."""
    found, until = 0.0, begin
    for span in sorted((span for span in spans if span["kind"] == kind), key=lambda span: span["start_ms"]):
        first, last = max(until, span["start_ms"]), min(end, span["end_ms"] if span["end_ms"] is not None else end)
        if last > first:
            found, until = found + last - first, last
    return found

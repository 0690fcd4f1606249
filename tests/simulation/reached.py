"""The faults and states that a set of seeds must reach, because a fault that never occurs proves nothing."""

from collections import Counter

from shared.failpoints import SITES
from tests.simulation.channel import FAULTS
from tests.simulation.scenario import FLEET_FAULTS, NODE_FAULTS, OUTAGE, STALL

STATES = (
    "client: finished",
    "client: cancelled",
    "client: failed",
    "client: lost",
    "state: preempted",
    "state: quarantined",
    "state: reserved",
    "state: prefix hit",
    "state: rows found corrupt",
    "state: two nodes down",
    "state: moved before a token",
    "state: moved in decode",
    "state: a moved request found its blocks",
    "channel: a fenced writer is refused",
    "channel: a writer that seems dead is connected",
    "channel: a row without a reservation is dropped",
    "channel: a row arrives after its writer gave up",
    "exited in order",
    "log: request %s is retried: %s",
    "log: handoff of %s failed: %s",
    "log: handoff of %s ended: %s",
)
WANTED = (
    *(f"site {site}" for site in SITES),
    *(f"fault: {kind}" for kind in sorted({*NODE_FAULTS, *FLEET_FAULTS, *OUTAGE.values(), STALL, "kill router"})),
    *(f"channel: {fault}" for fault in FAULTS),
    *STATES,
)


def table(reached: Counter[str]) -> tuple[str, list[str]]:
    """Return a table of the counts, with names outside WANTED last, and the names in WANTED that were never reached."""
    others = [what for what in sorted(reached) if what not in WANTED]
    lines = [f"{reached[what]:9}  {what}" for what in (*WANTED, *others)]
    return "\n".join(lines), [what for what in WANTED if not reached[what]]

"""What a set of seeds must have reached at least once: a fault that never strikes proves nothing ("sometimes" asserts)."""

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
    "channel: a barred writer is refused",
    "channel: a writer that seems dead is connected",
    "channel: a row without an open ticket is dropped",
    "channel: a row comes after its writer gave up",
    "ended in good order",
    "log: request %s goes on elsewhere: %s",
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
    """How often each was reached, and which never were. Other things that were reached stand below."""
    others = [what for what in sorted(reached) if what not in WANTED]
    lines = [f"{reached[what]:9}  {what}" for what in (*WANTED, *others)]
    return "\n".join(lines), [what for what in WANTED if not reached[what]]

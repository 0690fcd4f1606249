"""Where handoffs stand, counted from their events as the queues that SGLang shows for its two pools."""

from dataclasses import dataclass

from shared.rpc.messages import NodeInfo, RequestEvent

MAX_OPEN = 65_536  # attempts; the oldest are forgotten first

# Names and meanings are SGLang's; the role is that of the nodes that have the queue.
QUEUES = {
    "num_prefill_bootstrap_queue_reqs": ("prefill", "Requests in prefill that wait for room on their decode node."),
    "num_prefill_inflight_queue_reqs": ("prefill", "Computed prompts whose KV is not wholly handed over."),
    "num_decode_prealloc_queue_reqs": ("decode", "Handoffs that wait for room."),
    "num_decode_transfer_queue_reqs": ("decode", "Handoffs whose KV is on its way."),
}
BOOTSTRAP, INFLIGHT, PREALLOC, TRANSFER = QUEUES


@dataclass(slots=True)
class OpenHandoff:
    """An attempt that at least one node works on. The two nodes' events come in any order."""

    prefill: str = ""  # node where it is, or "": not there yet, or over there
    decode: str = ""
    is_handoff: bool = False
    admitted: bool = False
    granted: bool = False
    sampled: bool = False
    landed: bool = False


class HandoffQueues:
    def __init__(self) -> None:
        self._open: dict[str, OpenHandoff] = {}

    def event(self, info: NodeInfo, event: RequestEvent) -> None:
        is_prefill = info.role == "prefill"
        attempt = self._open.get(event.id)
        if event.kind == "queued":
            self._queued(info, attempt or self._new(event.id), is_prefill)
        elif attempt is None:
            return
        elif event.kind == "ended":
            self._left(event.id, attempt, info.id)
        elif event.kind == "landed":
            attempt.landed = True
        elif info.id == attempt.prefill:  # not by its role, which it may just have changed
            attempt.admitted |= event.kind == "admitted"
            attempt.granted |= event.kind == "reserving"
            attempt.sampled |= event.kind == "first"

    def lost(self, node: str) -> None:
        """Nobody will say how that ended which was there."""
        for identity, attempt in list(self._open.items()):
            self._left(identity, attempt, node)

    def counts(self) -> dict[tuple[str, str], int]:
        """How many stand in each node's each queue."""
        counts: dict[tuple[str, str], int] = {}
        for attempt in self._open.values():
            for place in _places(attempt):
                counts[place] = counts.get(place, 0) + 1
        return counts

    def _new(self, identity: str) -> OpenHandoff:
        if len(self._open) >= MAX_OPEN:
            del self._open[next(iter(self._open))]
        self._open[identity] = OpenHandoff()
        return self._open[identity]

    @staticmethod
    def _queued(info: NodeInfo, attempt: OpenHandoff, is_prefill: bool) -> None:
        if is_prefill:
            attempt.prefill, attempt.is_handoff = info.id, True
        else:
            attempt.decode = info.id

    def _left(self, identity: str, attempt: OpenHandoff, node: str) -> None:
        if attempt.prefill == node:
            attempt.prefill = ""
        if attempt.decode == node:
            attempt.decode = ""
        if not attempt.prefill and not attempt.decode:
            del self._open[identity]


def _places(attempt: OpenHandoff) -> list[tuple[str, str]]:
    """The queues that an attempt stands in, by node."""
    found = []
    if attempt.prefill and attempt.admitted and not attempt.granted:
        found.append((attempt.prefill, BOOTSTRAP))
    if attempt.prefill and attempt.granted and attempt.sampled:
        found.append((attempt.prefill, INFLIGHT))
    if attempt.decode and attempt.is_handoff and not attempt.landed:
        found.append((attempt.decode, TRANSFER if attempt.granted else PREALLOC))
    return found

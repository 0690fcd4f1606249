"""What a node records of its steps and requests, until its routers are told: bounded, the oldest is dropped.

The engine's thread makes a record in about 2 µs and 0.1 µs for each request in the step. It is made there and then:
kept until later, a step's many small objects would cost the garbage collector more than that.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.engine import StepTiming
from scheduler.blocks import Ledger
from scheduler.request import Request, RequestState, Slice, Step
from scheduler.scheduler import Scheduler, StepOutput
from shared.clock import now_ns
from shared.rpc.messages import RequestEvent, StepRecord

MAX_STEPS = 8192  # not yet told; seconds of the fastest engine
MAX_EVENTS = 32_768


class SchedulerSnapshot(NamedTuple):
    """The scheduler at the end of a turn."""

    ledger: Ledger
    running: int = 0
    waiting: int = 0


class StepRecorder:
    """`added`, `scheduled`, `stepped`, `ran` and `turned` are the engine's thread's; `event` is anybody's."""

    def __init__(self, max_steps: int = MAX_STEPS, max_events: int = MAX_EVENTS) -> None:
        self.dropped = 0
        self._steps: deque[StepRecord] = deque(maxlen=max_steps)
        self._events: deque[RequestEvent] = deque(maxlen=max_events)
        self._ran: StepTiming | None = None
        self._waiting: dict[str, Request] = {}  # queued, and in no step yet
        self._unsampled: dict[str, Request] = {}  # in steps, without a token yet
        self._prune_at = 64
        self._preemptions = 0
        self._epochs: dict[str, int] = {}  # of the preempted

    # ---- events -------------------------------------------------------------------------------------------------

    def event(self, identity: str, kind: str, at_ns: int | None = None, **fields: Any) -> None:
        """Something happened to a request, now or at `at_ns`; `fields` as in `shared.rpc.messages.RequestEvent`."""
        if len(self._events) == self._events.maxlen:
            self.dropped += 1
        self._events.append(RequestEvent(identity, kind, at_ns or now_ns(), **fields))

    def added(self, request: Request, at_ns: int) -> None:
        """The node took the request at `at_ns`; the scheduler just now, so that it has its number."""
        self.event(request.id, "queued", at_ns, serial=request.arrival, count=len(request.tokens))
        if len(self._waiting) + len(self._unsampled) >= self._prune_at:  # those that ended before their first token
            self._waiting, self._unsampled = _alive(self._waiting), _alive(self._unsampled)
            self._prune_at = 64 + 2 * (len(self._waiting) + len(self._unsampled))
        self._waiting[request.id] = request

    def scheduled(self, step: Step, scheduler: Scheduler) -> list[Request]:
        """Returns the requests whose first step here this is."""
        if scheduler.counters.preemptions != self._preemptions:
            self._find_preempted(scheduler)
        if not self._waiting:
            return []
        admitted = [piece.request for piece in step.slices if piece.request.id in self._waiting]
        for request in admitted:
            self._unsampled[request.id] = self._waiting.pop(request.id)
            self.event(request.id, "admitted", count=request.num_cached)
        return admitted

    def _find_preempted(self, scheduler: Scheduler) -> None:
        epochs = {request.id: request.epoch for request in scheduler.requests.values() if request.epoch}
        for identity, epoch in epochs.items():
            if epoch > self._epochs.get(identity, 0):
                self.event(identity, "preempted")
        self._epochs, self._preemptions = epochs, scheduler.counters.preemptions

    def stepped(self, events: Sequence[StepOutput], at_ns: int) -> None:
        """What a step did: some first tokens were sampled, perhaps."""
        if not self._unsampled:
            return
        for event in events:
            if event.token is not None and self._unsampled.pop(event.request.id, None) is not None:
                self.event(event.request.id, "first", at_ns)

    # ---- steps --------------------------------------------------------------------------------------------------

    def ran(self, ran: StepTiming) -> None:
        self._ran = ran

    def turned(self, seen: SchedulerSnapshot) -> None:
        """The turn is over: a step that ran in it is recorded with what the scheduler looked like then."""
        if self._ran is not None:
            if len(self._steps) == self._steps.maxlen:
                self.dropped += 1
            self._steps.append(_record(self._ran, seen))
            self._ran = None

    def take(self) -> tuple[list[StepRecord], list[RequestEvent]]:
        """All that was recorded since the last time. Events of requests in these steps are among these or earlier."""
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        return steps, [self._events.popleft() for _ in range(len(self._events))]


def _alive(requests: dict[str, Request]) -> dict[str, Request]:
    return {identity: request for identity, request in requests.items() if request.state is not RequestState.DONE}


def _record(ran: StepTiming, seen: SchedulerSnapshot) -> StepRecord:
    step, ledger, work = ran.step, seen.ledger, ran.step.work
    return StepRecord(
        step.number,
        ran.start_ns,
        ran.device_ns // 1000,
        ran.host_ns // 1000,
        round(step.predicted_s * 1e6),
        step.budget,
        step.reason,
        work.num_prefills,
        work.prefill_tokens,
        work.prefill_pairs,
        work.num_decodes,
        work.decode_context,
        step.num_preempted,
        seen.running,
        seen.waiting,
        ledger.free,
        ledger.cached,
        ledger.owned,
        ledger.reserved,
        _members(step.slices, work.num_prefills),
    )


def _members(slices: Sequence[Slice], num_chunks: int) -> bytes:
    """Chunks first, so that a reader who wants only them stops early."""
    if num_chunks:
        slices = sorted(slices, key=lambda piece: piece.is_decode)
    members: list[int] = []
    for piece in slices:
        members += (piece.request.arrival, piece.start, piece.count)
    return array("i", members).tobytes()

"""Records of a node's steps and requests, and a buffer of limited size that keeps them until they are sent to routers.

The engine's thread builds a record in about 2 µs, plus 0.1 µs for each request in the step. Keeping the step and
building its record later would cost more, because the garbage collector would visit the step's many small objects."""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from engine.step_time_fit import StepTiming
from scheduler.blocks import Ledger
from scheduler.request import Request, RequestState, Slice, Step
from scheduler.scheduler import Scheduler, StepOutput
from shared.clock import now_ns
from shared.rpc.messages import RequestEvent, StepRecord

MAX_STEPS = 8192  # maximum number of unsent steps; the fastest engine runs this many steps in a few seconds
MAX_EVENTS = 32_768


class SchedulerSnapshot(NamedTuple):
    """The block ledger and the numbers of running and waiting requests, after an iteration of the engine's loop."""

    ledger: Ledger
    running: int = 0
    waiting: int = 0


class StepRecorder:
    """Records steps, and events of requests from "queued" to "ended".

    The engine's thread calls `added`, `scheduled`, `stepped`, `ran` and `turned`. Any thread may call `event`. The
    event loop calls `take`. A full buffer drops its oldest record; `dropped` counts the dropped records.
    """

    def __init__(
        self, max_steps: int = MAX_STEPS, max_events: int = MAX_EVENTS, clock: Callable[[], int] = now_ns
    ) -> None:
        """`clock` returns the Unix time in nanoseconds."""
        self.dropped = 0
        self._clock = clock
        self._steps: deque[StepRecord] = deque(maxlen=max_steps)
        self._events: deque[RequestEvent] = deque(maxlen=max_events)
        self._timing: StepTiming | None = None
        self._waiting: dict[str, Request] = {}  # queued requests that have not been in a step yet
        self._unsampled: dict[str, Request] = {}  # requests that have been in a step, but have no new token yet
        self._prune_at = 64
        self._preemptions = 0
        self._epochs: dict[str, int] = {}  # for each preempted request, its `epoch` when it was last checked

    # ---- events -------------------------------------------------------------------------------------------------

    def event(self, request_id: str, kind: str, at_ns: int | None = None, **fields: Any) -> None:
        """Record an event of a request, now or at `at_ns`. `fields` are fields of `RequestEvent`."""
        if len(self._events) == self._events.maxlen:
            self.dropped += 1
        self._events.append(RequestEvent(request_id, kind, at_ns or self._clock(), **fields))

    def added(self, request: Request, at_ns: int) -> None:
        """Record a request that the node received at `at_ns` and has just given to the scheduler."""
        self.event(request.id, "queued", at_ns, serial=request.arrival, count=len(request.tokens))
        if len(self._waiting) + len(self._unsampled) >= self._prune_at:  # forget requests that ended without a token
            self._waiting, self._unsampled = _unfinished(self._waiting), _unfinished(self._unsampled)
            self._prune_at = 64 + 2 * (len(self._waiting) + len(self._unsampled))
        self._waiting[request.id] = request

    def scheduled(self, step: Step, scheduler: Scheduler) -> list[Request]:
        """Record and return the requests whose first step on this node is `step`."""
        if scheduler.counters.preemptions != self._preemptions:
            self._find_preempted(scheduler)
        if not self._waiting:
            return []
        admitted = [slice_.request for slice_ in step.slices if slice_.request.id in self._waiting]
        for request in admitted:
            self._unsampled[request.id] = self._waiting.pop(request.id)
            self.event(request.id, "admitted", count=request.num_cached)
        return admitted

    def _find_preempted(self, scheduler: Scheduler) -> None:
        epochs = {request.id: request.epoch for request in scheduler.requests.values() if request.epoch}
        for request_id, epoch in epochs.items():
            if epoch > self._epochs.get(request_id, 0):
                self.event(request_id, "preempted")
        self._epochs, self._preemptions = epochs, scheduler.counters.preemptions

    def stepped(self, events: Sequence[StepOutput], at_ns: int) -> None:
        """Record which requests got their first token in a step."""
        if not self._unsampled:
            return
        for event in events:
            if event.tokens and self._unsampled.pop(event.request.id, None) is not None:
                self.event(event.request.id, "first", at_ns)

    # ---- steps --------------------------------------------------------------------------------------------------

    def ran(self, timing: StepTiming) -> None:
        self._timing = timing

    def turned(self, snapshot: SchedulerSnapshot) -> None:
        """Record the step that ran in this iteration of the loop, if any, with the scheduler's state at the end of the
        iteration."""
        if self._timing is not None:
            self.record(_record(self._timing, snapshot))
            self._timing = None

    def record(self, step: StepRecord) -> None:
        if len(self._steps) == self._steps.maxlen:
            self.dropped += 1
        self._steps.append(step)

    def take(self) -> tuple[list[StepRecord], list[RequestEvent]]:
        """Return the records made since the last call. An event is returned in the same call as the steps that refer to
        it, or in an earlier call."""
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        return steps, [self._events.popleft() for _ in range(len(self._events))]


def _unfinished(requests: dict[str, Request]) -> dict[str, Request]:
    return {request_id: request for request_id, request in requests.items() if request.state is not RequestState.DONE}


def _record(timing: StepTiming, snapshot: SchedulerSnapshot) -> StepRecord:
    step, ledger, work = timing.step, snapshot.ledger, timing.step.work
    return StepRecord(
        number=step.number,
        start_ns=timing.start_ns,
        duration_us=timing.device_ns // 1000,
        host_us=timing.host_ns // 1000,
        predicted_us=round(step.predicted_s * 1e6),
        budget=step.budget,
        reason=step.reason,
        num_prefills=work.num_prefills,
        prefill_tokens=work.prefill_tokens,
        prefill_pairs=work.prefill_pairs,
        num_decodes=work.num_decodes,
        decode_context=work.decode_context,
        num_preempted=step.num_preempted,
        running=snapshot.running,
        waiting=snapshot.waiting,
        blocks_free=ledger.free,
        blocks_cached=ledger.cached,
        blocks_owned=ledger.owned,
        blocks_reserved=ledger.reserved,
        members=_members(step.slices, work.num_prefills),
        draft_tokens=work.draft_tokens,
        accepted_tokens=step.num_accepted,
    )


def _members(slices: Sequence[Slice], num_chunks: int) -> bytes:
    """Pack the slices, prompt chunks before decodes, so that a reader that needs only the chunks can stop early."""
    if num_chunks:
        slices = sorted(slices, key=lambda slice_: slice_.is_decode)
    members: list[int] = []
    for slice_ in slices:
        members += (slice_.request.arrival, slice_.start, slice_.count)
    return array("i", members).tobytes()

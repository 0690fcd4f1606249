"""A simulated node: the real scheduler on a virtual clock. A cost model predicts the duration of each step.

While only decodes run, the duration of a step is an affine function of the step's number. The node then skips a stretch
of steps at once: a formula gives their end times, and `Scheduler.skip_decodes` updates the scheduler's state."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import accumulate
from random import Random
from typing import NamedTuple, Protocol

from engine.emulation import Residuals
from scheduler.cost import CostModel, StepWork
from scheduler.request import Request, RequestState, Step
from scheduler.scheduler import Scheduler, SchedulerCounters, StepOutput
from shared.rpc.messages import NodeStats
from simulator.events import EventQueue

TOKEN = 0  # the token that every step samples, because only the numbers of tokens matter
PERIOD = 4096  # number of random factors; they repeat, so step PERIOD has the same factor as step 0
COUNTERS = tuple(field.name for field in fields(SchedulerCounters))
LONGEST = 256  # maximum number of steps in a stretch
Command = Callable[[Scheduler], object]


class Stretch(NamedTuple):
    """Consecutive steps of one node, beginning with step `number`. On the device, step i, counted from 0, takes
    first_s + i * slope_s seconds, times a random factor. The host adds `host_s` to each step."""

    begin_s: float
    number: int
    length: int
    first_s: float
    host_s: float
    slope_s: float = 0.0
    has_prompts: bool = False  # true only in a stretch of one step


class StepTimes:
    """The durations of a node's steps: the cost model's prediction, times a random factor, plus the host's time.

    The factors are drawn from `quantiles`, evenly spaced quantiles of the ratio of measured to predicted durations.
    For steps with prompts, `prompt_residuals` has separate quantiles for each range of predicted durations (see
    `Emulation`), because a delay of a given length changes this ratio less in a long step than in a short one. A step's
    factor depends only on the step's number and its work, so skipping steps does not change their durations. Prefix
    sums of the factors give the end of a stretch in O(1)."""

    def __init__(
        self,
        cost: CostModel,
        host_s: float = 0.0,
        host_slice_s: float = 0.0,
        quantiles: Sequence[float] = (1.0,),
        prompt_residuals: Sequence[Residuals] = (),
        seed: str = "",
    ) -> None:
        """In addition to its time on the device, a step takes `host_s`, plus `host_slice_s` for each slice. Without
        `prompt_residuals`, `quantiles` are used for all steps."""
        self._cost, self._host_s, self._host_slice_s = cost, host_s, host_slice_s
        self.varies = bool(prompt_residuals) or any(each != 1 for each in quantiles)
        self._prompt_residuals = prompt_residuals
        random = Random(seed)
        self._shares = [random.random() for _ in range(PERIOD)] if self.varies else []
        self._factors = [quantile(quantiles, share) for share in self._shares]
        self._sums = list(accumulate(self._factors, initial=0.0))
        self._moments = list(accumulate((i * each for i, each in enumerate(self._factors)), initial=0.0))

    def of_step(self, work: StepWork) -> tuple[float, float]:
        """Return a step's seconds on the device, before its random factor is applied, and its seconds on the host."""
        num_slices = work.num_prefills + work.num_decodes
        return self._cost.seconds(work), self._host_s + self._host_slice_s * num_slices

    def slope(self, num_decodes: int) -> float:
        """Return how many seconds longer each step of `num_decodes` decodes is than the step before it."""
        return self._cost.per_context * num_decodes

    def longest(self, number: int) -> int:
        """Return the maximum number of steps of a stretch that begins with step `number`."""
        return min(LONGEST, PERIOD - number % PERIOD) if self.varies else LONGEST

    def end(self, steps: Stretch, count: int) -> float:
        """Return the time at which the first `count` steps have ended."""
        begin_s = steps.begin_s + count * steps.host_s
        if not self.varies:
            return begin_s + count * steps.first_s + steps.slope_s * (count * (count - 1) // 2)
        first = steps.number % PERIOD
        if steps.has_prompts and self._prompt_residuals:
            classes = self._prompt_residuals
            own = next((each for each in classes if steps.first_s <= each.up_to_s), classes[-1])
            return begin_s + steps.first_s * quantile(own.quantiles, self._shares[first])
        factors = self._sums[first + count] - self._sums[first]
        moments = self._moments[first + count] - self._moments[first] - first * factors
        return begin_s + steps.first_s * factors + steps.slope_s * moments

    def ends(self, log: Sequence[Stretch]) -> list[float]:
        """Return the end times of all steps in a node's log, in the order of their numbers."""
        return [self.end(steps, count) for steps in log for count in range(1, steps.length + 1)]


def quantile(quantiles: Sequence[float], share: float) -> float:
    """Return the quantile at `share`, interpolated between the evenly spaced `quantiles`."""
    place, part = divmod(share * (len(quantiles) - 1), 1)
    low, high = quantiles[int(place)], quantiles[min(int(place) + 1, len(quantiles) - 1)]
    return low + part * (high - low)


class NodeListener(Protocol):
    """Receives the events of a node. During a call, the virtual clock shows the time of the event."""

    def on_receiving(self, node: "SimulatedNode", requests: list[Request]) -> None:
        """Called when blocks have been reserved for the KV that these requests will receive."""

    def on_scheduled(self, node: "SimulatedNode", step: Step) -> None:
        """Called when a step has been decided and begins. Not called for steps that are skipped."""

    def on_outputs(self, node: "SimulatedNode", step: Step, outputs: Sequence[StepOutput]) -> None:
        """Called when a step has ended. `outputs` has an output for each slice, and for each request in
        `step.decodes` that has ended. Not called for steps that are skipped."""

    def on_stretch(self, node: "SimulatedNode", steps: Stretch) -> None:
        """Called before a stretch of steps is skipped. Each of these steps decodes every running request."""

    def on_ended(self, node: "SimulatedNode", outputs: list[StepOutput]) -> None:
        """Called if requests ended in the last step of a skipped stretch. `outputs` has an output for each of them."""


class SimulatedNode:
    """One node: its scheduler, and the loop of `engine.engine.Engine` on a virtual clock.

    Commands run between two steps, in the order in which they were posted. A command that arrives during a stretch of
    decodes shortens the stretch to the steps that have begun. `log` has all steps so far.
    """

    def __init__(
        self,
        name: str,
        events: EventQueue,
        scheduler: Scheduler,
        times: StepTimes,
        listener: NodeListener,
        *,
        skips: bool = True,
    ) -> None:
        """If `skips` is false, the node decides every step separately."""
        self.name, self.scheduler, self.times = name, scheduler, times
        self.log: list[Stretch] = []
        self.num_steps = 0
        self._events, self._listener, self._skips = events, listener, skips
        self._inbox: deque[Command] = deque()
        self._is_busy = False
        self._stretch: Stretch | None = None
        self._generation = 0  # increases when the end of the current stretch changes
        self._snapshot = scheduler.ledger(), 0, 0

    def post(self, command: Command) -> None:
        """Run `command` before the next step."""
        self._inbox.append(command)
        if self._stretch is not None:
            self._shorten(self._stretch)
        elif not self._is_busy:
            self._turn()

    def stats(self) -> NodeStats:
        """Return the stats that the node reports at a heartbeat: its state after its last completed step."""
        self.settle()
        ledger, running, num_waiting = self._snapshot
        requests = self.scheduler.requests.values() if num_waiting else ()
        waiting = (each for each in requests if each.state is RequestState.WAITING and not each.receive_kv)
        return NodeStats(
            running=running,
            waiting=num_waiting,
            waiting_tokens=sum(len(request.tokens) for request in waiting),
            **{f"blocks_{name}": count for name, count in ledger._asdict().items()},
            **{name: getattr(self.scheduler.counters, name) for name in COUNTERS},
        )

    def settle(self) -> None:
        """During a stretch, bring the scheduler to its state after the last completed step."""
        if self._stretch is not None:
            self._settle(self._stretch)

    # ---- steps --------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Run the commands, and begin the next step or stretch. Without work, wait for a command."""
        self._is_busy = True
        scheduler, inbox = self.scheduler, self._inbox
        while inbox:
            inbox.popleft()(scheduler)
        self._take_snapshot()
        if self._skips and (count := scheduler.num_decode_only(self.times.longest(self.num_steps))) > 1:
            self._begin(count)
            return
        step = scheduler.schedule(gathers=self._skips)
        if step.receiving:
            self._listener.on_receiving(self, step.receiving)
        if not (step.slices or step.decodes):
            self._is_busy = False
            return
        has_prompts = step.work.num_prefills > 0
        steps = Stretch(self._events.now, self.num_steps, 1, *self.times.of_step(step.work), has_prompts=has_prompts)
        self.log.append(steps)
        self._listener.on_scheduled(self, step)
        self._events.at(self.times.end(steps, 1), self._finish, step, late=True)

    def _finish(self, step: Step) -> None:
        tokens = [(TOKEN,) if slice_.samples else () for slice_ in step.slices]
        outputs = self.scheduler.update(step, tokens)
        self.num_steps += 1
        self._listener.on_outputs(self, step, outputs)
        self._turn()

    def _take_snapshot(self) -> None:
        scheduler = self.scheduler
        self._snapshot = scheduler.ledger(), len(scheduler.running) + scheduler.num_receiving, scheduler.num_waiting

    # ---- skipping steps that only decode ------------------------------------------------------------------------

    def _begin(self, count: int) -> None:
        running = self.scheduler.running
        context = sum(request.num_scheduled for request in running) + len(running)
        times = self.times.of_step(StepWork(num_decodes=len(running), decode_context=context))
        self._continue(Stretch(self._events.now, self.num_steps, count, *times, self.times.slope(len(running))))

    def _continue(self, steps: Stretch) -> None:
        self._stretch = steps
        self._generation += 1
        self._events.at(self.times.end(steps, steps.length), self._end, self._generation, late=True)

    def _shorten(self, steps: Stretch) -> None:
        """Let the stretch end when its current step ends."""
        now = self._events.now
        count = 1 + bisect_left(range(1, steps.length), now, key=lambda count: self.times.end(steps, count))
        if count < steps.length:
            self._continue(steps._replace(length=count))

    def _settle(self, steps: Stretch) -> None:
        """Process the results of those steps of the stretch that have ended."""
        now = self._events.now
        count = bisect_left(range(1, steps.length), True, key=lambda count: self.times.end(steps, count) >= now)
        if count == 0:
            return
        self._skip(steps._replace(length=count))
        first_s = steps.first_s + steps.slope_s * count
        begin_s = self.times.end(steps, count)
        self._continue(Stretch(begin_s, self.num_steps, steps.length - count, first_s, steps.host_s, steps.slope_s))
        self._take_snapshot()

    def _end(self, generation: int) -> None:
        if generation != self._generation or self._stretch is None:
            return
        steps, self._stretch = self._stretch, None
        if ended := self._skip(steps):
            self._listener.on_ended(self, ended)
        self._turn()

    def _skip(self, steps: Stretch) -> list[StepOutput]:
        self.log.append(steps)
        self._listener.on_stretch(self, steps)
        self.num_steps += steps.length
        return self.scheduler.skip_decodes(steps.length, TOKEN)

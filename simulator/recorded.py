"""A simulated cluster that reports to the router's observer like a live cluster, including the records of steps."""

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

from engine.step_time_fit import StepTiming
from node.recorder import SchedulerSnapshot, StepRecorder
from router.observer import RouterObserver
from scheduler.placement import Placement
from scheduler.request import Request, Step
from scheduler.scheduler import StepOutput
from shared.errors import UnavailableError
from shared.rpc.messages import NodeUpdate
from simulator.cluster import ClusterPlan, SimulatedCluster
from simulator.handoff import SimulatedHandoff
from simulator.node import SimulatedNode
from simulator.routed import RoutedNode, SimulatedRequest

FLUSH_S = 0.1  # nodes send their records ten times a second


class RecordedCluster(SimulatedCluster):
    """A simulated cluster that simulates every step separately. Its nodes record steps and events with `StepRecorder`.

    `observer` gets all records, with times on the virtual clock, which begins at `epoch_ns` (Unix time).
    """

    def __init__(self, plan: ClusterPlan, observer: RouterObserver, epoch_ns: int) -> None:
        super().__init__(plan, skips=False)
        self._observer, self._epoch_ns = observer, epoch_ns
        self._recorders = {node.info.id: StepRecorder(clock=self.now_ns) for node in self.nodes}

    def now_ns(self) -> int:
        return self._epoch_ns + round(self.events.now * 1e9)

    def run(self, requests: Iterable[SimulatedRequest], timeout_s: float = inf) -> None:
        self.events.at(FLUSH_S, self._flush)
        super().run(requests, timeout_s)
        self._send_records()

    def _flush(self) -> None:
        self._send_records()
        if self.num_open:
            self.events.at(self.events.now + FLUSH_S, self._flush)

    def _send_records(self) -> None:
        for node in self.nodes:
            steps, events = self._recorders[node.info.id].take()
            self._observer.node_updated(node.info, NodeUpdate([], node.stats, steps=steps, events=events))

    # ---- requests -----------------------------------------------------------------------------------------------

    def on_accepted(self, request: SimulatedRequest) -> None:
        self._observer.accepted(request.id, request.num_prompt, 1, waited_s=self.times.request_s)

    def on_placed(self, request: SimulatedRequest, placement: Placement) -> None:
        estimates = [
            estimate.ready_s if estimate is not None and estimate.keeps_tbt else 0.0
            for estimate in (placement.local, placement.remote)
        ]
        self._observer.placed(request.attempt, placement.prefill, placement.decode, placement.reason, *estimates)

    def on_closed(self, request: SimulatedRequest) -> None:
        if request.error:
            self._observer.ended(request.id, 0, "error", UnavailableError(request.error))
        else:
            self._observer.ended(request.id, 0, "length")

    def _deliver(self, numbers: dict[str, int]) -> None:
        for request_id, count in numbers.items():
            self._observer.output(request_id, 0, count)

    # ---- nodes --------------------------------------------------------------------------------------------------

    def on_added(self, node: RoutedNode, row: Request, received_s: float) -> None:
        self._recorders[node.info.id].added(row, self._epoch_ns + round(received_s * 1e9))

    def on_handoff(self, handoff: SimulatedHandoff, kind: str, began_s: float, **fields: Any) -> None:
        node = handoff.decode if kind == "received" else handoff.prefill
        duration_us = round((self.events.now - began_s) * 1e6)
        event = self._recorders[node.info.id].event
        event(handoff.request.attempt, kind, duration_us=duration_us, peer=handoff.decode.info.address, **fields)

    def on_scheduled(self, node: SimulatedNode, step: Step) -> None:
        self._recorders[node.name].scheduled(step, node.scheduler)
        super().on_scheduled(node, step)

    def on_outputs(self, node: SimulatedNode, step: Step, outputs: Sequence[StepOutput]) -> None:
        now, now_ns, recorder, scheduler = self.events.now, self.now_ns(), self._recorders[node.name], node.scheduler
        recorder.stepped(outputs, now_ns)
        host_ns = round(1e9 * (self.times.step_s + self.times.slice_s * len(step.slices)))
        start_ns = self._epoch_ns + round(node.log[-1].begin_s * 1e9) + host_ns
        recorder.ran(StepTiming(step, start_ns, now_ns - start_ns, host_ns))
        running = len(scheduler.running) + scheduler.num_receiving
        recorder.turned(SchedulerSnapshot(scheduler.ledger(), running, scheduler.num_waiting))
        for output in outputs:
            if output.finish:
                recorder.event(output.request.id, "ended", reason=output.finish)
        numbers = {output.request.sampling[0].id: len(output.tokens) for output in outputs if output.tokens}
        self.events.at(now + min(self.times.rpc_s, self.times.answer_s), self._deliver, numbers)
        super().on_outputs(node, step, outputs)

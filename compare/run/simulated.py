"""Simulated deployments of arms: each trial runs on a virtual clock, in a new cluster with empty caches."""

import asyncio
import itertools
import json
import time
from array import array
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from itertools import repeat

from compare.arms import Arm, ArmSettings
from compare.endpoint import Document, Endpoint
from compare.load.client import LoadSpec
from compare.load.outcome import LatencySlo, LoadRecording, Outcome
from compare.run.deployments import Deployments
from compare.run.session import Experiment, Trial
from dashboard.chrome_trace import trace_events
from dashboard.history import HistoryLimits, RequestHistory
from dashboard.step_ring import FIELDS
from engine.emulation import Emulation
from router.nodes.load import node_status
from scheduler.prefix import block_hashes
from shared.config.settings import resolve
from shared.errors import ConfigError
from simulator.cluster import ClusterPlan, SimulatedCluster
from simulator.recorded import RecordedCluster
from simulator.routed import SimulatedRequest

UNLIMITED = HistoryLimits(requests=10**6, rows=10**8)  # a report has all requests of a trial


def cluster_plan(arm: Arm, device: Emulation) -> ClusterPlan:
    """Return the cluster of an arm. Raises ConfigError if a setting is not simulated."""
    settings: ArmSettings = resolve(ArmSettings, arm.settings, {})[0]
    if settings.kv_channel == "pool":
        raise ConfigError(f"{arm.name}: kv_channel=pool is not simulated; use `baton compare --on emulated`")
    if settings.speculative_config:
        raise ConfigError(f"{arm.name}: speculative_config is not simulated; use `baton compare --on live`")
    return ClusterPlan(arm.prefill, arm.decode, settings, settings, device)


def outcomes_of(
    cluster: SimulatedCluster, requests: Sequence[SimulatedRequest], slos: Iterable[LatencySlo | None] = repeat(None)
) -> list[Outcome]:
    """Return the outcomes that the clients of a simulated cluster saw. The cluster must have served the requests."""
    ends, answer_s = cluster.ends(), cluster.times.answer_s
    return [
        # An array takes a quarter of the memory of a list, and a search for a capacity keeps millions of times.
        outcome_of(index, request, array("d", request.token_s(answer_s, ends)), slo)
        for index, (request, slo) in enumerate(zip(requests, slos, strict=False))
    ]


def outcome_of(
    index: int, request: SimulatedRequest, token_s: MutableSequence[float], slo: LatencySlo | None
) -> Outcome:
    return Outcome(
        index,
        request.id,
        request.at_s,
        sent_s=request.at_s,
        first_byte_s=token_s[0] if token_s else None,
        token_s=token_s,
        finish="" if request.error else "length",
        error=request.error,
        prompt_tokens=request.num_prompt,
        max_tokens=request.max_tokens,
        ended_s=request.finish_s,
        slo=slo,
    )


class SimulatedEndpoint(Endpoint):
    """A simulated cluster in place of a running stack. `serve` runs one trial; the other methods read its records."""

    def __init__(self, name: str, plan: ClusterPlan, numbers: Iterator[int], *, records: bool) -> None:
        """`numbers` yields a unique number for each request of the session. Without `records`, a trial is faster, but
        its requests have no records."""
        super().__init__(name)
        self.url, self.model, self.max_model_len, self.is_baton = name, plan.device.name, 0, True
        self._epoch_ns, self._numbers, self._records = time.time_ns(), numbers, records
        self._history = RequestHistory(lambda: self._epoch_ns + round(1e9 * self._cluster.events.now), UNLIMITED)
        self._cluster = RecordedCluster(plan, self._history, self._epoch_ns) if records else SimulatedCluster(plan)

    def serve(self, spec: LoadSpec, recording: LoadRecording) -> None:
        """Simulate one trial, and fill in the recording as the load generator does."""
        cluster, recording.started_unix_ns = self._cluster, self._epoch_ns
        requests = [
            SimulatedRequest(
                f"r{next(self._numbers)}",
                each.at_s,
                len(each.prompt),
                each.max_tokens,
                block_hashes(each.prompt, cluster.plan.block_tokens, self._salt(spec, index)),
                each.prompt,
            )
            for index, each in enumerate(spec.arrivals)
        ]
        cluster.run(requests, spec.timeout_s)
        recording.outcomes += outcomes_of(cluster, requests, [arrival.slo for arrival in spec.arrivals])
        if not self._records:
            for outcome in recording.outcomes:
                outcome.id = ""

    def _salt(self, spec: LoadSpec, index: int) -> bytes:
        shares = self._cluster.plan.computing.enable_prefix_caching
        return spec.salt.encode() + (b"" if shares else b" %d" % index)

    async def connect(self) -> None:
        """Do nothing, because the cluster is in this process."""

    async def status(self) -> Document:
        nodes = [node_status(node.info, self._cluster.stats(node), alive=True) for node in self._cluster.nodes]
        return {"nodes": nodes, "requests": {"running": 0, "moved": 0}}

    async def requests(self) -> list[Document]:
        return list(self._history.latest_requests(10**6))

    async def timeline(self, identity: str) -> Document:
        return self._history.request(identity) or {}

    async def steps(self, node: str, since_ms: float) -> list[Document]:
        ring = self._history.ring(node)
        return [] if ring is None else [dict(zip(FIELDS, ring.shown(row), strict=True)) for row in ring.rows(0)]

    async def trace(self, last_s: float) -> bytes:
        events = list(trace_events(self._history, 0))
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode()

    async def complete(self, prompt: Sequence[int], max_tokens: int, salt: str) -> list[int]:
        return []  # a simulation computes no tokens

    async def until_idle(self, timeout_s: float) -> bool:
        return True


async def predict(experiment: Experiment, device: Emulation, trials: Iterable[Trial]) -> dict[int, list[Outcome]]:
    """Simulate trials that have been measured. Return the outcomes, keyed by the position of the trial."""
    deployments, found = SimulatedDeployments(experiment.all_arms, device, records=False), {}
    for trial in trials:
        recording, traffic = LoadRecording(), experiment.traffic(trial.seed, trial.rate)
        await deployments.up(trial.arm)
        await deployments.drive(LoadSpec("", "", traffic.arrivals, experiment.slo, experiment.timeout_s), recording)
        found[trial.position] = recording.outcomes
    return found


class SimulatedDeployments(Deployments):
    """The simulated clusters of all arms. Every trial gets a new cluster."""

    def __init__(self, arms: Sequence[Arm], device: Emulation, *, records: bool) -> None:
        """Plan the clusters of the arms. Raises ConfigError if an arm cannot be simulated."""
        super().__init__([], keeps_all=True)
        self._plans = {arm.name: cluster_plan(arm, device) for arm in arms}
        self._numbers, self._records = itertools.count(), records
        self._current: SimulatedEndpoint | None = None

    async def up(self, name: str) -> Endpoint:
        self._current = SimulatedEndpoint(name, self._plans[name], self._numbers, records=self._records)
        return self._current

    async def drive(self, spec: LoadSpec, recording: LoadRecording) -> None:
        assert self._current is not None
        await asyncio.sleep(0.01)  # handles signals, which wait during the simulations
        self._current.serve(spec, recording)

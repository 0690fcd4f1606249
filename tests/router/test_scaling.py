"""Test the functions that compute how many nodes a router's requests need, and an autoscaler on a virtual clock."""

from collections import deque
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from math import ceil, exp
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.dispatch.admission import AdmissionQueue
from router.metrics.request_metrics import SlidingCounts
from router.metrics.scaling import ScalingSignals
from router.nodes.placement import PoolCapacity
from router.rebalance import Rebalancer
from router.scaling import (
    FLIP_S,
    KV_TARGET,
    RECENT_S,
    STEADY_S,
    SURVIVORS,
    Demand,
    NodeCapability,
    RebalanceClock,
    capability_of,
    load_of_decode,
    load_of_prefill,
    needed,
    recent_rate,
)
from scheduler.cost import CostModel, StepWork, pairs_of
from shared.errors import RequestError
from shared.rpc.messages import NodeInfo, NodeStats

POLL_S, START_S, WINDOW_S, COOL_S = 15, 20, 60, 300  # KEDA's poll interval, node start, rate window, scale-down window
STEP_AT, END = 900, 900 + 60 + 600
MAX_QUEUE_S = 15.0  # a router refuses requests that would wait longer
NUMBERS = st.floats(0.01, 1000)


@given(load=st.floats(0, 200), present=st.integers(1, 100))
def test_a_router_asks_for_more_nodes_at_once_and_for_fewer_one_at_a_time(load: float, present: int) -> None:
    wanted = needed(load, present)
    if load > present:
        assert wanted == load
    elif wanted < present:
        assert wanted == present - 1 >= 1
        assert load <= SURVIVORS * wanted, "the others would not be used too much"
        assert needed(load, wanted) <= wanted, "the next answer does not reverse this one"
    else:
        assert wanted == present


@given(loads=st.lists(st.floats(0, 20), min_size=1, max_size=8), present=st.integers(1, 40))
def test_routers_with_equal_loads_together_ask_for_what_one_would(loads: list[float], present: int) -> None:
    routers, load = len(loads), sum(loads)
    together = sum(needed(load / routers, present / routers, routers) for _ in loads)
    assert together == pytest.approx(needed(load, present), abs=1e-6)
    assert sum(needed(each, present / routers, routers) for each in loads) >= min(load, present) - 1 - 1e-6


@given(rate=NUMBERS, kv=NUMBERS, size=NUMBERS, values=st.tuples(*[NUMBERS] * 8))
def test_each_kind_of_demand_counts_in_the_nodes_that_it_fills(
    rate: float, kv: float, size: float, values: tuple[float, ...]
) -> None:
    node, asked = NodeCapability(rate, kv, size), Demand(*values)
    prefill, decode = load_of_prefill(asked, node), load_of_decode(asked, node)
    assert prefill is not None
    peak = max(asked.prompt_tokens_per_s, asked.recent_prompt_tokens_per_s)
    assert asked.prompt_tokens_per_s <= prefill * rate * (1 + 1e-9) <= peak * (1 + 1e-6)
    requests = max(asked.requests, asked.expected_requests)
    assert decode * size >= requests * (1 - 1e-9)
    assert decode * KV_TARGET * kv >= requests * asked.request_kv_tokens * (1 - 1e-9)
    no_queue = replace(asked, queued_prompt_tokens=0.0, queued_requests=0.0)
    assert load_of_prefill(no_queue, node) == pytest.approx(asked.prompt_tokens_per_s / rate)
    assert load_of_decode(no_queue, node) <= decode
    assert load_of_prefill(asked, NodeCapability()) is None
    assert needed(None, 3) == 3, "an unknown speed changes nothing"


def info_of(slo_ms: float = 0.0) -> NodeInfo:
    facts = {"max_step_tokens": "512", "tbt_slo_ms": str(slo_ms)}
    return NodeInfo("d", "b", "decode", "h:1", "m", "f", 16, 64, 1001, 8192, 256, attributes=facts)


@given(per_decode=st.floats(1e-6, 1e-2), slo_ms=st.floats(1, 500), context=st.floats(1, 1e4))
def test_the_capability_follows_the_step_time_model(per_decode: float, slo_ms: float, context: float) -> None:
    cost = CostModel(overhead=0.001, per_token=1e-5, per_context=1e-8, per_decode=per_decode)
    can = capability_of([(info_of(slo_ms), cost)], context)
    chunk_s = cost.seconds(StepWork(1, 512, pairs_of(0, 512)))
    assert can.prompt_tokens_per_s == pytest.approx(512 / chunk_s)
    assert can.kv_tokens == 16_000
    step_s = [cost.seconds(StepWork(num_decodes=n, decode_context=round(n * context))) for n in (1, 2)]
    most = int(can.requests)
    assert 1 <= most <= 256
    if most > 1:
        assert cost.seconds(StepWork(num_decodes=most, decode_context=round(most * context))) <= slo_ms / 1000
    if most < 256:
        more = StepWork(num_decodes=most + 1, decode_context=round((most + 1) * context))
        assert cost.seconds(more) > slo_ms / 1000
    assert step_s[1] >= step_s[0]
    assert capability_of([(info_of(slo_ms), None)], context).prompt_tokens_per_s == 0.0


@dataclass
class Replay:
    """A role's nodes and their autoscaler, on a virtual clock of whole seconds.

    `hold_s` is the time that a request stays on a decode node. It is 0 for prefill nodes, because their work waits in a
    queue. `load` is the number of nodes that the requests keep busy.
    """

    load: float  # the load before STEP_AT; then it is four times as large
    hold_s: int
    seed: int
    nodes: int = 1
    requests_per_node: int = 64  # prompts per second of a prefill node, or concurrent requests of a decode node
    queue: float = 0.0
    starting: list[int] = field(default_factory=list)  # times at which the starting nodes will be ready
    leaving: deque[int] = field(default_factory=lambda: deque(maxlen=COOL_S // POLL_S))  # latest counts of wanted nodes
    last_down: int = -COOL_S
    arrived: deque[int] = field(default_factory=lambda: deque([0] * WINDOW_S, maxlen=WINDOW_S))
    held: deque[int] = field(default_factory=deque)  # requests that began in each of the last `hold_s` seconds
    history: list[int] = field(default_factory=list)  # at each second, how many nodes run or start

    def run(self) -> "Replay":
        random = Random(self.seed)
        for second in range(END):
            load = self.load * (4 if second >= STEP_AT else 1)
            per_s = load * self.requests_per_node / max(1, self.hold_s)
            arrivals = poisson(random, per_s)
            self._serve(arrivals)
            wanted = needed(self._load_of(), self.nodes)
            if second % POLL_S == 0:
                self._scale(ceil(wanted - 1e-9), second)
            self.nodes += sum(at <= second for at in self.starting)
            self.starting = [at for at in self.starting if at > second]
            self.history.append(self.nodes + len(self.starting))
        return self

    def _serve(self, arrivals: int) -> None:
        room = MAX_QUEUE_S * self.nodes * self.requests_per_node / max(1, self.hold_s)
        self.arrived.append(arrivals)
        self.queue += min(arrivals, max(0.0, room - self.queue))
        if self.hold_s:
            while len(self.held) >= self.hold_s:
                self.held.popleft()
            begun = min(int(self.queue), self.nodes * self.requests_per_node - sum(self.held))
            self.held.append(max(0, begun))
            self.queue -= max(0, begun)
        else:
            self.queue -= min(self.queue, self.nodes * self.requests_per_node)

    def _load_of(self) -> float:
        size = float(self.requests_per_node)
        minute, recent = sum(self.arrived) / WINDOW_S, sum(islice(reversed(self.arrived), round(RECENT_S)))
        recent_per_s = recent_rate(recent, recent)
        if self.hold_s:
            expected = minute * self.hold_s, recent_per_s * self.hold_s
            return load_of_decode(Demand(0, 0, 0, sum(self.held), self.queue, 0, *expected), NodeCapability(0, 1, size))
        asked = Demand(minute, recent_per_s, self.queue)
        load = load_of_prefill(asked, NodeCapability(prompt_tokens_per_s=size))
        assert load is not None
        return load

    def _scale(self, wanted: int, second: int) -> None:
        """Scale like a HorizontalPodAutoscaler: up at once, and down by one node per minute, to the largest number that
        was wanted in the last five minutes."""
        present = self.nodes + len(self.starting)
        self.leaving.append(wanted)
        if wanted > present:
            self.starting += [second + START_S] * (wanted - present)
        elif max(self.leaving) < present and second - self.last_down >= 60 and self.nodes > 1:
            self.nodes -= 1
            self.last_down = second


def poisson(random: Random, mean: float) -> int:
    if mean > 200:
        return max(0, round(random.gauss(mean, mean**0.5)))
    count, limit, product = 0, exp(-mean), random.random()
    while product > limit:
        count += 1
        product *= random.random()
    return count


@given(load=st.floats(0.3, 6), hold_s=st.sampled_from([0, 5, 20]), seed=st.integers(0, 2**16))
@example(1.0, 0, 1)
def test_a_step_of_load_of_4_times_gets_the_right_number_of_nodes_within_a_minute(
    load: float, hold_s: int, seed: int
) -> None:
    replay = Replay(load, hold_s, seed).run()
    right = ceil(4 * load)
    after = replay.history[STEP_AT + 60 :]
    assert abs(after[0] - right) <= 1, (after[0], right)
    changes = [new - old for old, new in pairwise(after) if new != old]
    assert not (min(changes, default=0) < 0 < max(changes, default=0)), f"reversed at a constant load: {changes}"


class FakePool:
    """A pool with nodes of two roles. All nodes take requests, and report the number of routers."""

    def __init__(self, num_prefill: int, num_decode: int, routers: int = 1) -> None:
        cost = CostModel(overhead=0.001, per_token=1e-5, per_decode=1e-4)
        node = SimpleNamespace(info=info_of(), load=SimpleNamespace(cost=cost), alive_since=0.0)
        self._nodes = [node] * num_prefill, [node] * num_decode
        self._stats = NodeStats(num_routers=routers)

    def routable(self) -> tuple[list[Any], list[Any]]:
        return self._nodes

    def nodes(self) -> list[tuple[NodeInfo, NodeStats, bool]]:
        return [(info_of(), self._stats, True)]


def signals_of(pool: FakePool) -> tuple[ScalingSignals, AdmissionQueue]:
    queue = AdmissionQueue()
    queue.resize(PoolCapacity(10**6, 10**9, 10**9, 10**6), 100.0)
    return ScalingSignals(cast(Any, pool), queue, SlidingCounts(), "m", clock=lambda: 100.0), queue


def test_an_idle_router_keeps_one_node_of_each_role_and_lets_one_of_several_go() -> None:
    assert signals_of(FakePool(1, 1))[0].needed() == {"prefill": 1, "decode": 1}
    assert signals_of(FakePool(3, 4))[0].needed() == {"prefill": 2, "decode": 3}
    assert signals_of(FakePool(0, 4))[0].needed() == {"prefill": 0, "decode": 3}
    assert signals_of(FakePool(3, 4, routers=2))[0].needed() == {"prefill": 1, "decode": 1.5}


def test_requests_in_progress_need_the_nodes_that_hold_them() -> None:
    signals, queue = signals_of(FakePool(1, 1))
    for _ in range(10):
        queue.offer(queue.entry(4000, 4000, 100.0), 100.0)
    capacity = KV_TARGET * 16_000
    assert signals.needed()["decode"] == pytest.approx(10 * 6000 / capacity)
    (family,) = signals.collect()
    assert {sample.labels["role"]: sample.value for sample in family.samples} == signals.needed()


def test_prompts_of_the_last_minute_need_the_nodes_that_compute_them() -> None:
    now = 100.0
    arrivals = SlidingCounts(lambda: now)
    signals = ScalingSignals(cast(Any, FakePool(1, 1)), AdmissionQueue(), arrivals, "m", clock=lambda: now)
    for second in range(60):
        now = 100.0 + second
        arrivals.add("prompt", 300_000)
        arrivals.add("cached", 100_000)
    now = 160.0
    arrivals.add("cached")  # in the current slice of time, which does not count yet
    chunk_s = 0.001 + 512e-5
    assert signals.needed()["prefill"] == pytest.approx(200_000 / (512 / chunk_s))
    now = 260.0
    assert signals.needed()["prefill"] == 1, "the prompts were more than a minute ago"


def test_a_node_changes_its_role_after_a_steady_minute_and_not_again_for_five() -> None:
    now = 1000.0
    clock = RebalanceClock(lambda: now)
    more_prefill = {"prefill": 2.4, "decode": 3.0}, {"prefill": 2, "decode": 4}
    flips = []
    for _ in range(int(STEADY_S + FLIP_S + 10)):
        if role := clock.update(*more_prefill):
            flips.append((now, role))
        now += 1
    assert [at for at, _ in flips] == [1000 + STEADY_S, 1000 + STEADY_S + FLIP_S]
    assert {role for _, role in flips} == {"prefill"}


@pytest.mark.parametrize(
    ("needs", "present"),
    [
        ({"prefill": 2.4, "decode": 4.0}, {"prefill": 2, "decode": 4}),  # no decode node can be spared
        ({"prefill": 2.0, "decode": 3.0}, {"prefill": 2, "decode": 4}),  # no prefill node is needed
        ({"prefill": 9.0, "decode": 0.0}, {"prefill": 1, "decode": 1}),  # each role has only one node
    ],
)
def test_no_node_changes_its_role_without_need(needs: dict[str, float], present: dict[str, int]) -> None:
    now = 0.0
    clock = RebalanceClock(lambda: now)
    for _ in range(1000):
        now += 1
        assert clock.update(needs, present) == ""


def test_a_need_that_is_interrupted_does_not_change_a_role() -> None:
    now = 0.0
    clock = RebalanceClock(lambda: now)
    for second in range(1000):
        now += 1
        load = 2.4 if second % 50 else 2.0
        assert clock.update({"prefill": load, "decode": 3.0}, {"prefill": 2, "decode": 4}) == ""


async def test_the_least_loaded_node_of_the_other_role_changes_and_none_if_there_are_several_routers() -> None:
    now = 0.0
    changed: list[tuple[str, str]] = []

    async def change(node: Any, role: str) -> str:
        changed.append((node.info.id, role))
        if node.info.id == "d1":
            raise RequestError("it is draining", "role", status=409)
        return ""

    def node(name: str, num_requests: int, owner: str = "") -> Any:
        info = replace(info_of(), id=name, incarnation_id=f"incarnation of {name}", shared_pool_owner=owner)
        return SimpleNamespace(info=info, listeners=range(num_requests), load=SimpleNamespace(outstanding_tokens=0))

    prefill = [node("p0", 0), node("p1", 0, owner="incarnation of d0")]  # d0 and d3 own shared pools
    decode = [node("d0", 0), node("d1", 1), node("d2", 0, owner="incarnation of d3"), node("d3", 0), node("d4", 9)]
    connections = {each.info.id: each for each in prefill + decode}
    pool = SimpleNamespace(routable=lambda: (prefill, decode), connections=connections)
    signals = SimpleNamespace(
        num_routers=2, needed=lambda: {"prefill": 1.5, "decode": 3.0}, present=lambda: {"prefill": 1, "decode": 4}
    )
    admin = SimpleNamespace(change=change)
    rebalancer = Rebalancer(cast(Any, pool), cast(Any, signals), cast(Any, admin), lambda: now)
    for routers in (2, 1):
        signals.num_routers = routers
        for _ in range(int(STEADY_S) + 2):
            await rebalancer.tick()
            now += 1
    assert changed == [("d1", "prefill")], "an error is logged"

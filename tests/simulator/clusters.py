"""Make simulated clusters and their traffic."""

from collections.abc import Sequence
from random import Random

from engine.emulation import Emulation, LinkSpeed, ServingTimes
from scheduler.cost import CostModel
from scheduler.prefix import block_hashes
from shared.config.settings import ComputingSettings, ServingSettings
from simulator.cluster import ClusterPlan, SimulatedCluster
from simulator.routed import SimulatedRequest

COST = CostModel(2e-3, 1e-5, 200.0, 1e-9, 3e-8, 1e-5)
TIMES = ServingTimes(step_s=3e-4, slice_s=1e-5, request_s=2e-3, rpc_s=7e-4, answer_s=1.1e-3, push_s=4e-4)
DEVICE = Emulation("device", COST, 100_000, 4096, LinkSpeed(1e-4, 5e9), TIMES, (1.0,), 16)


class StackSettings(ServingSettings, ComputingSettings):
    """All settings of a cluster."""


def cluster_plan(prefill: int, decode: int, device: Emulation = DEVICE, **settings: object) -> ClusterPlan:
    own = StackSettings(**({"disaggregate": "always" if prefill else "auto", "max_num_seqs": 8} | settings))  # type: ignore[arg-type]
    return ClusterPlan(prefill, decode, own, own, device)


def request(number: int, at_s: float, prompt: Sequence[int], max_tokens: int) -> SimulatedRequest:
    return SimulatedRequest(f"r{number}", at_s, len(prompt), max_tokens, block_hashes(prompt, 16, b""), prompt)


def traffic(
    seed: int, count: int = 60, rate: float = 60.0, longest: int = 900, answers: Sequence[int] = (1, 2, 40, 100)
) -> list[SimulatedRequest]:
    random = Random(seed)
    stems = [[random.randrange(1000) for _ in range(600)] for _ in range(3)]
    at_s, found = 0.0, []
    for number in range(count):
        at_s += random.expovariate(rate)
        prompt = random.choice(stems)[: random.randrange(600)] if random.random() < 0.5 else []
        prompt += [random.randrange(1000) for _ in range(random.randrange(1, longest))]
        found.append(request(number, at_s, prompt, random.choice(answers)))
    return found


def serve(
    plan: ClusterPlan, requests: list[SimulatedRequest], *, skips: bool = True, timeout_s: float = 600.0
) -> SimulatedCluster:
    """Run a cluster, and check that nothing is left on its nodes and in its router."""
    cluster = SimulatedCluster(plan, skips=skips)
    cluster.run(requests, timeout_s)
    queue = cluster.queue
    assert (queue.held_requests, queue.held_tokens, queue.pending_prefills, queue.queued_requests) == (0, 0, 0, 0)
    for node in cluster.nodes:
        load, ledger = node.load, node.node.scheduler.ledger()
        assert (load.outstanding_tokens, load.outstanding_pairs, load.kv_tokens, load.prefilling) == (0, 0, 0, 0)
        assert (node.num_requests, ledger.owned, ledger.reserved) == (0, 0, 0)
        assert node.node.scheduler.audit() == ""
    return cluster

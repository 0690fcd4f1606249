"""Measure how many requests the simulator simulates per CPU second. The traffic is the preset "chat" with unscaled
lengths, and the nodes are H200s that serve Llama-3.1-8B.

CPU time is measured, because other processes affect it less. Each run is a process, whose peak memory is reported.
"""

import argparse
import resource
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

from benchmarks.result import Cell, Result, Table, medians, parser
from compare.planning.candidates import REFERENCE_RATE, Simulations, block_names, prepare
from compare.planning.options import PlanOptions
from simulator.cluster import SimulatedCluster
from simulator.routed import SimulatedRequest

CASES = {  # arm, requests/s for each node, number of requests
    "one node, light load": ("colocated:1", 4.0, 5000),
    "one node, near its capacity": ("colocated:1", 14.0, 5000),
    "8 nodes, co-located": ("colocated:8", 14.0, 5000),
    "8 nodes, disaggregated": ("disaggregated:3p5d", 10.0, 5000),
}
CURVE = (1, 4, 16, 64, 250, 999)  # numbers of nodes to measure, up to the maximum of an arm
LONG_NODES = 999  # number of nodes in the run with --long requests
CURVE_RATE, CURVE_REQUESTS = 10.0, 3000  # requests/s for each node; requests of each run
Figures = dict[str, float]


def simulate(arm: str, node_rate: float, count: int) -> Figures:
    """Simulate one run. Return requests per CPU second, CPU seconds, peak MiB and steps. Runs in a separate process."""
    simulations = prepare(PlanOptions(preset="chat"))
    plan = simulations.plan(arm)
    requests = simulations.requests(plan, node_rate * (plan.prefill + plan.decode), 1, count)
    cluster = SimulatedCluster(plan)
    found = measured(cluster, requests)
    assert all(request.is_over and not request.error for request in requests)
    steps = sum(node.node.num_steps for node in cluster.nodes)
    return found | {"requests_per_cpu_s": len(requests) / found["cpu_s"], "steps": steps}


def long_run(nodes: int, count: int) -> Figures:
    """Simulate many requests, which are drawn as they arrive and then discarded. Runs in a separate process."""
    simulations = prepare(PlanOptions(preset="chat"))
    plan = simulations.plan(f"colocated:{nodes}")
    return measured(SimulatedCluster(plan), repeating(simulations, plan.block_tokens, CURVE_RATE * nodes, count))


def measured(cluster: SimulatedCluster, requests: Iterable[SimulatedRequest]) -> Figures:
    """Serve the requests. Return the CPU seconds that this took, and the peak MiB of this process."""
    began = time.process_time()
    cluster.run(requests)
    cpu_s = time.process_time() - began
    return {"cpu_s": cpu_s, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def repeating(simulations: Simulations, block_tokens: int, rate: float, count: int) -> Iterator[SimulatedRequest]:
    """Yield `count` requests, whose lengths and gaps repeat and whose prompts share no prefixes."""
    rows = simulations.rows(1)
    lap_s = rows[-1].at_s + 1 / REFERENCE_RATE
    for number in range(count):
        row = rows[number % len(rows)]
        at_s = (number // len(rows) * lap_s + row.at_s) * REFERENCE_RATE / rate
        names = list(block_names(row, number, block_tokens))
        yield SimulatedRequest(f"r{number}", at_s, row.prompt_len, row.max_tokens, names)


def repeated(arm: str, node_rate: float, count: int, repeats: int) -> Figures:
    runs = []
    for _ in range(repeats):
        with ProcessPoolExecutor(1) as pool:
            runs.append(pool.submit(simulate, arm, node_rate, count).result())
    return medians(runs)


def _long(given: argparse.Namespace) -> None:
    command = f"python -m benchmarks simulator --long {given.long}"
    with ProcessPoolExecutor(1) as pool:
        found = pool.submit(long_run, LONG_NODES, given.long).result()
    cells: list[Cell] = [LONG_NODES, given.long, found["cpu_s"], 1000 * found["cpu_s"] / given.long, found["peak_mib"]]
    table = Table("A long run", ["nodes", "requests", "CPU s", "CPU ms per request", "peak MiB"], [cells])
    Result("simulator_long", "One run of many requests on many nodes.", [table], command=command).finish(given.out)


def main() -> None:
    options = parser(__doc__, repeats=3)
    options.add_argument("--long", type=int, default=0, help=f"only one run, of LONG requests on {LONG_NODES} nodes")
    given = options.parse_args()
    if given.long:
        _long(given)
        return
    rows: list[list[Cell]] = []
    for name, (arm, rate, count) in CASES.items():
        found = repeated(arm, rate, count, given.repeats)
        rows.append([name, arm, rate, found["requests_per_cpu_s"], found["steps"] / found["cpu_s"], found["peak_mib"]])
    columns = ["case", "arm", "requests/s per node", "requests per CPU s", "steps per CPU s", "peak MiB"]
    cases = Table("Speed of the simulator", columns, rows)
    curve: list[list[Cell]] = []
    for nodes in CURVE:
        found = repeated(f"colocated:{nodes}", CURVE_RATE, CURVE_REQUESTS, 1)
        curve.append([nodes, CURVE_REQUESTS, 1000 / found["requests_per_cpu_s"], found["peak_mib"]])
    table = Table("Cost by the number of nodes", ["nodes", "requests", "CPU ms per request", "peak MiB"], curve)
    what = "The simulator's speed. The router's placement looks at every node for every request, as a live router does."
    Result("simulator", what, [cases, table]).finish(given.out)

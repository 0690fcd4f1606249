"""What deciding costs: a scheduled decode, hashing and placing a 128k-token prompt, placing in a fleet of 1,000 nodes.

    python -m benchmarks scheduler

One thread, no device and no network. The fleet is the router's own, of nodes that nobody dialled.
"""

import gc
import itertools
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.result import Cell, Result, Table, in_turn, median, parser
from router.history.history import RequestHistory
from router.nodes.connection import NodeConnection
from router.nodes.pool import NodePool
from scheduler.cost import CostModel
from scheduler.request import Request
from scheduler.scheduler import Scheduler, StepLimits
from shared.registry import EmbeddedRegistry
from shared.rpc.messages import NodeInfo, NodeStats, NodeUpdate

RUNNING = (32, 256, 512, 1024)
FLEETS = (16, 100, 1000)
NUM_STEPS = 200
LONG_PROMPT, LONG_BLOCK = 131_072, 64
COST = CostModel(per_token=2e-5, knee_tokens=236, per_pair=9e-10, per_context=3e-8, per_decode=8e-6)


def seconds_of(work: Callable[[], object], times: int) -> float:
    """Of processor time, lower quartile: what it costs when nobody else is here."""
    taken = []
    for _ in range(times):
        started = time.thread_time()
        work()
        taken.append(time.thread_time() - started)
    return sorted(taken)[times // 4]


def decode_us(num_running: int) -> float:
    """`schedule` and `update` together, a decode, when all of them decode."""
    scheduler = Scheduler(StepLimits(8192, num_running), num_running * 40 + 2, 16)
    for number in range(num_running):
        scheduler.add(Request(f"r{number}", list(range(64)), 64, NUM_STEPS + 50))

    def step() -> int:
        decided = scheduler.schedule()
        scheduler.update(decided, [7 if piece.samples else None for piece in decided.slices])
        return decided.work.num_decodes

    while step() < num_running:
        pass
    gc.collect()
    gc.freeze()  # as a node does after its start
    taken_s = seconds_of(step, NUM_STEPS)
    assert step() == num_running
    gc.unfreeze()
    return taken_s / num_running * 1e6


def fleet_of(num_nodes: int) -> NodePool:
    """Half of the nodes compute prompts; all are busy and have told a step-time model."""
    fleet = NodePool("router", EmbeddedRegistry("router", "127.0.0.1", 0), "disaggregated", 1.0, RequestHistory())
    for number in range(num_nodes):
        role = ("prefill", "decode")[number % 2]
        sizes = (LONG_BLOCK, 1 << 20, 1 << 14, 1 << 18, 256)
        info = NodeInfo(f"n{number}", "boot", role, "127.0.0.1:1", "m", "print", *sizes)
        link = NodeConnection("router", info, 1.0, lambda _: None, RequestHistory())
        link._process(NodeUpdate(stats=NodeStats(running=8, prompt_tokens=1 << 20, cost=COST.packed())))
        fleet._connections[info.id] = link
    return fleet


def placing_us(num_nodes: int, prompt: list[int], converts: bool = False) -> dict[str, float]:
    """From a row of tokens to a recorded placement, for a prompt that no node has and for one that its nodes have.

    `converts`: with making the array that is hashed and sent, which is the request's cost and not the placement's.
    """
    fleet = fleet_of(num_nodes)
    row = array("i", prompt)
    numbers = itertools.count(1_000_000)

    def placed() -> None:
        tokens = array("i", prompt) if converts else row
        proposal = fleet.place(f"r{next(numbers)}", tokens, b"", (), "auto")
        assert proposal is not None
        found = proposal.placement
        fleet.prefixes.record(proposal.hashes, *filter(None, (found.prefill, found.decode)))

    def placed_new() -> None:
        row[0] = prompt[0] = next(numbers)
        placed()

    fresh_s = seconds_of(placed_new, 100)
    for _ in range(50):
        placed()
    return {"fresh": fresh_s * 1e6, "known": seconds_of(placed, 100) * 1e6}


def adding_ms(prompt: list[int]) -> float:
    """A node takes a prompt in: it hashes it again, as it trusts no router's hashes."""
    scheduler = Scheduler(StepLimits(8192, 64), 2 * len(prompt) // LONG_BLOCK + 2, LONG_BLOCK)
    numbers = itertools.count()
    return 1000 * seconds_of(lambda: scheduler.add(Request(f"r{next(numbers)}", prompt, len(prompt), 16)), 20)


def main() -> None:
    args = parser(__doc__, repeats=5).parse_args()
    arms: dict[str, Callable[[], object]] = {
        **{f"decode {count}": partial(decode_us, count) for count in RUNNING},
        **{f"place {count}": partial(placing_us, count, list(range(1000))) for count in FLEETS},
        "place long": partial(placing_us, 1000, [7919 * i % 50_000 for i in range(LONG_PROMPT)], converts=True),
        "add long": partial(adding_ms, [7919 * i % 50_000 for i in range(LONG_PROMPT)]),
    }
    runs: dict[str, list[Any]] = in_turn(arms, args.repeats)

    def of(name: str, key: str, scale: float = 1.0) -> float:
        return median([run[key] for run in runs[name]]) * scale

    decodes: list[list[Cell]] = [[count, us := median(runs[f"decode {count}"]), us <= 5.0] for count in RUNNING]
    places: list[list[Cell]] = [
        [count, of(f"place {count}", "fresh"), us := of(f"place {count}", "known"), us <= 50] for count in FLEETS
    ]
    long: list[list[Cell]] = [
        ["router: pack, hash, place and record", (ms := of("place long", "fresh", 1e-3)), ms <= 3.0],
        ["the same, known to both nodes", (ms := of("place long", "known", 1e-3)), ms <= 3.0],
        ["node: hash and queue", (ms := median(runs["add long"])), ms <= 3.0],
    ]
    Result(
        "scheduler",
        "What deciding costs on one thread, without a device and without a network.",
        [
            Table("schedule and update", ["running", "µs a decode", "≤ 5 µs"], decodes),
            Table("placing a 1,000-token prompt", ["nodes", "µs, new", "µs, known", "≤ 50 µs"], places),
            Table("a 128k-token prompt in blocks of 64", ["what", "ms", "≤ 3 ms"], long),
        ],
        runs,
    ).finish(args.out)


if __name__ == "__main__":
    main()

"""Measure the host time of a decode step next to the model's pass, and the gain of planning ahead.

   python -m benchmarks step_overhead

Steps run in a node's engine loop, on the 110M shape with random weights, one after the other or planned ahead. Host
time is the part of a step outside the model's pass: scheduling, building the batch, sampling, publishing.
"""

from functools import partial

from benchmarks.models import checkpoint
from benchmarks.process import PeerProcess
from benchmarks.result import Cell, Result, Table, in_turn, medians, parser

KV_GIB_PER_REQUEST = 0.03  # enough for the longest context
GOAL, GOAL_AT = 0.05, 32


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--counts", type=int, nargs="+", default=[1, 8, 32, 64, 256], help="decodes in a step")
    flags.add_argument("--context", type=int, default=512)
    flags.add_argument("--steps", type=int, default=60)
    flags.add_argument("--threads", type=int, default=2)
    args = flags.parse_args()
    options = {"model": str(checkpoint("110m")), "threads": args.threads}
    rows: list[list[Cell]] = []
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    with PeerProcess("benchmarks.peers.baton", options | {"kv_gib": max(args.counts) * KV_GIB_PER_REQUEST}) as peer:
        for count in args.counts:
            call = partial(peer.call, "step_times", batch=count, context=args.context, steps=args.steps)
            call(ahead=False)
            arms = {"one after the other": partial(call, ahead=False), "planned ahead": partial(call, ahead=True)}
            runs[str(count)] = in_turn(arms, args.repeats)
            waits, ahead = (medians(found) for found in runs[str(count)].values())
            share = waits["host_us"] / (waits["host_us"] + waits["pass_us"])
            goal = share <= GOAL if count == GOAL_AT else None
            times = [waits["pass_us"], waits["host_us"], 100 * share, goal, waits["turn_us"], ahead["turn_us"]]
            rows.append([count, *times])
    columns = ["decodes", "pass, µs", "host, µs", "host, % of a step", "≤ 5 %", "turn, µs", "planned ahead, µs"]
    note = f"Medians. The goal is 5 % at {GOAL_AT} decodes."
    what = f"A decode step of the 110M shape, context {args.context}: host time, and the gain of planning ahead."
    Result("step_overhead", what, [Table("A decode step", columns, rows, note)], runs).finish(args.out)

"""Compare Baton's own implementation of a model with transformers' modules over the same pool: decoding and prefilling.

    python -m benchmarks model_impl

Both run the same checkpoint of random weights on one thread. Each runs in a separate process. The processes take turns;
the other one is stopped.
"""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.models import CACHE, SHAPES, checkpoint
from benchmarks.process import PeerProcess
from benchmarks.result import Cell, Result, Table, in_turn, median, parser, ratio, versions

THREADS, CONTEXT, GOAL = 1, 512, 1.4
OURS, THEIRS = "baton", "transformers"
ROWS: list[tuple[str, str, dict[str, int], int]] = [  # label, call of the worker, its arguments, tokens
    ("prefill 512", "prefill", {"tokens": 512}, 512),
    ("decode, batch 8", "decode", {"batch": 8, "context": CONTEXT, "steps": 16}, 128),
    ("decode, batch 1", "decode", {"batch": 1, "context": CONTEXT, "steps": 32}, 32),
]


def main() -> None:
    flags = parser(__doc__, repeats=7)
    flags.add_argument("--model", choices=list(SHAPES), default="110m")
    flags.add_argument("--directory", type=Path, default=CACHE, help="directory of the generated model")
    arguments = flags.parse_args()
    model = str(checkpoint(arguments.model, arguments.directory))
    rows: list[list[Cell]] = []
    runs: dict[str, Any] = {}
    with ExitStack() as stack:
        workers = {}
        for name in (OURS, THEIRS):
            options = {"model": model, "threads": THREADS, "model_impl": name}
            workers[name] = PeerProcess(
                "benchmarks.peers.baton", options, env={"OMP_NUM_THREADS": str(THREADS)}, pauses=True
            )
            stack.callback(workers[name].close)
        for label, call, given, tokens in ROWS:
            arms = {name: partial(worker.call, call, **given) for name, worker in workers.items()}
            taken = {name: values[1:] for name, values in in_turn(arms, arguments.repeats + 1).items()}
            runs[label] = {name: [tokens / seconds for seconds in values] for name, values in taken.items()}
            cost = ratio(taken[THEIRS], taken[OURS])
            rows.append(
                [label, median(runs[label][OURS]), median(runs[label][THEIRS]), cost, f"≤ {GOAL}", cost <= GOAL]
            )
            print(f"{label}: transformers' modules take {cost:.2f} times as long", flush=True)
    columns = ["tokens/s", "own implementation", "transformers' modules", "cost of these modules", "goal", ""]
    title = f"{arguments.model}, {THREADS} thread, {CONTEXT} tokens of context"
    what = "A Llama by its own implementation, and by transformers' modules with Baton's products and attention."
    compared = versions("torch", "numba", "transformers")
    Result("model_impl", what, [Table(title, columns, rows)], runs, compared).finish(arguments.out)


if __name__ == "__main__":
    main()

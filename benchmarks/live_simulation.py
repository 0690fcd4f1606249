"""Compare live runs of the demo model with simulations of the same traffic, end to end.

As in `baton profile --from`, a cost file is fitted to the records of a live cluster, which serves the preset "mix".
Then other traffic runs on new clusters of both modes, and each period is simulated with this cost file. Because the
machine's speed varies, the cost file is fitted again for each kind of traffic. --traces is a directory with traces of
Azure and Mooncake. The machine must be idle.
"""

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.result import Cell, Result, Table, parser
from compare.arms import parse_arm
from compare.load.client import LoadSpec, drive
from compare.load.outcome import LoadRecording
from compare.load.traffic import TrafficSource
from compare.main import run_compare, vocabulary_of
from compare.options import CompareOptions
from compare.profiling.main import from_records
from compare.run.deployments import LaunchOptions, LocalStack
from shared.model_files import DEMO_MODEL

FITTED_ARM = "disaggregated:1p1d@disaggregate=auto"  # some prompts are handed off; the decode node computes the others
FITTED_TRAFFIC = CompareOptions(preset="mix", scale_tokens=0.2, rate=4.0, duration=60.0)
TRAFFIC: dict[str, dict[str, Any]] = {
    "preset agentic": {"preset": "agentic", "scale_tokens": 0.05, "rate": 4.0},
    "preset chat, twice the lengths": {"preset": "chat", "scale_tokens": 0.4, "rate": 3.0},
    "Azure, conversation": {"trace": "azure2023_conv_first_half.csv", "scale_tokens": 0.2, "rate": 4.0},
    "Azure, code": {"trace": "azure2023_code_first_half.csv", "scale_tokens": 0.1, "rate": 4.0},
    "Mooncake, conversation": {"trace": "mooncake_conversation_000-900s.jsonl", "scale_tokens": 0.03, "rate": 4.0},
}
METRICS = {"tpot_p50_ms": "TPOT p50 ms", "ttft_p50_ms": "TTFT p50 ms", "ttft_p99_ms": "TTFT p99 ms"}


async def fitted(log: Path) -> dict[str, Any]:
    """Run a cluster, and return the cost file that fits its records."""
    vocabulary, limit = vocabulary_of(DEMO_MODEL, Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")))
    arrivals = TrafficSource(FITTED_TRAFFIC, vocabulary, [], limit).draw(1).arrivals
    stack = LocalStack(parse_arm(FITTED_ARM), LaunchOptions(str(DEMO_MODEL)), log)
    try:
        await stack.start()
        await drive(LoadSpec(stack.endpoint.url, stack.endpoint.model, arrivals), LoadRecording())
        await stack.endpoint.until_idle(30.0)
        return await from_records(stack.endpoint)
    finally:
        await stack.end()


def predictions(cost: Path, out: Path, options: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Run the traffic live, and simulate every period. Return the measured and simulated mean of each metric by arm."""
    asyncio.run(run_compare(CompareOptions(on="live", emulate=str(cost), too_long="cut", out=out, **options)))
    found: dict[str, dict[str, dict[str, float]]] = json.loads((out / "report.json").read_text())["prediction"]
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--traces", type=Path, required=True)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--duration", type=float, default=30.0)
    given = options.parse_args()
    rows: list[list[Cell]] = []
    with tempfile.TemporaryDirectory(prefix="live-") as directory:
        for number, (name, traffic) in enumerate(TRAFFIC.items()):
            cost = Path(directory) / f"{number}.json"
            cost.write_text(json.dumps(asyncio.run(fitted(Path(directory) / "log"))))
            trace = {"trace": given.traces / traffic["trace"]} if "trace" in traffic else {}
            chosen = traffic | trace | {"seeds": given.seeds, "duration": given.duration}
            for arm, found in predictions(cost, Path(directory) / str(number), chosen).items():
                row: list[Cell] = [name, arm]
                for metric in METRICS:
                    measured, simulated = found[metric]["measured"], found[metric]["simulated"]
                    row += [f"{measured:.3g}, {simulated:.3g}", f"{100 * (simulated / measured - 1):+.1f}"]
                shares = found["attainment"]
                row += [f"{100 * shares['measured']:.1f}, {100 * shares['simulated']:.1f}"]
                rows.append(row)
                print(row, flush=True)
    columns = [
        "traffic",
        "arm",
        *(text for one in METRICS.values() for text in (one, "error %")),
        "within the limits %",
    ]
    what = "The demo model on a CPU: means over live periods, then over simulations of the same periods."
    Result("live_simulation", what, [Table("Live and simulated", columns, rows)]).finish(given.out)

"""Compare ten pairs of arms by simulation and by measurement, and count how often the verdicts agree.

The arms are those of `baton compare`. The pairs, their traffic and their SLOs were chosen before any pair was measured.
Emulated nodes sleep as long as the cost file of --cost says; everything else about them is real. --trace is a file such
as azure2023_conv_first_half.csv.

With --slow N, all times of the device and all limits are N times as long, and rates are divided by N, so that delays on
a busy machine matter less. All pairs are simulated before the first one is measured.
"""

import asyncio
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.result import Cell, Result, Table, parser
from compare.main import run_compare
from compare.options import CompareOptions
from engine.emulation import COSTS

DURATION_S = 10.0  # seconds of traffic in each period
TIMES = ("overhead", "per_token", "per_pair", "per_context", "per_decode")
TIE = "too close to call"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two arms, the rate in requests/s, and the limits of the SLO in milliseconds."""

    one: str
    two: str
    rate: float
    ttft_ms: float
    tbt_ms: float

    def slowed(self, slow: float) -> "Pair":
        return replace(self, rate=self.rate / slow, ttft_ms=self.ttft_ms * slow, tbt_ms=self.tbt_ms * slow)


PAIRS = (
    Pair("colocated:2", "disaggregated:1p1d", 4.0, 1000.0, 50.0),
    Pair("colocated:2", "disaggregated:1p1d", 5.0, 1000.0, 30.0),
    Pair(
        "colocated:2@max_num_batched_tokens=2048", "disaggregated:1p1d@max_num_batched_tokens=2048", 4.0, 1000.0, 60.0
    ),
    Pair("colocated:2", "colocated:2@prefill_first", 5.0, 1000.0, 60.0),
    Pair("colocated:2", "colocated:2@static", 3.0, 2000.0, 100.0),
    Pair("colocated:2", "colocated:2@decode_first", 4.0, 1000.0, 100.0),
    Pair("colocated:2@max_num_batched_tokens=256", "colocated:2@max_num_batched_tokens=2048", 4.0, 1000.0, 60.0),
    Pair("colocated:2@max_num_seqs=8", "colocated:2@max_num_seqs=64", 5.0, 1000.0, 60.0),
    Pair("disaggregated:2p1d", "disaggregated:1p2d", 8.0, 1000.0, 60.0),
    Pair("colocated:3", "disaggregated:1p2d", 7.0, 1000.0, 35.0),
)


def slowed_cost(name: str, slow: float, folder: Path) -> str:
    """Write the cost file of a device that is slower by the factor `slow`, and return the file's path."""
    data = json.loads((COSTS / f"{name}.json").read_text())
    data["cost"] |= {each: slow * data["cost"][each] for each in TIMES}
    for link in data["links"].values():
        link |= {"latency_s": slow * link["latency_s"], "bytes_per_s": link["bytes_per_s"] / slow}
    path = folder / f"{name}-slow.json"
    path.write_text(json.dumps(data))
    return str(path)


def verdict(
    pair: Pair, *, on: str, cost: str, trace: Path, seeds: int, duration_s: float
) -> tuple[str, dict[str, float]]:
    """Return the verdict (the better arm, TIE, or "none: " and the reason), and the mean attainments in percent."""
    with tempfile.TemporaryDirectory(prefix="agreement-") as directory:
        options = CompareOptions(
            arms=[pair.one, pair.two],
            on=on,
            emulate="" if on == "live" else cost,
            trace=trace,
            rate=pair.rate,
            duration=duration_s,
            timeout=300.0,
            seeds=seeds,
            ttft_slo_ms=pair.ttft_ms,
            tbt_slo_ms=pair.tbt_ms,
            too_long="cut",
            out=Path(directory),
        )
        asyncio.run(run_compare(options))
        report: dict[str, Any] = json.loads((Path(directory) / "report.json").read_text())
    values: dict[str, list[float]] = {}
    for run in report["runs"]:
        if run["valid"]:
            values.setdefault(run["arm"], []).append(100 * run["metrics"]["attainment"])
    means = {arm: sum(own) / len(own) for arm, own in values.items()}
    sentence: str = report["verdict"]["sentence"]
    if not report["valid"]:
        return f"none: {sentence}", means
    return TIE if sentence.lower().startswith(TIE) else max(means, key=means.__getitem__), means


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--trace", type=Path, required=True)
    options.add_argument("--cost", default="h200-qwen3-32b")
    options.add_argument("--on", default="emulated", choices=("emulated", "live"))
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--slow", type=float, default=1.0)
    options.add_argument("--pairs", type=int, nargs="*", default=range(1, len(PAIRS) + 1), help="numbers of pairs")
    options.add_argument("--jobs", type=int, default=1, help="number of pairs that run at once")
    given = options.parse_args()
    cost = slowed_cost(given.cost, given.slow, Path(tempfile.mkdtemp(prefix="agreement-")))
    pairs = [PAIRS[number - 1].slowed(given.slow) for number in given.pairs]
    find = partial(verdict, cost=cost, trace=given.trace, seeds=given.seeds, duration_s=DURATION_S * given.slow)
    with ProcessPoolExecutor(given.jobs) as pool:
        found = [list(pool.map(partial(find, on=on), pairs)) for on in ("sim", given.on)]
    rows: list[list[Cell]] = []
    for number, pair, (simulated, ours), (measured, theirs) in zip(given.pairs, pairs, *found, strict=True):
        shares = [
            f"{means.get(pair.one, float('nan')):.1f}, {means.get(pair.two, float('nan')):.1f}"
            for means in (ours, theirs)
        ]
        limits = f"{pair.ttft_ms:g}, {pair.tbt_ms:g}"
        agrees = "yes" if simulated == measured else "no"
        rows.append([number, pair.one, pair.two, pair.rate, limits, *shares, simulated, measured, agrees])
    columns = ["pair", "first", "second", "requests/s", "TTFT, TBT ms", "simulated: % within", "measured: % within"]
    columns += ["simulated verdict", "measured verdict", "agree"]
    num = sum(row[-1] == "yes" for row in rows)
    what = f"Verdicts of `baton compare --on sim` and `--on {given.on}` on the same pairs: {num} of {len(rows)} agree."
    Result("agreement", what, [Table("Ten pairs", columns, rows)]).finish(given.out)

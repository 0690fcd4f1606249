"""Compare Baton on a CPU with llama.cpp, vLLM and transformers, with the same weights and the same number of threads.

    BATON_PEER_LLAMA=…/python BATON_PEER_VLLM=…/python python -m benchmarks cpu --model 110m
    python -m benchmarks cpu --model 0.5b --rows decode,16bit

benchmarks/peers/install.sh installs the peers. If all peers of a row are missing, the row has only Baton's figure. A
run replaces the groups of rows that it measures in results/cpu_MODEL.json. It keeps the other groups if they were
measured on the same machine.
"""

import json
import math
import os
import random
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.models import CACHE, SHAPES, checkpoint
from benchmarks.process import ROOT, PeerFailedError, PeerProcess
from benchmarks.result import (
    MACHINE,
    RESULTS,
    Cell,
    Result,
    Table,
    command,
    in_turn,
    median,
    parser,
    ratio,
    shown,
    versions,
)

CONTEXT = 512
STEPS = {1: 32, 8: 16, 32: 10}
OUR_KV_GIB, VLLM_KV_GIB = 0.5, 1  # Baton's default; vLLM's minimum, of which only the used part becomes resident
WORK_KV_GIB = 0.4  # enough for 32 contexts and their steps with the models 110m and 0.5b; 1b-moe needs more
FP32, BITS16, INT8 = "Baton fp32", "Baton 16-bit weights", "Baton int8"
LLAMA_F32, VLLM_FP32, TRANSFORMERS = "llama.cpp F32", "vLLM fp32", "transformers fp32"
# With 16-bit weights, Baton's KV is float16, as llama.cpp's KV is.
OUR_OPTIONS: dict[str, dict[str, str]] = {
    FP32: {}, BITS16: {"weight_dtype": "bfloat16", "kv_cache_dtype": "float16"}, INT8: {"quantization": "int8"}
}  # fmt: skip
FLASH = " flash"  # llama.cpp is measured with and without flash attention; the table has the faster result
Runs = dict[str, dict[str, list[float]]]  # the values of each repeat, keyed by measurement, then by arm


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """A table row, measured by the workers' method `call`. `goal`: minimum ratio of our speed to the best peer's."""

    label: str
    call: str
    arguments: dict[str, int]
    ours: str
    peers: tuple[str, ...]
    goal: float = 0.0

    @property
    def tokens(self) -> int:
        return math.prod(value for name, value in self.arguments.items() if name != "context")


def _prefill(tokens: int, ours: str, peers: tuple[str, ...], goal: float) -> SpeedRow:
    return SpeedRow(f"prefill {tokens:,}", "prefill", {"tokens": tokens}, ours, peers, goal)


def _decodes(ours: str, peers: tuple[str, ...], goals: dict[int, float]) -> list[SpeedRow]:
    arguments = {batch: {"batch": batch, "context": CONTEXT, "steps": STEPS[batch]} for batch in goals}
    return [SpeedRow(f"decode, batch {n}", "decode", arguments[n], ours, peers, goal) for n, goal in goals.items()]


def _llama(*kinds: str) -> tuple[str, ...]:
    return tuple(f"llama.cpp {kind}{flash}" for kind in kinds for flash in ("", FLASH))


FULL, HALF, EIGHT = (*_llama("F32"), VLLM_FP32), _llama("BF16", "F16"), _llama("Q8_0")
SPEEDS: dict[str, list[SpeedRow]] = {
    "prefill": [_prefill(512, FP32, FULL, 1.1), _prefill(2048, FP32, FULL, 1.1)],
    "decode": _decodes(FP32, FULL, {1: 1.0, 8: 1.1, 32: 1.3}),
    "transformers": _decodes(FP32, (TRANSFORMERS,), {8: 2.0, 32: 2.0}),
    "16bit": _decodes(BITS16, HALF, {1: 0.95, 8: 1.2, 32: 1.2}),
    "int8": [_prefill(2048, INT8, EIGHT, 2.0), *_decodes(INT8, EIGHT, {1: 1.1, 8: 2.3, 32: 2.2})],
}
ARMS = {name: {arm for row in rows for arm in (row.ours, *row.peers)} for name, rows in SPEEDS.items()}
ARMS |= {"memory": {FP32, VLLM_FP32}}


@dataclass(frozen=True, slots=True)
class CpuOptions:
    """How to run the benchmark. `llama` and `vllm` are paths of the peers' interpreters, "" if not installed."""

    model: str
    threads: int
    directory: Path  # directory of the models
    llama: str = ""
    vllm: str = ""
    kv_gib: float = OUR_KV_GIB


@dataclass(slots=True)
class WorkerPool:
    """The workers, keyed by arm. Each worker starts when it is first needed, and is paused between calls. `failed` has
    the errors of workers that did not start."""

    options: CpuOptions
    workers: dict[str, PeerProcess] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def get(self, arm: str) -> PeerProcess | None:
        """Return the arm's worker, or None if it cannot be started."""
        try:
            if arm not in self.workers and arm not in self.failed:
                self.workers[arm] = self._start(arm)
                print(f"started {arm}: {self.workers[arm].facts}", flush=True)
        except PeerFailedError as error:
            self.failed[arm] = str(error)
            print(f"without {arm}: {error}", flush=True)
        return self.workers.get(arm)

    def close(self, keep: Collection[str] = ()) -> None:
        for arm in [arm for arm in self.workers if arm not in keep]:
            self.workers.pop(arm).close()

    def _start(self, arm: str) -> PeerProcess:
        options = self.options
        model = checkpoint(options.model, options.directory)
        common: dict[str, Any] = {"model": str(model), "threads": options.threads}
        start = partial(PeerProcess, env={"OMP_NUM_THREADS": str(options.threads)}, pauses=True)
        if arm.startswith("Baton"):
            return start("benchmarks.peers.baton", common | {"kv_gib": options.kv_gib} | OUR_OPTIONS[arm])
        if arm == TRANSFORMERS:
            return start("benchmarks.peers.transformers_generate", common)
        python, variable = (
            (options.vllm, "BATON_PEER_VLLM") if arm == VLLM_FP32 else (options.llama, "BATON_PEER_LLAMA")
        )
        if not python:
            raise PeerFailedError(f"{arm}: give its interpreter with --{variable[11:].lower()} or {variable}")
        if arm == VLLM_FP32:
            cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            env = {"VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB), "VLLM_CPU_OMP_THREADS_BIND": cpus}
            return start("benchmarks.peers.vllm_offline", common, python=python, env=env)
        gguf = self._gguf(model, arm.split()[1])
        llama = common | {"model": str(gguf), "flash": arm.endswith(FLASH)}
        return start("benchmarks.peers.llama_cpp_api", llama, python=python)

    def _gguf(self, model: Path, kind: str) -> Path:
        out = model.with_name(f"{model.name}-{kind}.gguf")
        if not out.exists():
            making = out.with_suffix(".partial")
            convert = [self.options.llama, "-m", "benchmarks.peers.gguf_file", str(model), kind, str(making)]
            done = subprocess.run(convert, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                raise PeerFailedError(f"converting to {kind}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
            making.rename(out)
        return out


def measure_speeds(rows: list[SpeedRow], workers: WorkerPool, repeats: int) -> Runs:
    """Return the tokens per second by row and arm."""
    found: Runs = {}
    for row in rows:
        started = {arm: worker for arm in (row.ours, *row.peers) if (worker := workers.get(arm)) is not None}
        found[row.label] = speeds_of(row, started, repeats)
    return found


def speeds_of(row: SpeedRow, workers: Mapping[str, PeerProcess], repeats: int) -> dict[str, list[float]]:
    """Return the tokens per second by arm. The first call of each arm is a warm-up and is left out."""
    calls = {arm: partial(worker.call, row.call, **row.arguments) for arm, worker in workers.items()}
    runs = in_turn(calls, repeats + 1)
    found = {arm: [row.tokens / seconds for seconds in values[1:]] for arm, values in runs.items()}
    print(f"{row.label}: {_each(found)} tokens/s", flush=True)
    return found


def measure_memory(workers: WorkerPool, repeats: int) -> Runs:
    """Return the peak memory in bytes of new processes that load the model, then run a long prompt and a large batch.

    Baton's KV pool has just the size that this work needs, because the whole pool becomes resident. In vLLM, only the
    used part becomes resident.
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
    """Return the largest difference between Baton's top logprobs and llama.cpp's with the same float32 weights."""
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
    """Measure one group of rows and return its entry in the results file."""
    load = round(os.getloadavg()[0], 2)
    is_speed = group in SPEEDS
    runs = measure_speeds(SPEEDS[group], workers, repeats) if is_speed else measure_memory(workers, repeats)
    return {
        "command": command("cpu"),
        "load_before": load,
        "without": {arm: why for arm, why in workers.failed.items() if arm in ARMS[group]},
        "facts": {arm: worker.facts for arm, worker in workers.workers.items() if arm in ARMS[group]},
        "options": asdict(workers.options) | {"directory": "", "llama": "", "vllm": ""},  # omit paths of this machine
        "largest_logprob_difference_to_llama_cpp": agreement(workers),
        "runs": runs,
    }


def table(shape: str, groups: dict[str, dict[str, Any]]) -> Table:
    """Return the table of all groups that were measured."""
    rows = [
        compared_row(f"{row.label} ({group})", groups[group]["runs"][row.label], row.ours, row.goal)
        for group, speeds in SPEEDS.items()
        if group in groups
        for row in speeds
    ]
    if "memory" in groups:
        in_gb = {arm: [value / 1e9 for value in row] for arm, row in groups["memory"]["runs"]["memory"].items()}
        rows.append(compared_row(f"peak memory with {WORK_KV_GIB} GiB of KV, GB", in_gb, FP32, 0.5, lower=True))
    columns = ["tokens/s unless stated otherwise", "ours", "theirs", "ours / the better of theirs", "goal", ""]
    return Table(f"{shape}: on a CPU, {CONTEXT} tokens of context", columns, rows, _note(list(groups.values())))


def compared_row(label: str, arms: dict[str, list[float]], ours: str, goal: float, lower: bool = False) -> list[Cell]:
    """Return the row that compares the arm `ours` with the best other arm. If `lower` is true, lower values are better,
    and the goal is an upper bound."""
    others = {arm: values for arm, values in arms.items() if arm != ours}
    bound = f"≤ {goal}" if lower else f"≥ {goal}"
    if not others:
        return [label, median(arms[ours]), "", None, bound, ""]
    best = (min if lower else max)(others.values(), key=median)
    found = ratio(arms[ours], best)
    return [label, median(arms[ours]), _each(others), found, bound, found <= goal if lower else found >= goal]


def _each(arms: dict[str, list[float]]) -> str:
    return ", ".join(f"{arm} {shown(median(values))}" for arm, values in arms.items())


def _note(groups: list[dict[str, Any]]) -> str:
    """Return the note below the table, which states the conditions of the measurement."""
    key = "largest_logprob_difference_to_llama_cpp"
    differences = [found for group in groups if (found := group[key]) is not None]
    without = {why for group in groups for why in group["without"].values()}
    facts = {arm: found for group in groups for arm, found in group["facts"].items()}
    kv = ", ".join(f"{own['kv_cache_dtype']} for {arm}" for arm, own in facts.items() if "kv_cache_dtype" in own)
    parts = [
        "Baton is timed through a node's engine loop, with scheduling, sampling and publishing. llama.cpp is timed "
        "without sampling, as in its batched bench, with and without flash attention. vLLM is timed by steps of its "
        "engine. Figures are medians of interleaved runs. A ratio is computed in each repeat, and its median over all "
        "repeats is given. Steps have "
        f"up to 2,048 prompt tokens. The KV format is {kv} (llama.cpp: F16)."
    ]
    if differences:
        parts.append(f"With the same fp32 weights, logprobs differ from llama.cpp's by at most {max(differences):.1e}.")
    if without:
        parts.append(f"Not compared: {'; '.join(sorted(without))}.")
    loads = [group["load_before"] for group in groups]
    return " ".join([*parts, f"Machine load before the groups: {min(loads)} to {max(loads)}."])


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", choices=list(SHAPES), default="110m")
    flags.add_argument("--rows", default=",".join(ARMS), help=f"any of {', '.join(ARMS)}")
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--directory", type=Path, default=CACHE, help="directory of the generated models")
    flags.add_argument("--llama", default=os.environ.get("BATON_PEER_LLAMA", ""), help="Python with llama_cpp and gguf")
    flags.add_argument("--vllm", default=os.environ.get("BATON_PEER_VLLM", ""), help="Python with vllm-cpu")
    args = flags.parse_args()
    chosen = args.rows.split(",")
    if unknown := set(chosen) - set(ARMS):
        flags.error(f"--rows {','.join(sorted(unknown))}: choose from {', '.join(ARMS)}")
    name = f"cpu_{args.model}"
    out: Path = args.out or RESULTS / f"{name}.json"
    groups = _kept(out)
    workers = WorkerPool(CpuOptions(args.model, args.threads, args.directory, args.llama, args.vllm))
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[: args.threads])  # the workers inherit this affinity
    try:
        for index, group in enumerate(chosen):
            groups[group] = measure(group, workers, args.repeats)
            _result(name, args.model, groups).write(out)
            workers.close(keep={arm for later in chosen[index + 1 :] for arm in ARMS[later]})
    finally:
        workers.close()
        os.sched_setaffinity(0, allowed)
    _result(name, args.model, groups).finish(out)


def _result(name: str, shape: str, groups: dict[str, dict[str, Any]]) -> Result:
    what = "Baton and its peers with the same random weights and number of threads. Only one computes at a time."
    commands = " && ".join(dict.fromkeys(group["command"] for group in groups.values()))
    facts = {arm: found for group in groups.values() for arm, found in group["facts"].items()}
    compared = {arm: str(found["version"]) for arm, found in facts.items() if "version" in found}
    return Result(name, what, [table(shape, groups)], groups, versions("torch", "numba") | compared, commands)


def _kept(out: Path) -> dict[str, dict[str, Any]]:
    """Return the groups of rows of an earlier run on this machine. A table must not mix the results of two machines."""
    before: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"runs": {}, "machine": MACHINE}
    same = all(before["machine"][key] == MACHINE[key] for key in ("processor", "cores"))
    return {group: found for group, found in before["runs"].items() if same and group in ARMS}

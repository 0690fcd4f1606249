"""Run everything that needs a GPU (experimental): checks, kernels, a whole model, handoffs, a cluster.

    python -m benchmarks gpu_first_run
    python -m benchmarks gpu_first_run --only decode,prefill

The results file is written after each section, so an interrupted run keeps its results, and a run of a few sections
(`--only`) adds to the file of an earlier run. A failed section reports the failure in its table and the next one runs.
All sections except the cluster need only torch, Triton, numpy, safetensors, msgpack and xxhash (and pytest).
`--device cpu --toy --out FILE` tests the script itself under Triton's interpreter.
"""

import argparse
import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.scene import GpuScene, GpuSection
from benchmarks.result import RESULTS, Cell, Result, Table, versions

NAME = "gpu_first_run"
TOTAL_S = 540.0
# Seconds that each section may take of TOTAL_S; a run of a few sections shares all of TOTAL_S among them.
SECTIONS: Mapping[str, float] = {
    "checks": 120,
    "decode": 90,
    "prefill": 60,
    "gemm": 30,
    "model": 75,
    "handoff": 45,
    "cluster": 120,
}
ALIASES = {"kernels": ("checks", "decode", "prefill", "gemm")}
PYTEST = "[pytest]\naddopts = --import-mode=importlib\nmarkers = gpu: needs a CUDA device\n"
SUITES = {
    "test_kernels.py": 8,
    "test_runner.py": 0,
}  # number of processes: tests that measure memory need the device alone
ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 6


def checks(scene: GpuScene) -> GpuSection:
    """Run tests/gpu with separate pytest settings: the machine may lack the plugins of the project's."""
    rows: list[list[Cell]] = []
    said: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        settings = Path(directory) / "pytest.ini"
        settings.write_text(f"{PYTEST}pythonpath = {ROOT}\n")
        for suite, processes in SUITES.items():
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(settings)]
            command += ["--rootdir", str(ROOT), "-m", "gpu", "-rfE", "--tb=short", str(ROOT / "tests" / "gpu" / suite)]
            if processes and not scene.toy and importlib.util.find_spec("xdist") is not None:
                command += ["-n", str(processes)]
            said[suite] = _said(command, scene.until - time.monotonic())
            rows.append([suite, *counts(said[suite]), "; ".join(failures(said[suite]))[:400] or "none"])
    columns = ["suite", "passed", "failed", "skipped", "failures"]
    return GpuSection(
        [Table("Checks on the device", columns, rows)], {suite: text[-6000:] for suite, text in said.items()}
    )


def _said(command: list[str], left_s: float) -> str:
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, left_s), check=False)
    except subprocess.TimeoutExpired as error:
        return f"{_text(error.stdout)}{_text(error.stderr)}\nERROR cut off after {error.timeout:.0f} s"
    return run.stdout + run.stderr


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def counts(said: str) -> list[Cell]:
    """Return passed, failed or in error, and skipped, from pytest's last line."""
    found = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|errors?|skipped)", said)}
    return [
        found.get("passed", 0),
        sum(found.get(what, 0) for what in ("failed", "error", "errors")),
        found.get("skipped", 0),
    ]


def failures(said: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (.+)$", said, re.MULTILINE)


# ---- the run ----------------------------------------------------------------------------------------------------


class ResultsFile:
    """The results file, with the sections of earlier runs."""

    def __init__(self, out: Path, gpu: str) -> None:
        self._out = out
        self._gpu = gpu
        self._found: dict[str, Any] = {}
        if out.exists():
            self._found = json.loads(out.read_text())["runs"]

    def add(self, name: str, section: GpuSection, took_s: float) -> None:
        tables = [asdict(table) for table in section.tables]
        self._found[name] = {"tables": tables, "runs": section.runs, "took_s": took_s, "gpu": self._gpu}
        Result(
            NAME,
            "Results on one GPU, section by section.",
            [Table(**table) for name in SECTIONS if name in self._found for table in self._found[name]["tables"]],
            self._found,
            {"gpu": self._gpu} | versions("torch", "triton", "numpy"),
        ).write(self._out)


def run_section(name: str, scene: GpuScene) -> GpuSection:
    """Run one section. Modules are imported here, because a bare machine lacks the libraries of some."""
    match name:
        case "checks":
            return checks(scene)
        case "decode" | "prefill" | "gemm":
            from benchmarks.gpu import kernels

            return {"decode": kernels.decode, "prefill": kernels.prefill, "gemm": kernels.gemm}[name](scene)
        case "model":
            from benchmarks.gpu.model import model

            return model(scene)
        case _:
            from benchmarks.gpu import handoff

            return handoff.handoff(scene) if name == "handoff" else handoff.cluster(scene)


def attempt(name: str, section: Callable[[], GpuSection]) -> GpuSection:
    """Return the result of `section`, or a table with the end of its traceback."""
    try:
        return section()
    except Exception:  # noqa: BLE001 - the sections after it can still run
        lines = [line.strip() for line in traceback.format_exc().splitlines() if line.strip(" ^~")]
        return GpuSection(
            [Table(f"{name}: failed", ["end of the traceback"], [["; ".join(lines[-LAST_LINES:])]])], lines
        )


def wanted(text: str) -> list[str]:
    """Return the sections named by a list such as "kernels,model", in their order. Raises ValueError."""
    names = [name for part in text.split(",") for name in ALIASES.get(part.strip(), (part.strip(),))]
    if unknown := [name for name in names if name not in SECTIONS]:
        raise ValueError(f"--only {unknown[0]}: choose from {', '.join([*SECTIONS, *ALIASES])}")
    return [name for name in SECTIONS if name in names]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--only", default=",".join(SECTIONS), help=f"any of {', '.join([*SECTIONS, *ALIASES])}")
    flags.add_argument("--out", type=Path, help=f"results file, instead of benchmarks/results/{NAME}.json")
    flags.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    flags.add_argument("--toy", action="store_true", help="sizes of a few tokens; required on a CPU")
    args = flags.parse_args()
    try:
        names = wanted(args.only)
    except ValueError as error:
        flags.error(str(error))
    if args.device == "cpu" and not args.toy:
        flags.error("--device cpu: only with --toy, to test the script itself")
    if args.toy and args.out is None:
        flags.error("--toy: give --out, since toy figures are not results")
    if args.device == "cuda" and not torch.cuda.is_available():
        flags.error("--device cuda: torch finds no CUDA device; test the script with --device cpu --toy")
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    run(
        names,
        torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu"),
        args.toy,
        args.out or RESULTS / f"{NAME}.json",
    )


@torch.inference_mode()
def run(names: list[str], device: torch.device, toy: bool, out: Path) -> None:
    record = ResultsFile(
        out, torch.cuda.get_device_name(device) if device.type == "cuda" else "none: a CPU at toy size"
    )
    planned_s = sum(SECTIONS[name] for name in names)
    for name in names:
        began = time.monotonic()
        scene = GpuScene(device, toy, began + SECTIONS[name] * TOTAL_S / planned_s)
        section = attempt(name, partial(run_section, name, scene))
        took_s = time.monotonic() - began
        record.add(name, section, took_s)
        print("\n".join(table.markdown() for table in section.tables), f"{name}: {took_s:.1f} s", sep="\n", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"written: {out}")


if __name__ == "__main__":
    main()

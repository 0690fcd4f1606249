"""Run everything that needs a GPU (experimental): checks, kernels, a whole model, handoffs.

    python -m benchmarks gpu_first_run
    python -m benchmarks gpu_first_run --only decode,prefill

The results file is written after each section, so an interrupted run keeps the results of finished sections. A run of
some sections (`--only`) replaces only these sections in the file of an earlier run. If a section fails, its table shows
the error, and the next section runs. The run needs only torch, Triton, numpy, safetensors, msgpack, httpx, xxhash,
llguidance and tokenizers. The checks also need pytest and hypothesis; with pytest-xdist, they compile kernels in
parallel. `--device cpu --toy --out FILE` tests the script itself under Triton's interpreter.
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.attention import GpuScene, GpuSection, decode, prefill
from benchmarks.gpu.handoff import handoff
from benchmarks.gpu.layers import layers
from benchmarks.gpu.model import model
from benchmarks.process import ROOT
from benchmarks.result import RESULTS, Cell, Result, Table, versions

NAME = "gpu_first_run"
PYTEST = "[pytest]\naddopts = --import-mode=importlib\nmarkers = gpu: needs a CUDA device\n"
# The number of processes of each suite. A test of `test_runner.py` measures the free memory, so it runs alone.
SUITES = {"test_kernels.py": 8, "test_runner.py": 1}
CHECKS_S = 900.0  # timeout of one suite
LAST_LINES = 6


def checks(scene: GpuScene, suite: str) -> GpuSection:
    """Run a suite of tests/gpu with separate pytest settings, because the machine may lack the project's plugins."""
    with tempfile.TemporaryDirectory() as directory:
        settings = Path(directory) / "pytest.ini"
        settings.write_text(f"{PYTEST}pythonpath = {ROOT}\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(settings)]
        command += ["--rootdir", str(ROOT), "-m", "gpu", "-rfE", "--tb=short", str(ROOT / "tests" / "gpu" / suite)]
        parallel = SUITES[suite] > 1 and scene.device.type == "cuda" and find_spec("xdist")
        command += ["-n", str(SUITES[suite])] if parallel else []
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CHECKS_S, check=False)
    printed = (run.stderr + run.stdout)[-6000:]
    counts = [_count(printed, words) for words in ("passed", "failed|errors?", "skipped")]
    failures = re.findall(r"^(?:FAILED|ERROR) (.+)$", printed, re.MULTILINE)
    row: list[Cell] = [suite, *counts, "; ".join(failures)[:400] or "none"]
    columns = ["suite", "passed", "failed", "skipped", "failures"]
    return GpuSection([Table(f"Checks on the device: {suite}", columns, [row])], {suite: printed})


def _count(printed: str, words: str) -> int:
    return sum(int(number) for number in re.findall(rf"(\d+) (?:{words})", printed))


SECTIONS: dict[str, Callable[[GpuScene], GpuSection]] = {
    "check_kernels": partial(checks, suite="test_kernels.py"),
    "check_runner": partial(checks, suite="test_runner.py"),
    "decode": decode, "prefill": prefill, "layers": layers, "model": model, "handoff": handoff
}  # fmt: skip


class ResultsFile:
    """The results file, which keeps the sections of earlier runs on the same kind of GPU."""

    def __init__(self, out: Path, gpu: str) -> None:
        self._out = out
        self._gpu = gpu
        found: dict[str, Any] = json.loads(out.read_text())["runs"] if out.exists() else {}
        self._found = {name: section for name, section in found.items() if section["gpu"] == gpu}

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


def attempt(name: str, section: Callable[[], GpuSection]) -> GpuSection:
    """Return the result of `section` or, if it fails, a table with the end of its traceback."""
    try:
        return section()
    except Exception:  # noqa: BLE001 - the next sections can still run
        lines = [line.strip() for line in traceback.format_exc().splitlines() if line.strip(" ^~")]
        end = "; ".join(lines[-LAST_LINES:])
        return GpuSection([Table(f"{name}: failed", ["end of the traceback"], [[end]])], lines)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--only", default=",".join(SECTIONS), help=f"any of {', '.join(SECTIONS)}")
    flags.add_argument("--out", type=Path, help=f"results file, instead of benchmarks/results/{NAME}.json")
    flags.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    flags.add_argument("--toy", action="store_true", help="sizes of a few tokens; required on a CPU")
    args = flags.parse_args()
    names = [name.strip() for name in args.only.split(",")]
    if unknown := set(names) - SECTIONS.keys():
        flags.error(f"--only {','.join(sorted(unknown))}: choose from {', '.join(SECTIONS)}")
    if args.toy and args.out is None:
        flags.error("--toy: give --out, since toy figures are not results")
    if args.device == "cpu" and not args.toy:
        flags.error("--device cpu: only with --toy, to test the script itself")
    if args.device == "cuda" and not torch.cuda.is_available():
        flags.error("--device cuda: torch finds no CUDA device; test the script with --device cpu --toy")
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    run(names, torch.device(args.device), args.toy, args.out or RESULTS / f"{NAME}.json")


@torch.inference_mode()
def run(names: list[str], device: torch.device, toy: bool, out: Path) -> None:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none: a CPU at toy size"
    record = ResultsFile(out, gpu)
    for name in names:
        began = time.monotonic()
        section = attempt(name, lambda name=name: SECTIONS[name](GpuScene(device, toy)))  # type: ignore[misc]
        took_s = time.monotonic() - began
        record.add(name, section, took_s)
        print("\n".join(table.markdown() for table in section.tables), f"{name}: {took_s:.1f} s", sep="\n", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"written: {out}")

"""Everything that a GPU is needed to find out, in one go: checks, kernels, a whole model, handoffs, a cluster.

    python -m benchmarks gpu_first_run
    python -m benchmarks gpu_first_run --only decode,prefill

Written after each section, so that a run that is cut off keeps what it has, and one of a few sections (`--only`) adds
to the file of another. A section that fails says so in its table, and the next one runs. But for the cluster, nothing
is needed beside torch, Triton, numpy, safetensors, msgpack and xxhash (and pytest for the checks).
`--device cpu --toy --out FILE` tries the script itself, under Triton's interpreter.
"""

import argparse
import gc
import importlib
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
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_scene import Scene, Section
from benchmarks.result import RESULTS, Cell, Result, Table, versions

NAME = "gpu_first_run"
TOTAL_S = 540.0
# Section -> its module and function, and the seconds that it may take of TOTAL_S; of a few sections, each has more.
SECTIONS: Mapping[str, tuple[str, str, float]] = {
    "checks": (f"benchmarks.{NAME}", "checks", 120),
    "decode": ("benchmarks.gpu_kernels", "decode", 90),
    "prefill": ("benchmarks.gpu_kernels", "prefill", 60),
    "gemm": ("benchmarks.gpu_kernels", "gemm", 30),
    "model": ("benchmarks.gpu_model", "model", 75),
    "handoff": ("benchmarks.gpu_handoff", "handoff", 45),
    "cluster": ("benchmarks.gpu_handoff", "cluster", 120),
}
ALIASES = {"kernels": ("checks", "decode", "prefill", "gemm")}
PYTEST = "[pytest]\naddopts = --import-mode=importlib\nmarkers = gpu: needs a CUDA device\n"
SUITES = {"test_kernels.py": 8, "test_runner.py": 0}  # by processes: what measures memory has the device for itself
ROOT = Path(__file__).resolve().parents[1]
LAST_LINES = 6


def checks(scene: Scene) -> Section:
    """The suite in tests/gpu, with settings of its own: this machine may lack the plugins that the project's name."""
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
    return Section(
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
    """Passed, failed and in error, skipped: as pytest's last line has it."""
    found = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|errors?|skipped)", said)}
    return [
        found.get("passed", 0),
        sum(found.get(what, 0) for what in ("failed", "error", "errors")),
        found.get("skipped", 0),
    ]


def failures(said: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (.+)$", said, re.MULTILINE)


# ---- the run ----------------------------------------------------------------------------------------------------


class Record:
    """The results file: what every section found, those of earlier runs included."""

    def __init__(self, out: Path, gpu: str) -> None:
        self._out = out
        self._gpu = gpu
        self._found: dict[str, Any] = {}
        if out.exists():
            self._found = json.loads(out.read_text())["runs"]

    def add(self, name: str, section: Section, took_s: float) -> None:
        tables = [asdict(table) for table in section.tables]
        self._found[name] = {"tables": tables, "runs": section.runs, "took_s": took_s, "gpu": self._gpu}
        Result(
            NAME,
            "What one GPU did, in the order in which it was to be found out.",
            [Table(**table) for name in SECTIONS if name in self._found for table in self._found[name]["tables"]],
            self._found,
            {"gpu": self._gpu} | versions("torch", "triton", "numpy"),
        ).write(self._out)


def attempt(name: str, scene: Scene, load: Callable[[], Callable[[Scene], Section]]) -> Section:
    """What the section found, or a table with the end of its traceback."""
    try:
        return load()(scene)
    except Exception:  # noqa: BLE001 - whatever it is, the sections behind it can still be run
        lines = [line.strip() for line in traceback.format_exc().splitlines() if line.strip(" ^~")]
        return Section([Table(f"{name}: failed", ["its traceback's end"], [["; ".join(lines[-LAST_LINES:])]])], lines)


def wanted(text: str) -> list[str]:
    """Sections of "kernels,model", in their order. Raises ValueError."""
    names = [name for part in text.split(",") for name in ALIASES.get(part.strip(), (part.strip(),))]
    if unknown := [name for name in names if name not in SECTIONS]:
        raise ValueError(f"--only {unknown[0]}: there are {', '.join([*SECTIONS, *ALIASES])}")
    return [name for name in SECTIONS if name in names]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join([*SECTIONS, *ALIASES])}")
    flags.add_argument("--out", type=Path, help=f"results file, instead of benchmarks/results/{NAME}.json")
    flags.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    flags.add_argument("--toy", action="store_true", help="sizes of a few tokens; the only ones that a CPU takes")
    args = flags.parse_args()
    try:
        names = wanted(args.only)
    except ValueError as error:
        flags.error(str(error))
    if args.device == "cpu" and not args.toy:
        flags.error("--device cpu: only with --toy, to try the script itself")
    if args.toy and args.out is None:
        flags.error("--toy: give --out, since nothing of it belongs among the results")
    if args.device == "cuda" and not torch.cuda.is_available():
        flags.error("--device cuda: torch finds no CUDA device; try the script with --device cpu --toy")
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined
    run(
        names,
        torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu"),
        args.toy,
        args.out or RESULTS / f"{NAME}.json",
    )


@torch.inference_mode()
def run(names: list[str], device: torch.device, toy: bool, out: Path) -> None:
    record = Record(out, torch.cuda.get_device_name(device) if device.type == "cuda" else "none: a CPU at toy size")
    planned_s = sum(SECTIONS[name][2] for name in names)
    for name in names:
        module, function, most_s = SECTIONS[name]
        began = time.monotonic()
        scene = Scene(device, toy, began + most_s * TOTAL_S / planned_s)
        section = attempt(name, scene, lambda m=module, f=function: getattr(importlib.import_module(m), f))  # type: ignore[misc]
        took_s = time.monotonic() - began
        record.add(name, section, took_s)
        print("\n".join(table.markdown() for table in section.tables), f"{name}: {took_s:.1f} s", sep="\n", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"written: {out}")


if __name__ == "__main__":
    main()

"""Run every fuzz target `--runs` times, under atheris if it is installed.

atheris is libFuzzer for Python, made by Google. It keeps the inputs that reach new branches. Each target runs in its
own process; `--jobs` processes run in parallel.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ["compare", "engine", "router", "scheduler", "shared"]


def main() -> int:
    """Run the targets and print each finding with the input that causes it. Return 1 if there was a finding, else 0."""
    options = argparse.ArgumentParser(description=str(__doc__).split("\n\n", maxsplit=1)[0])
    options.add_argument("--runs", type=int, default=10_000, help="executions per target")
    options.add_argument("--target", help="run only this target")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--jobs", type=int, default=1, help="targets to run in parallel")
    options.add_argument(
        "--engine", choices=["atheris", "mutate"], default="atheris" if find_spec("atheris") else "mutate"
    )
    options.add_argument("--input", type=Path, help="run only the input in this file")
    options.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.child and chosen.engine == "atheris":
        return _under_atheris(chosen.target, chosen.runs, chosen.seed)
    from tests.fuzz.mutate import fuzz, run_one
    from tests.fuzz.targets import TARGETS

    if chosen.child:
        fuzz(chosen.target, chosen.runs, chosen.seed)
        return 0
    if chosen.input is not None:
        run_one(chosen.target, chosen.input.read_bytes(), trace=False)
        return 0
    names = [chosen.target] if chosen.target else list(TARGETS)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        return max(pool.map(lambda name: _report(name, chosen), names))


def _report(name: str, chosen: argparse.Namespace) -> int:
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.fuzz.run", "--child", "--target", name, "--engine", chosen.engine]
    command += ["--runs", str(chosen.runs), "--seed", str(chosen.seed)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    took_s = time.monotonic() - began
    found = "a finding" if ended.returncode else "no finding"
    print(f"{name:20} {chosen.runs} runs, {took_s:.0f} s: {found}", flush=True)
    if ended.returncode:
        print(ended.stderr[-4000:], flush=True)
    return min(1, abs(ended.returncode))


def _under_atheris(name: str, runs: int, seed: int) -> int:
    import atheris

    with atheris.instrument_imports(include=PACKAGES):
        from tests.fuzz.mutate import TRACED_EVERY, run_one
        from tests.fuzz.targets import TARGETS, scratch
    corpus = Path(tempfile.mkdtemp(prefix="baton-corpus-"))
    for number, data in enumerate(TARGETS[name].seeds):
        (corpus / str(number)).write_bytes(data)
    TARGETS[name].fuzzed(TARGETS[name].seeds[0])  # imports the modules that the target needs
    number = 0

    def one(data: bytes) -> None:
        nonlocal number
        number += 1
        run_one(name, data, trace=number % TRACED_EVERY == 0)
        if number >= runs:  # clean up here, because libFuzzer exits without running exit handlers
            shutil.rmtree(corpus, ignore_errors=True)
            shutil.rmtree(scratch(), ignore_errors=True)

    # Without -reload=0, libFuzzer rescans the corpus directory every second and fails when the directory is deleted.
    flags = [f"-runs={runs}", f"-seed={seed}", "-max_len=65536", "-verbosity=0", "-reload=0"]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], one)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())

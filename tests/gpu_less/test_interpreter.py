"""Test the kernels under Triton's interpreter. This needs a separate process, because Triton chooses the interpreter
when a kernel is defined. test_compile.py and the GPU tests cover races, shared memory and registers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.build import thinned

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FILES = sorted((HERE / "interpreted").glob("*.py"))

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="triton has wheels for Linux only"),
    pytest.mark.timeout(1300),
]


@pytest.mark.parametrize("marks", thinned(["not exhaustive", "exhaustive"], 2))
def test_kernels_are_correct_under_the_interpreter(marks: str) -> None:
    files = [str(file) for file in FILES if file.stem != "conftest"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *files]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]

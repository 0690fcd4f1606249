"""Test that the modules that a node imports at its start need neither Triton nor CUDA."""

import subprocess
import sys

MODULES = "engine.components, node.process, engine.cuda.selection, engine.kernels, engine.cuda.build"


def test_a_node_starts_without_triton() -> None:
    code = f"import torch, sys; sys.modules['triton'] = None; import {MODULES}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-2000:]

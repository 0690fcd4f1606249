"""Test the machine code of every kernel for an H200, compiled without a GPU. It must use tensor cores for 16-bit types,
spill no registers, and stay within the limits of registers per thread and of shared memory per thread block."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.build import thinned

ROOT = Path(__file__).parent.parent.parent
PROCESSES = {"few": 1, "all": 2}
SHARED_BYTES = 227 * 1024  # the limit for a thread block on sm_90
SPILLS = "attention fp32 in a tile too large"  # a kernel that spills, to check that the test detects it
# Triton before 3.7 puts a table on the stack for sine and cosine of angles over 105,615 radians. This is not a spill.
ANGLES_STACK = 32

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="triton has wheels for Linux only"),
    pytest.mark.timeout(1300),
]


@pytest.fixture(scope="module", params=thinned(["few", "all"], 2))
def kernels(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Compile the kernels. Triton finds kernels in its cache by their sources and options."""
    processes = PROCESSES[request.param]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(request.config.cache.mkdir("triton")), "TRITON_DEFAULT_FP_FUSION": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu_less.compiled", str(part), str(processes), request.param],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in range(processes)
    ]
    found = []
    try:
        for process in running:
            output, errors = process.communicate(timeout=1200)
            assert process.returncode == 0, errors[-4000:]
            found += [json.loads(line) for line in output.splitlines()]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return found


def test_no_kernel_spills_or_exceeds_the_limits_of_a_processor(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        allowed = ANGLES_STACK if kernel["kernel"] == "rotate_and_store" else 0
        if kernel["label"] != SPILLS:
            assert kernel["stack"] <= allowed, kernel
        assert kernel["local"] == 0, kernel
        assert 0 < kernel["reg"] <= 255, kernel
        assert kernel["shared"] <= SHARED_BYTES, kernel


def test_a_spill_is_detected(kernels: list[dict[str, Any]]) -> None:
    assert [kernel["stack"] > 0 for kernel in kernels if kernel["label"] == SPILLS] == [True]


def test_16_bits_run_on_tensor_cores_with_wide_asynchronous_copies(kernels: list[dict[str, Any]]) -> None:
    found = [kernel for kernel in kernels if kernel["kernel"] == "attend" and "fp32" not in kernel["label"]]
    assert {kernel["rows"] for kernel in found} >= {16, 128}
    for kernel in found:
        whole_warp_groups = kernel["rows"] >= 64  # the minimum for wgmma
        assert (kernel["wgmma"] > 0) == whole_warp_groups, kernel
        assert (kernel["mma"] > 0) != whole_warp_groups, kernel
        assert kernel["copies"] > 0, kernel


def test_loops_load_ahead(kernels: list[dict[str, Any]]) -> None:
    """Kernels load tiles of prompts, or tokens of recurrent layers, while they compute earlier tiles or tokens."""
    prompts = [kernel for kernel in kernels if kernel["label"] == "attention bf16 128" and kernel["rows"] == 128]
    recurrent = [kernel for kernel in kernels if kernel["kernel"] == "recur"]
    assert prompts
    assert recurrent
    assert all(kernel["ahead"] > 0 for kernel in prompts + recurrent), prompts + recurrent


def test_float32_is_never_rounded_to_19_bits(kernels: list[dict[str, Any]]) -> None:
    found = [kernel for kernel in kernels if kernel["kernel"] == "attend" and "fp32" in kernel["label"]]
    assert len(found) >= 2
    assert all(kernel["tf32"] == kernel["mma"] == kernel["wgmma"] == 0 for kernel in found)


def test_every_kernel_was_compiled(kernels: list[dict[str, Any]]) -> None:
    assert {kernel["kernel"] for kernel in kernels} == {
        "attend", "merge", "norm_rows", "rotate_and_store", "gated", "find_highest", "find_least", "draw_part",
        "choose_part", "product", "route", "sort_by_expert", "combine", "convolve", "factors", "recur", "norm_gated",
    }  # fmt: skip

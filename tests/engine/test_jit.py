"""Test compiled kernels: the cache and its trusted directories, the threads, and the fallback to torch."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)

from engine.cpu.jit import cache_directory, cache_places, is_ours

ROOT = Path(__file__).parents[2]

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="all other CPUs convert float16")


def test_kernels_run_on_the_threads_of_torch() -> None:
    """The threads of a second OpenMP runtime would spin and slow down those of the first."""
    code = """
import torch
torch.set_num_threads(2)
from engine.cpu.layer_kernels import gated
def running():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads"))
rows, out = torch.randn(512, 512), torch.empty(512, 256)
rows @ rows
before = running()
for _ in range(20):
    gated(10**6, 512, 256, rows.data_ptr(), out.data_ptr(), 0)
    rows @ rows
gate, up = rows.chunk(2, 1)
assert torch.allclose(out, torch.nn.functional.silu(gate) * up, atol=1e-6)
assert running() == before, (running(), before)
with open("/proc/self/maps") as maps:
    found = {line.split()[-1] for line in maps if any(name in line for name in ("gomp", "iomp", "libomp", "tbb"))}
assert len(found) == 1, found
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert run.returncode == 0, run.stderr


def test_a_directory_that_others_can_write_is_not_trusted(tmp_path: Path) -> None:
    assert is_ours(tmp_path / "ours")
    assert os.stat(tmp_path / "ours").st_mode & 0o077 == 0
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    (tmp_path / "file").touch()
    for other in ("open", "link", "file", "file/below"):
        assert not is_ours(tmp_path / other)


def test_our_directory_inside_a_writable_one_is_not_trusted(tmp_path: Path) -> None:
    """The owner of the outer directory can replace the inner one."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    places = [Path("relative"), tmp_path / "open", tmp_path / "ours"]
    found = cache_directory(Path(__file__), places)
    assert found is not None
    assert found.parent == tmp_path / "ours"
    assert cache_directory(Path(__file__), places[:2]) is None


def test_a_user_without_a_home_has_a_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    places = list(cache_places())
    assert [place.is_absolute() for place in places] == [True, False, True]


PROBE = """
import logging
import torch
logging.basicConfig(level="INFO", format="%(message)s")
from engine.cpu.jit import kernel
from engine.cpu.simd import put_address

@kernel
def put(values):
    put_address(values[0], values[1])

out = torch.zeros(1, dtype=torch.int64)
put(0, 7, out.data_ptr())
assert out.item() == 7
"""


def probed(where: Path) -> str:
    """Run the probe in the copy of the sources at `where`. Return its stderr."""
    command = [sys.executable, str(where / "probe.py")]
    run = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False, timeout=600)
    assert run.returncode == 0, run.stderr
    return run.stderr


def test_kernels_are_compiled_once_and_again_after_the_cache_is_damaged(tmp_path: Path) -> None:
    for package in ("engine", "shared"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "probe.py").write_text(PROBE)
    first = probed(tmp_path)
    assert re.search(r"^compiling kernels for this CPU \(1 of \d+\), once; they are kept in ", first)
    assert probed(tmp_path) == ""
    for kept in (tmp_path / "engine" / "cpu" / "__pycache__").rglob("*.nb[ic]"):  # a power loss can leave empty files
        kept.write_bytes(b"")
    assert "cannot be used, compiling them again" in probed(tmp_path)
    assert "compiling kernels for this CPU" in probed(tmp_path), "the damaged cache is gone"


@pytest.mark.parametrize(
    ("environment", "preparation", "reason"),
    [
        ({}, "import sys; sys.modules['numba'] = None", "numba"),
        pytest.param({"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse2"}, "", "F16C", marks=x86),
    ],
)
def test_a_machine_that_cannot_compile_falls_back_to_torch(
    environment: dict[str, str], preparation: str, reason: str
) -> None:
    code = (
        preparation
        + """
import torch
from engine.cpu.selection import attention_on_cpu, kernels_on_cpu, linear_on_cpu
from engine.linear import Plain
from engine.sampling import sample
from engine.sampling import SamplingRow
from shared.rpc.messages import SamplingParams
from tests.gpu_less.contract import config_of, pool_of
pool = pool_of(2, 16, 4, torch.float32, 9, torch.device("cpu"))
assert attention_on_cpu("auto", pool).name == kernels_on_cpu(config_of(64, 4, 2, 16), pool).name == "torch"
assert sample(torch.tensor([[0.0, 3.0]]), [SamplingRow(SamplingParams(temperature=0.0), [0], 1, 1)])[0].token == 1
assert isinstance(linear_on_cpu("auto", "none"), Plain)
for refused, words in (
    (lambda: attention_on_cpu("numba", pool), "--attention-backend numba: cannot run here"),
    (lambda: linear_on_cpu("bfloat16", "none"), "--weight-dtype bfloat16: needs compiled kernels"),
):
    try:
        refused()
    except ValueError as error:
        assert words in str(error)
    else:
        raise AssertionError(words)
"""
    )
    command, whole = [sys.executable, "-c", code], os.environ | environment
    run = subprocess.run(command, cwd=ROOT, env=whole, capture_output=True, text=True, check=False, timeout=600)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("\n") == 1, run.stderr
    assert reason in run.stderr

"""Tests of the GPU benchmarks in a separate process, at toy size on a CPU. Triton's interpreter runs the kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import first_run as script
from benchmarks.gpu.attention import LAYER_MAJOR, LLAMA_8B, OURS, GpuScene, GpuSection, LayerMajorPool, RandomKV, flops
from benchmarks.result import document

ROOT = Path(__file__).parents[2]
ABSENT = ("grpclib", "h2", "redis", "pydantic", "starlette", "uvicorn", "httptools", "pytest_asyncio")
BARE = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import tests.gpu.test_kernels, tests.gpu.test_runner  # the checks can run there too
from benchmarks.gpu.first_run import main
main()
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton has wheels for Linux only")


def measured(directory: Path, *parts: str) -> dict[str, Any]:
    """Run parts of the benchmark without the libraries that only a cluster needs, and return the report."""
    pytest.importorskip("triton")
    out = directory / "gpu_first_run.json"
    command = [sys.executable, "-c", BARE, "--device", "cpu", "--toy", "--out", str(out), "--only"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}  # tests.gpu imports Triton
    for only in parts:
        run = subprocess.run([*command, only], cwd=ROOT, env=environment, timeout=600, capture_output=True, check=False)
        assert run.returncode == 0, run.stderr.decode()[-2000:]
    found: dict[str, Any] = json.loads(out.read_text())
    marked = f"<!-- result: {out.stem} -->\n<!-- end -->\n"
    assert all(table["title"] in document([marked], out.parent)[0] for table in found["tables"])
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured(tmp_path_factory.mktemp("gpu"), "decode", "prefill,layers,model,handoff")


@pytest.mark.exhaustive
def test_attention_is_measured_in_both_layouts(tmp_path: Path) -> None:
    found = measured(tmp_path, "decode")
    assert {name for each in found["runs"]["decode"]["runs"].values() for name in each} == {OURS, LAYER_MAJOR}
    assert found["versions"]["gpu"] == "none: a CPU at toy size"


@pytest.mark.exhaustive
def test_every_section_measures_without_a_failure(report: dict[str, Any]) -> None:
    names = ["decode", "prefill", "layers", "model", "handoff"]
    assert [name for name in script.SECTIONS if name in report["runs"]] == names
    assert len(report["tables"]) == 7
    for table in report["tables"]:
        assert table["rows"]
        assert "ailed" not in table["title"] + table["note"]
    assert [row[0] for row in report["runs"]["handoff"]["tables"][0]["rows"]] == [
        "device copy, by torch",
        "shm",
        "pool",
    ]


@pytest.mark.exhaustive
def test_prefilling_is_measured(report: dict[str, Any]) -> None:
    assert all(rate > 0 for found in report["runs"]["prefill"]["runs"].values() for rate in found.values())


@pytest.mark.exhaustive
def test_the_model_is_measured_ahead_waiting_and_eager(report: dict[str, Any]) -> None:
    table = report["runs"]["model"]["tables"][0]
    assert [row[0] for row in table["rows"]][:3] == [f"decode {number} x 1024" for number in (1, 64, 256)]
    assert all(value > 0 for row in table["rows"] for value in row[1:6])


def test_a_section_that_fails_leaves_its_traceback_and_the_others(tmp_path: Path) -> None:
    def breaks() -> GpuSection:
        raise ValueError("no such kernel")

    record = script.ResultsFile(tmp_path / "out.json", "a gpu")
    record.add("model", script.attempt("model", breaks), 1.0)
    record.add("decode", script.attempt("decode", GpuSection), 1.0)
    report = json.loads((tmp_path / "out.json").read_text())
    assert [table["title"] for table in report["tables"]] == ["model: failed"]
    assert "ValueError: no such kernel" in report["tables"][0]["rows"][0][0]
    again = script.ResultsFile(tmp_path / "out.json", "a gpu")
    again.add("model", GpuSection(), 1.0)
    assert json.loads((tmp_path / "out.json").read_text())["runs"].keys() == {"model", "decode"}
    script.ResultsFile(tmp_path / "out.json", "another gpu").add("decode", GpuSection(), 1.0)
    assert json.loads((tmp_path / "out.json").read_text())["runs"].keys() == {"decode"}, "sections of two GPUs"


def test_a_failed_figure_is_reported() -> None:
    def breaks() -> None:
        raise ValueError("too large")

    scene = GpuScene(torch.device("cpu"), True)
    scene.attempt("tile 512", breaks)
    assert scene.failures == " Failed: tile 512: ValueError too large."


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--device", "cpu"], "only with --toy"), (["--toy"], "give --out"), (["--only", "model,x"], "--only x: choose")],
)
def test_invalid_flags_are_refused(
    flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_first_run", *flags])
    with pytest.raises(SystemExit):
        script.main()
    assert words in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="they would run here")
def test_the_checks_run_without_the_plugins_of_the_project() -> None:
    scene = GpuScene(torch.device("cpu"), True)
    sections = [script.SECTIONS[name](scene) for name in ("check_kernels", "check_runner")]  # each has its own table
    rows: Any = [section.tables[0].rows[0] for section in sections]
    assert [row[0] for row in rows] == list(script.SUITES)
    assert all(row[1:3] == [0, 0] and row[3] > 20 and row[4] == "none" for row in rows)


def test_the_other_layout_holds_the_same_values_in_another_order() -> None:
    pool = RandomKV(GpuScene(torch.device("cpu"), True), 1 << 16).pool(4, layer_major=True)
    assert isinstance(pool, LayerMajorPool)
    keys, values = pool.layer(1)
    layout = pool.layout
    assert keys.shape == (layout.num_blocks, layout.kv_heads, layout.block_tokens, layout.head_dim)
    flat = pool.tensor.view(layout.layers, layout.num_blocks, layout.block_tokens, layout.kv_heads, 2, layout.head_dim)
    assert torch.equal(keys[3, 1, 2], flat[1, 3, 2, 1, 0])
    assert torch.equal(values[3, 1, 2], flat[1, 3, 2, 1, 1])


def test_work_is_counted_as_for_the_published_figures() -> None:
    assert flops(LLAMA_8B, 0, 8192) == pytest.approx(4 * 32 * 128 * 8192**2 / 2, rel=1e-3)
    assert flops(LLAMA_8B, 100, 101) == 4 * 32 * 128 * 101

"""The GPU run at toy size on a CPU, in its own process: the code of every section runs, its kernels interpreted."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.document import written
from benchmarks.gpu import first_run as script
from benchmarks.gpu.handoff import ARMS, SHOWN, GpuPeer, PeerJob, compared
from benchmarks.gpu.kernels import (
    FA3_DECODE_TBS,
    FA3_PREFILL_TFS,
    LENGTHS,
    POINTS,
    KernelVariant,
    default_kernel,
    flops,
    products,
)
from benchmarks.gpu.scene import GpuScene, GpuSection, LayerMajorPool, RandomKV, failure_note, one_of_many
from engine.models.config import ModelConfig
from tests.compare.reports import report_of

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
MEASURED = ["decode", "prefill", "gemm", "model", "handoff"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton has wheels for Linux only")


def scene() -> GpuScene:
    return GpuScene(torch.device("cpu"), True, 0.0)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a machine that lacks the libraries that only a cluster needs."""
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("gpu") / "gpu_first_run.json"
    command = [sys.executable, "-c", BARE, "--device", "cpu", "--toy", "--out", str(out), "--only"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}  # a test imports Triton first
    for only in ("decode,gemm", "prefill,model,handoff"):
        run = subprocess.run([*command, only], cwd=ROOT, env=environment, timeout=600, capture_output=True, check=False)
        assert run.returncode == 0, run.stderr.decode()[-2000:]
    found: dict[str, Any] = json.loads(out.read_text())
    marked = f"<!-- result: {out.stem} -->\n<!-- end -->\n"
    assert all(table["title"] in written([marked], out.parent)[0] for table in found["tables"])
    return found


def test_every_section_measures_without_a_failure(report: dict[str, Any]) -> None:
    assert [name for name in script.SECTIONS if name in report["runs"]] == MEASURED
    assert [table["title"] for table in report["tables"] if "failed" in table["title"]] == []
    assert len(report["tables"]) == len(MEASURED)
    assert all(table["rows"] for table in report["tables"])
    assert report["versions"]["gpu"] == "none: a CPU at toy size"


def test_attention_is_measured_in_both_layouts_and_in_other_tiles(report: dict[str, Any]) -> None:
    variants = {name for found in report["runs"]["decode"]["runs"].values() for name in found}
    assert {KernelVariant().name, KernelVariant(layer_major=True).name} <= variants
    assert any("tile" in name or "splits" in name or "programs" in name for name in variants)
    assert all(rate > 0 for found in report["runs"]["prefill"]["runs"].values() for rate in found.values())


def test_the_model_is_measured_ahead_waiting_and_eager(report: dict[str, Any]) -> None:
    table = report["runs"]["model"]["tables"][0]
    assert [row[0] for row in table["rows"]][:3] == [f"decode {number} x 1024" for number in (1, 64, 256)]
    assert all(value > 0 for row in table["rows"] for value in row[1:6])


def test_blocks_arrive_in_the_other_process(report: dict[str, Any]) -> None:
    names = [row[0] for row in report["runs"]["handoff"]["tables"][0]["rows"]]
    assert names == ["device copy, by torch", "shm", "pool"]


def test_the_second_process_reports_why_it_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="its output is above"):
        GpuPeer(PeerJob(str(tmp_path / "missing"), False, 4, 64))
    assert "cannot listen" in capfd.readouterr().err


def test_a_section_that_fails_leaves_its_traceback_and_the_others(tmp_path: Path) -> None:
    def breaks() -> GpuSection:
        raise ValueError("no such kernel")

    record = script.ResultsFile(tmp_path / "out.json", "a gpu")
    record.add("gemm", script.attempt("gemm", breaks), 1.0)
    record.add("decode", script.attempt("decode", GpuSection), 1.0)
    report = json.loads((tmp_path / "out.json").read_text())
    assert [table["title"] for table in report["tables"]] == ["gemm: failed"]
    assert "ValueError: no such kernel" in report["tables"][0]["rows"][0][0]
    again = script.ResultsFile(tmp_path / "out.json", "a gpu")
    again.add("gemm", GpuSection(), 1.0)
    assert json.loads((tmp_path / "out.json").read_text())["runs"].keys() == {"gemm", "decode"}


def test_a_failed_figure_does_not_prevent_the_others() -> None:
    failed: list[str] = []
    measured = []
    for tile in (64, 512, 128):
        with one_of_many(f"tile {tile}", failed):
            measured.append(tile if tile < 512 else 1 // 0)
    assert (measured, failed) == ([64, 128], ["tile 512: ZeroDivisionError integer division or modulo by zero"])
    assert failure_note(failed).endswith("by zero.")
    assert failure_note([]) == ""


@pytest.mark.parametrize(
    ("text", "names"),
    [("kernels", ["checks", "decode", "prefill", "gemm"]), ("model, checks", ["checks", "model"])],
)
def test_sections_are_named_alone_or_together(text: str, names: list[str]) -> None:
    assert script.wanted(text) == names


def test_an_unknown_section_is_refused() -> None:
    with pytest.raises(ValueError, match="--only nonsense: choose from checks, "):
        script.wanted("model,nonsense")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "cpu"], "only with --toy"),
        (["--device", "cpu", "--toy"], "give --out"),
        (["--only", "x"], "choose from"),
    ],
)
def test_invalid_flags_are_refused(
    flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_first_run", *flags])
    with pytest.raises(SystemExit):
        script.main()
    assert words in capsys.readouterr().err


def test_pytest_results_are_counted() -> None:
    output = "FAILED tests/gpu/test_a.py::test_b - assert 1\nERROR tests/gpu/test_c.py\n1 failed, 7 passed, 2 skipped, 1 error in 3s"
    assert script.counts(output) == [7, 2, 2]
    assert script.failures(output) == ["tests/gpu/test_a.py::test_b - assert 1", "tests/gpu/test_c.py"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="they would run here")
def test_the_checks_run_without_the_plugins_that_the_project_names() -> None:
    section = script.checks(GpuScene(torch.device("cpu"), True, time.monotonic() + 60))
    rows: Any = section.tables[0].rows
    assert [row[0] for row in rows] == list(script.SUITES)
    assert all(row[1:3] == [0, 0] and row[3] > 20 and row[4] == "none" for row in rows)


def test_a_comparison_becomes_one_row_per_arm() -> None:
    section = compared(report_of(arms=ARMS[:2]))
    assert [row[0] for row in section.tables[0].rows] == list(ARMS[:2])
    assert section.tables[0].columns == ["arm", *SHOWN]
    assert "Answers: the same in every arm, of 600." in section.tables[0].note
    assert sum(value is not None for value in section.tables[0].rows[0][1:]) >= 3


def test_the_other_layout_holds_the_same_values_in_another_order() -> None:
    pool = RandomKV(scene(), 1 << 16).pool(4, layer_major=True)
    assert isinstance(pool, LayerMajorPool)
    keys, values = pool.layer(1)
    layout = pool.layout
    assert keys.shape == (layout.num_blocks, layout.kv_heads, layout.block_tokens, layout.head_dim)
    flat = pool.tensor.view(layout.layers, layout.num_blocks, layout.block_tokens, layout.kv_heads, 2, layout.head_dim)
    assert torch.equal(keys[3, 1, 2], flat[1, 3, 2, 1, 0])
    assert torch.equal(values[3, 1, 2], flat[1, 3, 2, 1, 1])
    assert keys.data_ptr() != values.data_ptr()


def test_work_is_counted_as_for_the_published_figures() -> None:
    real = GpuScene(torch.device("cpu"), False, 0.0)
    assert flops(real, 0, 8192) == pytest.approx(4 * 32 * 128 * 8192**2 / 2, rel=1e-3)
    assert flops(real, 100, 101) == 4 * 32 * 128 * 101
    count = sum(outputs * inputs for name, outputs, inputs in products(real) if name != "head")
    assert count * 32 == pytest.approx(6.98e9, rel=0.01)
    assert set(FA3_DECODE_TBS) <= set(POINTS)
    assert list(FA3_PREFILL_TFS) == list(LENGTHS)
    assert isinstance(real.config, ModelConfig)
    assert real.config.hidden_size == real.config.num_heads * real.config.head_dim


def test_the_default_kernel_for_prompts_is_decided_at_8k() -> None:
    assert "not measured" in default_kernel({})
    assert "our kernel stays" in default_kernel({"as chosen": 410.0, "flash_attn 3": 580.0})
    assert "should be flash_attn 3, at 580" in default_kernel({"as chosen": 390.0, "flash_attn 3": 580.0})


def test_the_sections_fit_into_nine_minutes() -> None:
    assert sum(script.SECTIONS.values()) == script.TOTAL_S <= 9 * 60

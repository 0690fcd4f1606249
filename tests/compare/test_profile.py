"""Test `baton profile`: the grid, the cost file, and the fit to the records of a running cluster."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import main
from compare.arms import parse_arm
from compare.load.client import LoadSpec
from compare.load.outcome import LoadRecording
from compare.load.traffic import PromptVocabulary, TrafficSource
from compare.options import CompareOptions
from compare.profiling.grid import grid
from compare.profiling.main import from_records, run_profile
from compare.profiling.options import ProfileOptions
from compare.run.simulated import SimulatedEndpoint, cluster_plan
from engine.emulation import load_emulation
from scheduler.cost import StepWork
from tests.command_line import refusal
from tests.engine.families import CONFIGS, save

TINY = "tests/data/stories260K"


@pytest.mark.parametrize(("most", "kv_tokens"), [(120, 880_000), (30, 880_000), (120, 4096)])
def test_the_cases_of_a_grid_fit_the_node(most: int, kv_tokens: int) -> None:
    cases = grid(most, 8192, 256, 40_000, kv_tokens)
    assert len(cases) == len(set(cases)) == most or kv_tokens == 4096
    for case in cases:
        assert case.kv_tokens <= kv_tokens
        assert case.work.tokens <= 8192
        assert max(case.start + case.count, case.context) < 40_000
    assert any(case.count and case.decodes for case in cases), "mixed steps"
    assert any(case.count and not case.decodes for case in cases)
    assert any(case.decodes > 8 and not case.count for case in cases)


def test_a_profile_that_was_interrupted_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cost.json"
    options = ProfileOptions(model=TINY, cases=20, seconds=0.0, out=out, set=["threads=1"])
    said = []

    def interrupt(*texts: str, **_: object) -> None:
        said.append(texts)
        if len(said) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("builtins.print", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_profile(options)
    assert not out.exists()
    assert run_profile(options) == 0
    printed = capsys.readouterr().out
    assert "continuing: 5 of 20 cases" in printed
    assert "1/15" in printed
    assert not out.with_suffix(".partial").exists()
    device = load_emulation(str(out))
    assert device.cost.seconds(StepWork(num_decodes=1, decode_context=16)) > 0
    assert device.residuals[0] < 1 < device.residuals[-1]
    assert (
        device.kv_tokens == (512 << 20) // device.kv_bytes_per_token // device.block_tokens * device.block_tokens - 16
    )


def test_a_model_that_mixes_windows_with_full_attention_is_profiled(tmp_path: Path) -> None:
    save(CONFIGS["gemma2"], tmp_path)
    shutil.copy(f"{TINY}/tokenizer.json", tmp_path)
    out = tmp_path / "cost.json"
    small = ["threads=1", "kv_cache_memory=1048576", "max_model_len=256", "max_num_batched_tokens=64"]
    options = ProfileOptions(model=str(tmp_path), cases=20, seconds=0.0, out=out, set=small)
    assert run_profile(options) == 0
    device = load_emulation(str(out))
    assert device.kv_tokens * device.kv_bytes_per_token == pytest.approx(1 << 20, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "./nowhere"], "nowhere"),
        (["--from", "http://127.0.0.1:9", "--model", TINY], "--model and --from: give only one of them"),
        (["--from", "http://127.0.0.1:9", "--set", "threads=2"], "--set and --from: give only one of them"),
        (["--seconds", "inf"], "--seconds inf: must be a number of at most 1e+09"),
        (["--from", "http://127.0.0.1:9", "--seconds", "1"], "--seconds and --from: give only one of them"),
        (["--out", "demo"], "--out demo: is a directory; give a file"),
        (["--model", "demo/hybrid"], "--model: models with recurrent layers are not profiled"),
        (["--set", "threads=many"], "--set: --threads 'many'"),
        (["--from", "http://127.0.0.1:9"], "nothing answers at http://127.0.0.1:9"),
        (["--model", TINY, "--cases", "20", "--seconds", "0", "--out", "file/cost.json"], "file/cost"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    here = sorted(Path().iterdir())
    given = [each.replace("file/", f"{tmp_path}/file/") for each in arguments]
    line = refusal(capsys, lambda: main(["profile", *given]))
    assert line.startswith("baton profile: ")
    assert complaint in line
    assert sorted(Path().iterdir()) == here


async def test_the_fit_to_records_finds_the_numbers_of_the_cluster(tmp_path: Path) -> None:
    """The records are those of a simulated cluster, whose parameters are known."""
    device = load_emulation("h200-llama-3.1-8b@100gbe")
    plan = cluster_plan(parse_arm("disaggregated:1p1d"), device)
    endpoint = SimulatedEndpoint("split", plan, itertools.count(), records=True)
    options = CompareOptions(preset="chat", scale_tokens=1.0, rate=12.0, duration=15.0)
    arrivals = TrafficSource(options, PromptVocabulary(1000), []).draw(1).arrivals
    endpoint.serve(LoadSpec("", "", arrivals), LoadRecording())
    found = await from_records(endpoint)
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(found))
    fitted = load_emulation(str(path))
    for work in (
        StepWork(num_decodes=1, decode_context=500),
        StepWork(num_decodes=40, decode_context=60_000),
        StepWork(1, 512, 300_000, 0, 0),
    ):
        assert fitted.cost.seconds(work) == pytest.approx(device.cost.seconds(work), rel=0.02)
    assert found["errors_percent"]["mean"] < 0.5
    assert fitted.residuals[0] < 1 < fitted.residuals[-1]
    assert fitted.prefill_residuals[0].up_to_s < fitted.prefill_residuals[-1].up_to_s
    assert all(each.quantiles == pytest.approx([1.0] * 201, abs=0.05) for each in fitted.prefill_residuals)
    assert fitted.times.step_s == pytest.approx(device.times.step_s, rel=0.05)
    assert fitted.times.slice_s == pytest.approx(device.times.slice_s, rel=0.2)
    assert fitted.link.bytes_per_s == pytest.approx(device.link.bytes_per_s, rel=0.1)
    assert (fitted.kv_bytes_per_token, fitted.block_tokens) == (device.kv_bytes_per_token, device.block_tokens)
    assert fitted.kv_tokens == device.kv_tokens // device.block_tokens * device.block_tokens


async def test_the_wait_for_a_commit_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = cluster_plan(parse_arm("disaggregated:1p1d"), load_emulation("h200-llama-3.1-8b"))
    endpoint = SimulatedEndpoint("split", plan, itertools.count(), records=True)
    options = CompareOptions(preset="chat", rate=8.0, duration=5.0)
    endpoint.serve(
        LoadSpec("", "", TrafficSource(options, PromptVocabulary(1000), []).draw(1).arrivals), LoadRecording()
    )
    assert (await from_records(endpoint))["serving"]["push_s"] < 0.001
    requests = await endpoint.requests()
    for each in requests:
        if each["transfer"]:
            each["transfer"]["exposed_ms"] += 50.0

    async def delayed() -> list[dict[str, Any]]:
        return requests

    monkeypatch.setattr(endpoint, "requests", delayed)
    assert (await from_records(endpoint))["serving"]["push_s"] == pytest.approx(0.05, abs=0.005)


async def test_a_cluster_without_records_is_refused() -> None:
    plan = cluster_plan(parse_arm("colocated:1"), load_emulation("h200-llama-3.1-8b"))
    with pytest.raises(ValueError, match="has records of 0 steps and 0 requests, which are too few; send it traffic"):
        await from_records(SimulatedEndpoint("idle", plan, itertools.count(), records=True))

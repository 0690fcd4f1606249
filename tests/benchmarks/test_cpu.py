"""Tests of the CPU benchmark at toy size: the workers, the comparison with goals, and the results of earlier runs."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import __main__ as entry
from benchmarks import cpu
from benchmarks.cpu import FP32, LLAMA_F32, VLLM_FP32
from benchmarks.models import SHAPES, checkpoint
from benchmarks.process import PeerFailedError, PeerProcess
from engine.models.families import read_model_config
from tests.cluster.harness import state_of, wait_for


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def ours(models: Path) -> Iterator[PeerProcess]:
    options = {"model": str(checkpoint("tiny", models)), "threads": 1}
    with closing(PeerProcess("benchmarks.peers.baton", options, pauses=True)) as worker:
        yield worker


@pytest.mark.parametrize("shape", SHAPES)
def test_the_engine_accepts_the_config_of_every_shape(shape: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape]))
    config = read_model_config(tmp_path)
    assert config.head_dim * config.num_heads == config.hidden_size
    assert config.layers[0].mixer.qkv_bias == (shape == "0.5b")


def test_a_checkpoint_is_generated_once(models: Path) -> None:
    path = checkpoint("tiny", models)
    made = (path / "model.safetensors").stat().st_mtime_ns
    assert checkpoint("tiny", models) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == made
    with pytest.raises(ValueError, match="110m"):
        checkpoint("7b", models)


def test_our_worker_times_each_kind_of_work_and_is_stopped_between_calls(ours: PeerProcess) -> None:
    assert ours.call("prefill", tokens=64) > 0
    assert ours.call("decode", batch=3, context=32, steps=4) > 0
    assert ours.peak_bytes > 50e6
    wait_for(lambda: state_of(ours.pid) == "stopped", "the signal takes effect", 10.0)


def test_our_logprobs_do_not_depend_on_the_previous_call(ours: PeerProcess) -> None:
    first = ours.call("logprobs", tokens=[5, 6, 7])
    ours.call("decode", batch=2, context=16, steps=2)
    assert len(first) == 20
    assert ours.call("logprobs", tokens=[5, 6, 7]) == pytest.approx(first, abs=1e-5)
    assert sum(math.exp(value) for value in first.values()) < 1


def test_a_failure_is_reported_in_one_line_and_the_worker_continues(ours: PeerProcess) -> None:
    for call in ("no_such_call", "_start"):
        with pytest.raises(PeerFailedError, match=call):
            ours.call(call)
    assert ours.call("prefill", tokens=8) > 0
    with pytest.raises(PeerFailedError, match="no-such-model"):
        PeerProcess("benchmarks.peers.baton", {"model": "/no-such-model", "threads": 1})
    with pytest.raises(PeerFailedError, match="no-such-python"):
        PeerProcess("benchmarks.peers.baton", {}, python="/no-such-python")


@pytest.mark.exhaustive
def test_a_run_keeps_the_rows_of_the_previous_run(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "cpu.json"
    for name in ("BATON_PEER_LLAMA", "BATON_PEER_VLLM"):
        monkeypatch.delenv(name, raising=False)
    for rows in ("memory", "prefill"):
        flags = ["--model", "tiny", "--rows", rows, "--repeats", "1", "--threads", "1", "--directory", str(models)]
        monkeypatch.setattr(sys, "argv", ["benchmarks", "cpu", *flags, "--out", str(out)])
        entry.main()
    report = json.loads(out.read_text())
    assert set(report["runs"]) == {"memory", "prefill"}
    labels = [row[0] for row in report["tables"][0]["rows"]]
    assert labels == ["prefill 512 (prefill)", "prefill 2,048 (prefill)", "peak memory with 0.4 GiB of KV, GB"]
    without = report["runs"]["prefill"]["without"]
    assert "BATON_PEER_LLAMA" in without[LLAMA_F32]
    assert "BATON_PEER_VLLM" in without[VLLM_FP32]


def test_rows_are_judged_against_the_better_peer_and_their_bound() -> None:
    arms = {FP32: [10.0, 12.0], LLAMA_F32: [9.0, 9.0], VLLM_FP32: [10.0, 10.0]}
    _, ours, theirs, ratio, goal, met = cpu.compared_row("decode", arms, FP32, 1.1)
    assert (ours, ratio, goal, met) == (11.0, pytest.approx(1.1), "≥ 1.1", True)
    assert theirs == "llama.cpp F32 9, vLLM fp32 10"
    assert cpu.compared_row("memory", {FP32: [3.0], VLLM_FP32: [4.0]}, FP32, 0.5, lower=True)[-1] is False
    assert cpu.compared_row("alone", {FP32: [3.0]}, FP32, 1.1)[3:] == [None, "≥ 1.1", ""]


def test_every_entry_loads_and_an_unknown_one_lists_the_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len({entry.load(name) for name in entry.BENCHMARKS}) == len(entry.BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "nothing"])
    with pytest.raises(SystemExit, match="2"):
        entry.main()
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in entry.BENCHMARKS)

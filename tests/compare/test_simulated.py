"""Test `baton compare --on sim`: the same arms, traffic and report as live, on a virtual clock."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from compare.main import prepare, run_compare
from compare.options import DEFAULT_EMULATED, CompareOptions
from compare.run.session import run_session
from compare.run.simulated import SimulatedEndpoint, predict
from engine.emulation import load_emulation

ARMS = ["colocated:2", "disaggregated:1p1d", "colocated:2@prefill_first"]


async def compare(out: Path, **options: object) -> dict[str, Any]:
    given = {"on": "sim", "preset": "chat", "rate": 8.0, "duration": 12.0, "seeds": 2, "scale_tokens": 0.5}
    await run_compare(CompareOptions(out=out, **(given | options)))
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


async def test_a_report_has_what_a_live_report_has(tmp_path: Path) -> None:
    report = await compare(tmp_path, arms=ARMS, tbt_slo_ms=8.0)
    assert report["valid"], report["problems"]
    assert report["on"] == "sim"
    assert report["verdict"]["conditions"].startswith("2 simulated h200-llama-3.1-8b devices, ")
    split = report["arms"][1]["name"]
    for arm in ARMS:
        assert report["summary"][arm]["ttft_p50_ms"]["mean"] > 5
        nodes = report["busy"][arm]
        assert len(nodes) == 2
        assert all(0 < node["busy"] < 1 for node in nodes.values())
        phases = report["phases"][arm]
        assert phases["requests"]["mean"] == phases["requests"]["arrived"]
        assert phases["residual_ms"]["p99"] < 0.01, "phases sum to the time at the client"
        assert report["strip"][arm]["requests"]
    assert report["phases"][split]["mean"]["transfer_exposed"] > 0
    assert report["phases"][ARMS[0]]["mean"]["interference"] > 0
    assert report["miss_causes"][ARMS[0]]
    assert report["worst"][0]["spans"]
    kept = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert len(kept) == len(ARMS) * report["traffic"]["num_requests"]
    assert (tmp_path / "report.html").exists()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


async def test_a_simulation_is_repeatable(tmp_path: Path) -> None:
    one, other = [await compare(tmp_path / name, arms=ARMS[:2], duration=6.0) for name in ("one", "other")]
    assert one["summary"] == other["summary"]
    assert one["verdict"] == other["verdict"]


async def test_a_signal_ends_a_session_after_the_current_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = SimulatedEndpoint.serve

    def interrupted(self: SimulatedEndpoint, *arguments: Any) -> None:
        serve(self, *arguments)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(SimulatedEndpoint, "serve", interrupted)
    report = await compare(tmp_path, arms=ARMS[:2], duration=1.0, find_capacity=True, rate=None)
    assert report["problems"][0].startswith("interrupted: ")
    assert [run["valid"] for run in report["runs"]] == [True, False]


async def test_capacities_are_found(tmp_path: Path) -> None:
    """A request takes about 1.2 s. Two nodes, each with two requests at once, therefore serve about 3 requests/s."""
    traffic = {"rate": None, "duration": 60.0, "scale_tokens": 1.0, "ttft_slo_ms": 3000.0}
    report = await compare(tmp_path, arms=ARMS[:2], find_capacity=True, set=["max_num_seqs=2"], **traffic)
    colocated, split = (report["summary"][arm]["capacity_rps"] for arm in ARMS[:2])
    assert colocated["bounded"] == split["bounded"] == "yes"
    assert 1.5 < colocated["mean"] < 4
    assert 0.3 * colocated["mean"] < split["mean"] < 0.7 * colocated["mean"], "only one of its nodes generates"


async def test_a_search_below_all_rates_gives_a_report(tmp_path: Path) -> None:
    report = await compare(tmp_path, arms=ARMS[:2], find_capacity=True, tbt_slo_ms=1.0, rate=None)
    assert any("sustains less than" in problem for problem in report["problems"])


async def test_an_arm_that_shares_no_prefixes_computes_more(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"t": n / 8, "prompt_len": 900, "prefix_id": "p", "prefix_len": 800, "max_tokens": 20} for n in range(40)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    arms = ["colocated:1", "colocated:1@enable_prefix_caching=false"]
    report = await compare(
        tmp_path / "out", arms=arms, trace=trace, preset="", scale_tokens=1.0, rate=None, duration=5.0, seeds=1
    )
    shares, not_shares = (report["summary"][arm]["ttft_p50_ms"]["mean"] for arm in arms)
    assert shares < 0.7 * not_shares


@pytest.mark.parametrize("arm", ["disaggregated:1p1d@disaggregate=auto", "disaggregated:1p1d@ttft_slo_ms=30"])
async def test_the_router_decides_as_when_live(arm: str, tmp_path: Path) -> None:
    """Conditional disaggregation keeps some prompts on the decode node, and --ttft-slo-ms refuses some requests."""
    report = await compare(tmp_path, arms=["colocated:2", arm], rate=30.0, seeds=1, duration=5.0)
    run = next(run for run in report["runs"] if run["arm"] == arm)
    if "auto" in arm:
        assert 0 < run["kv"]["handoffs"] < run["arrived"]
    else:
        assert 0 < run["failed"] < run["arrived"]


async def test_a_measured_period_can_be_simulated(tmp_path: Path) -> None:
    options = CompareOptions(on="sim", arms=ARMS[:2], rate=8.0, duration=5.0, seeds=1, out=tmp_path)
    experiment, deployments, _ = prepare(options)
    findings = await run_session(experiment, deployments, lambda _: None)
    found = await predict(experiment, load_emulation(DEFAULT_EMULATED), [period.trial for period in findings.periods])
    for period in findings.periods:
        for measured, simulated in zip(period.recording.outcomes, found[period.trial.position], strict=True):
            assert simulated.token_s == pytest.approx(measured.token_s, abs=1e-6)

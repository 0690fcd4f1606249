"""Test `baton plan`: the recommendation, its basis, and the refusal of invalid options."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from cluster.cli import main
from compare.arms import parse_arm
from compare.endpoint import EndpointError
from compare.load.outcome import LatencySlo
from compare.load.traffic import Arrival, Traffic
from compare.planning.candidates import Run, Simulations, candidates, miss_counts, prepare
from compare.planning.deployment import compose_override
from compare.planning.main import add_validation, run_plan
from compare.planning.options import PlanOptions
from compare.planning.report import cells_of, finalist, flips, recommendation, winners
from compare.planning.search import Measured, kept
from compare.planning.validation import simulated, validate
from compare.run.session import Experiment, Findings
from compare.stats.capacity import CapacityEstimate, CapacityPoint, capacity_of, paired_capacities
from engine.emulation import COSTS
from tests.cluster.harness import state_of, wait_for
from tests.command_line import refusal
from tests.engine.build import thinned

ONE, SPLIT = "colocated:2", "disaggregated:1p1d"
SMALL: dict[str, Any] = {"gpus": 3, "budgets": [2048], "policies": ["stall_free"], "seeds": 3, "requests": 100}


def trace(path: Path, prompt: int, answer: int) -> Path:
    rows = [{"t": float(n), "prompt_len": prompt + n % 7, "max_tokens": answer + n % 5} for n in range(50)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--gpus", "0"], "--gpus 0: there is nothing to split; give 2 or more"),
        (["--gpus", "1"], "--gpus 1: there is nothing to split; give 2 or more"),
        (["--preset", "poetry"], "--preset poetry: must be chat"),
        (["--trace", "t.jsonl", "--preset", "chat"], "--trace and --preset: give only one of them"),
        (["--trace-format", "own"], "--trace-format: has no effect without --trace; give --trace, or leave out"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
        (["--trace", "negative.jsonl"], "negative.jsonl, line 1, read as own: prompt_len is -5, which is not a number"),
        (["--trace", "long.jsonl"], "a request has 2000010 tokens, but a node holds the KV of"),
        (["--trace", "long.jsonl"], "give --scale-tokens 0.4"),
        (["--set", "num_blocks=3"], "but a node holds the KV of 128: give a larger num_blocks"),
        (["--tbt-slo-ms", "inf"], "--tbt-slo-ms inf: must be a number of at most 1e+09"),
        (["--scale-tokens", "inf"], "--scale-tokens inf: must be a number of at most"),
        (["--burstiness", "inf"], "--burstiness inf: must be a number of at most"),
        (["--cost", "h900"], "--cost h900: is neither a file nor one of h200-llama-3.1-8b"),
        (["--cost", "old.json"], "--cost old.json: version is 0, but must be"),
        (["--tbt-slo-ms", "2"], "--tbt-slo-ms 2: one step of h200-llama-3.1-8b takes 5.0 ms; give more"),
        (["--ttft-slo-ms", "1"], "--ttft-slo-ms 1: one step of h200-llama-3.1-8b takes 5.0 ms; give more"),
        (["--policies", "lucky"], "--policies lucky: must be stall_free"),
        (["--validate", "mars"], "--validate mars: must be live or emulated"),
        (["--set", "max_num_seqs=many"], "--set: --max-num-seqs 'many': must be a whole number"),
        (["--set", "speculative_config=ngram"], "baton plan: colocated:1: speculative_config is not simulated"),
        (["--set", "policy=static"], "--set policy: the plan tries several values; give --policies instead"),
        (["--set", "max-num-batched-tokens=64"], "--set max_num_batched_tokens: the plan tries several values; give"),
        (["--model", "nowhere"], "--model: has no effect without --validate; give --validate, or leave out --model"),
        (["--budgets", "9999999"], "Invalid value for '--budgets'"),
        (["--requests", "50000"], "Invalid value for '--requests'"),
        (["--workers", "3000000000"], "Invalid value for '--workers'"),
        (["--out", "t.jsonl"], "--out t.jsonl: Not a directory"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    trace(Path("t.jsonl"), 10, 10)
    Path("negative.jsonl").write_text('{"t": 0, "prompt_len": -5, "max_tokens": 3}')
    Path("long.jsonl").write_text('{"t": 0, "prompt_len": 2000000, "max_tokens": 10}')
    Path("old.json").write_text('{"version": 0}')
    before = set(Path().iterdir())
    line = refusal(capsys, lambda: main(["plan", *arguments]))
    assert line.startswith("baton plan: ")
    assert complaint in line
    assert set(Path().iterdir()) == before


def test_a_value_that_is_given_twice_is_tried_once() -> None:
    once = PlanOptions(budgets=[512, 256], policies=["stall_free"])
    twice = PlanOptions(budgets=[512, 256, 512], policies=["stall_free", "stall_free"])
    assert candidates(twice) == candidates(once)


@pytest.mark.parametrize(("prompt", "answer", "better"), thinned([(2000, 4, "2p1d"), (100, 40, "1p2d")], 2))
def test_the_ratio_follows_the_traffic(
    prompt: int, answer: int, better: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long prompts with short answers need prefill nodes; short prompts with long answers need decode nodes."""
    file = trace(tmp_path / "trace.jsonl", prompt, answer)
    few = SMALL | {"seeds": 2, "set": ["max_num_seqs=4"]}
    assert run_plan(PlanOptions(trace=file, price=3.0, out=tmp_path / "out", workers=1, **few)) == 0
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    splits = [each["arm"] for each in plan["candidates"] if each["arm"].startswith("disaggregated")]
    assert len(plan["candidates"]) == 4
    assert splits[0].startswith(f"disaggregated:{better}")
    assert [each["prefill"] for each in plan["splits"]] == [0, 1, 2]
    found = {each["arm"]: each["capacity_rps"] for each in plan["splits"] if each["prefill"]}
    assert max(found, key=found.__getitem__) == splits[0]
    own = [cell for cell in plan["lengths"] if cell["prompt_tokens"] == pytest.approx(prompt + 3, abs=1)]
    assert len(plan["lengths"]) == 9
    assert [cell["answer_tokens"] / (answer + 2) for cell in own] == pytest.approx([0.5, 1, 2], rel=0.05)
    best = plan["finalists"][0]
    rate = best["capacity_rps"]
    assert rate["bounded"] == "yes"
    assert rate["low"] < rate["mean"] < rate["high"]
    tokens = rate["mean"] * (prompt + 3 + answer + 2) * 3600 / 1e6
    assert best["dollars_per_million_tokens"] == pytest.approx(3 * 3.0 / tokens, rel=0.01)
    assert best["arm"] in plan["recommendation"]
    assert plan["recommendation"] in capsys.readouterr().out
    assert all(sum(each["miss_causes"].values()) for each in plan["finalists"][1:]), "at this rate, the others miss"
    page = (tmp_path / "out" / "plan.html").read_text()
    assert "<script" not in page
    assert all(each["arm"] in page for each in plan["candidates"])
    assert page.count('<div class="wide" tabindex="0"') == page.count("<table>"), "a keyboard can scroll each table"
    cells = re.findall(r'<td class="(?:split|one)" title="([^"]+)">[^ ]+ ([^<]+)</td>', page)
    assert len(cells) == sum(bool(cell["winner"]) for cell in plan["winners"] + plan["lengths"]) > 0
    assert all(label in arm or (label == "co-located" and "colocated" in arm) for arm, label in cells)


def simulations(**options: Any) -> Simulations:
    return prepare(PlanOptions(preset="chat", **options))


def test_a_run_is_repeatable_and_its_seeds_are_paired() -> None:
    one = simulations()
    first, again = (one.run(ONE, 4.0, 1, 150) for _ in range(2))
    assert np.array_equal(first.ttft_ms, again.ttft_ms)
    assert not np.array_equal(first.ttft_ms, one.run(ONE, 4.0, 2, 150).ttft_ms)
    slow, fast = (one.requests(one.plan(ONE), rate, 1, 150) for rate in (4.0, 8.0))
    assert [each.num_prompt for each in slow] == [each.num_prompt for each in fast]
    assert [each.at_s for each in slow] == pytest.approx([2 * each.at_s for each in fast])


def test_no_prompts_share_blocks_without_the_prefix_cache() -> None:
    one = prepare(PlanOptions(preset="agentic"))
    shared, own = (
        [name for each in one.requests(one.plan(arm), 1.0, 0, 100) for name in each.hashes]
        for arm in (ONE, f"{ONE}@enable_prefix_caching=false")
    )
    assert len(set(shared)) < len(shared) == len(own) == len(set(own))


def test_the_slo_of_a_row_replaces_that_of_the_plan(tmp_path: Path) -> None:
    rows = [{"t": n, "prompt_len": 800, "max_tokens": 50} for n in range(100)]
    strict = [row | ({"slo": {"ttft_ms": 1}} if n % 2 else {}) for n, row in enumerate(rows)]
    loose = [
        row | {"slo": {"tbt_ms": 1, "tbt_of": "max"} if n % 2 else {"ttft_ms": 10**6}} for n, row in enumerate(rows)
    ]
    file, found = tmp_path / "trace.jsonl", []
    for given in (rows, strict, loose):
        file.write_text("\n".join(map(json.dumps, given)))
        one = prepare(PlanOptions(trace=file))
        runs = one.run(ONE, 2.0, 0, 100)
        causes = [miss_counts(one, ONE, 2.0, 100, LatencySlo(ttft, 1000.0)) for ttft in (1000.0, 1.0)]
        attainment = [runs.attainment(LatencySlo(ttft, 1000.0)) for ttft in (1000.0, 1.0)]
        found.append((attainment, [sum(each.values()) for each in causes]))
    assert found == [([1.0, 0.0], [0, 50]), ([0.5, 0.0], [25, 50]), ([0.5, 0.5], [25, 25])]
    assert set(one.slos(0, 100)) == {LatencySlo(450.0, 1, "max"), LatencySlo(10**6, 40.0)}


def test_a_trace_may_be_shorter_than_the_periods_of_a_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiments = []

    async def run_session(experiment: Experiment, *_: Any) -> Findings:
        experiments.append(experiment)
        return Findings()

    monkeypatch.setattr("compare.planning.validation.run_session", run_session)
    options = PlanOptions(trace=trace(tmp_path / "trace.jsonl", 200, 20), validate="emulated")
    best = [Measured(arm, CapacityEstimate(rate, None, None)) for arm, rate in ((ONE, 20.0), (SPLIT, 5.0))]
    assert asyncio.run(validate(options, prepare(options), best, tmp_path, lambda _: None)) == []
    (experiment,) = experiments
    assert experiment.first_rates == {ONE: 20.0, SPLIT: 5.0}
    assert len(experiment.traffic(2, 20.0).arrivals) > 300


def test_predicted_attainment_counts_overload_as_measured_attainment_does() -> None:
    """Nearly all requests meet the limits, but the queue grows. For a growing queue, a session reports attainment 0."""
    one, slo = simulations(set=["max_num_seqs=4"]), LatencySlo(1e6, 1e6)
    traffic = Traffic((Arrival(0.0, (1,), 1),) * 200)
    experiment: Any = SimpleNamespace(traffic=lambda *_: traffic, timeout_s=600.0, slo=slo)
    assert one.run(ONE, 20.0, 1, 200).attainment(slo) > 0.9
    assert simulated(one, ONE, CapacityPoint(20.0, 1, 1.0), experiment).attainment == 0


def test_a_validation_that_cannot_start_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any) -> None:
        raise EndpointError("http://127.0.0.1:1 does not answer")

    monkeypatch.setattr("compare.planning.main.validate", fails)
    options = PlanOptions(validate="emulated")
    assert add_validation({}, options, simulations(), [], tmp_path, print) == 1
    assert capsys.readouterr().err == "baton plan: --validate emulated: http://127.0.0.1:1 does not answer\n"


@pytest.mark.parametrize(("num_rows", "status"), [(0, 1), (1, 1), (2, 0)])
def test_a_validation_fails_if_a_candidate_was_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rows: int, status: int
) -> None:
    async def measures(*_: Any) -> list[dict[str, Any]]:
        assert not (tmp_path / "validation" / "requests.jsonl").read_text(), "no requests of an earlier validation"
        return [{}] * num_rows

    (tmp_path / "validation").mkdir()
    (tmp_path / "validation" / "requests.jsonl").write_text("{}")
    monkeypatch.setattr("compare.planning.main.validate", measures)
    monkeypatch.setattr("compare.planning.main._write", lambda *_: None)
    best = [Measured(arm, CapacityEstimate(1.0, None, None)) for arm in (ONE, SPLIT)]
    assert add_validation({}, PlanOptions(validate="emulated"), simulations(), best, tmp_path, print) == status


def measured(arm: str, rates: list[float]) -> Measured:
    """Return a candidate whose seeds have these capacities."""
    points = [
        CapacityPoint(at, seed, 0.9 + (capacity - at) / 100)
        for seed, capacity in enumerate(rates)
        for at in (8, 10, 12)
    ]
    return Measured(arm, capacity_of(points, 0.9), points)


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ([10.0, 10.1, 9.9, 10.2], "Too close to call: colocated:2 (10.1 req/s) and disaggregated:1p1d"),
        ([8.5, 8.6, 8.4, 8.6], "Use colocated:2: it carries 10.1 req/s within the SLO for 90% of the requests, 18 %"),
    ],
)
def test_the_recommendation_says_when_it_is_too_close_to_call(rates: list[float], says: str) -> None:
    found = [measured(ONE, [10.0, 10.1, 10.0, 10.2]), measured(SPLIT, rates)]
    runs = paired_capacities({one.arm: one.points for one in found}, 0.9)
    assert recommendation(found, runs, PlanOptions()).startswith(says)


def test_the_recommendation_says_when_only_variants_of_one_mode_are_too_close_to_call() -> None:
    found = [measured(name, [10.0, 10.1, 10.0, 10.2]) for name in (SPLIT, f"{SPLIT}@max_num_batched_tokens=512")]
    found.append(measured(ONE, [8.5, 8.6, 8.4, 8.6]))
    runs = paired_capacities({one.arm: one.points for one in found}, 0.9)
    text = recommendation(found, runs, PlanOptions())
    assert text.startswith(
        f"Use {SPLIT} (10.1 req/s) or {SPLIT}@max_num_batched_tokens=512 (10.1 req/s) within the SLO"
    )
    assert ": these are too close to call." in text
    assert f" {SPLIT} carries 18 % more than {ONE} [" in text


def test_a_terminated_plan_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "baton", "plan", "--workers", "2", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        workers: list[psutil.Process] = []
        wait_for(lambda: workers.extend(psutil.Process(process.pid).children()) or len(workers) > 1, "workers start")
        process.terminate()
    wait_for(lambda: not any(state_of(each.pid) for each in workers), "no worker is left", 10)


def test_the_recommendation_names_the_candidates_with_unknown_intervals() -> None:
    """One seed of the second candidate has a low capacity. Its other seeds have capacities above the measured rates."""
    found = [measured(ONE, [10.0, 10.1, 10.0]), measured(SPLIT, [12.5, 12.4, 4.0])]
    runs = paired_capacities({one.arm: one.points for one in found}, 0.9)
    unknown = f"{SPLIT} (about {found[1].capacity.rate:.3g} req/s)"
    assert recommendation(found, runs, PlanOptions()) == (
        f"No recommendation: {ONE} carries about 10 req/s, but the interval of {unknown} is unknown; give more --seeds"
        " or --requests."
    )
    third = measured("disaggregated:1p2d", [8.5, 8.6, 8.4])
    found = [found[0], third, found[1]]
    runs = paired_capacities({one.arm: one.points for one in found}, 0.9)
    text = recommendation(found, runs, PlanOptions())
    assert text.startswith(f"Use {ONE}: ")
    assert text.endswith(f"The interval of {unknown} is unknown.")


def test_limits_under_which_the_other_mode_wins_are_named() -> None:
    """One arm has shorter TTFTs, and the other has shorter TBTs. All latencies grow in proportion to the rate."""
    slo, one = LatencySlo(1000.0, 100.0), np.ones(10)
    rates = [(rate, seed) for rate in np.arange(2.0, 17.0, 0.5) for seed in (0, 1)]
    runs = {
        ONE: {key: Run(100 * key[0] * one, 12.5 * key[0] * one) for key in rates},
        SPLIT: {key: Run(125 * key[0] * one, 10 * key[0] * one) for key in rates},
    }
    cells = {(cell["ttft_ms"], cell["tbt_ms"]): cell for cell in winners(runs, slo, 0.9)}
    assert cells[1000.0, 100.0]["winner"] == "", "both carry about 8 req/s"
    assert cells[500.0, 200.0]["winner"] == ONE
    assert cells[2000.0, 50.0]["winner"] == SPLIT
    texts = flips(measured(ONE, [10.0, 10.0]), list(cells.values()))
    assert any(text.startswith(f"with TTFT 1000 ms and TBT 50 ms, {SPLIT} carries about") for text in texts)
    assert not any(f", {ONE} carries" in text for text in texts)


@pytest.mark.parametrize("cost", [{"overhead": 0.01}, {"per_pair": 1e-9}])
def test_estimates_accept_costs_without_a_part(cost: dict[str, float], tmp_path: Path) -> None:
    file = tmp_path / "flat.json"
    device = json.loads((COSTS / "h200-llama-3.1-8b.json").read_text())
    file.write_text(json.dumps(device | {"cost": cost, "serving": dict.fromkeys(device["serving"], 0.0)}))
    one, slo = simulations(cost=str(file)), LatencySlo(500.0, 50.0)
    assert one.first_rate(SPLIT, slo) > 0
    assert one.split_for(SPLIT, slo, (2.0, 1.0)) == SPLIT


def test_the_interval_of_a_capacity_has_no_negative_rates() -> None:
    row = finalist(measured(ONE, [8.1, 11.9]), PlanOptions(), simulations(), {})["capacity_rps"]
    assert row["low"] == 0 < row["mean"] < row["high"]


def test_failed_requests_count_in_the_percentiles_of_a_finalist() -> None:
    """Of 100 requests, two were refused, so the 99th percentile has no value."""
    latencies = np.array([10.0] * 98 + [np.inf] * 2)
    point = CapacityPoint(1.0, 0, 0.98)
    found = Measured(ONE, capacity_of([point], 0.9), [point], {(1.0, 0): Run(latencies, latencies)})
    row = finalist(found, PlanOptions(), simulations(), {})
    assert row["latencies_ms"]["ttft"] == {"p50": 10, "p90": 10, "p99": None}
    assert cells_of(row)[1] == ">= 1.0"
    assert cells_of(row)[3:7] == ["10", "-", "10", "-"]
    assert cells_of(row)[7].startswith("<= ")


def test_a_finalist_without_finished_requests_has_no_latencies() -> None:
    one, failed = simulations(), np.full(10, np.inf)
    point = CapacityPoint(1.0, 0, 0.0)
    found = Measured(ONE, capacity_of([point], 0.9), [point], {(1.0, 0): Run(failed, failed)})
    row = finalist(found, PlanOptions(), one, {})
    assert set(row["latencies_ms"]["ttft"].values()) == {None}
    assert cells_of(row)[3:7] == ["-"] * 4


def test_the_split_follows_the_lengths() -> None:
    one, slo = simulations(gpus=8), LatencySlo(500.0, 50.0)
    split = "disaggregated:4p4d@max_num_batched_tokens=512"
    assert one.split_for(split, slo, (1.0, 1.0)) == split
    assert one.split_for(split, slo, (2.0, 0.5)).startswith("disaggregated:6p2d@max_num")
    assert one.split_for(split, slo, (0.001, 100.0)).startswith("disaggregated:1p7d@")
    assert one.split_for("colocated:8", slo, (2.0, 0.5)) == "colocated:8"


def test_the_best_of_each_mode_stays() -> None:
    arms = ["disaggregated:1p2d", "disaggregated:2p1d", "colocated:3"]
    assert kept(arms, 2) == ["disaggregated:1p2d", "colocated:3"]
    assert kept(arms[::-1], 2) == ["colocated:3", "disaggregated:2p1d"]


@pytest.mark.parametrize("arm", ["colocated:4@max_num_batched_tokens=512", "disaggregated:1p3d@tbt_slo_ms=20"])
def test_the_compose_override_starts_the_recommended_nodes(arm: str) -> None:
    head, _, body = compose_override(parse_arm(arm)).partition("{")
    services = json.loads("{" + body)["services"]
    replicas = {name: service["deploy"]["replicas"] for name, service in services.items() if "deploy" in service}
    if arm.startswith("colocated"):
        assert "--profile colocated" in head
        assert replicas == {"prefill": 0, "decode": 0, "colocated": 4}
        assert services["colocated"]["environment"] == {"BATON_MAX_NUM_BATCHED_TOKENS": "512"}
        assert services["router"]["environment"] == {"BATON_MODE": "colocated"}
    else:
        assert replicas == {"prefill": 1, "decode": 3}
        assert services["decode"]["environment"]["BATON_TBT_SLO_MS"] == "20"
        assert services["router"]["environment"] == {"BATON_MODE": "disaggregated", "BATON_DISAGGREGATE": "always"}

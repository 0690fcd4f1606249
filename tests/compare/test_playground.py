"""Test the interactive simulator: its queries, its figures, and what the guided tour says."""

import json
import re
import subprocess
import sys
import tracemalloc
from dataclasses import fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from compare.playground.interactive import LIMITS, PlayQuery, PlaySettings, simulate, traffic
from compare.run.simulated import outcomes_of
from dashboard.routes import FOLDER
from engine.emulation import load_emulation
from shared.config.settings import ComputingSettings, ServingSettings
from shared.errors import ConfigError
from simulator.cluster import ClusterPlan, SimulatedCluster

ROOT = Path(__file__).parents[2]
SHORT: dict[str, Any] = {"requests": 40, "prompt": 400, "answer": 40}
LIMIT_MS = 8.0  # SLO for the time between tokens; some tokens take longer


def test_settings_have_the_defaults_of_the_nodes_and_the_router() -> None:
    real = {**ServingSettings.model_fields, **ComputingSettings.model_fields}
    chosen = {"policy", "max_num_batched_tokens", "disaggregate", "max_queue_s", "max_queued_tokens"}
    played = PlaySettings("stall_free", 512)
    assert {each.name for each in fields(PlaySettings)} <= set(real)
    for each in fields(PlaySettings):
        if each.name not in chosen:
            assert getattr(played, each.name) == real[each.name].get_default(call_default_factory=True), each.name


@pytest.mark.parametrize("nodes", [{"decode": 2}, {"prefill": 1, "decode": 1}])
def test_rows_have_the_times_of_the_simulated_clients(nodes: dict[str, int]) -> None:
    found = simulate(SHORT | nodes | {"tbt_slo_ms": LIMIT_MS})
    assert len(found["nodes"]) == 2
    plan = ClusterPlan(
        nodes.get("prefill", 0), nodes["decode"], ServingSettings(disaggregate="always"),
        ComputingSettings(), load_emulation("h200-llama-3.1-8b"),
    )  # fmt: skip
    cluster = SimulatedCluster(plan)
    requests = traffic(PlayQuery.read(SHORT | nodes), plan.device)
    cluster.run(requests)
    waited_ms = 0.0
    for row, outcome in zip(found["requests"], outcomes_of(cluster, requests), strict=True):
        assert row["ttft_ms"] == pytest.approx(1000 * (outcome.token_s[0] - outcome.scheduled_s), abs=0.02)
        assert row["end_ms"] == pytest.approx(1000 * outcome.token_s[-1], abs=0.02)
        kinds = [span["kind"] for span in row["spans"]]
        assert "chunk" in kinds
        assert ("transfer" in kinds) == ("prefill" in nodes)
        assert sum(span["tokens"] for span in row["spans"] if span["kind"] == "chunk") >= row["prompt"]
        gaps = [1000 * (after - before) for before, after in pairwise(outcome.token_s)]
        waits = [span for span in row["spans"] if span["kind"] == "wait"]
        assert sum(span["tokens"] for span in waits) == sum(gap > LIMIT_MS for gap in gaps)
        own_ms = sum(span["end_ms"] - span["start_ms"] for span in waits)
        assert own_ms == pytest.approx(sum(gap for gap in gaps if gap > LIMIT_MS), abs=0.02 * len(gaps))
        waited_ms += own_ms
    assert waited_ms > 0
    for node in found["nodes"]:
        ends = [start + total for start, total, *_ in node["steps"]]
        assert all(start >= end - 0.02 for (start, *_), end in zip(node["steps"][1:], ends, strict=False))
    steps = sum(step[4] for node in found["nodes"] for step in node["steps"])
    assert steps == sum(node.node.num_steps for node in cluster.nodes)


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ([], "the query must be a JSON object"),
        ({"gpus": 8}, "gpus: is not a setting of the simulator"),
        ({"rate": -1}, "rate: must be a number from 0.01 to 1000"),
        ({"rate": float("nan")}, "rate: must be a number"),
        ({"rate": "fast"}, "rate: must be a number"),
        ({"decode": 0}, "decode: must be a whole number from 1 to 16"),
        ({"prompt": 2.5}, "prompt: must be a whole number"),
        ({"budget": True}, "budget: must be a whole number"),
        ({"prefill": 9, "decode": 9}, "prefill, decode: must add up to at most 16 nodes"),
        ({"policy": "lucky"}, "policy: must be stall_free"),
        ({"policy": []}, "policy: must be stall_free"),
        ({"device": "../../etc/passwd"}, "device: must be h200-llama-3.1-8b"),
        ({"trace": 5}, "trace: must be a text"),
        ({"trace": "\ud800"}, "trace: must be valid Unicode text"),
        ({"trace": "hello"}, "trace: its first line matches no known format"),
        (
            {"trace": '{"t": 0, "prompt_len": -5, "max_tokens": 3}'},
            "trace, line 1, read as own: prompt_len is -5, which is not a number",
        ),
        ({"trace": '{"t": 0, "prompt_len": 2000000, "max_tokens": 3}'}, "trace: a request has 2000003 tokens"),
        (
            {"trace": '{"t": 0, "prompt_len": 5, "max_tokens": 3, "slo": {"ttft_ms": 9}}'},
            "trace: a row has an slo, but",
        ),
        ({"prompt": 32768, "requests": 2000, "device": "h200-qwen3-32b"}, "prompt, answer: a request has"),
        ({"requests": 2000, "answer": 4096}, "requests: their answers have over 1000000 tokens"),
    ],
)
def test_a_query_that_makes_no_sense_is_refused(query: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        simulate(query)


def test_limits_name_settings() -> None:
    assert set(LIMITS) <= {each.name for each in fields(PlayQuery)}


def test_no_request_is_refused_or_given_up() -> None:
    """The last prompts wait for over ten minutes, and still get an answer."""
    load = {"prompt": 32768, "answer": 1, "rate": 1000, "requests": 120}
    found = simulate({"device": "h200-qwen3-32b", "budget": 16384, **load})
    assert {row["error"] for row in found["requests"]} == {""}
    assert found["figures"]["late"] == found["figures"]["counted"] == 108
    assert found["figures"]["ttft_ms"]["p99"] > 600_000


def test_a_pasted_trace_replaces_the_traffic() -> None:
    rows = [{"t": n / 4, "prompt_len": 100 + n, "max_tokens": 5 + n} for n in range(20)]
    found = simulate({"trace": "\n".join(map(json.dumps, rows)), "requests": 15})
    assert [(row["prompt"], row["answer"]) for row in found["requests"]] == [(100 + n, 5 + n) for n in range(15)]


def test_a_prompt_of_one_token_waits_only_until_its_step_begins() -> None:
    (row,) = simulate({"trace": json.dumps({"t": 0, "prompt_len": 1, "max_tokens": 4})})["requests"]
    assert row["spans"][0]["kind"] == "chunk"
    assert row["begun_ms"] == row["spans"][0]["start_ms"] < row["ttft_ms"]


def test_a_pasted_trace_begins_with_its_first_row() -> None:
    found = []
    for begin_s in (0, 512):
        rows = [{"t": begin_s + n / 4, "prompt_len": 100, "max_tokens": 5} for n in range(20)]
        found.append(simulate({"trace": "\n".join(map(json.dumps, rows))}))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        (2_000_000_000, "trace: a request has 2000000001 tokens, but h200-llama-3.1-8b holds 880000; give shorter"),
        (800_000, "requests: their prompts have over 80000000 tokens together; give fewer requests"),
    ],
)
def test_a_trace_of_huge_prompts_is_refused_before_it_takes_memory(prompt: int, complaint: str) -> None:
    row = json.dumps({"t": 0, "prompt_len": prompt, "max_tokens": 1})
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=complaint):
            simulate({"trace": "\n".join([row] * 300)})
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_it_runs_with_the_standard_library_alone() -> None:
    """A browser has no other packages. The test starts the same module as the router, but without site-packages."""
    command = [sys.executable, "-S", "-m", "compare.playground"]
    found = subprocess.run(command, input=json.dumps(SHORT), check=True, capture_output=True, text=True, cwd=ROOT)
    assert json.loads(found.stdout) == json.loads(json.dumps(simulate(SHORT)))
    wrong = subprocess.run(command, input="nonsense", check=True, capture_output=True, text=True, cwd=ROOT)
    assert json.loads(wrong.stdout)["error"].startswith("Expecting value")


# ---- the tour ------------------------------------------------------------------------------------------------------

TOUR = json.loads(re.search(r"TOUR = (\[.*\]);", (FOLDER / "tour.js").read_text(), re.DOTALL)[1])  # type: ignore[index]


@cache
def toured(step: int, **changes: Any) -> dict[str, Any]:
    return simulate(TOUR[step - 1]["settings"] | changes)["figures"]  # type: ignore[no-any-return]


def test_the_tour_tells_what_its_runs_show() -> None:
    assert len(TOUR) == 8
    for step in TOUR:
        for _, changes in step["tries"]:
            PlayQuery.read(step["settings"] | changes)
    assert toured(1)["ttft_ms"]["p50"] > 20_000 > 20 * toured(2)["ttft_ms"]["p50"], "static batches make requests wait"
    stalls, chunks, free = (toured(step)["tbt_ms"]["p50"] for step in (3, 4, 5))
    assert stalls > 50, "whole prompts delay answers"
    assert stalls < chunks < 1.2 * stalls, "chunks that go first do not help"
    assert free < 50, "but chunks with the decodes do"
    assert toured(5)["attainment"] > 0.95
    assert toured(3)["attainment"] < 0.5
    budgets = [toured(6, budget=budget) for budget in (256, 1024, 4096)]
    assert sorted(each["tbt_ms"]["p50"] for each in budgets) == [each["tbt_ms"]["p50"] for each in budgets]
    assert sorted((each["ttft_ms"]["p50"] for each in budgets), reverse=True) == [
        each["ttft_ms"]["p50"] for each in budgets
    ]


def test_the_tour_tells_where_each_mode_wins() -> None:
    colocated: dict[str, Any] = {"prefill": 0, "decode": 2}
    assert toured(7)["attainment"] > 0.95
    assert toured(7, **colocated)["attainment"] < 0.7
    assert toured(7, **colocated, budget=256)["attainment"] > 0.95, "with a suitable budget, it is just as good"
    assert toured(8, **colocated)["attainment"] > 0.95
    assert toured(8, **colocated)["ttft_ms"]["p99"] < 0.2 * toured(8)["ttft_ms"]["p99"], "requests wait for the node"

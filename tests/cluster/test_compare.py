"""Test `baton compare` with whole clusters: check its report against the arms that ran."""

import json
import os
import re
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.cluster.comparisons import report_in, start
from tests.cluster.harness import cluster, state_of, wait_for

SMALL = ["--set", "runner=hash", "--set", "num_blocks=512"]


def until(process: subprocess.Popen[str], sign: str) -> str:
    """Return the output of the command up to the first line that contains `sign`."""
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if sign in line:
            return output
    raise AssertionError(f"the command ended without {sign!r}:\n{output}")


def pids(directory: Path) -> list[int]:
    """Return the process ids of all arms, from their logs."""
    logs = [log.read_text() for log in (directory / "report" / "logs").iterdir()]
    return [int(pid) for log in logs for pid in re.findall(r"started, process (\d+)", log)]


@pytest.mark.parametrize("control", [[], pytest.param(["--control"], marks=pytest.mark.exhaustive)])
def test_two_arms_and_a_control_are_measured_alike(tmp_path: Path, control: list[str]):
    arms = ["colocated:2", "disaggregated:1p1d"]
    names = [*arms, *["colocated:2 (control)" for _ in control]]
    process = start(tmp_path, "--arms", *arms, *SMALL, *control, "--duration", "1", "--seeds", "2")
    output, _ = process.communicate(timeout=600)
    report = report_in(tmp_path)
    assert process.returncode == (0 if report["valid"] else 1), output
    # The control arm may differ by chance, and on a busy machine, periods may be invalid.
    assert not report["problems"] or re.search("control|invalid", report["problems"][0]), output
    assert report["verdict"]["sentence"] in output
    assert [arm["name"] for arm in report["arms"]] == names
    assert report["parity"]["equal"]

    order = [(run["seed"], run["arm"]) for run in report["runs"]]  # on a busy machine, runs of a spare seed may follow
    assert order[: 2 * len(names)] == [(1, name) for name in names] + [(2, name) for name in reversed(names)]
    runs = [run for run in report["runs"] if run["valid"]]
    assert len({run["arrived"] for run in runs if run["seed"] == 1}) == 1
    assert all(run["finished"] == run["arrived"] > 0 for run in runs)

    for run in runs:
        block_bytes = int(
            next(f for f in report["parity"]["facts"] if f["fact"] == "block_bytes")["values"][run["arm"]]
        )
        assert run["kv"]["bytes"] == run["kv"]["blocks"] * block_bytes
        assert (run["kv"]["handoffs"] > 0) == (run["arm"] == "disaggregated:1p1d")
    requests = [json.loads(line) for line in (tmp_path / "report" / "requests.jsonl").read_text().splitlines()]
    assert report["tokens"] == {
        "compared": len({(r["seed"], r["index"]) for r in requests}),
        "different": [],
        "equal": True,
    }
    assert all(one["router"]["phases_ms"] for one in requests)
    assert set(report["strip"]) == set(names)
    assert all(any(strip["nodes"].values()) for strip in report["strip"].values())
    assert json.loads((tmp_path / "report" / "trace.json").read_text())
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
    assert not any(map(state_of, pids(tmp_path)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", ["interrupt", "router"])
def test_a_session_that_ends_early_keeps_its_measurements_and_leaves_nothing_running(tmp_path: Path, what: str):
    process = start(tmp_path, "--arms", "colocated:1", "colocated:1@prefill_first", *SMALL, "--duration", "8")
    try:
        until(process, "1/12 colocated:1")
        started = pids(tmp_path)
        log = (tmp_path / "report" / "logs" / "arm-1.log").read_text()
        url, router = (re.search(pattern, log) for pattern in (r"serving at (\S+)", r"router.*started, process (\d+)"))
        assert url
        assert router
        wait_for(lambda: num_ended(url[1]) > 12, "some requests have ended")  # including those of the preflight
        if what == "interrupt":
            process.send_signal(signal.SIGINT)
        else:
            os.kill(int(router[1]), signal.SIGKILL)
        output, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 1, output
    report = report_in(tmp_path)
    assert not report["valid"]
    assert ("interrupted" if what == "interrupt" else "colocated:1 was lost") in report["problems"][0]
    assert report["verdict"]["sentence"].startswith("No verdict: ")
    assert not report["runs"][0]["valid"]
    assert (tmp_path / "report" / "requests.jsonl").stat().st_size > 0
    assert started
    wait_for(lambda: not any(map(state_of, started)), "all processes ended")


def num_ended(url: str) -> int:
    with urllib.request.urlopen(f"{url}/v1/requests?limit=100") as answer:
        return sum(each["ended_ms"] is not None for each in json.load(answer)["requests"])


def test_a_running_stack_is_compared_with_itself_and_its_loss_ends_the_session(tmp_path: Path):
    with cluster(prefill=1, decode=1, disaggregate="always", runner="torch") as running:
        arms = ["--url", running.url, "--control", "--model", str(running.settings["model"]), "--duration", "1"]
        output, _ = start(tmp_path, *arms, "--seeds", "2").communicate(timeout=600)
        report = report_in(tmp_path)
        assert report["on"] == "url", output
        assert (report["arms"][0]["prefill"], report["arms"][0]["decode"]) == (1, 1)
        assert report["tokens"]["equal"]
        assert report["tokens"]["compared"] > 0
        if report["problems"]:  # the control arm may differ by chance, and on a busy machine, periods may be invalid
            assert re.search("control|invalid|stopped early", report["problems"][0]), output
        else:
            assert "against itself" in report["verdict"]["sentence"], output
        assert running.processes["router"].poll() is None
        process = start(tmp_path, *arms)
        until(process, "1/12")
        running.send_signal("router", signal.SIGKILL)
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 1, output
    report = report_in(tmp_path)
    assert not report["valid"]
    assert "was lost" in report["problems"][0]

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compare.arms import Arm, copy_of, parse_arms
from compare.endpoint import Document, Endpoint, EndpointError
from compare.load.outcome import LatencySlo, Outcome
from compare.load.traffic import Arrival, Traffic
from compare.run.deployments import Deployments, fit_together
from compare.run.experiment import (
    Experiment,
    Findings,
    Period,
    Trial,
    keep_requests,
    trace_name,
    trials_of,
)
from compare.run.session import RouterWatch, Session, check_counts, run_session, splits_of
from compare.stats.measures import slo_excess
from tests.compare.reports import recording

ARMS = parse_arms(["colocated:2", "disaggregated:1p1d"])


def experiment(out: Path, *, control: bool = False) -> Experiment:
    traffic = Traffic((Arrival(0.0, (1, 2), 2),), {"rate": 1.0})
    return Experiment(
        tuple(ARMS), copy_of(ARMS[0]) if control else None, lambda seed, rate: traffic, (1, 2), LatencySlo(450, 40), 0.9, None,
        ((1, 2),), (), "ids", 5.0, out,
    )  # fmt: skip


# ---- order and time ------------------------------------------------------------------------------------------------


def test_arms_take_turns_forwards_and_backwards():
    order = [trial for number, seed in enumerate((1, 2, 3)) for trial in trials_of(["a", "b", "c"], seed, number)]
    assert "".join(trial.arm for trial in order) == "abccbaabc"
    assert [trial.seed for trial in order] == [1] * 3 + [2] * 3 + [3] * 3
    assert [trial.position for trial in order] == list(range(9))


def test_the_default_plan_with_a_control_is_below_fifteen_minutes(tmp_path: Path):
    arms = (*ARMS, parse_arms(["colocated:2", "colocated:2@static"])[1])
    plan = replace(experiment(tmp_path, control=True), arms=arms, seeds=tuple(range(6))).plan(20.0, keeps_all=True)
    assert plan.startswith("plan: 4 arms x 6 periods x 20 s")
    assert 8 <= int(plan.rpartition(" about ")[2].split()[0]) < 15


# ---- the proof that KV moved ---------------------------------------------------------------------------------------


def node(name: str, **counts: int) -> dict[str, Any]:
    usual = {
        "id": name,
        "alive": True,
        "steps": 5,
        "handoffs": 0,
        "blocks_moved": 0,
        "bytes_moved": 0,
        "block_bytes": 64,
    }
    return usual | counts


def status(*nodes: dict[str, Any], moved: int = 0) -> dict[str, Any]:
    return {"nodes": list(nodes), "requests": {"moved": moved}}


def test_handed_off_blocks_and_bytes_agree():
    before = status(node("p", handoffs=2, blocks_moved=10, bytes_moved=640), node("d"))
    after = status(node("p", steps=9, handoffs=3, blocks_moved=13, bytes_moved=832), node("d"))
    moved, problems = check_counts(before, after, splits=True)
    assert problems == []
    assert (moved["handoffs"], moved["blocks_moved"], moved["bytes_moved"]) == (1, 3, 192)


@pytest.mark.parametrize(
    ("after", "splits", "problem"),
    [
        (status(node("n")), True, "no KV was handed off"),
        (
            status(node("n", handoffs=1, blocks_moved=3, bytes_moved=191)),
            True,
            "191 bytes of KV moved, and its blocks are 192",
        ),
        (status(node("n", handoffs=1, blocks_moved=1, bytes_moved=64)), False, "co-located, but 1 requests"),
        (status(node("n", steps=4)), None, "node n was restarted"),
        (status(node("n") | {"alive": False}), None, "node n was lost"),
        (status(node("n"), node("m")), None, "node m joined"),
        (status(node("n"), moved=2), None, "2 attempts failed and were retried on another node"),
    ],
)
def test_events_that_distort_a_period_make_it_invalid(after: dict[str, Any], splits: bool | None, problem: str):
    _, problems = check_counts(status(node("n")), after, splits=splits)
    assert len(problems) == 1
    assert problem in problems[0]


def test_an_arm_that_decides_for_each_request_may_hand_off_or_not():
    assert check_counts(status(node("n")), status(node("n")), splits=None)[1] == []
    assert [splits_of(arm) for arm in ARMS] == [False, True]
    assert splits_of(Arm("a", 1, 1, {"disaggregate": "auto"})) is None
    assert splits_of(Arm("u", 0, 0, {}, "http://u")) is None


# ---- the session -----------------------------------------------------------------------------------------------------


def test_as_text_every_server_gets_words_that_it_has_not_seen(tmp_path: Path):
    """All arms get the same words. They differ by seed and rate, and for the copy of a running stack."""
    arms = (Arm("http://a", 0, 0, {}, "http://a"), Arm("http://b", 0, 0, {}, "http://b"))
    made = replace(experiment(tmp_path), arms=arms, control=copy_of(arms[0]), send="text")
    session = Session(made, UnreachableDeployments(), print, Findings())

    def salt(arm: str, seed: int = 1, rate: float | None = None) -> str:
        return session.spec(Endpoint("http://x"), Trial(arm, seed, 0, rate), Traffic(())).salt

    assert salt("http://a")
    assert salt("http://a") == salt("http://b")
    assert len({salt("http://a"), salt("http://a (control)"), salt("http://a", 2), salt("http://a", 1, 3.0)}) == 4


def test_other_servers_that_take_ids_get_no_salt(tmp_path: Path):
    session = Session(experiment(tmp_path), UnreachableDeployments(), print, Findings())
    endpoint = Endpoint("http://x")
    assert session.spec(endpoint, Trial("colocated:2", 1, 0), Traffic(())).salt == ""
    endpoint.is_baton = True
    salts = {
        session.spec(endpoint, Trial(arm.name, 1, 0), Traffic(())).salt
        for arm in experiment(tmp_path, control=True).everyone
    }
    assert len(salts) == 1
    assert salts != {""}


class Forgetful(Endpoint):
    """An endpoint whose router keeps the records of only one request."""

    async def until_idle(self, timeout_s: float) -> bool:
        return True

    async def status(self) -> Document:
        return status()

    async def requests(self) -> list[Document]:
        return [{"id": "r1"}]

    async def timeline(self, identity: str) -> Document:
        return {"id": identity, "spans": []}


async def test_requests_without_a_record_at_the_router_are_noted():
    period = Period(Trial("a", 1, 0), recording([1], [2], [3]))
    watch = RouterWatch(Forgetful("http://x"), None)
    await watch.begin(period)
    await watch.end(period, LatencySlo(), 5)
    assert period.problems == []
    assert len(period.notes) == 1
    assert period.notes[0].startswith("the router kept no record of 2 of 3 requests (it keeps 4000 at most)")


def test_the_worst_request_exceeds_its_slo_most():
    slo = LatencySlo(100, 10)
    assert slo_excess(Outcome(0, "", 0.0, token_s=[0.05, 0.08], finish="length"), slo) == pytest.approx(3.0)
    assert slo_excess(Outcome(0, "", 0.0, token_s=[0.4], finish="length"), slo) == pytest.approx(4.0)
    assert slo_excess(Outcome(0, "", 0.0, token_s=[0.01], error="timeout"), slo) == float("inf")


# ---- files and ends ------------------------------------------------------------------------------------------------


def test_requests_are_kept_as_they_come(tmp_path: Path):
    period = Period(Trial("a", 1, 0), recording([1], [2]), {"r1": {"id": "r1", "attempts": 1}})
    keep_requests(tmp_path / "requests.jsonl", period)
    keep_requests(tmp_path / "requests.jsonl", Period(Trial("b", 1, 1), recording([3]), problems=["late"]))
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [(line["arm"], line["index"], line["valid"]) for line in lines] == [
        ("a", 0, True),
        ("a", 1, True),
        ("b", 0, False),
    ]
    assert lines[1]["router"]["attempts"] == 1
    assert lines[0]["router"] is None


def test_traces_of_arms_do_not_overwrite_each_other(tmp_path: Path):
    names = [
        trace_name(experiment(tmp_path, control=True), arm.name) for arm in experiment(tmp_path, control=True).everyone
    ]
    assert names == ["trace.json", "trace-2.json", "trace-3.json"]


def test_a_full_disk_raises_an_error():
    with pytest.raises(OSError, match="No space left"):
        keep_requests(Path("/dev/full"), Period(Trial("a", 1, 0), recording([1])))


class Counted:
    """Fake for an arm's processes that records whether they run."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm
        self.endpoint = Endpoint("http://x")
        self.is_up = False

    async def start(self) -> None:
        self.is_up = True

    def terminate(self) -> None: ...

    async def end(self) -> None:
        self.is_up = False


@pytest.mark.parametrize("keeps_all", [True, False])
async def test_arms_stay_up_together_or_one_at_a_time(keeps_all: bool):
    one, other = (Counted(arm) for arm in ARMS)
    stacks = Deployments([one, other], keeps_all=keeps_all)
    await stacks.up(one.arm.name)
    await stacks.up(other.arm.name)
    assert (one.is_up, other.is_up) == (keeps_all, True)
    await stacks.end()
    assert not one.is_up
    assert not other.is_up


def test_arms_on_gpus_do_not_stay_up_together(tmp_path: Path):
    cuda = parse_arms(["colocated:2", "disaggregated:1p1d"], ["device=cuda"])
    assert not fit_together(cuda, str(tmp_path))
    cpu = parse_arms(["colocated:2", "disaggregated:1p1d"], ["device=cpu", "kv_cache_memory=1MiB"])
    assert fit_together(cpu, str(tmp_path))
    assert not fit_together(
        parse_arms(["colocated:2", "disaggregated:1p1d"], ["device=cpu", "kv_cache_memory=900TiB"]), str(tmp_path)
    )


class UnreachableDeployments:
    """Deployments whose arms cannot be reached."""

    def __init__(self) -> None:
        self.ended = False

    async def up(self, name: str) -> Endpoint:
        raise EndpointError(f"nothing answers for {name}")

    async def end(self) -> None:
        self.ended = True


async def test_an_arm_that_does_not_start_ends_the_run_and_all_other_arms(tmp_path: Path):
    deployments = UnreachableDeployments()
    with pytest.raises(EndpointError, match="nothing answers for colocated:2"):
        await run_session(experiment(tmp_path), deployments, print)
    assert deployments.ended

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compare.arms import Arm, copy_of, parse_arms
from compare.endpoint import Document, Endpoint, EndpointError
from compare.load.outcome import LatencySlo, Outcome
from compare.load.traffic import Arrival, Traffic
from compare.run.deployments import Deployments, fit_together
from compare.run.session import (
    Experiment,
    Findings,
    Period,
    Session,
    Trial,
    add_records,
    check_counts,
    keep_requests,
    run_session,
    splits_of,
    trace_name,
    trials_of,
)
from compare.stats.measures import slo_excess
from tests.compare.fake_server import serving
from tests.compare.reports import recording

ARMS = parse_arms(["colocated:2", "disaggregated:1p1d"])


def experiment(out: Path, *, control: bool = False) -> Experiment:
    traffic = Traffic((Arrival(0.0, (1, 2), 2),), {"rate": 1.0})
    return Experiment(
        tuple(ARMS), copy_of(ARMS[0]) if control else None, lambda seed, rate: traffic, (1, 2), LatencySlo(450, 40), 0.9, None,
        ((1, 2),), (), "ids", 5.0, out,
    )  # fmt: skip


# ---- order and time ------------------------------------------------------------------------------------------------


def test_the_order_of_arms_alternates():
    order = [trial for number, seed in enumerate((1, 2, 3)) for trial in trials_of(["a", "b", "c"], seed, number)]
    assert "".join(trial.arm for trial in order) == "abccbaabc"
    assert [trial.seed for trial in order] == [1] * 3 + [2] * 3 + [3] * 3
    assert [trial.position for trial in order] == list(range(9))


def test_the_default_plan_with_a_control_is_below_fifteen_minutes(tmp_path: Path):
    arms = (*ARMS, parse_arms(["colocated:2", "colocated:2@static"])[1])
    plan = replace(experiment(tmp_path, control=True), arms=arms, seeds=tuple(range(6))).plan(20.0, keeps_all=True)
    assert plan.startswith("plan: 4 arms x 6 periods x 20 s")
    assert 8 <= int(plan.partition(" about ")[2].split()[0]) < 15
    assert plan.endswith(" in total, up to 3 min more if periods are invalid")


# ---- the proof that KV moved ---------------------------------------------------------------------------------------


def node(name: str, **counts: int) -> dict[str, Any]:
    moved = dict.fromkeys(("handoffs", "blocks_moved", "bytes_moved"), 0)
    return {"id": name, "alive": True, "steps": 5, "block_bytes": 64} | moved | counts


def status(*nodes: dict[str, Any], moved: int = 0) -> dict[str, Any]:
    return {"nodes": list(nodes), "requests": {"moved": moved}}


def test_blocks_and_bytes_that_were_handed_off_agree():
    before = status(node("p", handoffs=2, blocks_moved=10, bytes_moved=640), node("d"))
    after = status(node("p", steps=9, handoffs=3, blocks_moved=13, bytes_moved=832), node("d"))
    moved, problems = check_counts(before, after, splits=True)
    assert problems == []
    assert (moved["handoffs"], moved["blocks_moved"], moved["bytes_moved"]) == (1, 3, 192)


ONE_BLOCK = {"handoffs": 1, "blocks_moved": 1, "bytes_moved": 64}


@pytest.mark.parametrize(
    ("after", "splits", "problem"),
    [
        (status(node("n")), None, None),
        (status(node("n", **ONE_BLOCK)), None, None),
        (status(node("n")), True, "no KV was handed off"),
        (status(node("n", **ONE_BLOCK | {"bytes_moved": 63})), True, "63 bytes of KV were moved, but"),
        (status(node("n", **ONE_BLOCK)), False, "co-located, but 1 requests"),
        (status(node("n", steps=4)), None, "node n was restarted"),
        (status(node("n") | {"alive": False}), None, "node n was lost"),
        (status(node("n"), node("m")), None, "node m joined"),
        (status(node("n"), moved=2), None, "2 attempts failed and were retried on another node"),
    ],
)
def test_events_that_distort_a_period_make_it_invalid(after: dict[str, Any], splits: bool | None, problem: str | None):
    _, problems = check_counts(status(node("n")), after, splits=splits)
    assert len(problems) == (problem is not None)
    assert (problem or "") in "".join(problems)


def test_only_some_arms_must_hand_off():
    auto, running = Arm("a", 1, 1, {"disaggregate": "auto"}), Arm("u", 0, 0, {}, "http://u")
    assert [splits_of(arm) for arm in (*ARMS, auto, running)] == [False, True, None, None]


# ---- the session -----------------------------------------------------------------------------------------------------


def test_no_server_has_cached_a_prompt_of_an_earlier_trial(tmp_path: Path):
    """All arms get the same salt, except for the control copy of a running stack. The salt differs between seeds and
    between rates. If prompts are sent as token ids, only servers of Baton get a salt."""
    arms = (Arm("http://a", 0, 0, {}, "http://a"), Arm("http://b", 0, 0, {}, "http://b"))
    made = replace(experiment(tmp_path), arms=arms, control=copy_of(arms[0]), send="text")

    def salt(arm: str, seed: int = 1, rate: float | None = None, *, is_baton: bool = False, send: str = "text") -> str:
        session = sessions[send]
        endpoint = Endpoint("http://x")
        endpoint.is_baton = is_baton
        return session.spec(endpoint, Trial(arm, seed, 0, rate), Traffic(())).salt

    sessions = {
        send: Session(replace(made, send=send), UnreachableDeployments(), print, Findings()) for send in ("text", "ids")
    }
    assert salt("http://a") == salt("http://b") != ""
    assert len({salt("http://a"), salt("http://a (control)"), salt("http://a", 2), salt("http://a", 1, 3.0)}) == 4
    assert salt("http://a", send="ids") == ""
    assert salt("http://a", send="ids", is_baton=True) == salt("http://b", send="ids", is_baton=True) != ""


async def test_a_repeated_trial_finds_no_prompt_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first trial of the second arm is invalid, so a search for the capacity repeats it, with another salt."""
    monkeypatch.setattr("compare.run.session.steady_attainment", lambda *_: 0.0)  # the search ends at its first rate
    arms = tuple(replace(arm, url="http://x") for arm in ARMS)
    made = replace(experiment(tmp_path), arms=arms, slo=LatencySlo(60_000, 60_000), first_rate=1.0, lowest_rate=1.0)
    async with serving() as (url, bodies):
        deployments = ServedDeployments(url, ())
        deployments.endpoints = {arms[0].name: Traced(url, 0), arms[1].name: Traced(url, 2)}
        found = await run_session(made, deployments, print)
    one, other = (arm.name for arm in arms)
    assert [period.trial.arm for period in found.periods] == [one, other, other]
    salts = [body["cache_salt"] for body in bodies]
    assert salts[0] == salts[1] != salts[2]
    assert found.compared == 1, "the answers to the repeated trial have no counterpart with the same salt"


class Forgetful(Endpoint):
    """An endpoint whose router keeps the records of only one request."""

    async def until_idle(self, timeout_s: float) -> bool:
        return True

    async def status(self) -> Document:
        return status()

    async def requests(self) -> list[Document]:
        return [{"id": "r1"}]


async def test_steps_that_the_router_has_dropped_are_noted(monkeypatch: pytest.MonkeyPatch):
    class Stepped(Forgetful):
        async def status(self) -> Document:
            return status(node("n"), node("m"))

        async def steps(self, node: str, since_ms: float) -> list[Document]:
            return [{"start_ms": 1.0}] * (3 if node == "n" else 2)

    monkeypatch.setattr("compare.run.session.STEPS", 3)
    period = Period(Trial("a", 1, 0), recording())
    await add_records(period, Stepped("http://x"), status(node("n"), node("m")), splits=None)
    assert [note.partition(",")[0] for note in period.notes] == ["the router kept only the latest 3 steps of n"]


async def test_requests_without_a_record_at_the_router_are_noted():
    period = Period(Trial("a", 1, 0), recording([1], [2], [3]))
    await add_records(period, Forgetful("http://x"), status(), splits=None)
    assert period.problems == []
    assert len(period.notes) == 1
    assert period.notes[0].startswith("the router kept no record of 2 of 3 requests (it keeps 4000 at most)")


def test_the_worst_request_exceeds_its_slo_most():
    slo = LatencySlo(100, 10)
    assert slo_excess(Outcome(0, "", 0.0, token_s=[0.05, 0.08], finish="length"), slo) == pytest.approx(3.0)
    assert slo_excess(Outcome(0, "", 0.0, token_s=[0.4], finish="length"), slo) == pytest.approx(4.0)
    assert slo_excess(Outcome(0, "", 0.0, token_s=[0.01], error="timeout"), slo) == float("inf")


# ---- files and ends ------------------------------------------------------------------------------------------------


def test_requests_are_appended_with_the_record_of_the_router(tmp_path: Path):
    period = Period(Trial("a", 1, 0), recording([1], [2]), {"r1": {"id": "r1", "attempts": 1}})
    keep_requests(tmp_path / "requests.jsonl", period)
    keep_requests(tmp_path / "requests.jsonl", Period(Trial("b", 1, 1), recording([3]), problems=["late"]))
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    found = [(line["arm"], line["index"], line["valid"], line["router"]) for line in lines]
    assert found == [("a", 0, True, None), ("a", 1, True, {"id": "r1", "attempts": 1}), ("b", 0, False, None)]
    with pytest.raises(OSError, match="No space left"):
        keep_requests(Path("/dev/full"), period)


def test_traces_of_arms_do_not_overwrite_each_other(tmp_path: Path):
    made = experiment(tmp_path, control=True)
    names = [trace_name(made, arm.name) for arm in made.all_arms]
    assert names == ["trace.json", "trace-2.json", "trace-3.json"]


class Counted:
    """A fake of an arm's processes that records whether they run."""

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


def test_arms_on_gpus_or_without_enough_memory_do_not_stay_up_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fit(*settings: str) -> bool:
        return fit_together(parse_arms([arm.name for arm in ARMS], settings), str(tmp_path))

    assert not fit("device=cuda")
    assert fit("device=cpu", "kv_cache_memory=1MiB")
    assert not fit("device=cpu", "kv_cache_memory=900TiB")
    # A container with only the second GPU of its host has no /dev/nvidia0.
    monkeypatch.setattr("engine.options.GPU_FILES", (str(tmp_path),))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert not fit("kv_cache_memory=1MiB")
    assert fit("runner=hash", "kv_cache_memory=1MiB")


class UnreachableDeployments(Deployments):
    """Deployments whose arms cannot be reached."""

    def __init__(self) -> None:
        super().__init__([], keeps_all=True)
        self.ended = False

    async def up(self, name: str) -> Endpoint:
        raise EndpointError(f"nothing answers for {name}")

    async def end(self) -> None:
        self.ended = True


class Served(Endpoint):
    """An endpoint of the fake server, which is always reachable."""

    async def connect(self) -> None: ...


class ServedDeployments(UnreachableDeployments):
    """Deployments on a fake server. Arms in `bundling` send several tokens per event, so their periods are invalid."""

    def __init__(self, url: str, bundling: tuple[str, ...]) -> None:
        super().__init__()
        self.endpoints: dict[str, Endpoint] = {arm.name: Served(url) for arm in ARMS}
        for name, endpoint in self.endpoints.items():
            endpoint.model = "no-ids-bundled" if name in bundling else "ids"

    async def up(self, name: str) -> Endpoint:
        return self.endpoints[name]


@pytest.mark.parametrize(
    ("bundling", "num_seeds", "problem"),
    [
        ((), 2, None),
        ((ARMS[0].name, ARMS[1].name), 1, "stopped early: 0 of 1 seeds so far had a valid period in every arm, too few"),
        ((ARMS[1].name,), 2, "stopped early: 0 of 2 seeds so far had a valid period in every arm, too few"),
    ],
)  # fmt: skip
async def test_a_session_stops_if_no_verdict_can_be_reached(
    tmp_path: Path, bundling: tuple[str, ...], num_seeds: int, problem: str | None
):
    """A session stops if all periods of the first seed are invalid, or once too few seeds are left for a verdict."""
    said: list[str] = []
    arms = tuple(replace(arm, url="http://x") for arm in ARMS)
    made = replace(experiment(tmp_path), arms=arms, send="text", treatment=("model",))
    made = replace(made, traffic=lambda seed, rate: Traffic((Arrival(0.0, (1, 2), 4),), {"rate": 1.0}))
    made = replace(made, slo=LatencySlo(60_000, 60_000))  # so long that a run with a late load generator is valid
    async with serving() as (url, _):
        found = await run_session(made, ServedDeployments(url, bundling), said.append)
    one, other = (arm.name for arm in ARMS)
    order = [(1, one), (1, other), (2, other), (2, one)]
    assert [(period.trial.seed, period.trial.arm) for period in found.periods] == order[: 2 * num_seeds]
    assert found.problems[0].startswith(problem) if problem else not found.problems
    assert any(line.startswith("1/4 colocated:2, seed 1: 1 requests") for line in said)
    assert any(line.strip() == "1 of 1 requests met the SLO, including the warm-up" for line in said) == (
        len(bundling) < 2
    )


class Traced(Served):
    """A fake Baton without nodes. For its first `num_busy` polls, it is not idle. Each trace contains its number."""

    def __init__(self, url: str, num_busy: int) -> None:
        super().__init__(url)
        self.model, self.is_baton = "ids", True
        self._num_busy, self._num_traces = num_busy, 0

    async def complete(self, prompt: Sequence[int], max_tokens: int, salt: str) -> list[int]:
        return [1]

    async def until_idle(self, timeout_s: float) -> bool:
        self._num_busy -= 1
        return self._num_busy < 0

    async def status(self) -> Document:
        return status()

    async def requests(self) -> list[Document]:
        return []

    async def trace(self, last_s: float) -> bytes:
        self._num_traces += 1
        return b"trace %d" % self._num_traces


async def test_the_kept_traces_are_those_of_the_first_seed_that_is_valid_in_every_arm(tmp_path: Path):
    arms = tuple(replace(arm, url="http://x") for arm in ARMS)
    made = replace(experiment(tmp_path), arms=arms, seeds=(1, 2, 3, 4), slo=LatencySlo(60_000, 60_000))
    async with serving() as (url, _):
        deployments = ServedDeployments(url, ())
        deployments.endpoints = {arms[0].name: Traced(url, 0), arms[1].name: Traced(url, 2)}
        found = await run_session(made, deployments, print)
    valid = [(period.trial.seed, period.trial.arm) for period in found.periods if not period.problems]
    assert {(1, arms[0].name), (2, arms[0].name), (2, arms[1].name), (3, arms[1].name)} <= set(valid)
    assert (1, arms[1].name) not in valid
    assert (tmp_path / "trace.json").read_bytes() == b"trace 2"
    assert (tmp_path / "trace-2.json").read_bytes() == b"trace 1"


async def test_a_full_disk_ends_a_session(tmp_path: Path):
    (tmp_path / "requests.jsonl").symlink_to("/dev/full")
    arms = tuple(replace(arm, url="http://x") for arm in ARMS)
    made = replace(experiment(tmp_path), arms=arms, send="text")
    async with serving() as (url, _):
        found = await run_session(made, ServedDeployments(url, ()), print)
    assert len(found.periods) == 1
    assert found.problems == ["cannot write the measurements: No space left on device"]


async def test_an_arm_that_does_not_start_ends_the_run_and_all_other_arms(tmp_path: Path):
    deployments = UnreachableDeployments()
    with pytest.raises(EndpointError, match="nothing answers for colocated:2"):
        await run_session(experiment(tmp_path), deployments, print)
    assert deployments.ended

"""A node under what others do to it, and under its own faults: stuck loops, broken ledgers, requests that raise."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

import engine.runner
import engine.sampling
import engine.sampling_params
import scheduler.scheduler
from engine.engine import Engine
from engine.models.decoder import Decoder
from engine.runner import SliceOutput
from engine.step_time_fit import FIRST_S, StepDeadline
from node import active_requests, router_sessions
from node.watchdog import Watchdog, Watched
from scheduler.cost import StepWork
from scheduler.request import Request, Step
from shared.lifecycle import wait_until
from shared.registry import EmbeddedRegistry
from shared.rpc.messages import RouterCommand, SamplingParams, SubmitRequest, TokenDelta, pack_ids
from shared.rpc.methods import ATTACH, connect
from tests.engine.build import CPU, torch_runner
from tests.engine.test_overlap import (
    BLOCK_TOKENS,
    Ahead,
    Drive,
    answers,
    expected_of,
    model,  # noqa: F401 - a fixture
    runner_of,
    scheduler_of,
    workload,
)
from tests.engine.test_records import Line, node

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def quiet() -> Any:
    """What is planted here is logged with its traceback, as it should be."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# ---- stuck or slow -------------------------------------------------------------------------------------------------


def step_of(tokens: int, predicted_s: float = 0.0) -> Step:
    return Step(0, [], [], work=StepWork(1, tokens), predicted_s=predicted_s)


def test_a_step_may_take_as_long_as_what_was_seen_says_and_never_less_than_the_least() -> None:
    patience = StepDeadline(5.0)
    assert patience.seconds(step_of(512)) == FIRST_S, "nothing is known"
    patience.observe(1, 0.08)  # a decode on a laptop
    assert patience.seconds(step_of(1)) == 5.0
    assert patience.seconds(step_of(512)) == pytest.approx(10 * 512 * 0.08), "its first chunk takes 20 s, perhaps"
    patience.observe(512, 15.0)
    assert patience.seconds(step_of(512)) == pytest.approx(150.0)
    patience.observe(64, 0.01)
    assert patience.seconds(step_of(512)) == 5.0
    assert patience.seconds(step_of(512, predicted_s=2.0)) == 20.0, "what the step-time model knows counts too"


def test_only_time_that_the_process_lived_without_progress_counts() -> None:
    turns = 0
    watched = Watched("the engine", lambda: turns, lambda: 5.0)
    assert not any(watched.is_stuck(0.5) for _ in range(10))
    turns += 1
    assert not any(watched.is_stuck(0.5) for _ in range(11)), "a sign of life starts anew"
    assert watched.is_stuck(0.5)


def test_a_process_whose_memory_comes_back_from_the_disk_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = itertools.count()
    told: list[str] = []
    monkeypatch.setattr("node.watchdog._faults", lambda: next(faults))
    watchdog = Watchdog([Watched("the engine", lambda: 0, lambda: 0.4)], told.append)
    watchdog.start()
    time.sleep(1.0)
    assert told == []
    monkeypatch.setattr("node.watchdog._faults", lambda: 0)
    time.sleep(1.0)
    assert told == ["the engine made no progress for 0.4 s"]
    watchdog.stop()


def test_an_idle_engine_shows_signs_of_life_more_often_than_a_stuck_one_may() -> None:
    idle = Engine(scheduler_of(8), cast(Any, None), MagicMock(), stuck_s=0.4)
    idle.start()
    before = idle.progress
    time.sleep(0.4)
    assert idle.progress > before + 1
    idle.stop()


# ---- one request's own ---------------------------------------------------------------------------------------------

VICTIM = "r4"


def raising_for(function: Callable[..., Any], is_victims: Callable[..., bool]) -> Callable[..., Any]:
    def call(*given: Any, **more: Any) -> Any:
        if is_victims(*given):
            raise ValueError("planted")
        return function(*given, **more)

    return call


def marked(sampling: SamplingParams) -> SamplingParams:
    """Of the victim: its draws take every way there is."""
    return SamplingParams(
        seed=77,
        temperature=0.9,
        top_p=0.9,
        logprobs=13,
        logit_bias={7: 1.0},
        frequency_penalty=0.5,
        prompt_logprobs=sampling.prompt_logprobs,
    )


HOOKS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "row": (engine.runner, "row_of", lambda piece: piece.request.id == VICTIM),
    "bias": (engine.sampling, "_shifts", lambda row: row.sampling.seed == 77),
    "penalties": (engine.sampling_params, "is_penalized", lambda sampling: sampling.seed == 77),
    "noise": (engine.sampling_params, "key_of", lambda seed, _position: seed == 77),
    "logprobs": (engine.sampling, "describe", lambda _logits, _tokens, tops: 13 in tops),
    "prompt logprobs": (engine.runner, "describe", lambda _logits, _tokens, tops: 12 in tops),
    "update": (scheduler.scheduler, "extend_hashes", lambda _h, tokens, *_: tokens[:1] == [60] and len(tokens) > 14),
    "end": (Request, "finish_reason", lambda request: request.id == VICTIM),
}


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_request_whose_own_code_raises_fails_alone(
    model: Decoder,  # noqa: F811
    hook: str,
    ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = expected_once(model)
    rows = workload(8)
    victim = rows[4]
    victim.tokens[:] = [60, *range(1, 13)]
    victim.num_prompt, victim.max_tokens, victim.stop_tokens = 13, 9, frozenset()
    victim.sampling = marked(victim.sampling)
    if hook == "prompt logprobs":
        victim.sampling.prompt_logprobs, victim.needs_prompt_logprobs = 12, True
    owner, name, is_victims = HOOKS[hook]
    runner = runner_of(model, 200)
    runner.ahead = ahead
    drive = Drive(scheduler_of(200), runner, {0: [("add", row) for row in rows]})
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising_for(getattr(owner, name), is_victims))
        drive.run()
    assert drive.death is None
    assert victim.finish == "error"
    assert answers(rows[:4] + rows[5:]) == expected[:4] + expected[5:], "mates' tokens are unchanged"
    assert drive.scheduler.audit() == ""
    ledger = drive.scheduler.ledger()
    assert ledger.free + ledger.cached == ledger.total


@cache
def expected_once(model: Decoder) -> list[tuple[list[int], str | None]]:  # noqa: F811
    return expected_of(model, 8)


class Broken(Ahead):
    """The victim's logits are not numbers."""

    def _pass(self, step: Step, batch: Any) -> list[SliceOutput]:
        places = [at for at, index in enumerate(batch.sampled) if step.slices[index].request.id == VICTIM]
        plain, self._model = self._model, _WithNan(self._model, places)
        try:
            return super()._pass(step, batch)
        finally:
            self._model = plain


class _WithNan:
    def __init__(self, inner: Decoder, places: list[int]) -> None:
        self._inner, self._places = inner, places
        self.forward, self.config = inner.forward, inner.config

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._inner.logits(hidden).clone()
        logits[self._places] = torch.nan
        return logits


@pytest.mark.parametrize("ahead", [False, True])
def test_logits_that_are_no_numbers_end_their_request_alone(model: Decoder, ahead: bool) -> None:  # noqa: F811
    expected = expected_once(model)
    rows = workload(8)
    plain, pool, _ = torch_runner(model, 200, BLOCK_TOKENS)
    runner = Broken(model, pool, plain._backend, plain._kernels, CPU)
    runner.ahead = ahead
    drive = Drive(scheduler_of(200), runner, {0: [("add", row) for row in rows]})
    drive.run()
    assert drive.errors == ["numerical"]
    assert answers(rows[:4] + rows[5:]) == expected[:4] + expected[5:]
    assert drive.scheduler.audit() == ""


# ---- what others send ------------------------------------------------------------------------------------------------


def submission(name: str = "r", **fields: Any) -> SubmitRequest:
    given = {
        "tokens": pack_ids([5, 6, 7]),
        "num_prompt": 3,
        "max_tokens": 4,
        "sampling": SamplingParams(temperature=0.0),
    }
    return SubmitRequest(name, "router", **(given | fields))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"num_prompt": 0}, "num_prompt 0"),
        ({"num_prompt": 4}, "num_prompt 4"),
        ({"max_tokens": 2**40}, "num_prompt and max_tokens together"),
        ({"tokens": pack_ids([5, 6, 97])}, "beyond the vocabulary"),
        ({"tokens": b"\0" * 11}, ""),
        ({"stop_tokens": b"\xff" * 4}, "negative"),
        ({"decode_node": "file:///etc/passwd"}, "decode_node"),
        ({"decode_node": "host"}, "decode_node"),
        ({"salt": b"s" * 300}, "salt"),
        ({"traceparent": "t" * 300}, "traceparent"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(logit_bias={97: 1.0})}, "logit_bias"),
        ({"sampling": SamplingParams(logprobs=2**31)}, "logprobs"),
    ],
)
async def test_nonsense_is_refused_with_the_fields_name_and_the_node_serves_on(fields: Any, complaint: str) -> None:
    async with node() as (running, line, _):
        line.commands.put_nowait(RouterCommand("router", [submission("bad", **fields), submission("good")]))
        assert await wait_until(lambda: "stop" in finishes(line, "good") or "length" in finishes(line, "good"), 5.0)
        (refusal,) = [delta for report in line.reports for delta in report.deltas if delta.id == "bad"]
        assert complaint in refusal.error != ""
        assert (refusal.retry, running.active.num_tokens) == (False, 0)


def finishes(line: Line, name: str) -> list[str]:
    return [delta.finish for report in line.reports for delta in report.deltas if delta.id == name and delta.finish]


def errors(line: Line) -> list[tuple[str, bool]]:
    return [(delta.error, delta.retry) for report in line.reports for delta in report.deltas if delta.error]


@pytest.mark.parametrize("limit", ["MAX_REQUESTS", "max_tokens"])
async def test_a_flood_is_bounded_and_may_go_elsewhere(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active_requests, "MAX_REQUESTS", 10 if limit == "MAX_REQUESTS" else 1000)
    async with node() as (running, line, scheduler):
        running.active.max_tokens = 30 if limit == "max_tokens" else 10**6
        line.commands.put_nowait(RouterCommand("router", [submission(f"r{index}") for index in range(200)]))
        assert await wait_until(lambda: len(errors(line)) == 190, 5.0)
        assert all(retry and "no more fit" in error for error, retry in errors(line))
        assert await wait_until(lambda: not scheduler.requests and not running.active.router_of, 5.0)
        assert (running.active.num_tokens, scheduler.counters.generated_tokens) == (0, 40), "those within are served"


async def test_a_router_ends_only_its_own_requests_and_ids_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_sessions, "MAX_ROUTERS", 2)
    async with node(2000) as (running, line, _):
        other, third = Line(), Line()
        attached = [asyncio.ensure_future(running.attach(one)) for one in (other, third)]
        other.commands.put_nowait(RouterCommand("other"))
        await asyncio.sleep(0)
        third.commands.put_nowait(RouterCommand("third"))
        await asyncio.wait_for(attached[1], 5.0)
        line.commands.put_nowait(RouterCommand("router", [submission(max_tokens=3000)]))
        assert await wait_until(lambda: running.owns("r"), 5.0)
        theft = SubmitRequest(
            "r", "other", *[getattr(submission(), name) for name in ("tokens", "num_prompt")], 4, SamplingParams()
        )
        other.commands.put_nowait(RouterCommand("other", [theft], aborts=["r", "nobody"]))
        assert await wait_until(lambda: bool(errors(other)), 5.0)
        assert "already exists on this node" in errors(other)[0][0]
        assert running.owns("r")
        line.commands.put_nowait(RouterCommand("router", aborts=["r", "r"]))
        assert await wait_until(lambda: not running.active.router_of, 5.0)
        other.commands.put_nowait(None)
        await attached[0]


@pytest.mark.usefixtures("quiet")
async def test_a_router_that_reads_nothing_loses_its_requests_and_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_sessions, "MAX_OUTBOX", 20)

    class Unread(Line):
        async def send_message(self, report: Any) -> None:
            await asyncio.Event().wait()

    async with node(2000) as (running, _, scheduler):
        unread, again, last = Unread(), Line(), Line()
        attached = asyncio.ensure_future(running.attach(unread))
        unread.commands.put_nowait(RouterCommand("other"))
        unread.commands.put_nowait(RouterCommand("other", [submission(max_tokens=3000)]))
        await asyncio.wait_for(attached, 10.0)
        assert "other" not in running.sessions.streams
        assert await wait_until(lambda: not scheduler.requests, 5.0)
        assert not running.owns("r")
        back = asyncio.ensure_future(running.attach(again))  # it dials anew, and once more before that stream has ended
        again.commands.put_nowait(RouterCommand("other"))
        await asyncio.sleep(0)
        once_more = asyncio.ensure_future(running.attach(last))
        last.commands.put_nowait(RouterCommand("other"))
        await asyncio.wait_for(back, 5.0)
        last.commands.put_nowait(RouterCommand("other", [submission("r2")]))
        assert await wait_until(lambda: finishes(last, "r2") == ["length"], 5.0), "it outlives the stream before it"
        last.commands.put_nowait(None)
        await once_more


@pytest.mark.usefixtures("quiet")
async def test_a_broken_ledger_is_told_and_takes_nothing_more_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with node(2000) as (running, line, scheduler):
        line.commands.put_nowait(RouterCommand("router", [submission("runs", max_tokens=2000)]))
        assert await wait_until(lambda: scheduler.counters.steps > 1, 5.0)
        scheduler.pool._owned -= 1
        assert await wait_until(lambda: running.stats().state == "breached", 5.0)
        assert "blocks do not balance" in running.stats().ledger_error
        line.commands.put_nowait(RouterCommand("router", [submission("late")]))
        assert await wait_until(lambda: bool(errors(line)), 5.0)
        assert ("block ledger is broken" in errors(line)[0][0], errors(line)[0][1]) == (True, True)
        assert await wait_until(lambda: finishes(line, "runs") == ["length"], 20.0), "what runs goes on"
        assert not running.fatal_error.done()


async def test_a_leak_that_keeps_the_sums_right_is_found_when_the_engine_is_idle() -> None:
    async with node() as (running, line, scheduler):
        line.commands.put_nowait(RouterCommand("router", [submission()]))
        assert await wait_until(lambda: finishes(line, "r") == ["length"], 5.0)
        running.engine.post(lambda scheduler: scheduler.pool.take(1))
        assert await wait_until(lambda: running.stats().state == "breached", 10.0)
        assert "has 0 holders and 1 references" in scheduler.ledger_error


# ---- real processes --------------------------------------------------------------------------------------------------

NODES: dict[str, dict[str, str]] = {
    "hangs": {"FAILPOINT": "engine.step:40=hang", "STUCK_S": "1"},
    "raises": {"FAILPOINT": "engine.step:40=raise"},
    "deaf": {"FAILPOINT": "node.taken:2=hang", "STUCK_S": "1"},
    "drains": {"DRAIN_TIMEOUT_S": "0.5", "FAILPOINT": "engine.step:*=sleep-0.05"},
    "hurried": {"FAILPOINT": "engine.step:*=sleep-0.05"},
}


@contextlib.contextmanager
def forked(directory: Path, port: int) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """The nodes' parent, which prints how they end, and their process ids."""
    common = {"MODEL": str(ROOT / "demo" / "model"), "RUNNER": "hash", "NUM_BLOCKS": "200", "HEARTBEAT_S": "0.1"}
    common |= {"REGISTRY": f"127.0.0.1:{port}", "ALLOW_FAILPOINTS": "true", "KV_DIRECTORY": str(directory / "kv")}
    settings = {name: {f"BATON_{key}": value for key, value in (common | own).items()} for name, own in NODES.items()}
    command = [sys.executable, "-m", "tests.engine.forked_nodes", json.dumps(settings), str(directory)]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        yield parent, json.loads(parent.stdout.readline())
    finally:
        parent.kill()  # its children end with it
        parent.wait()
        parent.stdout.close()


async def served(address: str, heard: list[TokenDelta], submits: list[SubmitRequest]) -> None:
    """What one node says of requests, until its stream ends."""
    channel = connect(address)
    try:
        async with ATTACH.open(channel) as stream:
            await stream.send_message(RouterCommand("router", submits[:0]))
            for submit in submits:
                await stream.send_message(RouterCommand("router", [submit]))
            while (report := await stream.recv_message()) is not None:
                heard += report.deltas
    except Exception as error:  # noqa: BLE001 - however a process's end shows
        heard.append(TokenDelta("end", error=type(error).__name__))
    finally:
        channel.close()


async def test_processes_that_are_stuck_dead_or_asked_to_end_do_so_with_the_right_status(tmp_path: Path) -> None:
    """F10, F11, F15, F17: nothing that a node serves waits for more than the node's end."""
    registry = EmbeddedRegistry("router", "127.0.0.1", 0)
    await registry.start(lambda: None)
    heard: dict[str, list[TokenDelta]] = {name: [] for name in NODES}
    long = [submission(f"r{index}", max_tokens=2000) for index in range(2)]
    with forked(tmp_path, registry.port) as (parent, pids):
        assert await wait_until(lambda: set(registry.nodes) == set(NODES), 60.0), registry.nodes
        addresses = {name: info.address for name, info in registry.nodes.items()}
        streams = [asyncio.ensure_future(served(addresses[name], heard[name], long)) for name in NODES]
        assert await wait_until(lambda: all(heard.values()), 30.0)
        for name in ("drains", "hurried"):
            os.kill(pids[name], signal.SIGTERM)
        assert await wait_until(
            lambda: "hurried" not in registry.nodes or registry.nodes["hurried"].state == "draining", 20
        )
        os.kill(pids["hurried"], signal.SIGTERM)
        assert parent.stdout is not None
        statuses = json.loads(await asyncio.wait_for(asyncio.to_thread(parent.stdout.readline), 60.0))
        await asyncio.gather(*streams)
    await registry.close()
    assert statuses == {"hangs": 70, "raises": 70, "deaf": 70, "drains": 0, "hurried": 128 + signal.SIGTERM}
    moved = {delta.id for delta in heard["drains"] if delta.retry}
    assert moved == {"r0", "r1"}, "they go on elsewhere"
    assert {delta.error for delta in heard["drains"] if delta.retry} == {"node drains ends"}
    assert all("end" in {delta.id for delta in heard[name]} for name in ("hangs", "raises"))
    assert "made no progress for 1.0 s" in (tmp_path / "hangs.log").read_text()
    assert "the event loop made no progress" in (tmp_path / "deaf.log").read_text()

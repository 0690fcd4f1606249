"""Tests of the supervision of a local cluster, with small programs as its processes."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.local import lines_of, num_ready, report_waiting, restart_delay_s, url_of
from tests.cluster.harness import ROOT, state_of, wait_for

PATIENCE_S = 30.0

DRIVER = """
import asyncio, json, sys
from cluster.local import LocalCluster, printer
from cluster.plan import Child

programs = json.loads(sys.argv[1])
children = [Child(name, (sys.executable, "-c", program), {"PYTHONUNBUFFERED": "1"}) for name, program in programs]
say = printer([child.name for child in children], sys.argv[2])
async def all_ready():
    say("baton", "all ready")
async def status():
    return {"requests": {"running": 3}}
sys.exit(asyncio.run(LocalCluster(children, say, 0.2, all_ready, status).run()))
"""
POLITE = """
import signal, sys, time
def end(*_):
    time.sleep({delay_s})
    print("bye")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up")
while True: time.sleep(60)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"


class Watcher:
    """A cluster of `programs` in a separate process, and the lines that it has printed."""

    def __init__(self, programs: dict[str, str], log_format: str = "text") -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps(list(programs.items())), log_format],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )

    def read(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"ended early: {self.lines}"
        self.lines.append(line.rstrip("\n"))

    def wait_for(self, *patterns: str) -> None:
        """Read until every pattern has matched a line, in any order."""
        while not all(any(re.search(pattern, line) for line in self.lines) for pattern in patterns):
            self.read()

    def pid(self, name: str) -> int:
        """Return the process id of the latest start of a child."""
        found = [re.match(rf"{name} +\| started, process (\d+)", line) for line in self.lines]
        return int([match[1] for match in found if match][-1])

    def ended(self) -> int:
        rest, _ = self.process.communicate(timeout=PATIENCE_S)
        self.lines += rest.splitlines()
        return self.process.returncode

    def index(self, pattern: str) -> int:
        return next(number for number, line in enumerate(self.lines) if re.search(pattern, line))


Watch = Callable[..., Watcher]


@pytest.fixture
def watch() -> Iterator[Watch]:
    watchers: list[Watcher] = []

    def start(log_format: str = "text", **programs: str) -> Watcher:
        watchers.append(Watcher({name.replace("_", "-"): program for name, program in programs.items()}, log_format))
        return watchers[-1]

    yield start
    for watcher in watchers:
        watcher.process.kill()
        watcher.process.communicate()


def test_a_signal_restarts_the_nodes_in_turn_and_another_ends_the_router_before_them(watch: Watch) -> None:
    polite = POLITE.format(delay_s=0)
    watcher = watch(router=POLITE.format(delay_s=0.3), prefill_0=polite, decode_0=polite)
    watcher.wait_for(r"router +\| up", r"prefill-0 +\| up", r"decode-0 +\| up")
    watcher.process.send_signal(signal.SIGUSR1)
    watcher.wait_for(r"every node was restarted", r"decode-0 +\| starts again", r"prefill-0 +\| starts again")
    order = [watcher.index(rf"{name} +\| {word}") for name in ("prefill-0", "decode-0") for word in ("restart", "bye")]
    assert order == sorted(order)
    assert sum("all ready" in line for line in watcher.lines) == 3, "before the first restart, and after each"
    while sum(bool(re.search(r"-0 +\| up", line)) for line in watcher.lines) < 4:
        watcher.read()
    watcher.lines.clear()
    watcher.process.send_signal(signal.SIGTERM)
    assert watcher.ended() == 0
    assert watcher.index(r"router +\| bye") < min(
        watcher.index(r"prefill-0 +\| bye"), watcher.index(r"decode-0 +\| bye")
    )


@pytest.mark.parametrize("signals", [1, 2])
def test_a_process_that_ignores_sigterm_is_killed_in_time_or_by_a_second_signal(watch: Watch, signals: int) -> None:
    watcher = watch(router=STUBBORN if signals == 2 else POLITE.format(delay_s=0), decode_0=STUBBORN)
    watcher.wait_for(r"router +\| up", r"decode-0 +\| up")
    watcher.process.send_signal(signal.SIGINT)
    watcher.wait_for("draining 3 requests, for at most 0.2 s; a second signal")
    if signals == 2:
        watcher.process.send_signal(signal.SIGINT)
    assert watcher.ended() == (130 if signals == 2 else 0)
    assert any("has not ended in time and is killed" in line for line in watcher.lines) == (signals == 1)
    assert re.fullmatch(r"baton +\| ended", watcher.lines[-1])
    pids = watcher.pid("router"), watcher.pid("decode-0")
    wait_for(lambda: not any(map(state_of, pids)), "both processes end", PATIENCE_S)


def test_a_node_that_dies_is_started_again_and_a_killed_parent_leaves_no_process(watch: Watch) -> None:
    watcher = watch(router=STUBBORN, decode_0=STUBBORN)
    watcher.wait_for(r"router +\| up", r"decode-0 +\| up")
    first = watcher.pid("decode-0")
    os.kill(first, signal.SIGKILL)
    watcher.wait_for(r"decode-0 +\| ended unexpectedly, by SIGKILL", r"decode-0 +\| starts again in 0.5 s")
    while watcher.pid("decode-0") == first:
        watcher.read()
    pids = watcher.pid("router"), watcher.pid("decode-0")
    assert all(map(state_of, pids))
    watcher.process.kill()
    wait_for(lambda: not any(map(state_of, pids)), "the children end with their parent", PATIENCE_S)


@pytest.mark.parametrize(
    ("router", "node", "status", "line"),
    [
        ("raise SystemExit(3)", "", 3, r"router +\| ended unexpectedly, with status 3"),
        ("raise SystemExit(0)", "", 1, "router"),
        ("import os; os.kill(os.getpid(), 9)", "", 1, r"router +\| ended unexpectedly, by SIGKILL"),
        ("", "import sys; print('node: bad --block-size', file=sys.stderr); sys.exit(2)", 2, "node: bad --block-size"),
    ],
)
def test_a_router_that_ends_or_a_node_with_invalid_settings_ends_all(
    watch: Watch, router: str, node: str, status: int, line: str
) -> None:
    polite = POLITE.format(delay_s=0)
    watcher = watch(router=router or polite, decode_0=node or polite)
    assert watcher.ended() == status
    assert any(re.search(line, each) for each in watcher.lines)
    assert not any("starts again" in each for each in watcher.lines)


@pytest.mark.parametrize(("output", "encoding"), [("/dev/full", "utf-8"), ("/dev/null", "ascii")])
def test_a_cluster_whose_lines_cannot_be_printed_runs_and_drains(tmp_path: Path, output: str, encoding: str) -> None:
    done = [tmp_path / name for name in ("printed", "started", "drained")]
    touch = f"import pathlib; pathlib.Path({str(done[0])!r}).touch()"
    prints = 'sys.stdout.buffer.write("ü\\n".encode() + 2_000_000 * b"x")'
    node = POLITE.format(delay_s=0).replace('print("up")', f"{prints}; {touch}")
    router = POLITE.format(delay_s=0.3).replace('print("up")', touch.replace("printed", "started"))
    router = router.replace('print("bye")', touch.replace("printed", "drained"))
    programs = json.dumps([("router", router), ("decode-0", node)])
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    with open(output, "w") as file:
        command = [sys.executable, "-c", DRIVER, programs, "text"]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL, cwd=ROOT, env=environment)
    try:
        wait_for(done[0].exists, "a node has printed more than a pipe holds", PATIENCE_S)
        wait_for(done[1].exists, "the router handles signals", PATIENCE_S)
        process.send_signal(signal.SIGHUP)
        wait_for(done[2].exists, "the router has drained, and was not killed", PATIENCE_S)
    finally:
        process.kill()
        process.wait()


def test_with_json_logs_every_line_is_an_object(watch: Watch) -> None:
    node = """print('{"message": "its own", "node": "decode-0"}'); print("{not JSON"); import os; os.kill(os.getpid(), 9)"""
    watcher = watch(log_format="json", router=POLITE.format(delay_s=0), decode_0=node)
    watcher.wait_for('"starts again', '"up"')
    watcher.process.send_signal(signal.SIGTERM)
    assert watcher.ended() == 0
    found = [json.loads(line) for line in watcher.lines]
    assert {"message": "its own", "node": "decode-0"} in found
    messages = {(line["node"], line["message"]): line for line in found}
    assert ("decode-0", "{not JSON") in messages
    assert messages["decode-0", "ended unexpectedly, by SIGKILL"]["level"] == "error"
    assert messages["baton", "ended"].keys() == {"time", "level", "logger", "message", "node"}


async def test_nodes_that_are_not_ready_are_named_until_they_are() -> None:
    def status(*states: str) -> dict[str, list[dict[str, object]]]:
        names = ("prefill-0", "decode-0")
        return {"nodes": [{"id": n, "alive": True, "state": s} for n, s in zip(names, states, strict=False)]}

    answers = [None, status("draining"), status("ready", "ready")]
    said: list[str] = []

    async def get_status() -> object:
        return answers.pop(0)

    await report_waiting(["prefill-0", "decode-0"], 2, lambda _, line: said.append(line), get_status, delay_s=0.01)
    assert [re.sub(r"after \d+ s", "after 0 s", line) for line in said] == [
        "0 of 2 nodes are ready after 0 s; waiting for prefill-0 (starting), decode-0 (starting)",
        "0 of 2 nodes are ready after 0 s; waiting for prefill-0 (draining), decode-0 (starting)",
    ]


def test_a_wildcard_address_is_printed_as_one_that_clients_can_use() -> None:
    assert url_of("0.0.0.0", 80) == url_of("::", 80) == "http://127.0.0.1:80"


def test_a_node_that_drains_or_is_lost_is_not_ready() -> None:
    states = [(True, "ready"), (True, "draining"), (False, "ready")]
    assert num_ready({"nodes": [{"alive": alive, "state": state} for alive, state in states]}) == 1


@given(st.lists(st.floats(0.0, 30.0), max_size=40))
def test_restarts_back_off_and_are_at_most_five_a_minute(lives_s: list[float]) -> None:
    now, restarts = 1000.0, list[float]()
    for life_s in lives_s:
        now += life_s
        delay_s = restart_delay_s(restarts, now)
        assert delay_s >= 0
        now += delay_s
        restarts.append(now)
    for first, sixth in zip(restarts, restarts[5:], strict=False):
        assert sixth - first >= 60 - 1e-6
    assert restart_delay_s([], now) == 0.5
    assert restart_delay_s([now], now) == 1.0
    assert restart_delay_s([now - 61], now) == 0.5


async def test_lines_are_whole_long_lines_are_split_and_the_last_needs_no_line_end() -> None:
    stream = asyncio.StreamReader(limit=16)
    for chunk in (b"fi", b"rst\r\nsecond\n", b"x" * 40 + b"y\n", b"last\xff"):
        stream.feed_data(chunk)
    stream.feed_eof()
    lines = [line async for line in lines_of(stream)]
    assert lines[:2] == ["first", "second"]
    assert "".join(lines[2:-1]) == "x" * 40 + "y"
    assert lines[-1] == "last\ufffd"

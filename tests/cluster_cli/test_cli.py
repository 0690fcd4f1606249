"""Tests of the output and exit status of the `baton` command, with fake routers that serve real HTTP."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import psutil
import pytest

from baton.__main__ import main as run_baton
from cluster import cli
from cluster.cli import main
from cluster.clients import COLUMNS, NUM_NARROW, head, latency_line, row_of, tail
from tests.cluster.harness import DEMO, ROOT, wait_for
from tests.command_line import refusal

NODE = {"id": "decode-0", "role": "decode", "state": "ready", "alive": True, "running": 3, "waiting": 1}
NODE |= {"blocks": {"free": 50, "cached": 20, "owned": 25, "reserved": 4, "quarantined": 1, "total": 100}}
NODE |= {"steps": 17, "handoffs": 2, "handoffs_failed": 1, "bytes_moved": 1572864, "channel_fallbacks": 1}
NODE |= {"channels": {"prefill-0": "shm", "prefill-1": "shm"}}
NODE |= {"batch": {"tokens": 520, "prefills": 1, "decodes": 8}, "steps_per_s": 41.6, "busy": 0.934}
ROW = ("decode-0", "decode", "ready", "3", "1", "512p+8d", "30/100", "42", "93%")
ROW += ("2 (1 failed)", "1.5 MiB", "shm (1 fell back)")
STATUS = {"model": "stories", "mode": "disaggregated", "registry": {"kind": "embedded", "state": "ok"}}
STATUS |= {"handoffs": 2, "bytes_moved": 1572864, "requests": {"running": 3, "total": 9}}
STATUS |= {"nodes": [NODE, NODE | {"id": "[red]x[/red]", "alive": False, "channels": {}, "channel_fallbacks": 0}]}

LATENCY = {"ttft_ms": {"p50": 180.44, "p99": 420.0}, "tbt_ms": {"p50": None, "p99": None}, "slo": {"ttft_ms": 450.0}}

Answering = Callable[[str, Any], tuple[int, bytes]]


@pytest.fixture
def serve() -> Iterator[Callable[[Answering], str]]:
    """Return a function that starts a fake router. The function's argument maps (path, body) to (status, body)."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answering) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                status, body = answer(self.path, json.loads(self.rfile.read(length)) if length else None)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.do_GET()

            def log_message(self, *_: object) -> None:
                """Log nothing, because the tests read stderr."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def run_at_terminal(*arguments: str, columns: int = 200) -> str:
    """Run `baton` in a terminal, and return its output."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-m", "baton", *arguments], stdout=theirs, stderr=theirs, cwd=ROOT, env=environment
    ) as process:
        os.close(theirs)
        printed = b""
        try:
            while piece := os.read(ours, 65536):
                printed += piece
        except OSError:  # the process has ended, which closes its side of the terminal
            pass
        os.close(ours)
        assert process.wait() == 0
    return printed.decode()


# ---- the command itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_help_names_the_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    for command in ("up", "serve", "router", "prefill", "decode", "status", "chat"):
        assert f"│ {command} " in out


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys; from cluster.cli import main; main(['--help']);"
        "print([name for name in ('torch', 'httpx', 'starlette', 'uvicorn', 'grpclib', 'redis') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.splitlines()[-1] == "[]"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("baton 0.")


@pytest.mark.parametrize("argv", [["serve", "dir"], ["up", "dir"], ["up", "--model", "dir"]])
def test_the_model_of_a_cluster_is_a_flag_or_an_argument(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--port", "9", "--print-config"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert {"model = dir  # flag --model", "port = 9  # flag --port"} <= set(printed)


@pytest.mark.parametrize(
    ("argv", "start"),
    [
        (["fly"], "baton: "),
        (["up", "--fly"], "baton up: No such option: --fly; see baton up --help"),
        (["up", "--prot", "1"], "baton up: No such option: --prot; did you mean --port?"),
        (["up", "--max_model_len", "1"], "baton up: No such option: --max_model_len; did you mean --max-model-len?"),
        (["up", "-tp", "2"], "baton up: -tp of vLLM is not supported"),
        (["serve", "m", "--tensor-parallel-size=2"], "baton serve: --tensor-parallel-size of vLLM is not supported"),
        (
            ["up", "--api-key", "x"],
            "baton up: --api-key of vLLM is named --api-keys-file here; `baton key` makes a key",
        ),
        (
            ["role", "decode-0", "both"],
            "baton role: Invalid value for 'role': 'both' is not one of 'prefill', 'decode'",
        ),
        (["role", "decode-0"], "baton role: Missing argument 'role'. Choose from: prefill, decode"),
        (["up", "--port", "x"], "baton up: --port 'x': must be a valid integer"),
        (["up", "--mode", "x"], "baton up: --mode 'x': must be 'disaggregated' or 'colocated'"),
        (["up", "--model", "/nowhere"], "baton up: --model: model '/nowhere' is neither a directory nor a hub id"),
        (["serve", "/nowhere"], "baton serve: --model: model '/nowhere' is neither a directory nor a hub id"),
        (["up", "/nowhere", "--model", "x"], "baton up: --model x: '/nowhere' is given too; give one"),
        (["up", "--prefill", "-1"], "baton up: --prefill '-1': must be greater than or equal to 0"),
        (["up", "--decode", "0"], "baton up: --decode '0': must be at least 1"),
        (["router"], "baton router: --model (or BATON_MODEL) is required"),
        (
            ["prefill", "--kv-channel", "x"],
            "baton prefill: --kv-channel 'x': must be 'auto', 'pool', 'cuda_ipc', 'shm' or 'tcp'",
        ),
        (["decode", "--registry", "x"], "baton decode: --registry 'x': must be host:port"),
        (["chat", "--temperature", "9"], "baton chat: "),
        (["ray", "down", "--drain-timeout-s", "inf"], "baton ray down: "),
        (["status", "surplus"], "baton status: "),
    ],
)
def test_wrong_usage_exits_with_2_and_one_line(argv: list[str], start: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, lambda: main(argv)).startswith(start)


# ---- status --------------------------------------------------------------------------------------------------------


def test_status_of_a_cluster(serve: Callable[[Answering], str], capsys: pytest.CaptureFixture[str]) -> None:
    url = serve(lambda path, _: (200 if path == "/v1/status" else 404, json.dumps(STATUS).encode()))
    assert main(["status", "--url", url + "/"]) == 0
    above = head(STATUS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[: len(above)] == above
    titles, *rows = lines[len(above) :]
    assert titles.split("\t") == list(COLUMNS)
    assert rows[0].split("\t") == list(ROW)
    assert rows[1].split("\t")[:3] == ["[red]x[/red]", "decode", "lost"]
    assert rows[1].split("\t")[-1] == "-"


def test_status_as_json_from_a_url_in_the_environment(
    serve: Callable[[Answering], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_URL", serve(lambda *_: (200, json.dumps(STATUS).encode())))
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_status_is_a_table_at_a_terminal(serve: Callable[[Answering], str]) -> None:
    status = STATUS | {"latency": LATENCY, "summary": "The prefill pool is the bottleneck."}
    printed = run_at_terminal("status", "--url", serve(lambda *_: (200, json.dumps(status).encode())))
    for cell in (*COLUMNS, *ROW, "[red]x[/red]", "lost", status["summary"], "TTFT 180/420 (SLO 450)"):
        assert cell in printed


@pytest.mark.parametrize("command", [["status"], ["top"], ["role", "decode-0", "prefill"]], ids=lambda argv: argv[0])
@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, b"{}", "status 404"),
        (404, b'{"error": {"message": "No.", "code": "unknown_url"}}', "does not serve this: with --admin-port"),
        (401, b'{"error": {"message": "An API key is needed."}}', "requires an API key: give --api-key"),
        (403, b'{"error": {"message": "This path needs the key of an admin."}}', "needs the key of an admin"),
        (200, b"hello", "is it a router?"),
        (200, b"[]", "is it a router?"),
        (200, b'{"nodes": 1}', "is it a router?"),
        (200, b'{"nodes": [{"role": "decode"}]}', "is it a router?"),
        (500, b"", "status 500"),
    ],
)
def test_an_unexpected_answer_prints_one_line_and_exits_with_1(
    serve: Callable[[Answering], str],
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    status: int,
    body: bytes,
    words: str,
) -> None:
    assert main([*command, "--url", serve(lambda *_: (status, body))]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"baton {command[0]}: ")
    assert err.count("\n") == 1
    assert words in err


def test_https_in_the_url_of_a_server_without_it_is_reported(
    serve: Callable[[Answering], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--url", serve(lambda *_: (200, b"{}")).replace("http:", "https:")]) == 1
    assert "the server does not use HTTPS: write http:// in the URL" in capsys.readouterr().err


def test_a_status_without_values_is_shown() -> None:
    assert row_of({}) == ("?", "?", "?", "0", "0", "-", "0/0", "0", "-", "0", "0 B", "-")
    assert head({})[0].startswith("?, ?; registry ?: ?;")


def test_a_wrong_key_is_reported_as_such(serve: Callable[[Answering], str], capsys: pytest.CaptureFixture[str]) -> None:
    url = serve(lambda *_: (401, b'{"error": {"message": "The API key is not valid."}}'))
    assert main(["status", "--url", url, "--api-key", "wrong"]) == 1
    assert "does not accept this API key" in capsys.readouterr().err
    assert main(["doctor", "--url", url]) == 1
    assert 'is not valid."}}; check --api-key and BATON_API_KEY\n' in capsys.readouterr().out


TOTALS = {"requests_per_s": 4.25, "prompt_tokens_per_s": 310.4, "generated_tokens_per_s": 120.0, "queued": 2}
TOTALS |= {"running": 5, "refused": 9, "failed": 0, "finished": 240}
LOST = {"id": "decode-1", "role": "decode", "state": "lost", "alive": False, "since_ms": 70_000}
LOST |= {"reason": "its connection was reset"}


def test_totals_lost_nodes_and_events_are_shown() -> None:
    events = [{"number": n, "time_ms": n * 1000, "kind": "joined", "text": f"Node n{n} has joined."} for n in range(15)]
    status = STATUS | {"totals": TOTALS, "nodes": [NODE, LOST, LOST | {"state": "left", "id": "d2"}], "events": events}
    above, below = "\n".join(head(status)), tail(status, 82.0)
    assert "now: 5 running, 2 queued" in above
    assert "last 10 s: 4.2 requests/s, 310 prompt tokens/s, 120 generated tokens/s" in above
    assert "last 60 s: 240 finished, 9 refused, 0 failed" in above
    assert below[0] == "decode-1: lost 12 s ago: its connection was reset"
    assert below[1].startswith("d2: left 12 s ago")
    assert [line.partition(" ")[2] for line in below[2:]] == [f"Node n{n} has joined." for n in range(5, 15)]
    assert [row_of(node)[2] for node in status["nodes"]] == ["ready", "lost", "left"]
    assert set(row_of(LOST | {"running": 1, "busy": 0.3, "channels": {"prefill-0": "shm"}})[3:]) == {"-"}


@pytest.mark.parametrize("columns", [80, 100])
def test_no_line_of_a_status_is_wider_than_the_terminal(serve: Callable[[Answering], str], columns: int) -> None:
    status = STATUS | {"latency": LATENCY, "totals": TOTALS, "nodes": [NODE, LOST]}
    url = serve(lambda *_: (200, json.dumps(status).encode()))
    lines = run_at_terminal("status", "--url", url.removeprefix("http://"), columns=columns).splitlines()
    titles = next(line for line in lines if "node" in line and "steps/s" in line)
    assert all(title in titles for title in COLUMNS[:NUM_NARROW])
    for line in head(status):
        assert any(line in each for each in lines), "it is not wrapped"


def test_help_uses_the_width_of_the_terminal_and_omits_flags_for_tests() -> None:
    printed = run_at_terminal("up", "--help", columns=160)
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip()) for line in printed.splitlines()) > 120
    for group in ("Model", "KV cache", "Scheduling", "API", "Limits", "Cluster", "Logs"):
        assert f" {group} " in printed
    assert "failpoint" not in printed
    assert "hash" not in printed
    of_ray = run_at_terminal("ray", "up", "--help")
    assert "Number of routers" in of_ray
    assert " Picker " not in of_ray


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["models", "--version"])
def test_a_command_whose_output_is_not_read_ends_without_a_traceback(command: str, unbuffered: str) -> None:
    read, write = os.pipe()
    os.close(read)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open(write, "w") as closed:
        ended = subprocess.run(
            [sys.executable, "-m", "baton", command],
            check=False,
            stdout=closed,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
        )
    assert (ended.returncode, ended.stderr) == (1 if unbuffered else 0, b"")


# ---- top -----------------------------------------------------------------------------------------------------------


def test_latencies_are_shown_with_their_slo() -> None:
    assert latency_line({}).endswith("no requests")
    assert latency_line({"latency": LATENCY}).endswith(": TTFT 180/420 (SLO 450)")


def test_top_without_a_terminal_prints_once_and_ends(
    serve: Callable[[Answering], str], capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [NODE | {"id": name, "role": name.rpartition("-")[0]} for name in ("decode-10", "decode-9", "prefill-0")]
    assert main(["top", "--url", serve(lambda *_: (200, json.dumps(STATUS | {"nodes": nodes}).encode()))]) == 0
    rows = capsys.readouterr().out.splitlines()[-3:]
    assert [row.split()[0] for row in rows] == ["prefill-0", "decode-9", "decode-10"]


# ---- chat ----------------------------------------------------------------------------------------------------------


def events(*texts: str) -> bytes:
    """Return a streamed answer in the router's format. Its last chunk has the usage."""
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant"}}]}]
    chunks += [{"choices": [{"delta": {"content": text}}]} for text in texts]
    chunks += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}]
    chunks += [{"choices": [], "usage": {"completion_tokens": len(texts)}}]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([*lines, ": a comment\n\n", "data: [DONE]\n\n"]).encode()


class Echo:
    """A fake router that answers with the words of the last message, and records the request bodies."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, path: str, body: Any) -> tuple[int, bytes]:
        assert path == "/v1/chat/completions"
        self.bodies.append(body)
        prompt = body["messages"][-1]["content"]
        if prompt == "fail":
            return 400, json.dumps({"error": {"message": "Too\nlong.", "code": None}}).encode()
        if prompt == "break":
            return 200, b'data: {"choices":[{"delta":{"content":"half"}}]}\n\ndata: {"error":{"message":"Lost."}}\n\n'
        if prompt == "babble":
            return 200, b"data: babble\n\n"
        if prompt == "crash":
            return 500, b"oops"
        return 200, events(*(word + " " for word in prompt.split()))


def chat(url: str, text: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return main(["chat", "--url", url, *arguments])


def test_the_timing_of_a_chat_begins_when_the_request_is_sent(
    serve: Callable[[Answering], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, url = [0.0], serve(Echo())

    class SlowClient(httpx.Client):
        """A client whose constructor takes one second by the clock of the command."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            now[0] += 1.0

    monkeypatch.setattr("cluster.clients.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("cluster.clients.httpx.Client", SlowClient)
    assert chat(url, "Hello you there\n", monkeypatch) == 0
    assert capsys.readouterr().err == "[3 tokens, TTFT 0 ms]\n"


def test_chat_from_a_pipe_answers_line_by_line_with_its_timing(
    serve: Callable[[Answering], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    echo = Echo()
    assert chat(serve(echo), "Hello you there\n\n  again  \nand again\n", monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out == "Hello you there \nagain \nand again \n"
    timings = err.splitlines()
    assert timings[0].startswith("[3 tokens, TTFT ")
    assert timings[0].endswith(" tokens/s]")
    assert timings[1].startswith("[1 tokens, TTFT ")
    assert "tokens/s" not in timings[2], "two events are too few to measure a rate"
    assert [message["content"] for message in echo.bodies[2]["messages"]] == [
        "Hello you there",
        "Hello you there ",
        "again",
        "again ",
        "and again",
    ]
    assert echo.bodies[0]["stream"] is True
    assert "max_tokens" not in echo.bodies[0]


def test_chat_options_reach_the_router(serve: Callable[[Answering], str], monkeypatch: pytest.MonkeyPatch) -> None:
    echo = Echo()
    arguments = ("--model", "small", "--system", "Be brief.", "--max-tokens", "7", "--temperature", "0")
    assert chat(serve(echo), "a\n/new\nb\n/quit\nc\n", monkeypatch, *arguments) == 0
    system = {"role": "system", "content": "Be brief."}
    assert [body["messages"] for body in echo.bodies] == [
        [system, {"role": "user", "content": "a"}],
        [system, {"role": "user", "content": "b"}],
    ]
    assert [echo.bodies[0][name] for name in ("model", "max_tokens", "temperature")] == ["small", 7, 0]


def test_commands_of_the_chat_are_answered_locally(
    serve: Callable[[Answering], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    echo = Echo()
    assert chat(serve(echo), "/help\n/nwe\n/etc/hosts has what?\n", monkeypatch) == 0
    help_line, unknown, *_ = capsys.readouterr().err.splitlines()
    assert help_line.startswith("/new forgets the conversation")
    assert unknown == f"/nwe is not a command: {help_line}"
    assert [body["messages"][-1]["content"] for body in echo.bodies] == ["/etc/hosts has what?"]


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ("fail", "baton chat: Too long. (status 400)"),
        ("crash", "status 500"),
        ("break", "baton chat: Lost."),
        ("babble", "is it a router?"),
    ],
)
def test_a_failed_answer_prints_one_line_and_leaves_the_conversation_unchanged(
    serve: Callable[[Answering], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prompt: str,
    line: str,
) -> None:
    echo = Echo()
    assert chat(serve(echo), f"{prompt}\nagain\n", monkeypatch) == 1
    out, err = capsys.readouterr()
    assert out.endswith("again \n")
    assert line in err.splitlines()[0]
    assert [message["content"] for message in echo.bodies[1]["messages"]] == ["again"]


def test_ctrl_c_stops_the_answer_and_not_the_program(serve: Callable[[Answering], str]) -> None:
    """Ctrl-C closes the connection, so that the router cancels the request. The question is removed from the chat."""
    echo, begun, stopped = Echo(), threading.Event(), threading.Event()

    def answer(path: str, body: Any) -> tuple[int, bytes]:
        if body["messages"][-1]["content"] == "wait":
            begun.set()
            stopped.wait(600)
        return echo(path, body)

    # The tests may run in the background, where a shell makes its children ignore SIGINT.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "baton", "chat", "--url", serve(answer)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        process.stdin.write("wait\nagain\n")
        process.stdin.flush()
        assert begun.wait(300)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    stopped.set()
    assert (process.returncode, out.strip()) == (1, "again")
    assert "[stopped]" in err
    assert [message["content"] for message in echo.bodies[-1]["messages"]] == ["again"]


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")
def test_the_first_process_of_a_container_ends_at_sigterm_while_it_starts(tmp_path: Path) -> None:
    """The node waits until the name of its router can be resolved."""
    baton, secret = [sys.executable, "-P", "-m", "baton"], str(tmp_path / "secret.pem")
    subprocess.run([*baton, "secret", secret], check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    flags = ["--model", str(DEMO), "--runner", "hash", "--host", "0.0.0.0", "--cluster-secret-file", secret]
    command = [
        "unshare",
        "--fork",
        "--pid",
        "--kill-child",
        *baton,
        "decode",
        *flags,
        "--registry",
        "none.invalid:8001",
    ]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}) as process:
        wait_for(lambda: psutil.Process(process.pid).children(), "the node starts")
        (node,) = psutil.Process(process.pid).children()
        wait_for(lambda: process.poll() is not None or node.terminate(), "the node ends")
        assert process.returncode == 143


def test_ctrl_c_while_the_command_is_loaded_prints_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "run_app", mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert run_baton() == 130

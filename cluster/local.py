"""Starts the processes of a local cluster, restarts nodes that end, and stops all processes together."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from cluster.plan import ROUTER, Child, LocalSettings, checked, inherited, plan
from cluster.secret import new_key, own_secret
from shared.api_client import bearer
from shared.config.settings import EVERY_ADDRESS
from shared.lifecycle import set_parent_death_signal
from shared.logs import json_line

# Prints a line. The arguments are the name of the process, the line and the level (default: "info").
Say = Callable[..., None]
GetJson = Callable[[], Awaitable[Any]]  # sends a request and returns the JSON of its answer, or None on failure

MAX_LINE_BYTES = 1 << 16
RESTARTS_PER_MINUTE = 5
FIRST_DELAY_S = 0.5
COUNT_S = 0.5  # maximum wait for the number of running requests, which is logged when the cluster drains
GRACE_S = 2.0  # how long a process may take to exit after its drain
BAD_SETTINGS = 2  # the exit status of a process with invalid settings, which is not restarted
WAITING_S, MAX_WAITING_S = 5.0, 60.0  # time before the first report of late nodes; longest time between reports


def up(settings: LocalSettings) -> int:
    """Run a cluster until a signal arrives or its router ends, and return the exit status.

    SIGINT, SIGTERM and SIGHUP drain the cluster; a second signal kills it. SIGUSR1 restarts the nodes one after the
    other. Raises ConfigError, before any process starts, if the settings are invalid.
    """
    settings, key = with_own_key(checked(settings))
    # With Redis, nodes on other hosts need the secret too, so the user must provide it.
    if not settings.cluster_secret_file and not settings.registry:
        settings = settings.model_copy(update={"cluster_secret_file": own_secret(settings.kv_directory)})
    children = plan(settings, settings.cpus or sorted(os.sched_getaffinity(0)))
    say = printer([child.name for child in children], settings.log_format)
    return asyncio.run(_up(settings, children, say, key))


def with_own_key(settings: LocalSettings) -> tuple[LocalSettings, str]:
    """If the settings have API keys, add a new admin key. Return the settings, and the new key or "".

    This process uses the new key for its own requests to the router.
    """
    if not (settings.api_keys_file or settings.api_keys):
        return settings, ""
    key, line = new_key("baton-up", is_admin=True)
    return settings.model_copy(update={"api_keys": ",".join(filter(None, (settings.api_keys, line)))}), key


def url_of(host: str, port: int, certfile: str = "") -> str:
    host = "127.0.0.1" if host in EVERY_ADDRESS else host
    return f"{'https' if certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


async def _up(settings: LocalSettings, children: Sequence[Child], say: Say, key: str) -> int:
    url = url_of(settings.host, settings.port, settings.ssl_certfile)
    admin = (settings.admin_host, settings.admin_port) if settings.admin_port else (settings.host, settings.port)
    admin_url = url_of(*admin, settings.ssl_certfile)
    nodes = [child.name for child in children if child.name != ROUTER]
    # The router is on this machine, so proxy settings do not apply, and its certificate may name only its public host.
    async with httpx.AsyncClient(timeout=2.0, trust_env=False, verify=False, headers=bearer(key)) as client:
        get_status = partial(get_json, client, f"{admin_url}/v1/status")
        all_ready = partial(until, get_status, lambda status: num_ready(status) >= len(nodes))
        reports = [
            asyncio.create_task(_report_ready(settings, say, partial(get_json, client, f"{url}/ready"), get_status)),
            asyncio.create_task(report_waiting([] if settings.registry else nodes, len(nodes), say, get_status)),
        ]
        try:
            return await LocalCluster(children, say, settings.drain_timeout_s, all_ready, get_status).run()
        finally:
            for report in reports:
                report.cancel()


async def _report_ready(settings: LocalSettings, say: Say, get_ready: GetJson, get_status: GetJson) -> None:
    await until(get_ready, lambda _: True)
    url = url_of(settings.host, settings.port, settings.ssl_certfile)
    own_name = url_of(socket.gethostname(), settings.port, settings.ssl_certfile)
    others = f" and {own_name}" if settings.host in EVERY_ADDRESS else ""
    say("baton", f"serving at {url}{others}")
    model = settings.served_model_name or Path(settings.model).name
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 40})
    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys_file or settings.api_keys else ""
    say("baton", f"try: curl {url}/v1/completions -H 'Content-Type: application/json'{key} -d '{body}'")
    num_prefill, num_decode = settings.num_nodes()
    await until(get_status, lambda status: num_ready(status) >= settings.num_all_nodes())
    mode = "vLLM servers" if settings.engines else settings.mode
    others = "".join(f", 1 of {text.partition('=')[0]}" for text in settings.more_models)
    say("baton", f"complete: {mode}, {num_prefill} prefill and {num_decode} decode{others}")


async def report_waiting(
    names: Sequence[str], num_nodes: int, say: Say, get_status: GetJson, delay_s: float = WAITING_S
) -> None:
    """Report the nodes that are not ready, after `delay_s` and then at doubling intervals, until all are ready.

    `names` are the ids of the nodes, or empty if the nodes choose their own ids.
    """
    started = time.monotonic()
    while True:
        await asyncio.sleep(delay_s)
        status = await get_status()
        if status is not None and num_ready(status) >= num_nodes:
            return
        delay_s = min(2 * delay_s, MAX_WAITING_S)
        states = {node["id"]: node["state"] for node in status["nodes"]} if status is not None else {}
        late = [f"{name} ({states.get(name, 'starting')})" for name in names if states.get(name) != "ready"]
        waiting = f"; waiting for {', '.join(late)}" if late else ""
        num = num_ready(status) if status is not None else 0
        say("baton", f"{num} of {num_nodes} nodes are ready after {time.monotonic() - started:.0f} s{waiting}")


def num_ready(status: Any) -> int:
    """Return the number of nodes that take requests, according to a router's /v1/status."""
    return sum(bool(node.get("alive")) and node["state"] == "ready" for node in status["nodes"])


async def get_json(client: httpx.AsyncClient, url: str) -> Any:
    """Send a GET request. Return the JSON of the response, or None if the request fails or the status is not 200."""
    with contextlib.suppress(httpx.HTTPError, ValueError):
        answer = await client.get(url)
        return answer.json() if answer.status_code == 200 else None
    return None


async def until(get: GetJson, is_enough: Callable[[Any], bool]) -> None:
    """Repeat a request until it succeeds and `is_enough` accepts its answer."""
    while True:
        answer = await get()
        if answer is not None and is_enough(answer):
            return
        await asyncio.sleep(0.1)


def printer(names: Iterable[str], log_format: str = "text") -> Say:
    """Return a function that prints a line of a process, either with the process's name before it or as JSON.

    A line that cannot be printed is lost: a closed terminal or a full disk must not stop the cluster.
    """
    width = max(map(len, names))

    def say(name: str, line: str, level: str = "info") -> None:
        text = json_line(name, line, level) if log_format == "json" else f"{name:<{width}} | {line}"
        with contextlib.suppress(OSError, UnicodeError):
            print(text, flush=True)

    return say


class LocalCluster:
    """The running processes of `children`.

    `baton up` creates this object, and calls `run` on the event loop. `run` restarts nodes that end, and leaves no
    process behind. It stops the cluster when the router ends or a node has invalid settings. After SIGTERM, a process
    is killed unless it ends within `drain_timeout_s` + GRACE_S. `all_ready` waits until every node takes requests.
    `get_status` returns the router's /v1/status, or None if the router does not answer.
    """

    def __init__(
        self,
        children: Sequence[Child],
        say: Say,
        drain_timeout_s: float,
        all_ready: Callable[[], Awaitable[None]],
        get_status: GetJson,
    ) -> None:
        self._children = children
        self._nodes = [child.name for child in children if child.name != ROUTER]
        self._say = say
        self._drain_timeout_s = drain_timeout_s
        self._processes: dict[str, Process] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._all_ready = all_ready
        self._get_status = get_status
        self._rolling: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self._num_signals = 0
        self._status = 0

    async def run(self) -> int:
        """Run the processes until they have all ended, and return the exit status.

        The exit status is 0 after one signal, and 128 plus the number of the second signal after two signals. If a
        child's end ends the cluster, the exit status is the child's, or 1 if the child exited with 0 or was killed.
        """
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGUSR1, self._on_restart)
        try:
            self._keepers = {child.name: loop.create_task(self._keep(child)) for child in self._children}
            for keeper in self._keepers.values():
                # A keeper also ends if it cannot start its child.
                keeper.add_done_callback(lambda _: self._ending.set())
            await self._ending.wait()
            if self._rolling is not None:
                self._rolling.cancel()
            if self._num_signals:
                await self._say_draining()
            # End the router first, because it needs the nodes to finish its requests.
            await self._end([ROUTER])
            await self._end(self._nodes)
            await asyncio.gather(*self._keepers.values())
            self._say("baton", "ended")
        finally:
            self._send(signal.SIGKILL, list(self._processes))
            for number in (*numbers, signal.SIGUSR1):
                loop.remove_signal_handler(number)
        return self._status

    def _on_signal(self, number: int) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._ending.set()
        else:
            self._status = 128 + number
            self._send(signal.SIGKILL, list(self._processes))

    async def _say_draining(self) -> None:
        status = None
        with contextlib.suppress(TimeoutError):
            status = await asyncio.wait_for(self._get_status(), COUNT_S)
        num = status["requests"]["running"] if status is not None else None
        what = (
            "" if num is None else f" {num} request{'' if num == 1 else 's'}, for at most {self._drain_timeout_s:g} s"
        )
        self._say("baton", f"draining{what}; a second signal ends all processes at once")

    def _on_restart(self) -> None:
        if self._rolling is None or self._rolling.done():
            self._rolling = asyncio.get_running_loop().create_task(self._restart_all())

    async def _restart_all(self) -> None:
        """Restart the nodes one after the other. Wait until a node takes requests again before the next one drains."""
        await self._all_ready()
        for name in self._nodes:
            if (process := self._processes.get(name)) is None:
                continue  # it is already being restarted
            self._say(name, "restarting: draining")
            self._send(signal.SIGTERM, [name])
            await process.wait()
            await self._all_ready()
        self._say("baton", "every node was restarted")

    def _send(self, number: signal.Signals, names: Iterable[str]) -> None:
        for process in [self._processes[name] for name in names if name in self._processes]:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _end(self, names: Sequence[str]) -> None:
        """Send SIGTERM to processes, wait until they have drained, and kill those that have not ended in time."""
        self._send(signal.SIGTERM, names)
        if names:
            await asyncio.wait([self._keepers[name] for name in names], timeout=self._drain_timeout_s + GRACE_S)
        for name in [name for name in names if name in self._processes]:
            self._say(name, "has not ended in time and is killed", "warning")
        self._send(signal.SIGKILL, names)

    async def _keep(self, child: Child) -> None:
        restarts: list[float] = []
        while not self._ending.is_set():
            status = await self._run(child)
            if self._ending.is_set():
                return
            drained = child.name != ROUTER and status == 0  # `_restart_all` sent SIGTERM
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            if drained:
                self._say(child.name, "has drained and ended")
            else:
                self._say(child.name, f"ended unexpectedly, {how}", "error")
            if child.name == ROUTER or status == BAD_SETTINGS:
                self._say("baton", f"the cluster ends, because {child.name} has ended", "error")
                self._status = status if status > 0 else 1
                self._ending.set()
                return
            delay_s = restart_delay_s(restarts, time.monotonic())
            self._say(child.name, f"starts again in {delay_s:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), delay_s)
            restarts.append(time.monotonic())

    async def _run(self, child: Child) -> int:
        """Run a child once. Return its exit status, or the negative number of the signal that ended it."""
        process = await asyncio.create_subprocess_exec(
            *child.command,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            limit=MAX_LINE_BYTES,
            env=inherited(os.environ) | child.environment,
            start_new_session=True,  # so that Ctrl-C at the terminal reaches only the parent process
            preexec_fn=set_parent_death_signal(os.getpid()),
        )
        self._processes[child.name] = process
        if self._ending.is_set():
            process.kill()  # the process has just started, so it has nothing to drain
        relay = asyncio.create_task(self._relay(child.name, process))
        try:
            return await process.wait()
        finally:
            del self._processes[child.name]
            await asyncio.wait({relay}, timeout=1.0)
            relay.cancel()

    async def _relay(self, name: str, process: Process) -> None:
        self._say(name, f"started, process {process.pid}")
        assert process.stdout is not None
        async for line in lines_of(process.stdout):
            self._say(name, line)


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield the lines of a stream, without the line breaks. Yield a line over MAX_LINE_BYTES in parts."""
    line = b"\n"
    while line:
        try:
            line = await stream.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:  # the stream has ended
            line = error.partial
        except asyncio.LimitOverrunError as error:
            line = await stream.read(error.consumed)
        if line:
            yield line.rstrip(b"\r\n").decode("utf-8", "replace")


def restart_delay_s(restarts: Sequence[float], now: float) -> float:
    """Return the delay before the next restart.

    The delay doubles with each restart in the last minute. After RESTARTS_PER_MINUTE restarts within a minute, the
    delay ends one minute after the first of these restarts.
    """
    recent = [at for at in restarts if now - at < 60]
    if len(recent) >= RESTARTS_PER_MINUTE:
        return recent[-RESTARTS_PER_MINUTE] + 60 - now
    return FIRST_DELAY_S * float(2 ** len(recent))

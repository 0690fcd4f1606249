"""Processes that benchmarks start, and their memory: peers that answer calls as JSON lines, and local clusters."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
START_S = 180.0


class PeerFailedError(Exception):
    """A peer did not start, or one of its calls failed. The message is one line."""


class PeerProcess:
    """A process group that runs `module` with `python` and answers calls through `benchmarks.peers.worker`.

    If `pauses` is true, SIGSTOP stops the group between calls, so that other peers can use the CPU. `facts` is the
    peer's first answer. Use this object with `contextlib.closing`. Raises PeerFailedError if the peer does not start.
    """

    def __init__(
        self,
        module: str,
        options: Mapping[str, Any],
        *,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
        pauses: bool = False,
    ) -> None:
        self._module, self._pauses = module.rpartition(".")[2], pauses
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        try:
            self._process = subprocess.Popen(
                [python, "-m", module, json.dumps(dict(options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                cwd=ROOT,
                env=os.environ | dict(env or {}),
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise PeerFailedError(f"{self._module}: {error}") from None
        try:
            self.facts: Any = self._answer()
        except PeerFailedError:
            self.close()
            raise
        self._signal(signal.SIGSTOP if pauses else signal.SIGCONT)

    def call(self, name: str, **arguments: Any) -> Any:
        """Call a method of the peer. Raises PeerFailedError if the method fails."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            print(json.dumps({"call": name, "with": arguments}), file=self._process.stdin, flush=True)
            return self._answer()
        except BrokenPipeError:
            raise PeerFailedError(f"{self._module} ended: {self._last_output()}") from None
        finally:
            self._signal(signal.SIGSTOP if self._pauses else signal.SIGCONT)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def peak_bytes(self) -> int:
        """The sum of the peak resident memory of all processes of the group, in bytes."""
        return sum(memory_of(pid, "VmHWM") for pid in processes() if _group(pid) == self.pid)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):
                if stream is not None:
                    stream.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise PeerFailedError(f"{self._module} ended: {self._last_output()}")
        if "error" in (answer := json.loads(line)):
            raise PeerFailedError(f"{self._module}: {answer['error']}")
        return answer["value"]

    def _last_output(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "no output"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@contextlib.contextmanager
def running_cluster(flags: tuple[str, ...], num_nodes: int) -> Iterator[tuple[str, int]]:
    """Start `baton up`. Yield its URL and pid when `num_nodes` nodes are alive. Raises TimeoutError if the command
    ends before that, or after START_S."""
    with tempfile.NamedTemporaryFile() as log:
        command = [sys.executable, "-m", "baton", "up", "--port", "0", "--registry-port", "0", *flags]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            deadline, url = time.monotonic() + START_S, ""
            while not url or _num_alive(url) < num_nodes:
                if time.monotonic() > deadline or process.poll() is not None:
                    about = f"`baton up` ended, or does not serve after {START_S:g} s"
                    raise TimeoutError(f"{about}: {Path(log.name).read_text()[-2000:]}")
                time.sleep(0.02)
                url = url or Path(log.name).read_text().partition("serving at ")[2].partition("\n")[0].split(" ")[0]
            yield url, process.pid
        finally:
            process.terminate()
            process.wait(60)


def _num_alive(url: str) -> int:
    try:
        return sum(node["alive"] for node in httpx.get(url + "/v1/status", timeout=2).json()["nodes"])
    except httpx.HTTPError:
        return 0


def free_port() -> int:
    """Return a free port. It is below the ephemeral range, so no outgoing connection can take it first."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def memory_of(pid: int, key: str = "VmRSS") -> int:
    """Return the figure `key` of /proc/PID/status in bytes, or 0 if the process has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return 0


def _group(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return 0

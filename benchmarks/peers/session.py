"""Runs the workers of a comparison side by side, so that their runs alternate, and lets only one of them have the CPU.

Every worker is a process group of its own, stopped (SIGSTOP) but while it answers a call.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.lifecycle import set_parent_death_signal

ROOT = Path(__file__).resolve().parents[2]


class PeerError(Exception):
    """A worker could not be started, or a call failed there; says why in one line."""


class Worker:
    """`module` of benchmarks.peers run by `python`. Loads at once; raises PeerError when that fails."""

    def __init__(
        self, python: str, module: str, options: Mapping[str, Any], env: Mapping[str, str] | None = None
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        try:
            self._process = subprocess.Popen(
                [python, "-m", f"benchmarks.peers.{module}", json.dumps(dict(options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": str(options["threads"])} | dict(env or {}),
                text=True,
                start_new_session=True,
                preexec_fn=set_parent_death_signal(os.getpid()),  # noqa: PLW1509 - no thread of ours runs yet
            )
        except OSError as error:
            self._log.close()
            raise PeerError(f"{module}: {error}") from None
        self._module = module
        try:
            self.facts: dict[str, Any] = self._answer()
        except PeerError:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def call(self, name: str, **arguments: Any) -> Any:
        """Raises PeerError when it fails there. The others of a comparison are stopped meanwhile."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"call": name, "with": arguments}) + "\n")
            self._process.stdin.flush()
            return self._answer()
        except BrokenPipeError:
            raise PeerError(f"{self._module} ended: {self._last_words()}") from None
        finally:
            self._signal(signal.SIGSTOP)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def peak_bytes(self) -> int:
        """Most resident memory that its processes had, each at its own time (VmHWM)."""
        return sum(_status(process, "VmHWM") * 1024 for process in _group(self._process.pid))

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._log.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self._module} ended: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self._module}: {answer['error']}")
        return answer["value"]

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _group(leader: int) -> list[Path]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(int(process.name)) == leader:
                found.append(process)
    return found


def _status(process: Path, key: str) -> int:
    with contextlib.suppress(OSError):
        for line in (process / "status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1])
    return 0

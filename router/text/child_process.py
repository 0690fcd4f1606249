"""Child processes of the router, for work on untrusted input that Python cannot stop: templates and grammars."""

import contextlib
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any


class ChildProcess:
    """A Python module that runs as a child process, and answers each JSON line with one JSON line.

    The module limits its own time and memory. It is killed if it ends without an answer, and when this object is
    garbage-collected. The caller uses the object from one thread at a time. In a forked process, the child counts as
    not running, and `start` starts another one.
    """

    _stop: "weakref.finalize[[subprocess.Popen[bytes]], ChildProcess] | None" = None

    def __init__(self, module: str) -> None:
        self._module = module
        self.start()

    def start(self) -> None:
        if self._stop is not None:
            self._stop.detach()
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],  # the package `router` can be imported from this directory
            env=os.environ | {"PYTHONSAFEPATH": ""},  # otherwise, Python may not search that directory
        )
        self._stop = weakref.finalize(self, _kill, self._process)

    @property
    def is_running(self) -> bool:
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, question: object) -> dict[str, Any] | None:
        """Return the child's answer, or None if the child exceeded a limit and gave no answer. The child is then
        killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            if self._stop is not None:
                self._stop()
            return None
        return answer


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(OSError):  # OSError: the child did not read all of its input
        process.communicate()

"""Child processes that handle untrusted templates, grammars and images, because Python cannot stop a thread.

The router uses `ChildProcess`. A module that runs as a child uses the functions `limit_process`, `questions` and
`reply`.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class ChildProcess:
    """A Python module that runs as a child process, and answers each JSON line with one JSON line.

    The module limits its own time and memory. If the child closes its output without an answer, it is killed, and the
    next question starts a new child. The child is also killed when this object is garbage-collected. The caller uses
    the object from one thread at a time. If the caller forks, the forked process starts its own child.
    """

    _process: "subprocess.Popen[bytes] | None" = None
    _stop: "weakref.finalize[[subprocess.Popen[bytes]], ChildProcess] | None" = None

    def __init__(self, module: str, settings: object = None) -> None:
        """Each child gets `settings` as its first line of input, unless `settings` is None."""
        self._module = module
        self._settings = settings

    def start(self) -> dict[str, Any] | None:
        """Start a child. Return its answer to the settings, or None if it exceeded a limit."""
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
        return {} if self._settings is None else self._exchange(self._process, self._settings)

    def ask(self, question: object) -> dict[str, Any] | None:
        """Return the child's answer, or None if the child exceeded a limit. Start a child if none is running."""
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self.start()
        assert self._process is not None
        return self._exchange(self._process, question)

    def _exchange(self, process: "subprocess.Popen[bytes]", question: object) -> dict[str, Any] | None:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
        except (OSError, ValueError):
            if self._stop is not None:
                self._stop()
            return None
        return answer


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with contextlib.suppress(OSError):  # the child did not read all of its input
        process.communicate()


def limit_process(memory_bytes: int) -> None:
    """Limit the address space of this process. Ignore SIGINT: Ctrl-C also reaches the router, which may still need this
    process to answer requests."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def questions(limit_s: float) -> Iterator[Any]:
    """Yield the questions that arrive on standard input, until it ends.

    If more than `limit_s` seconds of CPU time pass before the next question is requested, SIGPROF kills the process,
    even if it runs native code. CPU time does not depend on how busy the machine is.
    """
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        yield json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, 0)


def reply(answer: object) -> None:
    print(json.dumps(answer), flush=True)

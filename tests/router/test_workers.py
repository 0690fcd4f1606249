"""Test the supervisor of a router's workers."""

import subprocess
import sys
from pathlib import Path

from tests.cluster.harness import ROOT

# The worker kills itself at each start. At its fourth start, it ends the supervisor.
CRASH_LOOP = """
import os, signal, sys, time
from router.workers import supervise

before, starts = time.monotonic(), sys.argv[1]

def crash():
    with open(starts, "a") as file:
        file.write(".")
    if os.stat(starts).st_size == 4:
        os.kill(os.getppid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGKILL)

supervise({"worker-0": crash}, {}, lambda: None)
print(time.monotonic() - before)
"""


def test_a_worker_that_is_always_killed_starts_at_most_once_a_second(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CRASH_LOOP, str(tmp_path / "starts")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert float(ended.stdout) >= 3


# The worker stops the supervisor for longer than the interval of its timer, three times. Then it ends the supervisor.
STOPS = """
import os, signal, time
from router.workers import supervise

def stop():
    for _ in range(3):
        time.sleep(0.2)
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(0.7)
        os.kill(os.getppid(), signal.SIGCONT)
    time.sleep(0.2)
    print("undisturbed", flush=True)
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()

print(supervise({"worker-0": stop}, {}, lambda: None))
"""


def test_a_supervisor_that_is_stopped_and_continued_does_not_end_the_workers() -> None:
    command = [sys.executable, "-c", STOPS]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "undisturbed\n0\n", "")

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

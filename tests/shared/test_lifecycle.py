"""Test how a process collects its garbage."""

import subprocess
import sys

from tests.cluster.harness import ROOT

# Create long-lived objects, which with Python's default thresholds lead to full collections. Then wait until a cycle
# is collected.
SCRIPT = """
import asyncio, gc, weakref
from shared import lifecycle

class Cycle:
    def __init__(self):
        self.itself = self

async def main():
    lifecycle.FULL_S = 0.5
    collecting = asyncio.ensure_future(lifecycle.collect_garbage())
    await asyncio.sleep(0)
    kept = [[] for _ in range(500_000)]
    print(gc.get_stats()[2]["collections"] - before)
    collected = asyncio.Event()
    weakref.finalize(Cycle(), collected.set)
    await asyncio.wait_for(collected.wait(), 60)

before = gc.get_stats()[2]["collections"]
asyncio.run(main())
"""


def test_all_garbage_is_collected_at_fixed_intervals_only() -> None:
    command = [sys.executable, "-c", SCRIPT]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n", "")

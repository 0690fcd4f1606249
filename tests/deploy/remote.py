"""A client of a cluster that an orchestrator runs, for tests."""

import contextlib
import json
import os
import signal
import socket
import urllib.request
from collections import Counter
from typing import Any

from shared.clock import now_ns
from tests.chaos.traffic import Outcome
from tests.cluster.harness import START_S, free_port, wait_for

# The errors after which clients retry while a router restarts, if no response has begun (see docs/operations.md).
RETRIED = ("ConnectionRefusedError", "ConnectionResetError", "RemoteDisconnected", "ValueError: status 503")


class RouterClient:
    """Reads the status of a router."""

    def __init__(self, url: str) -> None:
        self.url = url

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/v1/status", timeout=5) as answer:
            return dict(json.load(answer))

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.status())
        return False

    def ready_nodes(self) -> Counter[str]:
        """Return the number of nodes that take requests, by role."""
        with contextlib.suppress(OSError):
            nodes = self.status()["nodes"]
            return Counter(node["role"] for node in nodes if node["alive"] and node["state"] == "ready")
        return Counter()

    def wait_for_nodes(self, timeout_s: float = START_S, **counts: int) -> None:
        wait_for(lambda: self.ready_nodes() == Counter(counts), f"{counts} nodes are ready", timeout_s)


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive ports that are free."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def kill(pid: int) -> tuple[int, int]:
    """Kill a process. Return the Unix times in ns before and after the kill."""
    before = now_ns()
    os.kill(pid, signal.SIGKILL)
    return before, now_ns()


def is_lost(outcome: Outcome, killed: tuple[int, int]) -> bool:
    """Return whether a request got wrong tokens, or failed although it was not in progress during the kill."""
    was_cut = outcome.began_ns <= killed[1] and outcome.ended_ns >= killed[0]
    return outcome.is_unequal or (bool(outcome.lost) and not was_cut)

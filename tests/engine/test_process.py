"""How a node that computes in another's pool leaves it."""

import os
import threading
from typing import NoReturn

import pytest

from engine import process
from engine.hash_model import KV_BYTES, HashRunner
from engine.node import Node
from engine.runner import Output
from scheduler.request import Request, Step
from scheduler.role import PREFILL
from scheduler.scheduler import Limits, Scheduler
from shared.kv.memory import HostMemory
from shared.messages import NodeInfo, Sampling
from shared.serve import until


class SlowRunner(HashRunner):
    """Its step takes as long as the test says."""

    begun, go_on = threading.Event(), threading.Event()

    def run(self, step: Step) -> list[Output]:
        self.begun.set()
        self.go_on.wait()
        return super().run(step)


class EndedError(Exception):
    """The process has ended, with this status."""


def end(status: int) -> NoReturn:
    raise EndedError(status)


async def test_a_borrowed_pool_is_not_given_back_while_a_step_may_still_write_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "_exit", end)
    runner = SlowRunner(HostMemory(9, 4 * KV_BYTES).rows, 4, 1, 512)
    info = NodeInfo("n0", "b" * 32, "prefill", "h:1", "m", "print", 4, 32, 9, 64, 8)
    node = Node(info, PREFILL, Scheduler(Limits(), 9, 4), runner, 0.05, 512)
    node.start()
    node.enter(Request("r", [5], 1, 1, payload=Sampling(temperature=0.0)))
    assert await until(runner.begun.is_set, 5.0)
    node.engine.stop(0.05)
    with pytest.raises(EndedError, match=str(process.EXIT_ENGINE_DIED)):
        process._leave_borrowed(node)
    runner.go_on.set()
    await node.close()
    process._leave_borrowed(node)
    node.ended(OSError("the device is gone"))
    assert await until(node.died_with.done, 5.0)
    with pytest.raises(EndedError):
        process._leave_borrowed(node)

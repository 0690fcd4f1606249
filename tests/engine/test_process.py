"""How a node that computes in another's pool leaves it, and the address that a node tells others."""

import os
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from engine.hash_model import KV_BYTES, HashRunner
from engine.runner import SliceOutput
from node import process
from node.node import Node
from node.node_info import advertised
from scheduler.request import Request, Step
from scheduler.role import PREFILL
from scheduler.scheduler import Scheduler, StepLimits
from shared.config.settings import NodeSettings
from shared.kv.memory import HostMemory
from shared.lifecycle import wait_until
from shared.rpc.messages import NodeInfo, SamplingParams


class SlowRunner(HashRunner):
    """Its step takes as long as the test says."""

    begun, go_on = threading.Event(), threading.Event()

    def run(self, step: Step) -> list[SliceOutput]:
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
    node = Node(info, PREFILL, Scheduler(StepLimits(), 9, 4), runner, 0.05, 512)
    node.start()
    node.enqueue(Request("r", [5], 1, 1, sampling=SamplingParams(temperature=0.0)))
    assert await wait_until(runner.begun.is_set, 5.0)
    node.engine.stop(0.05)
    with pytest.raises(EndedError, match=str(process.EXIT_ENGINE_DIED)):
        process._leave_borrowed(node)
    runner.go_on.set()
    await node.close()
    process._leave_borrowed(node)
    node.on_engine_failed(OSError("the device is gone"))
    assert await wait_until(node.fatal_error.done, 5.0)
    with pytest.raises(EndedError):
        process._leave_borrowed(node)


@pytest.mark.parametrize(
    ("host", "registry", "address"),
    [
        ("::", "redis://[::1]:6379", "::1"),
        ("::", "[::1]:8001", "::1"),
        ("::", "::1:8001", "::1"),
        ("0.0.0.0", "redis://127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1:8001", "127.0.0.1"),
        ("0.0.0.0", "unix:///run/redis.sock", "127.0.0.1"),
    ],
)
def test_a_node_that_listens_everywhere_tells_the_address_towards_its_registry(
    host: str, registry: str, address: str
) -> None:
    if ":" in address and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    assert advertised(NodeSettings(model="m", host=host, registry=registry)) == address


def test_a_registry_of_the_other_kind_of_address_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"--host 0\.0\.0\.0: .* --registry ::1 .* --advertise .* --host ::$"):
        advertised(NodeSettings(model="m", host="0.0.0.0", registry="redis://[::1]:6379"))

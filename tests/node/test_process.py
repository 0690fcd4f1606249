"""How a node leaves a shared KV pool, and which address it advertises."""

import os
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from engine.hash_model import HashRunner
from engine.runner import SliceOutput
from node.process import EXIT_ENGINE_FAILED, leave_shared_pool
from node.stats import advertised
from scheduler.request import Request, Step
from scheduler.role import PREFILL
from shared.config.settings import NodeSettings
from shared.kv.memory import HostMemory
from shared.lifecycle import wait_until
from tests.node.harness import BLOCK_TOKENS, GREEDY, LAYERS, ROW_BYTES, VOCABULARY, hash_node


class SlowRunner(HashRunner):
    """Its step ends when the test says so."""

    begun, proceed = threading.Event(), threading.Event()

    def run(self, step: Step) -> list[SliceOutput]:
        self.begun.set()
        self.proceed.wait()
        return super().run(step)


class EndedError(Exception):
    """The process exited, with this status."""


def end(status: int) -> NoReturn:
    raise EndedError(status)


async def test_a_shared_pool_is_not_left_while_a_step_may_still_write_into_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "_exit", end)
    memory = HostMemory(9, ROW_BYTES)
    runner = SlowRunner(memory.rows, BLOCK_TOKENS, LAYERS, VOCABULARY)
    here = hash_node(PREFILL, memory=memory, runner=runner)
    node = here.node
    node.start()
    node.requests.enqueue(Request("r", [5], 1, 1, sampling=GREEDY))
    assert await wait_until(runner.begun.is_set, 5.0)
    node.engine.stop(0.05)
    with pytest.raises(EndedError, match=str(EXIT_ENGINE_FAILED)):
        leave_shared_pool(node)
    runner.proceed.set()
    await node.close()
    leave_shared_pool(node)
    node.on_engine_failed(OSError("the device is gone"))
    assert await wait_until(node.fatal_error.done, 5.0)
    with pytest.raises(EndedError):
        leave_shared_pool(node)


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
def test_a_node_that_listens_everywhere_advertises_its_address_towards_the_registry(
    host: str, registry: str, address: str
) -> None:
    if ":" in address and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    assert advertised(NodeSettings(model="m", host=host, registry=registry)) == address


def test_a_registry_of_the_other_address_family_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"--host 0\.0\.0\.0: .* --registry ::1 .* --advertise .* --host ::$"):
        advertised(NodeSettings(model="m", host="0.0.0.0", registry="redis://[::1]:6379"))

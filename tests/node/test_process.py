"""Test the process of a node: how it leaves a shared KV pool, which address it advertises, and failed starts."""

import os
import socket
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from decode_node.__main__ import main
from engine.hash_model import HashRunner
from engine.runner import SliceOutput, TorchRunner
from engine.startup import is_out_of_memory
from node.identity import advertised, default_id
from node.process import EXIT_ENGINE_FAILED, leave_shared_pool
from scheduler.request import Request, Step
from scheduler.role import PREFILL
from shared.config.settings import NodeSettings
from shared.kv.memory import HostMemory
from shared.lifecycle import wait_until
from shared.registry import check_node
from shared.rpc.messages import NodeInfo
from tests.cluster.harness import DEMO
from tests.node.harness import BLOCK_TOKENS, GREEDY, ROW_BYTES, VOCABULARY, hash_node


class SlowRunner(HashRunner):
    """A runner whose steps wait until the test sets `proceed`."""

    begun, proceed = threading.Event(), threading.Event()

    def run(self, step: Step) -> list[SliceOutput]:
        self.begun.set()
        self.proceed.wait()
        return super().run(step)


class EndedError(Exception):
    """Raised instead of exiting the process. The message is the exit status."""


def end(status: int) -> NoReturn:
    raise EndedError(status)


async def test_a_shared_pool_is_not_left_while_a_step_may_still_write_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", end)
    memory = HostMemory(9, ROW_BYTES)
    runner = SlowRunner(memory.rows, BLOCK_TOKENS, VOCABULARY)
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
        ("0.0.0.0", "[::1]:8001,127.0.0.1:8001", "127.0.0.1"),
    ],
)
def test_a_node_that_listens_everywhere_advertises_its_address_towards_the_registry(
    host: str, registry: str, address: str
) -> None:
    if ":" in address and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    assert advertised(NodeSettings(model="m", host=host, registry=registry)) == address


def test_the_default_name_of_a_node_is_valid_and_differs_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ["host", "h" * 63, "h" * 64]
    monkeypatch.setattr(socket, "gethostname", iter(hosts).__next__)
    names = {default_id("prefill") for _ in hosts}
    assert len(names) == 3
    for name in names:
        check_node(NodeInfo(name, "a" * 32, "prefill", "host:1", "m", "print", *[1] * 5))


def test_a_registry_of_the_other_address_family_is_a_one_line_error() -> None:
    with pytest.raises(ValueError, match=r"--host 0\.0\.0\.0: .* --registry ::1 .* --advertise .* --host ::$"):
        advertised(NodeSettings(model="m", host="0.0.0.0", registry="redis://[::1]:6379"))


def settings_of(tmp_path: Path) -> NodeSettings:
    return NodeSettings(
        model=str(DEMO), kv_directory=str(tmp_path / "kv"), num_blocks=64, threads=1, port=0, device="cpu"
    )


# The stages at which a node on the CPU can fail to start. For each stage, the test makes one function fail.
STAGES: dict[str, tuple[object, str]] = {
    "threads": (torch, "set_num_threads"),
    "weights": (torch.Tensor, "to"),
    "the runner": (TorchRunner, "__init__"),
    "the first steps": (TorchRunner, "warm_up"),
}
ERRORS = [
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.\nC++ stack"),
    MemoryError(),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore advice"),
    AssertionError(),
]


@pytest.mark.parametrize(("stage", "error"), list(zip(STAGES.values(), ERRORS, strict=True)), ids=STAGES)
def test_a_failure_at_any_stage_of_the_start_prints_one_line_and_exits_with_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stage: tuple[Any, str],
    error: Exception,
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.setattr(*stage, fail)
    assert main(settings_of(tmp_path)) == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("decode: ")]
    assert type(error).__name__ in line
    fixes = ("smaller model", "lower --", "free memory")
    assert any(fix in line for fix in fixes) == is_out_of_memory(error)

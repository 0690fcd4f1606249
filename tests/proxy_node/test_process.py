"""Test the process of a proxy node, which probes its engine and joins again after each loss of the engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from proxy_node import probe
from proxy_node.__main__ import ProxyProcess
from proxy_node.vllm import VllmEngine
from shared.config.settings import ProxySettings
from shared.lifecycle import wait_until
from shared.rpc.messages import SetRoleRequest
from tests.cluster.harness import DEMO, free_port
from tests.proxy_node.vllm_stub import VOCABULARY, VllmStub

WAIT_S = 60.0


@asynccontextmanager
async def process_of(stub: VllmStub) -> AsyncIterator[ProxyProcess]:
    """A process whose registry does not answer. `lifetime` stands in for ProcessLifetime, which handles signals."""
    lifetime: Any = SimpleNamespace(draining=asyncio.Event())
    async with stub.serve() as url:
        registry = f"127.0.0.1:{free_port()}"
        settings = ProxySettings(
            model=str(DEMO), engine=url, registry=registry, advertise="127.0.0.1", heartbeat_s=0.05
        )
        process = ProxyProcess(settings, VllmEngine(url, "", VOCABULARY), 8192)
        serving = asyncio.ensure_future(process.serve(lifetime))
        try:
            yield process
        finally:
            lifetime.draining.set()
            await serving


async def test_a_probe_without_an_answer_is_logged_and_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(probe, "PROBE_S", 0.2)
    stub = VllmStub(is_stalled=True)
    async with process_of(stub) as process:
        assert await wait_until(lambda: "no answer within 0.2 s" in caplog.text, WAIT_S)
        monkeypatch.setattr(probe, "PROBE_S", WAIT_S)
        stub.set({"is_stalled": False})
        assert await wait_until(lambda: process.node is not None, WAIT_S)


async def test_a_changed_role_outlasts_the_loss_of_the_engine() -> None:
    stub = VllmStub(connector="nixl")
    async with process_of(stub) as process:
        assert await wait_until(lambda: process.node is not None, WAIT_S)
        assert (node := process.node) is not None
        assert not (await node.set_role(SetRoleRequest("prefill", 1.0))).error
        assert await wait_until(lambda: node.stats().steps > 0, WAIT_S)
        stub.steps = 0  # as after a restart
        assert await wait_until(lambda: process.node not in {None, node}, WAIT_S)
        assert process.node is not None
        assert process.node.info.role == "prefill"

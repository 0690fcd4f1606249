"""Test `baton doctor --engine`: each check prints a line, and each fault of a server fails the line that names it."""

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from cluster import doctor_engine
from cluster.doctor import Finding, examine
from cluster.doctor_engine import engine_checks
from cluster.plan import DoctorSettings
from proxy_node import probe
from tests.cluster.harness import DEMO, ROOT
from tests.proxy_node.vllm_stub import VllmStub

NAMES = ["server", "tokens", "answers", "cancels", "salts"]


@asynccontextmanager
async def examined(peer: bool = False, **knobs: Any) -> AsyncIterator[tuple[list[Finding], VllmStub]]:
    """Examine a server with these knobs. If `peer`, examine a pair whose second server has the knobs. Yield the
    findings, and the stub of the last server."""
    stubs = [VllmStub(connector="nixl"), VllmStub(**{"connector": "nixl"} | knobs)] if peer else [VllmStub(**knobs)]
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(stub.serve()) for stub in stubs]
        given = {"engine": urls[0], "peer": urls[1] if peer else "", "model": str(DEMO)}
        checks = await stack.enter_async_context(engine_checks(DoctorSettings(**given)))
        yield [await examine(name, check) for name, check in checks], stubs[-1]


def failed(findings: list[Finding]) -> list[str]:
    return [finding.name for finding in findings if finding.level == "failed"]


async def test_a_healthy_pair_passes_every_check() -> None:
    async with examined(peer=True) as (findings, stub):
        assert failed(findings) == []
        assert [finding.name for finding in findings] == [*NAMES, *NAMES, "same KV", "handoff", "handoff back"]
        assert "bytes moved" in findings[-1].text
        assert stub.handoffs["misused"] == 0


async def test_a_server_that_does_not_answer_fails_its_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_S", 2.0)  # enough for the 20 requests of the check "tokens"
    async with examined(is_stalled=True) as (findings, _):
        assert failed(findings) == ["answers", "cancels", "salts"]
        assert "no answer within 2 s" in findings[2].text


@pytest.mark.parametrize(
    ("name", "words", "knobs"),
    [
        ("server", "--max-model-len 4096", {"max_model_len": 4096}),
        ("server", "data-parallel", {"engines": 2}),
        ("answers", "token ids", {"token_ids": False}),
        ("answers", "do not repeat", {"repeats": False}),
        ("cancels", "still runs", {"never_drops": True}),
        ("salts", "tenants share a cache", {"ignores_salts": True}),
        ("salts", "--enable-prefix-caching", {"caches": False}),
    ],
)
async def test_a_fault_of_a_server_fails_the_line_that_names_it(
    name: str, words: str, knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_engine, "IDLE_S", 1.0)
    async with examined(**knobs) as (findings, _):
        [found] = [finding for finding in findings if finding.name == name]
        assert found.level == "failed"
        assert words in found.text


@pytest.mark.parametrize(
    ("name", "words", "knobs"),
    [
        ("same KV", "--kv-transfer-config", {"connector": ""}),
        ("same KV", "block_tokens is 16 on", {"block_size": 32}),
        ("same KV", "version is 0.32.0", {"version": "0.31.0"}),
        ("handoff", "no KV moved", {"ignores_params": True}),
        ("handoff", "Internal server error", {"no_kv": 1}),
    ],
)
async def test_a_fault_of_a_pair_fails_the_line_that_names_it(
    name: str, words: str, knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_engine, "IDLE_S", 1.0)
    async with examined(peer=True, **knobs) as (findings, _):
        assert name in failed(findings)
        [found] = [finding for finding in findings if finding.name == name]
        assert words in found.text


def test_the_command_ends_with_1_if_no_server_answers() -> None:
    command = [sys.executable, "-m", "baton", "doctor", "--engine", "http://127.0.0.1:9"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 1, found.stderr
    [line] = found.stdout.splitlines()
    assert line.startswith("failed   server")

"""Tests of `baton doctor` with faulty clusters and machines. Each check must name the problem and the remedy."""

import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from cluster.cli import main
from cluster.doctor import STATUS_CHECKS, CheckWarning, Finding, examine, handed_off, replays_here, same_tokens
from cluster.plan import DoctorSettings
from cluster.secret import write_secret
from compare.endpoint import EndpointError
from tests.cluster.harness import RedisServer, cluster, wait_for
from tests.command_line import refusal

NODE: dict[str, Any] = {
    "id": "decode-0",
    "role": "decode",
    "state": "ready",
    "alive": True,
    "fingerprint": "aa",
    "blocks": {"free": 50, "cached": 20, "owned": 25, "reserved": 4, "quarantined": 1, "total": 100},
    "block_bytes": 4096,
    "block_tokens": 16,
    "channels": {},
    "channel_fallbacks": 0,
    "clock_offset_ms": 0.0,
}
PREFILL = NODE | {"id": "prefill-0", "role": "prefill", "channels": {"127.0.0.1:1": "shm"}}


async def examined(*nodes: dict[str, Any], registry: str = "ok") -> dict[str, Finding]:
    status = {"nodes": list(nodes), "registry": {"kind": "redis", "state": registry}}
    return {name: await examine(name, partial(check, status)) for name, check in STATUS_CHECKS.items()}


async def test_a_healthy_cluster_gets_a_line_for_each_check() -> None:
    found = await examined(PREFILL, NODE)
    assert {finding.level for finding in found.values()} == {"ok"}
    assert found["nodes"].text == "1 prefill and 1 decode, all ready"
    assert found["channels"].text == "shm"


@pytest.mark.parametrize(
    ("check", "level", "node", "words"),
    [
        ("nodes", "failed", {"state": "lost"}, "decode-1 is lost"),
        (
            "fingerprints",
            "warning",
            {"fingerprint": "bb"},
            "decode-1: bb; the other nodes have aa and do not exchange KV",
        ),
        ("blocks", "failed", {"blocks": NODE["blocks"] | {"free": 49}}, "do not add up to the total"),
        ("channels", "warning", {"channel_fallbacks": 2}, "nodes used a slower channel: decode-1 2 times"),
        ("clocks", "warning", {"clock_offset_ms": -90_000.0}, "decode-1 by +90000 ms"),
    ],
)
async def test_a_problem_of_one_node_fails_one_check(check: str, level: str, node: dict[str, Any], words: str) -> None:
    found = await examined(PREFILL, NODE, NODE | {"id": "decode-1"} | node)
    assert (found[check].level, words in found[check].text) == (level, True), found[check]
    assert [name for name, finding in found.items() if finding.level != "ok"] == [check]


async def test_each_model_has_its_own_fingerprint() -> None:
    nodes = [NODE | {"model": "a"}, NODE | {"id": "decode-1", "model": "b", "fingerprint": "bb"}]
    status = {"nodes": nodes, "models": {"a": {}, "b": {}}}
    found = await examine("fingerprints", partial(STATUS_CHECKS["fingerprints"], status))
    assert found == Finding("fingerprints", "ok", "all aa, bb")
    nodes.append(NODE | {"id": "decode-2", "model": "b"})
    found = await examine("fingerprints", partial(STATUS_CHECKS["fingerprints"], status))
    assert (found.level, "decode-2: aa; the other nodes have" in found.text) == ("warning", False)


async def test_rows_of_nodes_that_are_gone_have_no_values_to_check() -> None:
    gone = {"id": "decode-2", "role": "decode", "alive": False}
    found = await examined(PREFILL, NODE, gone | {"state": "left"})
    assert {finding.level for finding in found.values()} == {"ok"}
    found = await examined(PREFILL, NODE, gone | {"state": "lost"})
    assert [name for name, finding in found.items() if finding.level != "ok"] == ["nodes"]


async def test_no_nodes_no_redis_and_no_dashboard() -> None:
    found = await examined(registry="down")
    assert (found["nodes"].level, found["membership"].level) == ("failed", "warning")
    found = await examined({name: value for name, value in NODE.items() if name != "clock_offset_ms"})
    assert found["clocks"] == Finding("clocks", "ok", "unknown")


def test_different_tokens_fail_the_replay() -> None:
    answers = {"co-located": [[1, 2, 3], [4]], "tcp": [[1, 2, 3], [5]]}
    with pytest.raises(ValueError, match="tcp answers greedy prompt 1"):
        same_tokens(answers)
    assert same_tokens(answers | {"tcp": [[1, 2, 3], [4]]}) == "2 prompts, co-located, tcp: the same tokens"


@pytest.mark.parametrize("settings", [{"emulate": "h200-qwen3-8b"}, {"runner": "hash"}, {"device": "cpu"}])
async def test_clusters_that_need_no_gpu_get_none(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    started = Mock(return_value=Mock(start=AsyncMock(side_effect=EndpointError("not started")), end=AsyncMock()))
    monkeypatch.setattr("cluster.doctor.LocalStack", started)
    monkeypatch.setattr("cluster.doctor.num_gpus", lambda: 1)
    assert [finding.level async for finding in replays_here(DoctorSettings(**settings))] == ["failed"] * 4
    launches = [(arm.name, launch.gpus) for arm, launch, _ in (call.args for call in started.call_args_list)]
    assert launches == [("co-located", 0), ("shm", 0), ("tcp", 0), ("pool", 0)]


def test_a_channel_that_was_not_used_fails() -> None:
    status = {"handoffs": 5, "bytes_moved": 4096, "nodes": [PREFILL, NODE]}
    assert handed_off(status, "shm", 5) == "5 prompts handed off, 4.0 KiB moved"
    for wrong in ({"handoffs": 4}, {"nodes": [NODE]}, {"nodes": [PREFILL | {"channels": {"a": "shm", "b": "tcp"}}]}):
        with pytest.raises(ValueError, match="were handed off; channels used"):
            handed_off(status | wrong, "shm", 5)


@pytest.mark.parametrize(
    ("error", "level", "text"),
    [
        (CheckWarning("slow"), "warning", "slow"),
        (ValueError("give another"), "failed", "give another"),
        (RuntimeError("a bug"), "failed", "RuntimeError: a bug"),
        (KeyError("nodes"), "failed", "KeyError: 'nodes'"),
        (TimeoutError(), "failed", "TimeoutError: "),
    ],
)
async def test_any_exception_of_a_check_is_a_line(error: Exception, level: str, text: str) -> None:
    def check() -> str:
        raise error

    async def asynchronous() -> str:
        raise error

    for each in (check, asynchronous):
        assert await examine("a", each) == Finding("a", level, text)


def test_a_running_cluster_with_redis_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_secret(tmp_path / "secret")
    secret = ["--cluster-secret-file", str(tmp_path / "secret")]
    with RedisServer(tmp_path) as redis:
        redis.start()
        settings = {"heartbeat_s": 2.0, "node_timeout_s": 30.0, "cluster_secret_file": tmp_path / "secret"}
        with cluster(registry=redis.url, routers=2, **settings) as running:
            for url in running.urls.values():
                flags = ["--url", url, "--host", "0.0.0.0", "--registry", redis.url]
                assert main(["doctor", *flags, *secret]) == 0
                lines = capsys.readouterr().out.splitlines()
                assert {line.split()[0] for line in lines} == {"ok"}
                assert [line.split()[1] for line in lines if " tokens" in line] == ["replays"]
                assert "ok       registry      Redis answers, and knows 2 nodes of cluster default" in lines
            assert main(["doctor", *flags]) == 1
    (failed,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed")]
    assert (
        "registry      2 nodes in Redis are not signed with this process's secret: --cluster-secret-file must be"
        in failed
    )


def test_a_running_cluster_with_the_embedded_registry_and_a_dead_node(capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(decode=2) as running:
        assert main(["doctor", "--url", running.url, "--host", "0.0.0.0"]) == 0
        running.send_signal("decode-1", signal.SIGKILL)
        wait_for(lambda: "decode-1" not in running.alive("router"), "the router notices the dead node")
        assert main(["doctor", "--url", running.url]) == 1
    out, err = capsys.readouterr()
    assert [line.split()[1] for line in out.splitlines() if line.startswith("failed")] == ["nodes"]
    assert "Traceback" not in out + err


def test_a_silent_router_and_a_silent_redis_give_two_failed_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--url", "http://127.0.0.1:9", "--registry", "redis://127.0.0.1:9"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("failed")] == ["registry", "cluster"]
    assert "--registry redis://127.0.0.1:9: no Redis within 3 s: Error 111 connecting to 127.0.0.1:9" in "".join(lines)


def test_a_peer_without_an_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--peer: needs --engine" in refusal(capsys, lambda: main(["doctor", "--peer", "http://127.0.0.1:9"]))

"""`baton doctor` on clusters and machines that are not well: each check says what, and what to do."""

import resource
import socket
from pathlib import Path
from typing import Any

import pytest

from cluster import installation
from cluster.doctor import _moved, _verdict, peers
from cluster.installation import CheckFailedError, Finding, examine
from cluster.plan import DoctorSettings

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
    "facts": {"dtype": "float32"},
}
PREFILL = NODE | {"id": "prefill-0", "role": "prefill", "channels": {"127.0.0.1:1": "shm"}}


def examined(*nodes: dict[str, Any], registry: str = "ok") -> dict[str, Finding]:
    status = {"nodes": list(nodes), "registry": {"kind": "redis", "state": registry}}
    return {finding.name: finding for finding in peers(status)}


def test_a_cluster_that_is_well_is_told_in_a_line_a_check() -> None:
    found = examined(PREFILL, NODE)
    assert {finding.level for finding in found.values()} == {"ok"}
    assert found["nodes"].text == "1 prefill and 1 decode, all ready"
    assert found["channels"].text == "shm"


@pytest.mark.parametrize(
    ("check", "level", "node", "words"),
    [
        ("nodes", "failed", {"state": "lost"}, "decode-1 is lost"),
        ("fingerprints", "failed", {"fingerprint": "bb", "facts": {"dtype": "float16"}}, "dtype float16, not float32"),
        ("fingerprints", "failed", {"fingerprint": "bb"}, "another model or revision"),
        ("blocks", "failed", {"blocks": NODE["blocks"] | {"free": 49}}, "is not the total"),
        ("channels", "warning", {"channel_fallbacks": 2}, "decode-1 2 times fell back"),
        ("clocks", "warning", {"clock_offset_ms": -90_000.0}, "decode-1 by +90000 ms"),
    ],
)
def test_what_is_wrong_with_one_node_is_said_of_it(check: str, level: str, node: dict[str, Any], words: str) -> None:
    found = examined(PREFILL, NODE, NODE | {"id": "decode-1"} | node)
    assert (found[check].level, words in found[check].text) == (level, True), found[check]
    assert [name for name, finding in found.items() if finding.level != "ok"] == [check]


def test_no_nodes_and_no_redis_are_told() -> None:
    found = examined(registry="down")
    assert (found["nodes"].level, found["membership"].level) == ("failed", "warning")


def test_tokens_that_differ_fail_the_replay() -> None:
    answers = {"co-located": [[1, 2, 3], [4]], "tcp": [[1, 2, 3], [5]]}
    found = _verdict("replays", answers, "2 prompts")
    assert found.level == "failed"
    assert "tcp answers greedy prompt 1" in found.text
    assert _verdict("replays", answers | {"tcp": [[1, 2, 3], [4]]}, "2 prompts").level == "ok"


def test_a_channel_that_was_not_used_proves_nothing() -> None:
    status = {"handoffs": 5, "bytes_moved": 4096, "nodes": [PREFILL, NODE]}
    assert _moved(status, "shm", 5) == "5 prompts handed off, 4.0 KiB moved"
    for wrong in ({"handoffs": 4}, {"nodes": [NODE]}, {"nodes": [PREFILL | {"channels": {"a": "shm", "b": "tcp"}}]}):
        with pytest.raises(ValueError, match="were handed off, over"):
            _moved(status | wrong, "shm", 5)


def test_a_check_that_would_stop_a_process_fails_and_one_that_slows_it_warns() -> None:
    def doubts() -> str:
        raise CheckFailedError("slow")

    def stops() -> str:
        raise ValueError("give another")

    assert examine("a", doubts) == Finding("a", "warning", "slow")
    assert examine("b", stops) == Finding("b", "failed", "give another")


def test_what_this_machine_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = DoctorSettings(kv_directory=str(tmp_path / ("long" * 40)))
    assert "no socket can be made" in examine("d", lambda: installation.kv_directory(settings)).text
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert "256 are allowed" in examine("f", lambda: installation.open_files(settings)).text
    monkeypatch.setattr(installation, "memory_available", lambda: 1 << 20)
    assert examine("m", lambda: installation.memory(settings)).level == "warning"
    monkeypatch.setattr(
        installation, "_requirements", lambda: ["torch>=99", "nothing-of-this-name>=1", "x>=1; extra == 'y'"]
    )
    told = examine("l", lambda: installation.libraries(settings)).text
    assert "needs 99; nothing-of-this-name missing, needs 1" in told


def test_a_port_that_is_taken_and_a_redis_that_is_not_there_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "REDIS_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "cannot listen" in examine("p", lambda: installation.ports(DoctorSettings(port=port))).text
    absent = DoctorSettings(registry=f"redis://127.0.0.1:{port}")
    found = examine("r", lambda: installation.registry(absent))
    assert (found.level, "no Redis answers" in found.text) == ("failed", True)

"""Invalid settings end a process with status 2 and one line that names the flag or file, the value and the fix."""

import json
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decode_node.__main__ import main as run_decode_node
from prefill_node.__main__ import main as run_prefill_node
from router.__main__ import main as router_main
from shared.config.settings import NodeSettings, RouterSettings
from tests.cluster.harness import DEMO, ROOT

COST = {"cost": {"per_token": 1e-3}, "kv_bytes_per_token": 64, "kv_tokens": 4096, "link": "x"}
LINKS = {"links": {"x": {"latency_s": 0.0, "bytes_per_s": 1e9}}}


def one_line(capsys: pytest.CaptureFixture[str], complaint: str) -> None:
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def nodes(tmp_path: Path, **changes: Any) -> NodeSettings:
    base: dict[str, Any] = {"model": str(DEMO), "kv_directory": str(tmp_path / "kv"), "runner": "hash", "threads": 1}
    return NodeSettings(**base | changes)


NODES: dict[str, tuple[dict[str, Any], str]] = {
    "no such model": ({"model": "/no/such/place"}, "model '/no/such/place' is neither a directory nor a hub id"),
    "a model above": ({"model": ".."}, "config.json: missing"),
    "a model of NUL": ({"model": "a\0b"}, "model 'a\\x00b' is neither a directory nor a hub id"),
    "longer than the model": ({"max_model_len": 10**6}, "--max-model-len 1000000 exceeds the"),
    "a pool of one block": ({"num_blocks": 1}, "--num-blocks 1: one block is kept as a dummy"),
    "a pool below one request": (
        {"num_blocks": 9, "max_model_len": 129},
        "--max-model-len 129: the KV pool holds 128 tokens (8 blocks of 16); use --num-blocks 10 or --kv-cache-memory",
    ),
    "memory below two blocks": ({"kv_cache_memory": 100}, "100 bytes of KV memory hold 0 blocks of 512 bytes (1 layers x"),
    "memory that no machine has": ({"kv_cache_memory": 10**17}, "memory"),
    "a GPU for what needs none": ({"device": "cuda"}, "--device cuda"),
    "bfloat16 on a CPU": ({"runner": "torch", "dtype": "bfloat16"}, "--weight-dtype"),
    "a directory that others can write": ({"kv_directory": "/tmp"}, "--kv-directory /tmp: other users can write there"),
    "a directory that is a file": ({"kv_directory": str(DEMO / "config.json")}, "config.json"),
    "a failpoint without permission": ({"failpoint": "engine.step=kill"}, "BATON_ALLOW_FAILPOINTS"),
    "an unknown failpoint": ({"failpoint": "x.y=kill", "allow_failpoints": True}, "BATON_FAILPOINT 'x.y=kill'"),
    "an unknown device to emulate": ({"emulate": "nothing"}, "--emulate nothing: is neither a file nor one of"),
}  # fmt: skip


@pytest.mark.timeout(300)  # a node that starts by mistake would serve until this timeout
@pytest.mark.parametrize(("changes", "complaint"), NODES.values(), ids=NODES)
def test_a_node_exits_with_one_line(
    changes: dict[str, Any], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_decode_node(nodes(tmp_path, **changes)) == 2
    one_line(capsys, complaint)


COSTS: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "not valid JSON"),
    "not UTF-8": (b"\xff", "utf-8"),
    "too deep": ("[" * 100_000, "not valid JSON"),
    "a list": ("[]", "cost must be an object"),
    "all zero": (json.dumps(COST | LINKS | {"cost": {"per_token": 0}}), "cost is all zero"),
    "below zero": (json.dumps(COST | LINKS | {"cost": {"per_token": -1}}), "cost.per_token must be a number from 0"),
    "NaN": ('{"cost": {"per_token": NaN}}', "cost.per_token must be a number from 0"),
    "400 digits": ('{"cost": {"per_token": %s}}' % ("9" * 400), "cost.per_token must be a number from 0"),
    "5,000 digits": ('{"cost": {"per_token": %s}}' % ("9" * 5000), "digits"),
    "an unknown name": (json.dumps({"cost": {"per_byte": 1}}), "cost.per_byte is not one of"),
    "a name of two lines": (json.dumps({"cost": {"per\nbyte": 1}}), "cost.per byte is not one of"),
    "no such link": (json.dumps(COST | {"links": {}}), "link 'x' is not one of"),
    "a link that is a list": (json.dumps(COST | {"links": {"x": []}}), "links.x.latency_s must be a number"),
    "tokens beyond memory": (json.dumps(COST | LINKS | {"kv_tokens": 1e30}), "kv_tokens must be a number from 1024"),
}


@pytest.mark.parametrize(("content", "complaint"), COSTS.values(), ids=COSTS)
def test_an_invalid_cost_model_is_reported_with_its_file(
    content: str | bytes, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cost.json"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    assert run_prefill_node(nodes(tmp_path, emulate=str(file))) == 2
    one_line(capsys, complaint)


def test_a_port_in_use_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert router_main(RouterSettings(model=str(DEMO), port=port, registry_port=0)) == 2
        one_line(capsys, f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port")
        flags = ["--model", str(DEMO), "--port", "0", "--registry-port", str(port)]
        command = [sys.executable, "-m", "router", *flags]  # the router detects this error after its start
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 2
    assert f"cannot listen on registry port {port}" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("host", ["no-such-host.invalid", "256.1.1.1", "203.0.113.7"])
def test_an_address_of_another_host_is_reported(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert router_main(RouterSettings(model=str(DEMO), host=host, port=0, registry_port=0)) == 2
    one_line(capsys, host)


@pytest.fixture
def _logging_as_before() -> Iterator[None]:
    root, interval_s = logging.getLogger(), sys.getswitchinterval()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("_logging_as_before")
def test_a_nodes_port_in_use_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_decode_node(nodes(tmp_path, port=port, num_blocks=64)) == 2
        one_line(capsys, f"cannot listen on 127.0.0.1:{port}: ")

"""Test that processes exit with status 2 and print one line if settings are invalid or a model directory is broken,
truncated or hostile. The line names the flag or file, the value and the fix.

The tests of single tensors and of the keys of config.json are in tests/engine/test_weights.py.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode_node.__main__ import main as run_decode_node
from engine.weights import INDEX, check_finite
from prefill_node.__main__ import main as run_prefill_node
from router.__main__ import main as router_main
from shared.config.settings import NodeSettings, RouterSettings, flag_of
from shared.lifecycle import listen
from shared.registry import EmbeddedRegistry
from shared.rpc.methods import RpcServer
from tests.cluster.harness import DEMO, ROOT
from tests.command_line import refusal

WEIGHTS = "model.safetensors"
Breaking = Callable[[Path], object]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the demo model. Each case damages its own copy."""
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS):
        shutil.copyfile(DEMO / name, tmp_path / name)
    return tmp_path


def written(name: str, content: str | bytes) -> Breaking:
    data = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / name).write_bytes(data)


def changed(name: str, **changes: Any) -> Breaking:
    def change(directory: Path) -> None:
        file = directory / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def of_size(name: str, size: int) -> Breaking:
    return lambda directory: os.truncate((directory / name), size)


def without(name: str) -> Breaking:
    return lambda directory: (directory / name).unlink()


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Breaking:
    def breaking(directory: Path) -> None:
        file = directory / "tokenizer.json"
        value = json.loads(file.read_text())
        change(value)
        file.write_text(json.dumps(value))

    return breaking


def regex(pattern: str) -> Breaking:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return tokenizer(lambda value: value.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [split]}))


DEEP = "[" * 100_000
DIGITS = '{"vocab_size": ' + "9" * 5000 + "}"

FOR_ROUTERS: dict[str, tuple[Breaking, str]] = {
    "no config": (without("config.json"), "config.json: missing"),
    "config not JSON": (written("config.json", "{"), "config.json: not valid JSON"),
    "config not UTF-8": (written("config.json", b"\xff\xfe{}"), "config.json: not valid JSON"),
    "config a list": (written("config.json", "[1]"), "config.json: not a JSON object"),
    "config too deep": (written("config.json", DEEP), "config.json: not valid JSON"),
    "config of long numbers": (written("config.json", DIGITS), "config.json: not valid JSON"),
    "config of 10 MiB": (of_size("config.json", 10 << 20), "config.json: larger than 1048576 bytes"),
    "no vocabulary": (changed("config.json", vocab_size=0), "config.json: vocab_size is 0: it must be from 1"),
    "vocabulary true": (changed("config.json", vocab_size=True), "config.json: vocab_size is True"),
    "positions text": (changed("config.json", max_position_embeddings="8"), "max_position_embeddings is '8'"),
    "end token negative": (changed("generation_config.json", eos_token_id=-1), "eos_token_id must be a token id"),
    "end token outside the vocabulary": (changed("generation_config.json", eos_token_id=[1, 9999]), "eos_token_id must be a token id"),
    "end token too deep": (written("generation_config.json", DEEP), "generation_config.json: not valid JSON"),
    "no tokenizer": (without("tokenizer.json"), "tokenizer.json does not exist"),
    "tokenizer not UTF-8": (written("tokenizer.json", b'{"version": "\xff"}'), "tokenizer.json: "),
    "tokenizer empty": (written("tokenizer.json", "{}"), "tokenizer.json: "),
    "tokenizer too deep": (written("tokenizer.json", DEEP), "tokenizer.json: "),
    "tokenizer of 1 GiB": (of_size("tokenizer.json", 1 << 30), "tokenizer.json is larger than 134217728 bytes"),
    "a merge of unknown tokens": (
        tokenizer(lambda value: value["model"]["merges"].append(["\u2603", "\u2603"])), "tokenizer.json: "
    ),
    "ids beyond the vocabulary": (
        tokenizer(lambda value: value["model"]["vocab"].update({"\u2603": 5000})), "token id 5000 is beyond the vocab_size 2048"
    ),
    "a pattern that backtracks": (regex("(a+)+$"), "'(a+)+$' repeats a group"),
    "a pattern that hides a repeat": (regex("(?#[)(a+)+$(?#])"), "has a comment, the option x or a group call"),
    "an unknown decoder": (tokenizer(lambda value: value.update(decoder={"type": "WordPiece", "prefix": "#", "cleanup": True})), "WordPiece"),
    "tokenizer config a list": (written("tokenizer_config.json", "[1]"), "tokenizer_config.json: not a JSON object"),
    "tokenizer config too deep": (written("tokenizer_config.json", DEEP), "tokenizer_config.json: not valid JSON"),
    "template not UTF-8": (written("chat_template.jinja", b"\xff"), "chat_template.jinja is not UTF-8 text"),
    "template of 2 MiB": (written("chat_template.jinja", " " * (2 << 20)), "chat_template.jinja is larger than 1048576 bytes"),
    "template not Jinja": (written("chat_template.jinja", "{% if %}"), "chat template does not compile: Expected an expr"),
    "template of blocks in blocks": (
        written("chat_template.jinja", "{% if a %}" * 200 + "{% endif %}" * 200), "does not compile: "
    ),
}  # fmt: skip


@pytest.mark.timeout(300)  # a router that starts by mistake would serve until this timeout
@pytest.mark.parametrize(("breaking", "complaint"), FOR_ROUTERS.values(), ids=FOR_ROUTERS)
def test_a_router_exits_with_one_line(
    breaking: Breaking, complaint: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    breaking(directory)
    check_refusal(capsys, lambda: router_main(RouterSettings(model=str(directory), port=0, registry_port=0)), complaint)


def check_refusal(capsys: pytest.CaptureFixture[str], start: Callable[[], object], complaint: str) -> None:
    line = refusal(capsys, start)
    assert complaint in line
    assert len(line) < 600


def with_tensor(change: Callable[[dict[str, torch.Tensor]], object]) -> Breaking:
    def breaking(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS)

    return breaking


def cut(directory: Path) -> None:
    os.truncate(directory / WEIGHTS, (directory / WEIGHTS).stat().st_size - 1)


def linked_out(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).symlink_to(DEMO / WEIGHTS)


def pickled(directory: Path) -> None:
    (directory / WEIGHTS).rename(directory / "pytorch_model.bin")


def crowded(directory: Path) -> None:
    """Write a file with 50,000 empty tensors."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{number}": entry for number in range(50_000)}).encode()
    (directory / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)


NORM = "model.norm.weight"
FOR_NODES: dict[str, tuple[Breaking, str]] = {
    "config too deep": (written("config.json", DEEP), "config.json: not valid JSON"),
    "config of long numbers": (written("config.json", DIGITS), "config.json: not valid JSON"),
    "code with the model": (changed("config.json", architectures=["OwnForCausalLM"], auto_map={"AutoModel": "x.Y"}), "auto_map"),
    "sizes beyond memory": (changed("config.json", hidden_size=2**31 - 2, head_dim=128), "the config needs"),
    "a vocabulary that differs from the embedding": (changed("config.json", vocab_size=2047), "'model.embed_tokens.weight' is [2048, "),
    "a tensor missing": (with_tensor(lambda tensors: tensors.pop(NORM)), f"tensor '{NORM}' is missing"),
    "a tensor too many": (with_tensor(lambda tensors: tensors.update(more=torch.ones(1))), "not part of the model that config.json describes, such as 'more'"),
    "a tensor of another shape": (with_tensor(lambda tensors: tensors.update({NORM: torch.ones(1)})), f"'{NORM}' is [1]"),
    "weights cut": (cut, "not fully covered; download the model again"),
    "50,000 tensors": (crowded, "'model.embed_tokens.weight' is missing"),
    "weights linked from another directory": (linked_out, "is not a safetensors file in this directory"),
    "pickled weights": (pickled, "only pickled weights (.bin, .pt)"),
    "a shard in the parent directory": (written(INDEX, '{"weight_map": {"a": "../x.safetensors"}}'), "'../x.safetensors' is not a safetensors"),
    "an index too deep": (written(INDEX, DEEP), f"{INDEX}: not valid JSON"),
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("breaking", "complaint"), FOR_NODES.values(), ids=FOR_NODES)
def test_a_node_exits_with_one_line(
    breaking: Breaking, complaint: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    breaking(directory)
    settings = nodes(directory, model=str(directory), num_blocks=64, port=0, device="cpu", runner="torch")
    check_refusal(capsys, lambda: run_decode_node(settings), complaint)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_nan_and_infinity_in_weights_are_reported_by_tensor(number: float, directory: Path) -> None:
    check_finite(directory)
    with_tensor(lambda tensors: tensors[NORM].__setitem__(3, number))(directory)
    with pytest.raises(ValueError, match=f"tensor '{NORM}' holds NaN or infinity"):
        check_finite(directory)


# ---- settings ------------------------------------------------------------------------------------------------------------

COST = {"version": 1, "cost": {"per_token": 1e-3}, "kv_bytes_per_token": 64, "kv_tokens": 4096, "link": "x"}
LINKS = {"links": {"x": {"latency_s": 0.0, "bytes_per_s": 1e9}}}


def nodes(tmp_path: Path, **changes: Any) -> NodeSettings:
    base: dict[str, Any] = {"model": str(DEMO), "kv_directory": str(tmp_path / "kv"), "runner": "hash", "threads": 1}
    base |= {"log_level": "error"}  # at the level info, lines about the start would precede the error
    return NodeSettings(**base | changes)


NODES: dict[str, tuple[dict[str, Any], str]] = {
    "no such model": ({"model": "/no/such/place"}, "model '/no/such/place' is neither a directory nor a hub id"),
    "a model in the parent directory": ({"model": ".."}, "config.json: missing"),
    "a model name with NUL": ({"model": "a\0b"}, "model 'a\\x00b' is neither a directory nor a hub id"),
    "longer than the model": ({"max_model_len": 10**6}, "--max-model-len 1000000 exceeds the"),
    "a pool of one block": ({"num_blocks": 1}, "--num-blocks 1: must be at least 2"),
    "a pool below one request": (
        {"num_blocks": 9, "max_model_len": 129},
        "--max-model-len 129: the KV pool holds 128 tokens (8 blocks of 16); use --num-blocks 10 or --kv-cache-memory",
    ),
    "memory below two blocks": ({"kv_cache_memory": 100}, "--kv-cache-memory 100 holds 0 blocks of 512 bytes (1 layers x"),
    "memory that no machine has": ({"kv_cache_memory": 10**17}, "memory"),
    "a GPU for the hash model": ({"device": "cuda"}, "--device cuda"),
    "bfloat16 on a CPU": ({"runner": "torch", "dtype": "bfloat16"}, "--weight-dtype"),
    "a directory that others can write": ({"kv_directory": "/tmp"}, "--kv-directory /tmp: other users can write there"),
    "a directory that is a file": ({"kv_directory": str(DEMO / "config.json")}, "config.json"),
    "a failpoint without permission": ({"failpoint": "engine.step=kill"}, "BATON_ALLOW_FAILPOINTS"),
    "an unknown failpoint": ({"failpoint": "x.y=kill", "allow_failpoints": True}, "BATON_FAILPOINT 'x.y=kill'"),
    "an unknown device to emulate": ({"emulate": "nothing"}, "--emulate nothing: is neither a file nor one of"),
}  # fmt: skip


@pytest.mark.timeout(300)  # a node that starts by mistake would serve until this timeout
@pytest.mark.parametrize(("changes", "complaint"), NODES.values(), ids=NODES)
def test_a_node_with_invalid_settings_exits_with_one_line(
    changes: dict[str, Any], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refusal(capsys, lambda: run_decode_node(nodes(tmp_path, **changes)), complaint)


COSTS: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "not valid JSON"),
    "not UTF-8": (b"\xff", "utf-8"),
    "too deep": ("[" * 100_000, "not valid JSON"),
    "a list": ("[]", "must contain an object"),
    "all zero": (json.dumps(COST | LINKS | {"cost": {"per_token": 0}}), "cost has only zeros"),
    "below zero": (json.dumps(COST | LINKS | {"cost": {"per_token": -1}}), "cost.per_token must be a number from 0"),
    "NaN": ('{"version": 1, "cost": {"per_token": NaN}}', "cost.per_token must be a number from 0"),
    "400 digits": ('{"version": 1, "cost": {"per_token": %s}}' % ("9" * 400), "cost.per_token must be a number from 0"),
    "5,000 digits": ('{"version": 1, "cost": {"per_token": %s}}' % ("9" * 5000), "digits"),
    "an unknown name": (json.dumps({"version": 1, "cost": {"per_byte": 1}}), "cost.per_byte is not one of"),
    "a name of two lines": (json.dumps({"version": 1, "cost": {"per\nbyte": 1}}), "cost.per byte is not one of"),
    "no version": (json.dumps({"cost": {"per_token": 1}}), "version is None, but must be 1"),
    "another version": (json.dumps({"version": "2"}), "version is '2', but must be 1"),
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
    check_refusal(capsys, lambda: run_prefill_node(nodes(tmp_path, emulate=str(file))), complaint)


def test_a_port_in_use_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check_refusal(
            capsys,
            lambda: router_main(RouterSettings(model=str(DEMO), port=port, registry_port=0)),
            f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port",
        )
        flags = ["--model", str(DEMO), "--port", "0", "--registry-port", str(port)]
        command = [sys.executable, "-m", "router", *flags]  # the router detects this error after its start
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}: " in ended.stderr
    assert ended.stderr.endswith("; choose another --registry-port\n")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("host", ["no-such-host.invalid", "256.1.1.1", "203.0.113.7"])
def test_an_address_of_another_host_is_reported(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = RouterSettings(model=str(DEMO), host=host, port=0, registry_port=0)
    check_refusal(capsys, lambda: router_main(given), f"--registry-host {host}: ")
    line = refusal(capsys, lambda: router_main(given.model_copy(update={"registry_host": "127.0.0.1"})))
    assert f"cannot listen on {host}:0: " in line
    assert line.rstrip().endswith("; choose another --host")


def test_the_router_logs_an_ipv6_address_as_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    lifetime: Any = SimpleNamespace(draining=asyncio.Event())
    lifetime.draining.set()
    given = RouterSettings(model=str(DEMO), host="::1", port=0, registry_port=0)
    assert router_main(given, lambda serve: asyncio.run(serve(lifetime))) == 0
    assert "listening on http://[::1]:" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["port", "kv_port"])
def test_a_nodes_port_in_use_is_reported(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = nodes(tmp_path, num_blocks=64, **{name: port})
        line = refusal(capsys, lambda: run_decode_node(settings))
    assert f"cannot listen on 127.0.0.1:{port}: " in line
    assert line.rstrip().endswith(f"; choose another {flag_of(name)}")


async def test_a_host_on_which_a_node_cannot_listen_is_reported_with_its_flag() -> None:
    with pytest.raises(OSError, match=r"^cannot listen on 203\.0\.113\.7:0: .*; choose another --kv-host$"):
        await listen(RpcServer({}).start, "203.0.113.7", 0, "--kv-port", "--kv-host")
    with pytest.raises(OSError, match=r"cannot listen on 203\.0\.113\.7:0: .*; choose another --registry-host$"):
        await EmbeddedRegistry("203.0.113.7", 0).start(lambda: None)

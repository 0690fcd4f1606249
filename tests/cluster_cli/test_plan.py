"""Tests of the plan of `baton up`: the processes, their settings, and the settings that it refuses."""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.plan import Child, LocalSettings, checked, inherited, plan, share_out
from shared.config.settings import NodeSettings, RouterSettings, resolve
from shared.errors import ConfigError
from tests.cluster.harness import DATA, DEMO, ROOT


def settings(**given: object) -> LocalSettings:
    return LocalSettings.model_validate({"model": "/m", "registry_port": 8001} | given)


def node_of(child: Child) -> NodeSettings:
    environment = {name: value for name, value in child.environment.items() if name != "BATON_CPUS"}
    return resolve(NodeSettings, {}, environment)[0]


def router_of(child: Child) -> RouterSettings:
    return resolve(RouterSettings, {}, child.environment)[0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copyfile(DEMO / name, tmp_path / name)
    return tmp_path


def test_a_router_a_prefill_node_and_a_decode_node_are_the_default() -> None:
    children = plan(settings(), [0, 1])
    assert [child.name for child in children] == ["router", "prefill-0", "decode-0"]
    assert [child.command[-1] for child in children] == ["router", "prefill_node", "decode_node"]
    assert router_of(children[0]) == RouterSettings(model="/m", registry_host="127.0.0.1")
    for child in children[1:]:
        node = node_of(child)
        assert (node.id, node.registry, node.port) == (child.name, "127.0.0.1:8001", 0)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"prefill": 2, "decode": 3}, ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]),
        ({"prefill": 0}, ["decode-0"]),
        ({"mode": "colocated"}, ["decode-0", "decode-1"]),
        ({"mode": "colocated", "prefill": 2}, ["decode-0", "decode-1", "decode-2"]),
        ({"mode": "colocated", "prefill": 2, "decode": 1}, ["decode-0"]),
    ],
)
def test_nodes_by_mode_and_number(given: dict[str, object], names: list[str]) -> None:
    children = plan(settings(**given), [0])
    assert [child.name for child in children[1:]] == names
    assert router_of(children[0]).mode == given.get("mode", "disaggregated")


def test_settings_reach_the_processes_they_are_for() -> None:
    given = {"host": "0.0.0.0", "port": 9000, "kv_channel": "tcp", "max_num_seqs": 7, "kv_cache_memory": "3MiB"}
    given |= {"enable_prefix_caching": False, "served_model_name": "name", "log_level": "debug"}
    router, prefill, decode = plan(settings(**given), [0, 1])
    found = router_of(router)
    assert (found.host, found.port, found.served_model_name) == ("0.0.0.0", 9000, "name")
    for child in (prefill, decode):
        node = node_of(child)
        assert (node.kv_channel, node.max_num_seqs, node.kv_cache_memory) == ("tcp", 7, 3 << 20)
        assert not node.enable_prefix_caching
        assert (node.log_level, node.host) == ("debug", "127.0.0.1")


def test_each_further_model_has_a_node_of_its_own() -> None:
    more = {"more_models": (f"org/other={DEMO}",), "speculative_config": '{"method": "ngram"}'}
    router, *nodes = plan(settings(**more), [0, 1, 2])
    assert router_of(router).more_models == (f"org/other={DEMO}",)
    assert [node.name for node in nodes] == ["prefill-0", "decode-0", "decode-org-other"]
    assert [node_of(node).served_model_name for node in nodes] == ["", "", "org/other"]
    assert (node_of(nodes[2]).model, node_of(nodes[2]).speculative_config) == (str(DEMO), "")


def test_the_nodes_of_further_models_with_similar_names_have_different_names() -> None:
    similar = ("0", "org/a", "org-a", "org:a", 50 * "x" + "1", 50 * "x" + "2")
    nodes = plan(settings(more_models=tuple(f"{name}={DEMO}" for name in similar)), [0])[1:]
    long = "decode-" + 40 * "x"
    expected = ["decode-0-2", "decode-org-a", "decode-org-a-2", "decode-org-a-3", long, f"{long}-2"]
    assert [node.name for node in nodes] == [node_of(node).id for node in nodes] == ["prefill-0", "decode-0", *expected]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("other", "--more-models 'other': must be NAME=DIRECTORY"),
        ("a=/x,a=/y", "must give each name once"),
        ("a=/no/such/model", "--more-models a: model '/no/such/model' is neither a directory nor a hub id"),
    ],
)
def test_a_wrong_further_model_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        checked(resolve(LocalSettings, {"more_models": text}, {})[0])


def test_every_node_and_router_setting_can_be_given_to_up() -> None:
    # These settings must differ between nodes, or are always loopback addresses.
    own = {"id", "advertise", "health_port", "kv_host", "kv_port"}
    assert set(NodeSettings.model_fields) - set(LocalSettings.model_fields) == own
    assert set(RouterSettings.model_fields) <= set(LocalSettings.model_fields)


def test_a_shared_redis_gets_unique_ids_and_its_password_is_on_no_command_line() -> None:
    children = plan(settings(registry="redis://user:secret@h:6379"), [0, 1])
    assert router_of(children[0]).registry == "redis://user:secret@h:6379"
    for child in children[1:]:
        assert (node_of(child).id, node_of(child).registry) == ("", "redis://user:secret@h:6379")
        assert "secret" not in " ".join(child.command)


@pytest.mark.parametrize(
    ("cores", "cpus", "threads"),
    [
        ([0, 1], ["0", "1"], ["1", "1"]),
        ([0, 1, 2, 3, 4], ["0,1", "2,3,4"], ["2", "3"]),
        ([5], [None, None], ["1", "1"]),
    ],
)
def test_nodes_share_the_cores(cores: list[int], cpus: list[str | None], threads: list[str]) -> None:
    nodes = plan(settings(), cores)[1:]
    assert [node.environment.get("BATON_CPUS") for node in nodes] == cpus
    assert [node.environment["OMP_NUM_THREADS"] for node in nodes] == threads
    assert [node.environment["BATON_THREADS"] for node in nodes] == threads


@given(st.integers(1, 200), st.integers(1, 50))
def test_each_core_goes_to_one_node_and_shares_are_even(num_cores: int, num_nodes: int) -> None:
    shares = share_out(range(num_cores), num_nodes)
    assert len(shares) == num_nodes
    if num_cores < num_nodes:
        assert set(shares) == {()}
    else:
        assert [core for share in shares for core in share] == list(range(num_cores))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [("auto", 0.45), ("auto", 0.45)]),
        ({"device": "cuda:2"}, [("cuda:2", 0.45), ("cuda:2", 0.45)]),
        ({"devices": "cuda:0, cuda:1"}, [("cuda:0", 0.9), ("cuda:1", 0.9)]),
        ({"devices": "cuda:3", "gpu_memory_utilization": 0.6}, [("cuda:3", 0.3), ("cuda:3", 0.3)]),
        (
            {"devices": "cuda:0,cuda:1", "prefill": 1, "decode": 2},
            [("cuda:0", 0.45), ("cuda:1", 0.9), ("cuda:0", 0.45)],
        ),
        ({"devices": "cuda:0,cuda:1", "mode": "colocated", "device": "cuda"}, [("cuda:0", 0.9), ("cuda:1", 0.9)]),
        (
            {"devices": "cuda:0,cuda:1", "prefill": 2, "decode": 2, "kv_channel": "pool"},
            [("cuda:0", 0.45), ("cuda:1", 0.45)] * 2,
        ),
    ],
)
def test_nodes_take_the_devices_in_turn_and_share_the_memory_of_one(
    given: dict[str, object], expected: list[tuple[str, float]]
) -> None:
    nodes = [node_of(child) for child in plan(settings(**given), [0])[1:]]
    assert [(node.device, round(node.gpu_memory_utilization, 3)) for node in nodes] == expected


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"node_timeout_s": 1.0, "heartbeat_s": 0.5}, "--node-timeout-s must be over twice --heartbeat-s"),
        (
            {"async_scheduling": "on", "speculative_config": "ngram"},
            "--async-scheduling on: --speculative-config needs",
        ),
        ({"devices": "cpu"}, "'cpu' is not a GPU: must be a list such as cuda:0,cuda:1"),
        ({"devices": "cuda"}, "'cuda' is not a GPU"),
        ({"devices": "cuda:0,"}, "'' is not a GPU"),
        ({"devices": "cuda:01"}, "'cuda:01' is not a GPU"),
        ({"devices": "cuda:0,cuda:0"}, "must name each GPU once"),
        ({"devices": "cuda:0", "device": "cpu"}, "leave out --device cpu"),
        ({"devices": "cuda:0,cuda:1,cuda:2"}, "there are only 2 nodes; name fewer GPUs"),
        (
            {"kv_channel": "pool", "decode": 2},
            "--kv-channel pool: only one decode node per device can share its pool; auto has several",
        ),
        (
            {"kv_channel": "pool", "devices": "cuda:0,cuda:1"},
            "--kv-channel pool: the prefill node on cuda:0 needs a decode node on cuda:0",
        ),
    ],
)
def test_invalid_combinations_of_settings_are_refused(given: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        settings(**given)


def test_a_child_inherits_no_setting_of_its_parent() -> None:
    parent = {"BATON_PORT": "8000", "BATON_PREFILL": "2", "PATH": "/bin", "PYTHONPATH": "/x"}
    parent["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    child = inherited(parent)
    assert set(child) == {"PATH", "PYTHONPATH", "GOMP_SPINCOUNT"}
    assert inherited({"GOMP_SPINCOUNT": "7"})["GOMP_SPINCOUNT"] == "7"
    assert "GOMP_SPINCOUNT" not in inherited({"OMP_WAIT_POLICY": "active"})
    assert child["PYTHONPATH"].endswith(":/x")
    assert (Path(child["PYTHONPATH"].split(":")[0]) / "cluster").is_dir()


def test_free_ports_and_the_model_are_filled_in(model: Path) -> None:
    random.seed(1374)  # without a check, both ports would be 20202
    found = checked(LocalSettings(model=str(model), port=0))
    random.seed()
    assert found.model == str(model)
    assert found.port > 0
    assert found.registry_port > 0
    assert found.port != found.registry_port


def remove(name: str) -> Callable[[Path], object]:
    return lambda model: (model / name).unlink()


def configure(**changes: object) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        file = model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def truncate(model: Path) -> None:
    os.truncate(model / "model.safetensors", 1 << 20)


QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip

EARLY: dict[str, tuple[dict[str, object], Callable[[Path], object], str]] = {
    "no config": ({}, remove("config.json"), "--model: {model}/config.json: missing"),
    "no tokenizer": ({}, remove("tokenizer.json"), "--model {model}: contains no tokenizer.json"),
    "no weights": ({}, remove("model.safetensors"), "--model: {model}: has neither model.safetensors nor"),
    "truncated weights": ({}, truncate, "--model: {model}/model.safetensors: .*download the model again"),
    "quantized": (
        {}, configure(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "--model: {model}/config.json: quantization_config.quant_method is .*bitsandbytes",
    ),
    "another architecture": (
        {}, configure(architectures=["NoSuchForCausalLM"]), r"architectures is \['NoSuchForCausalLM'\]: it must be one of Llama"
    ),
    "too long": ({"max_model_len": 999_999}, Path.exists, "--max-model-len 999999 exceeds the [0-9]+ positions"),
    "longer than the pool": ({"max_model_len": 256, "num_blocks": 9}, Path.exists, "--max-model-len 256: the KV pool holds 128"),
    "memory for one pool": ({"kv_cache_memory": "900TB"}, Path.exists, "--kv-cache-memory: 2 KV pools take .*; lower --kv-cache-memory$"),
    "blocks": ({"num_blocks": 2**30, "decode": 2}, Path.exists, "--num-blocks: 3 KV pools take .*; lower --num-blocks$"),
    "a shared pool": (
        {"num_blocks": 2**30, "kv_channel": "pool"}, Path.exists, "--num-blocks: the KV pool takes .*; lower --num-blocks$"
    ),
    "bfloat16 on a CPU": ({"dtype": "bfloat16"}, Path.exists, "--dtype bfloat16: the CPU computes in float32"),
    "a GPU's backend": ({"attention_backend": "triton"}, Path.exists, "--attention-backend triton: does not run on a CPU"),
    "a GPU's channel": ({"kv_channel": "cuda_ipc"}, Path.exists, "--kv-channel cuda_ipc: not available for KV on --device cpu"),
    "a tiny pool": ({"kv_cache_memory": 100}, Path.exists, "--kv-cache-memory 100 holds 0 blocks"),
    "no adapter": ({"lora_modules": "sql=/no/lora"}, Path.exists, "^--lora-modules sql: /no/lora: has no adapter_config.json; give"),
    "no such parser": ({"tool_call_parser": "x"}, Path.exists, "^--tool-call-parser x: must be auto, none, .*hermes"),
    "no keys": ({"api_keys_file": "/no/keys"}, Path.exists, "--api-keys-file /no/keys: cannot be read"),
    "no secret": ({"cluster_secret_file": "/no/secret"}, Path.exists, "--cluster-secret-file /no/secret"),
    "another vocabulary": (
        {"speculative_config": json.dumps({"model": str(DATA / "stories260K")})}, Path.exists,
        "--speculative-config: the draft model .*stories260K has a different vocabulary from {model}",
    ),
    "a draft model with windows": (
        {"speculative_config": '{"model": "MODEL"}'}, configure(sliding_window=64, architectures=["MistralForCausalLM"]),
        "--speculative-config: the draft model {model} has sliding windows",
    ),
    "a draft model for a model with windows": (
        {"speculative_config": json.dumps({"model": str(DEMO)})},
        configure(sliding_window=64, architectures=["MistralForCausalLM"]),
        "--speculative-config: the draft model .*: {model} has sliding windows in all layers; use the method ngram",
    ),
    "no draft model": (
        {"speculative_config": '{"model": "/no/model"}'}, Path.exists, "--speculative-config: model '/no/model' is neither",
    ),
    "int8 in 16 bits": ({"quantization": "int8", "weight_dtype": "bfloat16"}, Path.exists, "--weight-dtype bfloat16: omit it with"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "change", "complaint"), EARLY.values(), ids=EARLY)
def test_what_no_node_could_start_with_is_refused_before_a_process_starts(
    model: Path, given: dict[str, object], change: Callable[[Path], object], complaint: str
) -> None:
    change(model)
    given = {
        name: value.replace("MODEL", str(model)) if isinstance(value, str) else value for name, value in given.items()
    }
    with pytest.raises(ConfigError, match=complaint.format(model=model)):
        checked(LocalSettings.model_validate({"model": str(model), "device": "cpu", "port": 0} | given))


def test_the_early_checks_import_no_torch_and_start_no_process(model: Path) -> None:
    truncate(model)
    program = (
        "import sys; from cluster.cli import main\n"
        "sys.addaudithook(lambda event, _: event == 'subprocess.Popen' and print('started a process'))\n"
        f"try: main(['up', '--model', {str(model)!r}, '--port', '0', '--device', 'cpu'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == "2 False\n"
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("baton up: --model: ")


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine may have a GPU")
@pytest.mark.parametrize(
    ("given", "flag"), [({"device": "cuda"}, "--device cuda"), ({"devices": "cuda:0"}, "--devices cuda:0")]
)
def test_a_gpu_that_is_not_there_is_refused_before_a_process_starts(
    model: Path, given: dict[str, object], flag: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{flag}: torch .* finds no CUDA device .*; use --device cpu"):
        checked(LocalSettings.model_validate({"model": str(model), "port": 0} | given))


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere/x", "~/no where", "a/b/c", "{model}/config.json"])
def test_a_model_that_is_no_directory_is_refused(model: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"--model: model .* is neither a directory nor a hub id"):
        checked(LocalSettings(model=name.format(model=model), port=0))


@pytest.mark.parametrize("name", ["~nosuchuser/model", 300 * "a"])
def test_a_model_whose_path_cannot_be_read_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--model: model .* cannot be read: (Could not determine|File name too long)"
    ):
        checked(LocalSettings(model=name, port=0))


def test_an_address_that_cannot_be_bound_is_refused(model: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        for given, named in [
            ({"port": port}, f"--port {port}"),
            ({"port": 0, "registry_port": port}, f"--registry-port {port}"),
            ({"port": 8000, "host": "192.0.2.1"}, "--host 192.0.2.1"),
        ]:
            with pytest.raises(ConfigError, match=f"^{named}: cannot listen on"):
                checked(LocalSettings.model_validate({"model": str(model)} | given))
    with pytest.raises(ConfigError, match="is the same as --port"):
        checked(LocalSettings(model=str(model), port=port, registry_port=port))

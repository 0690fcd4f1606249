"""Tests of the plan of `baton up`: the processes, their settings, and the settings that it refuses."""

import socket
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.plan import Child, LocalSettings, checked, inherited, plan, share_out
from shared.config.settings import NodeSettings, RouterSettings, resolve
from shared.errors import ConfigError


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
        (tmp_path / name).touch()
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


def test_every_node_and_router_setting_can_be_given_to_up() -> None:
    own = {"id", "advertise", "kv_host", "kv_port"}  # must differ between nodes, or are always loopback addresses
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
        ({"devices": "cpu"}, "'cpu' is not a GPU: must be a list such as cuda:0,cuda:1"),
        ({"devices": "cuda"}, "'cuda' is not a GPU"),
        ({"devices": "cuda:0,"}, "'' is not a GPU"),
        ({"devices": "cuda:01"}, "'cuda:01' is not a GPU"),
        ({"devices": "cuda:0,cuda:0"}, "must name each GPU once"),
        ({"devices": "cuda:0", "device": "cpu"}, "leave out --device cpu"),
        ({"devices": "cuda:0,cuda:1,cuda:2"}, "are more than the 2 nodes; name fewer"),
        (
            {"kv_channel": "pool", "decode": 2},
            "--kv-channel pool: only one decode node per device can share its pool; auto has more",
        ),
        (
            {"kv_channel": "pool", "devices": "cuda:0,cuda:1"},
            "--kv-channel pool: the prefill node on cuda:0 needs a decode node there",
        ),
    ],
)
def test_invalid_combinations_of_settings_are_refused(given: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        settings(**given)


def test_a_child_inherits_no_setting_of_its_parent() -> None:
    parent = {"BATON_PORT": "8000", "BATON_PREFILL": "2", "PATH": "/bin", "PYTHONPATH": "/x"}
    child = inherited(parent)
    assert set(child) == {"PATH", "PYTHONPATH", "GOMP_SPINCOUNT"}
    assert inherited({"GOMP_SPINCOUNT": "7"})["GOMP_SPINCOUNT"] == "7"
    assert "GOMP_SPINCOUNT" not in inherited({"OMP_WAIT_POLICY": "active"})
    assert child["PYTHONPATH"].endswith(":/x")
    assert (Path(child["PYTHONPATH"].split(":")[0]) / "cluster").is_dir()


def test_free_ports_and_the_model_are_filled_in(model: Path) -> None:
    found = checked(LocalSettings(model=str(model), port=0))
    assert found.model == str(model)
    assert found.port > 0
    assert found.registry_port > 0
    assert found.port != found.registry_port


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "*.safetensors"])
def test_a_model_that_lacks_a_file_is_refused(model: Path, missing: str) -> None:
    for file in model.glob(missing):
        file.unlink()
    with pytest.raises(ConfigError) as refused:
        checked(LocalSettings(model=str(model), port=0))
    assert str(refused.value) == f"--model {model}: contains no {missing}"


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere/x", "~/no where", "a/b/c", "{model}/config.json"])
def test_a_model_that_is_no_directory_is_refused(model: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"--model: model .* is neither a directory nor a hub id"):
        checked(LocalSettings(model=name.format(model=model), port=0))


def test_an_address_that_cannot_be_bound_is_refused(model: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        for given in ({"port": port}, {"port": 0, "registry_port": port}, {"port": 0, "host": "192.0.2.1"}):
            with pytest.raises(ConfigError, match="cannot listen on"):
                checked(LocalSettings.model_validate({"model": str(model)} | given))
    with pytest.raises(ConfigError, match="is also the --port"):
        checked(LocalSettings(model=str(model), port=port, registry_port=port))

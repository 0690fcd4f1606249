"""Test the operation of a cluster: restarts under load, a power cut, `baton doctor`, and the ports, sockets and
connections that processes open."""

import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.chaos.traffic import Ask, Load, short
from tests.cluster.harness import ROOT, Cluster, RedisServer, cluster, expected, wait_for

GUARD = Path(__file__).parent / "guard"
GUARDED = (
    "router",
    "prefill-0",
    "decode-0",
)  # one process of each kind. These are not forked, because a fork would share its parent's sockets.
SOCKET_NAME = re.compile(r"[0-9a-f]{32}")


@pytest.fixture(scope="module")
def connections(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file to which tests/cluster/guard appends every connection."""
    return tmp_path_factory.mktemp("guard") / "connections"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, connections: Path) -> Iterator[Cluster]:
    """Two routers that share a Redis, one prefill and two decode nodes. The guard logs all connections of GUARDED."""
    directory = tmp_path_factory.mktemp("operations")
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(directory))
        redis.start()
        guard = ["env", f"PYTHONPATH={GUARD}", f"CONNECTIONS_LOG={connections}"]
        prefixes = dict.fromkeys(GUARDED, guard)
        running = stack.enter_context(cluster(prefill=1, decode=2, registry=redis.url, routers=2, prefixes=prefixes))
        for router in running.urls:
            wait_for(lambda router=router: len(running.alive(router)) == 3, f"{router} has all nodes")
        yield running


def redis_port(running: Cluster) -> int:
    return int(running.registry.rpartition(":")[2])


def directory_of(running: Cluster) -> Path:
    return Path(str(running.settings["kv_directory"]))


# ---- ports, sockets and connections --------------------------------------------------------------------------------


def listened(process: "subprocess.Popen[bytes]") -> tuple[set[tuple[str, int]], set[str]]:
    """Return the TCP and UDP addresses that the process and its children listen on, and the paths of unix sockets."""
    here = psutil.Process(process.pid)
    addresses: set[tuple[str, int]] = set()
    paths: set[str] = set()
    for one in (here, *here.children(recursive=True)):
        for connection in one.net_connections("inet"):
            if connection.status in {psutil.CONN_LISTEN, psutil.CONN_NONE}:
                addresses.add((str(connection.laddr[0]), int(connection.laddr[1])))
        paths |= {connection.laddr for connection in one.net_connections("unix") if connection.laddr}
    return addresses, paths


def test_a_process_listens_only_at_its_announced_addresses(running: Cluster) -> None:
    """This test detects a library that opens a port by itself."""
    assert listened(running.processes["router"]) == ({("127.0.0.1", running.port)}, set())
    for name in GUARDED[1:]:
        addresses, paths = listened(running.processes[name])
        rpc = ("127.0.0.1", int(running.nodes()[name]["address"].rpartition(":")[2]))
        assert rpc in addresses, name
        assert {host for host, _ in addresses} == {"127.0.0.1"}, name
        assert len(addresses) == 2, f"{name}: expected one address for RPC and one for KV over tcp, not {addresses}"
        assert len(paths) == 1, f"{name}: expected one socket for KV within the host, not {paths}"
        assert Path(*paths).parent == directory_of(running), name


def test_the_kv_directory_is_private_and_the_names_in_it_are_random(running: Cluster) -> None:
    """KV memory has no name in the file system. A process sends the memory's file descriptor over the socket."""
    directory = directory_of(running)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    sockets = [path for path in directory.iterdir() if path.is_socket()]
    assert len(sockets) == 3
    for path in sockets:
        assert SOCKET_NAME.fullmatch(path.name)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for name in running.nodes():
        files = {file.path for file in psutil.Process(running.processes[name].pid).open_files()}
        assert not any(file.startswith("/dev/shm/") for file in files), name
        links = {os.readlink(link) for link in Path(f"/proc/{running.processes[name].pid}/fd").iterdir()}
        assert "/memfd:baton-kv (deleted)" in links, name


def test_a_process_connects_only_to_its_peers(running: Cluster, connections: Path) -> None:
    """The guard's log covers everything since the start of the cluster, including requests."""
    prompt = [5] * 700
    assert running.complete(prompt, 4) == expected(prompt, 4)
    peers = {redis_port(running)}
    for name in running.nodes():
        peers |= {port for _, port in listened(running.processes[name])[0]}
    noted = [line.split("\t") for line in connections.read_text().splitlines()]
    by_process: dict[int, set[str]] = {}
    for pid, kind, address in noted:
        by_process.setdefault(int(pid), set()).add(address)
        is_peer = any(address == repr(("127.0.0.1", port)) for port in peers) or address == "'127.0.0.1'"
        is_ours = address.strip("('\",)").startswith(str(directory_of(running)))
        assert is_peer or is_ours, f"process {pid}: {kind} {address}"
    for name in GUARDED:
        process = running.processes[name]
        assert repr(("127.0.0.1", redis_port(running))) in by_process[process.pid], f"{name}: the guard saw nothing"


def test_the_guard_logs_unexpected_connections(tmp_path: Path) -> None:
    """The guard logs the connections of Python's sockets and those of uvloop."""
    program = (
        "import asyncio, contextlib, socket, uvloop\n"
        "with contextlib.suppress(OSError): socket.create_connection(('127.0.0.2', 9), 0.1)\n"
        "async def main():\n"
        "    with contextlib.suppress(OSError): await asyncio.open_connection('127.0.0.3', 9)\n"
        "uvloop.run(main())"
    )
    log = tmp_path / "connections"
    environment = os.environ | {"PYTHONPATH": str(GUARD), "CONNECTIONS_LOG": str(log)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=600)
    assert "('127.0.0.2', 9)" in log.read_text()
    assert "('127.0.0.3', 9)" in log.read_text()


# ---- restarts ------------------------------------------------------------------------------------------------------


def test_every_process_is_restarted_under_load_and_no_request_fails(running: Cluster) -> None:
    """Each process drains and comes back before the next one is restarted. The routers come last."""
    running.prefixes.clear()  # without the guard, processes are forked and start sooner
    before = {name: node["address"] for name, node in running.nodes().items()}
    refusals = ("ConnectionRefusedError", "ConnectionResetError", "RemoteDisconnected")
    load = Load(
        list(running.urls.values()), running.model, 2, share=0.5, refusals=refusals,
        asks=lambda index: Ask(index, short(index).prompt, 60),
    )  # fmt: skip
    with load:
        for name in ("prefill-0", "decode-0", "decode-1", "router", "router-1"):
            running.send_signal(name, signal.SIGTERM)
            assert running.processes[name].wait(60) == 0, f"{name} drained:\n{running.log(name)}"
            running.start(name)
            running.ready()
    assert {name: node["address"] for name, node in running.nodes().items()} != before
    running.idle()
    assert load.outcomes
    assert not load.failures()


def test_everything_starts_after_a_power_cut(running: Cluster) -> None:
    """Sockets and a partial file that killed processes left behind do not prevent a start. Old sockets are removed."""
    directory = directory_of(running)
    for process in running.processes.values():
        process.kill()
    for process in running.processes.values():
        process.wait()
    left = {path for path in directory.iterdir() if path.is_socket()}
    assert len(left) >= 3, "killed processes leave their sockets behind"
    for path in left:
        os.utime(path, (0, 0))
    (directory / "pool-host").write_bytes(b"half a card")
    for name in list(running.processes):
        running.start(name)
    running.ready()
    for router in running.urls:
        wait_for(lambda router=router: len(running.alive(router)) == 3, "all nodes are back")
    prompt = [9] * 500
    assert running.complete(prompt, 5) == expected(prompt, 5)
    assert running.settled()["handoffs"] == 1
    assert not any(path.exists() for path in left), "swept"
    assert len([path for path in directory.iterdir() if path.is_socket()]) == 3


# ---- nodes that are gone ------------------------------------------------------------------------------------------


def test_a_killed_node_and_a_planned_departure_are_reported_once() -> None:
    with cluster(prefill=1, decode=3, log_level="info") as running:
        running.send_signal("decode-0", signal.SIGKILL)
        wait_for(lambda: running.nodes()["decode-0"]["state"] == "lost", "the killed node is shown as lost")
        running.send_signal("decode-1", signal.SIGTERM)
        assert running.processes["decode-1"].wait(60) == 0
        wait_for(lambda: running.nodes()["decode-1"]["state"] == "left", "the stopped node is shown as gone")
        running.complete([5] * 100, 1)  # a request that is handed off and ends with its first token
        status, log = running.status(), (running.directory / "router.log").read_text()
        metrics = running.metrics()
        with urllib.request.urlopen(running.url + "/ready?role=decode") as answer:
            assert answer.status == 200
        running.send_signal("decode-2", signal.SIGKILL)
        wait_for(
            lambda: "No decode node is ready" in running.status()["summary"], "the empty pool is the first finding"
        )
        with pytest.raises(urllib.error.HTTPError, match="503"):
            running.get("/ready?role=decode")
        assert running.get("/ready") == {"ready": True}, "the prefill node generates"
        assert "WARNING" not in running.log("decode-1") + running.log("decode-2")
    kinds = [(event["kind"], event["node"]) for event in status["events"] if event["node"] in {"decode-0", "decode-1"}]
    assert [kind for kind, node in kinds if node == "decode-0"] == ["joined", "ready", "lost"]
    assert [kind for kind, node in kinds if node == "decode-1"] == ["joined", "ready", "draining", "left"]
    assert "Lost in the last 10 minutes: decode-0." in status["summary"]
    assert re.search(r'^baton_node_alive\{engine="decode-0".* 0.0$', metrics, re.MULTILINE)
    assert 'engine="decode-1"' not in metrics
    warnings = [line for line in log.splitlines() if " WARNING " in line]
    assert len(warnings) == 1, warnings
    assert "Node decode-0 is lost. The connection was closed without notice" in warnings[0]
    assert log.count("Node decode-1 left.") == 1
    ready = re.findall(r"ready: (\d) prefill, (\d) decode", log)
    assert ready[-3:] == [("1", "3"), ("1", "2"), ("1", "1")], "each change is logged once"


# ---- baton doctor -----------------------------------------------------------------------------------------------------


def test_doctor_starts_a_cluster_and_finds_the_same_tokens_in_both_modes() -> None:
    with tempfile.TemporaryDirectory() as directory:  # short, because Linux limits the length of a socket's path
        flags = ["--runner", "hash", "--kv-channel", "tcp", "--port", "0", "--kv-directory", directory]
        command = [sys.executable, "-m", "baton", "doctor", *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ok +co-located +5 prompts computed by the decode node", done.stdout, re.MULTILINE)
    assert re.search(r"^ok +tcp +5 prompts handed off, \d", done.stdout, re.MULTILINE)
    assert re.search(r"^ok +replays +5 prompts, co-located, tcp: the same tokens", done.stdout, re.MULTILINE)

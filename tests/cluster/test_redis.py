"""Only the registry is affected if Redis is absent, frozen, killed, emptied, full, read-only, locked, slow or wrong."""

import asyncio
import signal
import socket
import socketserver
import subprocess
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from shared import registry as registry_module
from shared.lifecycle import wait_until
from shared.registry import RedisAnnouncer, RedisRegistry
from shared.rpc.codec import decode, encode
from shared.rpc.connection import RpcChannel
from shared.rpc.messages import NodeInfo
from tests.cluster.harness import Cluster, cluster, completion, expected, redis_server, wait_for
from tests.cluster.load import Load, streamed

INFO = NodeInfo("d0", "boot-1", "decode", "127.0.0.1:1", "m", "print", 4, 64, 100, 512, 8)
PATIENCE_S = 20.0


class Relay(socketserver.ThreadingTCPServer):
    """A relay between Baton and Redis. `reply` replaces the answer to every command; b"" closes the connection."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, upstream: int) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.upstream = upstream
        self.reply: bytes | None = None
        self.delay_s = 0.0
        self.url = f"redis://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Do not print errors to stderr, because these tests break connections on purpose."""


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        relay = self.server
        assert isinstance(relay, Relay)
        with socket.create_connection(("127.0.0.1", relay.upstream)) as server:
            threading.Thread(target=self._back, args=(server,), daemon=True).start()
            while data := self.request.recv(65536):
                time.sleep(relay.delay_s)
                if relay.reply is None:
                    server.sendall(data)
                elif relay.reply:
                    self.request.sendall(relay.reply)
                else:
                    return

    def _back(self, server: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                self.request.sendall(data)
            self.request.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay_to(upstream: int) -> Iterator[Relay]:
    with Relay(upstream) as relay:
        yield relay
        relay.shutdown()


# ---- invalid answers -----------------------------------------------------------------------------------------------

LIES = {
    "OOM": b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
    "READONLY": b"-READONLY You can't write against a read only replica.\r\n",
    "LOADING": b"-LOADING Redis is loading the dataset in memory\r\n",
    "NOAUTH": b"-NOAUTH Authentication required.\r\n",
    "WRONGTYPE": b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
    "MOVED": b"-MOVED 3999 127.0.0.1:6381\r\n",
    "an error without words": b"-\r\n",
    "a number": b":5\r\n",
    "no number": b":five\r\n",
    "a word": b"+OK\r\n",
    "null": b"$-1\r\n",
    "a null array": b"*-1\r\n",
    "a list of numbers": b"*2\r\n:1\r\n:2\r\n",
    "a list of lists": b"*1\r\n*1\r\n*0\r\n",
    "a longer list than was asked for": b"*3\r\n$2\r\nd0\r\n$2\r\nd1\r\n$2\r\nd2\r\n",
    "a map": b"%1\r\n+a\r\n+b\r\n",
    "depth": b"*1\r\n" * 20_000,
    "a length that is none": b"$many\r\nabc\r\n",
    "a negative length": b"$-7\r\n",
    "a text that does not end": b"$1000000000\r\nabc",
    "a list that does not end": b"*1000000000\r\n:1\r\n",
    "half a line": b"*2\r\n$8\r\ndeco",
    "HTTP": b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
    "bytes": bytes(range(256)),
    "the end": b"",
}
# Redis may give these answers if there are no nodes. After a lease, the nodes leave the list but stay connected.
PLAUSIBLE = {"null", "a negative length", "a null array", "a longer list than was asked for", "a map"}


async def survives(name: str, lie: bytes, port: int) -> None:
    """Check that one node and one router's registry recover from wrong answers that last longer than their timeouts."""
    with relay_to(port) as relay:
        registry = RedisRegistry(relay.url, name, 0.1)
        node = RedisAnnouncer(relay.url, name, 0.05)
        await registry.start(lambda: None)
        await node.start(INFO)
        try:
            assert await wait_until(lambda: registry.nodes == {"d0": INFO}, PATIENCE_S), f"{name}: it never began"
            relay.reply = lie
            await asyncio.sleep(2 * registry_module.REDIS_TIMEOUT_S + 0.2)
            assert registry.nodes == {"d0": INFO} or name in PLAUSIBLE, f"{name}: the last list is not kept"
            relay.reply = None
            await node.update(replace(INFO, state="draining"))
            seen = await wait_until(lambda: registry.nodes.get("d0", INFO).state == "draining", PATIENCE_S)
            assert seen, f"{name}: {registry.state} after it, and {registry.nodes}"
        finally:
            await node.close()
            await registry.close()


async def test_malformed_answers_of_redis_leave_the_list_and_nodes_rejoin_after_them(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, start):
        start()
        port = int(url.rpartition(":")[2])
        await asyncio.to_thread(answering, port)
        outcomes = await asyncio.gather(*(survives(*lie, port) for lie in LIES.items()), return_exceptions=True)
        assert [outcome for outcome in outcomes if outcome is not None] == []


async def test_a_late_answer_is_never_used_for_the_next_query(tmp_path: Path) -> None:
    """A reply may arrive after its query timed out, so the next query must use another connection."""
    with redis_server(tmp_path) as (url, start):
        start()
        port = int(url.rpartition(":")[2])
        await asyncio.to_thread(answering, port)
        with relay_to(port) as relay:
            client = registry_module._client(relay.url)
            await client.set("mine", b"1")
            await client.set("another's", b"secret")
            relay.delay_s = 2 * registry_module.REDIS_TIMEOUT_S
            with pytest.raises((TimeoutError, redis.TimeoutError)):
                await client.get("another's")
            relay.delay_s = 0.0
            for _ in range(5):
                assert await client.get("mine") == b"1"
            late = asyncio.ensure_future(client.get("another's"))
            await asyncio.sleep(0)
            late.cancel()
            assert await client.get("mine") == b"1"
            await client.aclose()


async def test_names_are_resolved_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow resolver must block only the lookup."""
    threads: list[bool] = []

    def slow(*_: object, **__: object) -> object:
        threads.append(threading.current_thread() is threading.main_thread())
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    registry = RedisRegistry("redis://redis.invalid:6379", "c", 0.05)
    await registry.start(lambda: None)
    channel = RpcChannel("node.invalid:7000")
    with pytest.raises(OSError, match="name resolution"):
        await channel.__connect__()
    assert await wait_until(lambda: len(threads) > 1, PATIENCE_S)
    channel.close()
    await registry.close()
    assert not any(threads)


# ---- a cluster with Redis ------------------------------------------------------------------------------------------


def ask(running: Cluster, router: str, prompt: list[int]) -> list[int]:
    return streamed(running.urls[router], completion(running.model, prompt, 4, stream=True))


def answers(running: Cluster, router: str) -> bool:
    with suppress(OSError):
        return bool(running.status(router))
    return False


def answering(port: int) -> "redis.Redis":
    client = redis.Redis(port=port, socket_timeout=5.0)

    def answers() -> bool:
        with suppress(redis.RedisError):
            return bool(client.ping())
        return False

    wait_for(answers, "redis answers")
    return client


@contextmanager
def redis_here(directory: Path) -> Iterator[tuple[int, "Server"]]:
    with redis_server(directory) as (url, start):
        port = int(url.rpartition(":")[2])
        yield port, Server(port, start)


class Server:
    """A Redis server and the faults that tests inject into it."""

    def __init__(self, port: int, start: Callable[[], "subprocess.Popen[bytes]"]) -> None:
        self._start = start
        self._port = port
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = self._start()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def send_signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def command(self, *words: object) -> object:
        with redis.Redis(port=self._port, socket_timeout=5.0) as client:
            return client.execute_command(*words)

    def locked(self) -> None:
        self.command("CONFIG", "SET", "requirepass", "another")
        with redis.Redis(port=self._port, password="another") as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def unlocked(self) -> None:
        with redis.Redis(port=self._port, password="another") as client:
            client.execute_command("CONFIG", "SET", "requirepass", "")

    def num_nodes(self) -> int:
        """Return the number of nodes whose leases have not expired."""
        return len([*redis.Redis(port=self._port).scan_iter("baton:default:node:*")])


def test_no_request_fails_during_any_fault_of_redis(tmp_path: Path) -> None:
    """Each fault lasts until it is detected, while two routers serve load. After it, both routers list all nodes."""
    with redis_here(tmp_path) as (port, server), relay_to(port) as ours, relay_to(port) as theirs:
        threading.Timer(1.0, server.start).start()  # the processes of the cluster start earlier and wait for it
        with cluster(registry=ours.url, own={"router-1": {"registry": theirs.url}}, routers=2) as running:

            def state() -> set[str]:
                return {running.status(router)["registry"]["state"] for router in running.urls}

            def down() -> bool:
                return state() == {"down"}

            def set_relays(**harm: object) -> None:
                for relay, (name, value) in ((relay, item) for relay in (ours, theirs) for item in harm.items()):
                    setattr(relay, name, value)

            faults: dict[str, tuple[Callable[[], object], Callable[[], bool], Callable[[], object]]] = {
                "frozen": (
                    lambda: server.send_signal(signal.SIGSTOP),
                    down,
                    lambda: server.send_signal(signal.SIGCONT),
                ),
                "killed": (server.kill, down, server.start),
                "emptied": (lambda: server.command("FLUSHALL"), lambda: True, lambda: None),
                "full": (
                    lambda: server.command("CONFIG", "SET", "maxmemory", 1),
                    lambda: server.num_nodes() == 0,
                    lambda: server.command("CONFIG", "SET", "maxmemory", 0),
                ),
                "read-only": (
                    lambda: server.command("REPLICAOF", "127.0.0.1", 1),
                    lambda: server.num_nodes() == 0,
                    lambda: server.command("REPLICAOF", "NO", "ONE"),
                ),
                "locked": (server.locked, down, server.unlocked),
                "slow": (lambda: set_relays(delay_s=1.0), down, lambda: set_relays(delay_s=0.0)),
                "lying": (lambda: set_relays(reply=b":x\r\n"), down, lambda: set_relays(reply=None)),
            }
            with Load(running):
                for name, (inflict, is_felt, mend) in faults.items():
                    inflict()
                    wait_for(is_felt, f"{name}: felt")
                    assert all(len(running.alive(router)) == 2 for router in running.urls), f"{name}: the list stays"
                    mend()
                    mended = time.monotonic()
                    wait_for(lambda: state() == {"ok"} and server.num_nodes() == 2, f"{name}: all are back")
                    print(f"redis {name}: back after {time.monotonic() - mended:.2f} s")
            an_entry_at_the_address_of_another_node_is_not_used(running, port)
            a_router_that_sees_no_node_says_so_and_the_other_serves(running, theirs)


def an_entry_at_the_address_of_another_node_is_not_used(running: Cluster, port: int) -> None:
    """A dead node may have left such an entry behind, or another process may have written it."""
    client = redis.Redis(port=port)
    address = running.nodes()["decode-0"]["address"]
    entry = decode(bytes(client.get("baton:default:node:decode-0")), NodeInfo)
    client.set("baton:default:node:ghost", encode(replace(entry, id="ghost", incarnation_id="0" * 32, address=address)))
    client.sadd("baton:default:nodes", "ghost")
    wait_for(lambda: "ghost" in running.nodes(), "the entry is read")
    with Load(running):
        time.sleep(1.0)
    assert not running.nodes()["ghost"]["alive"], "another process answers at that address"
    client.delete("baton:default:node:ghost")
    wait_for(lambda: "ghost" not in running.nodes(), "it leaves with its entry")


def a_router_that_sees_no_node_says_so_and_the_other_serves(running: Cluster, theirs: Relay) -> None:
    """This cuts one of two routers off from Redis."""
    theirs.reply = b""
    prompt = [7] * 30
    wait_for(lambda: running.status("router-1")["registry"]["state"] == "down", "the cut is felt")
    assert ask(running, "router-1", prompt) == expected(prompt, 4), "it knows its nodes as they were"
    running.send_signal("router-1", signal.SIGTERM)
    running.processes["router-1"].wait()
    running.start("router-1")
    wait_for(lambda: answers(running, "router-1"), "it serves")
    with pytest.raises(urllib.error.HTTPError, match="503"):
        running.get("/ready", "router-1")
    assert ask(running, "router", prompt) == expected(prompt, 4)
    theirs.reply = None
    running.ready()
    assert ask(running, "router-1", prompt) == expected(prompt, 4)

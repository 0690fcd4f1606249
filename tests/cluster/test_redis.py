"""Test that no request fails if Redis is absent, frozen, killed, emptied, full, read-only, locked, slow or wrong."""

import asyncio
import signal
import socket
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from shared import registry as registry_module
from shared.lifecycle import wait_until
from shared.registry import RedisAnnouncer, RedisRegistry
from shared.rpc.codec import decode, encode
from shared.rpc.connection import RpcChannel
from shared.rpc.messages import NodeInfo
from tests.chaos.proxy import NONE, Harm, Proxy, Relays
from tests.chaos.traffic import Load, short
from tests.cluster.harness import Cluster, RedisServer, cluster, expected, wait_for

RELAY_HOST, OTHER_HOST = "127.0.0.10", "127.0.0.11"
INFO = NodeInfo("d0", "boot-1", "decode", "127.0.0.1:1", "m", "print", 4, 64, 100, 512, 8)
PATIENCE_S = 20.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture
def relays() -> Iterator[Relays]:
    with Relays() as relays:
        yield relays


def command(server: RedisServer, *words: object, password: str | None = None) -> Any:
    with redis.Redis(port=server.port, password=password, socket_timeout=5.0) as client:
        return client.execute_command(*words)


def started(server: RedisServer) -> int:
    """Start the server, wait until it answers, and return its port."""

    def answers() -> bool:
        with suppress(redis.RedisError):
            return bool(command(server, "PING"))
        return False

    server.start()
    wait_for(answers, "redis answers")
    return server.port


# ---- invalid answers -----------------------------------------------------------------------------------------------

WRONG_ANSWERS = {
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
    "a list that is too long": b"*3\r\n$2\r\nd0\r\n$2\r\nd1\r\n$2\r\nd2\r\n",
    "a map": b"%1\r\n+a\r\n+b\r\n",
    "depth": b"*1\r\n" * 20_000,
    "a length that is no number": b"$many\r\nabc\r\n",
    "a negative length": b"$-7\r\n",
    "a text that does not end": b"$1000000000\r\nabc",
    "a list that does not end": b"*1000000000\r\n:1\r\n",
    "half a line": b"*2\r\n$8\r\ndeco",
    "HTTP": b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
    "bytes": bytes(range(256)),
    "the end": b"",
}
# Redis could give such an answer if no node is registered. The list of nodes may then be empty after a lease.
PLAUSIBLE = {"null", "a negative length", "a null array", "a list that is too long", "a map"}


async def survives(name: str, answer: bytes, relay: Proxy, url: str) -> None:
    """Check that a node and a router's registry recover from wrong answers of Redis that last longer than a timeout."""
    registry = RedisRegistry(url, name, 0.1)
    node = RedisAnnouncer(url, name, 0.05)
    await registry.start(lambda: None)
    await node.start(INFO)
    try:
        assert await wait_until(lambda: registry.nodes == {"d0": INFO}, PATIENCE_S), f"{name}: the node is not listed"
        relay.harm = Harm(reply=answer)
        await asyncio.sleep(2 * registry_module.REDIS_TIMEOUT_S + 0.2)
        assert registry.nodes == {"d0": INFO} or name in PLAUSIBLE, f"{name}: the last list is not kept"
        relay.harm = NONE
        await node.update(replace(INFO, state="draining"))
        seen = await wait_until(lambda: registry.nodes.get("d0", INFO).state == "draining", PATIENCE_S)
        assert seen, f"{name}: the registry is {registry.state} afterwards and lists {registry.nodes}"
    finally:
        await node.close()
        await registry.close()


async def test_malformed_answers_of_redis_keep_the_list_and_nodes_rejoin_afterwards(
    server: RedisServer, relays: Relays
) -> None:
    port = await asyncio.to_thread(started, server)
    hosts = [f"127.0.1.{number}" for number in range(1, 1 + len(WRONG_ANSWERS))]
    outcomes = await asyncio.gather(
        *(
            survives(*wrong, relays.between(host, port), f"redis://{host}:{port}")
            for wrong, host in zip(WRONG_ANSWERS.items(), hosts, strict=True)
        ),
        return_exceptions=True,
    )
    assert [outcome for outcome in outcomes if outcome is not None] == []


async def test_a_late_answer_is_never_used_for_the_next_query(server: RedisServer, relays: Relays) -> None:
    """A reply may arrive after its query timed out, so the next query must use another connection."""
    port = await asyncio.to_thread(started, server)
    relay = relays.between(RELAY_HOST, port)
    client = registry_module._client(f"redis://{RELAY_HOST}:{port}")
    await client.set("mine", b"1")
    await client.set("another's", b"secret")
    relay.harm = Harm(delay_s=2 * registry_module.REDIS_TIMEOUT_S)
    with pytest.raises((TimeoutError, redis.TimeoutError)):
        await client.get("another's")
    relay.harm = NONE
    for _ in range(5):
        assert await client.get("mine") == b"1"
    late = asyncio.ensure_future(client.get("another's"))
    await asyncio.sleep(0)
    late.cancel()
    assert await client.get("mine") == b"1"
    await client.aclose()


async def test_names_are_resolved_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow name lookup must not block the event loop."""
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


def test_no_request_fails_during_any_fault_of_redis(server: RedisServer, relays: Relays) -> None:
    """Two routers serve load. Each fault lasts until it is detected. After each fault, both routers list all nodes."""
    ours, theirs = (relays.between(host, server.port) for host in (RELAY_HOST, OTHER_HOST))
    other = {"router-1": {"registry": f"redis://{OTHER_HOST}:{server.port}"}}
    threading.Timer(1.0, server.start).start()  # the cluster's processes start before Redis and wait for it
    with cluster(registry=f"redis://{RELAY_HOST}:{server.port}", own=other, routers=2) as running:

        def state() -> set[str]:
            return {running.status(router)["registry"]["state"] for router in running.urls}

        def down() -> bool:
            return state() == {"down"}

        def set_relays(harm: Harm) -> None:
            ours.harm = theirs.harm = harm

        def lock() -> None:
            command(server, "CONFIG", "SET", "requirepass", "another")
            command(server, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes", password="another")

        def num_nodes() -> int:
            """Return the number of nodes whose keys in Redis have not expired."""
            return len(command(server, "KEYS", "baton:default:node:*"))

        def is_empty() -> bool:
            return num_nodes() == 0

        # For each fault: a function that injects it, one that returns whether it is detected, and one that ends it.
        send, call = server.send_signal, partial(command, server)
        faults: dict[str, tuple[Callable[[], object], Callable[[], bool], Callable[[], object]]] = {
            "frozen": (lambda: send(signal.SIGSTOP), down, lambda: send(signal.SIGCONT)),
            "killed": (server.kill, down, server.start),
            "emptied": (lambda: call("FLUSHALL"), lambda: True, lambda: None),
            "full": (
                lambda: call("CONFIG", "SET", "maxmemory", 1),
                is_empty,
                lambda: call("CONFIG", "SET", "maxmemory", 0),
            ),
            "read-only": (lambda: call("REPLICAOF", "127.0.0.1", 1), is_empty, lambda: call("REPLICAOF", "NO", "ONE")),
            "locked": (lock, down, lambda: call("CONFIG", "SET", "requirepass", "", password="another")),
            "slow": (lambda: set_relays(Harm(delay_s=1.0)), down, lambda: set_relays(NONE)),
            "wrong": (lambda: set_relays(Harm(reply=b":x\r\n")), down, lambda: set_relays(NONE)),
        }
        with Load(list(running.urls.values()), running.model, 2, share=0.5, asks=short) as load:
            for name, (inject, is_detected, end) in faults.items():
                inject()
                wait_for(is_detected, f"{name}: detected")
                assert all(len(running.alive(router)) == 2 for router in running.urls), f"{name}: the list is kept"
                end()
                wait_for(lambda: state() == {"ok"} and num_nodes() == 2, f"{name}: all nodes are back")
            an_entry_at_the_address_of_another_node_is_not_used(running, server)
        assert not load.failures()
        a_router_without_nodes_is_not_ready_and_the_other_serves(running, theirs)


def an_entry_at_the_address_of_another_node_is_not_used(running: Cluster, server: RedisServer) -> None:
    """The entry may belong to a dead node, or to a process outside the cluster."""
    address = running.nodes()["decode-0"]["address"]
    with redis.Redis(port=server.port) as client:
        entry = decode(bytes(client.get("baton:default:node:decode-0")), NodeInfo)
        ghost = replace(entry, id="ghost", incarnation_id="0" * 32, address=address)
        client.set("baton:default:node:ghost", encode(ghost))
        client.sadd("baton:default:nodes", "ghost")
        wait_for(lambda: "ghost" in running.nodes(), "the entry is read")
        time.sleep(1.0)  # time for several connection attempts
        assert not running.nodes()["ghost"]["alive"], "another process answers at that address"
        client.delete("baton:default:node:ghost")
        wait_for(lambda: "ghost" not in running.nodes(), "the node is removed with its entry")


def a_router_without_nodes_is_not_ready_and_the_other_serves(running: Cluster, theirs: Proxy) -> None:
    """One of two routers is cut off from Redis, and is restarted while it is cut off."""
    theirs.harm = Harm(reply=b"")
    prompt = [7] * 30
    wait_for(lambda: running.status("router-1")["registry"]["state"] == "down", "the cut is detected")
    assert running.stream(prompt, 4, router="router-1") == expected(prompt, 4), "the router keeps its list of nodes"
    running.send_signal("router-1", signal.SIGTERM)
    running.processes["router-1"].wait()
    running.start("router-1")
    wait_for(lambda: running.answers("router-1"), "the router serves again")
    with pytest.raises(urllib.error.HTTPError, match="503"):
        running.get("/ready", "router-1")
    assert running.stream(prompt, 4) == expected(prompt, 4)
    theirs.harm = NONE
    running.ready()
    assert running.stream(prompt, 4, router="router-1") == expected(prompt, 4)

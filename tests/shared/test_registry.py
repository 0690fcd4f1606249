"""Test membership when streams end late, a router restarts, or Redis fails, freezes or loses its data."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from grpclib.exceptions import GRPCError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from cluster.secret import write_secret
from shared import registry as registry_module
from shared import resolver as resolver_module
from shared.lifecycle import wait_until
from shared.logs import peer_log
from shared.registry import (
    OUTAGE_S,
    READ_AT_ONCE,
    Announcer,
    EmbeddedRegistry,
    Outage,
    RedisAnnouncer,
    RedisRegistry,
    Registry,
    StreamAnnouncer,
    announcer,
)
from shared.resolver import NameResolver
from shared.rpc import tls
from shared.rpc.codec import encode
from shared.rpc.connection import RpcChannel
from shared.rpc.messages import Ack, NodeInfo
from shared.rpc.methods import ATTACH, JOIN, RpcServer, unary
from tests.shared.rpc import connected
from tests.simulation.redis import FakeRedis

INFO = NodeInfo("d0", "boot-1", "decode", "127.0.0.1:1", "m", "print", 4, 64, 100, 512, 8)
BEAT_S = 0.03
LEASE_S = 1.0  # longer than any lease in these tests (a few heartbeats)


async def joins_and_updates(node: Announcer, registry: Registry) -> None:
    await node.start(INFO)
    assert await wait_until(lambda: registry.nodes == {"d0": INFO}, 5.0)
    await node.update(replace(INFO, state="draining"))
    assert await wait_until(lambda: registry.nodes["d0"].state == "draining", 5.0), "an update is sent at once"
    await node.update(replace(INFO, role="prefill"))
    assert await wait_until(lambda: registry.nodes["d0"].role == "prefill", 5.0), "a node may change its role"


# ---- embedded -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def embedded(changes: list[dict[str, NodeInfo]]) -> AsyncIterator[EmbeddedRegistry]:
    registry = EmbeddedRegistry("127.0.0.1", 0)
    await registry.start(lambda: changes.append(dict(registry.nodes)))
    try:
        yield registry
    finally:
        await registry.close()


@asynccontextmanager
async def joined(registry: EmbeddedRegistry, info: NodeInfo) -> AsyncIterator[Any]:
    async with connected(f"127.0.0.1:{registry.port}") as channel, JOIN.open(channel) as stream:
        await stream.send_message(info)
        assert await stream.recv_message() == Ack()
        yield stream


async def test_a_node_is_a_member_while_its_stream_is_open() -> None:
    changes: list[dict[str, NodeInfo]] = []
    draining = replace(INFO, state="draining")
    async with embedded(changes) as registry:
        async with joined(registry, INFO) as stream:
            for message in (INFO, draining, draining):
                await stream.send_message(message)
                assert await stream.recv_message() == Ack()
            assert registry.nodes == {"d0": draining}
        assert await wait_until(lambda: registry.nodes == {}, 5.0)
    assert changes == [{"d0": INFO}, {"d0": draining}, {}], "a heartbeat without news is not a change"


@pytest.mark.parametrize("incarnation_id", ["boot-1", "boot-2"], ids=["reconnected", "restarted"])
async def test_the_late_end_of_an_old_stream_does_not_remove_the_node(incarnation_id: str) -> None:
    again, other = replace(INFO, incarnation_id=incarnation_id), replace(INFO, id="p0")
    async with embedded([]) as registry, joined(registry, other):
        async with AsyncExitStack() as old:
            await old.enter_async_context(joined(registry, INFO))
            async with joined(registry, again) as stream:
                await old.aclose()
                await asyncio.sleep(0.1)
                await stream.send_message(again)
                assert await stream.recv_message() == Ack()
                assert registry.nodes == {"d0": again, "p0": other}
        assert await wait_until(lambda: registry.nodes == {"p0": other}, 5.0)


async def test_the_end_of_one_of_two_processes_with_the_same_name_does_not_remove_the_other() -> None:
    new = replace(INFO, incarnation_id="boot-2")
    async with embedded([]) as registry, joined(registry, INFO) as old:
        async with joined(registry, new):
            for state in ("draining", "ready"):
                await old.send_message(replace(INFO, state=state))
                assert await old.recv_message() == Ack()
                assert registry.nodes == {"d0": new}
        assert await wait_until(lambda: registry.nodes == {"d0": INFO}, 5.0)
    assert await wait_until(lambda: registry.nodes == {}, 5.0)


async def test_a_stream_serves_one_node_and_the_number_of_nodes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_NODES", 1)
    other = replace(INFO, id="d1")

    async def join_as(*nodes: NodeInfo) -> None:
        async with joined(registry, nodes[0]) as stream:
            for node in nodes[1:]:
                await stream.send_message(node)
                await stream.recv_message()

    async with embedded([]) as registry:
        with pytest.raises(GRPCError, match="another node joined"):
            await join_as(INFO, other)
        assert await wait_until(lambda: registry.nodes == {}, 5.0)
        async with joined(registry, INFO):
            with pytest.raises(GRPCError, match="which is the limit"):
                await join_as(other)
            assert registry.nodes == {"d0": INFO}


async def test_an_announcer_joins_updates_and_leaves() -> None:
    async with embedded([]) as registry:
        node = announcer(f"127.0.0.1:{registry.port}", "default", 30.0)
        assert isinstance(node, StreamAnnouncer)
        await joins_and_updates(node, registry)
        await node.close()
        assert await wait_until(lambda: registry.nodes == {}, 5.0)


async def test_a_node_with_several_streams_to_a_router_leaves_when_the_last_one_ends() -> None:
    changes: list[dict[str, NodeInfo]] = []
    draining = replace(INFO, state="draining")
    async with embedded(changes) as registry:
        async with joined(registry, INFO):
            async with joined(registry, INFO), joined(registry, draining):
                assert registry.nodes == {"d0": draining}
            assert await wait_until(lambda: registry.nodes == {"d0": INFO}, 5.0)
        assert await wait_until(lambda: registry.nodes == {}, 5.0)
    assert changes[-1] == {}
    assert {} not in changes[:-1], "the node never left in between"


# ---- names --------------------------------------------------------------------------------------------------------


class Names:
    """A name service that a test controls."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.error: OSError | None = None
        self.num_queries = 0

    async def resolve(self) -> list[str]:
        self.num_queries += 1
        if self.error is not None:
            raise self.error
        return self.addresses


@asynccontextmanager
async def routers(*hosts: str) -> AsyncIterator[list[EmbeddedRegistry]]:
    """Start a registry on each host. All registries listen on the same port."""
    async with AsyncExitStack() as stack:
        started: list[EmbeddedRegistry] = []
        for host in hosts:
            started.append(EmbeddedRegistry(host, started[0].port if started else 0))
            await started[-1].start(lambda: None)
            stack.push_async_callback(started[-1].close)
        yield started


@pytest.fixture(autouse=True)
def _frequent_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "RESOLVE_INTERVAL_S", 0.1)


@asynccontextmanager
async def announced(port: int, names: Names) -> AsyncIterator[StreamAnnouncer]:
    node = StreamAnnouncer(f"routers.test:{port}", names.resolve)
    await node.start(INFO)
    try:
        yield node
    finally:
        await node.close()


def has_joined(*registries: Registry, info: NodeInfo = INFO) -> Callable[[], bool]:
    return lambda: all(registry.nodes == {"d0": info} for registry in registries)


async def test_a_node_joins_every_router_that_the_name_resolves_to() -> None:
    names = Names("127.0.0.1", "127.0.0.2")
    draining = replace(INFO, state="draining")
    async with routers("127.0.0.1", "127.0.0.2", "127.0.0.3") as (first, second, third):
        async with announced(first.port, names) as node:
            assert await wait_until(has_joined(first, second), 5.0)
            assert third.nodes == {}
            names.addresses.append("127.0.0.3")
            assert await wait_until(has_joined(third), 5.0)
            await node.update(draining)
            assert await wait_until(has_joined(first, second, third, info=draining), 5.0), "all are told at once"
        assert await wait_until(lambda: not (first.nodes or second.nodes or third.nodes), 5.0)


async def test_an_address_is_dropped_when_the_name_no_longer_has_it_and_its_stream_has_ended() -> None:
    names = Names("127.0.0.1", "127.0.0.2")
    async with routers("127.0.0.1", "127.0.0.2") as (first, second), announced(first.port, names):
        assert await wait_until(has_joined(first, second), 5.0)
        for names.error, names.addresses in ((OSError("no answer"), []), (TimeoutError(), []), (None, ["127.0.0.1"])):
            before = names.num_queries
            assert await wait_until(lambda before=before: names.num_queries > before + 1, 10.0)
            assert has_joined(first, second)(), f"{names.error}: the open streams are kept"
        await second.close()
        async with routers("127.0.0.1") as (elsewhere,):
            again = EmbeddedRegistry("127.0.0.2", first.port)
            await again.start(lambda: None)
            before = names.num_queries
            assert await wait_until(lambda: names.num_queries > before + 8, 10.0)  # longer than RETRY_S
            assert has_joined(first)()
            assert again.nodes == elsewhere.nodes == {}, "the old address is not dialled again"
            names.addresses = ["127.0.0.1", "127.0.0.2"]
            assert await wait_until(has_joined(first, again), 5.0), "until the name has it again"
            await again.close()


async def test_an_outage_of_the_name_service_at_the_start_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    names = Names("127.0.0.1")
    names.error = OSError("Name or service not known")
    async with routers("127.0.0.1") as (registry,), announced(registry.port, names):
        assert await wait_until(lambda: "Name or service not known" in caplog.text, 10.0)
        before = names.num_queries
        assert await wait_until(lambda: names.num_queries > before, 10.0)
        assert caplog.text.count("does not resolve") == 1
        names.error = None
        assert await wait_until(has_joined(registry), 5.0)


async def test_a_name_with_thousands_of_addresses_or_new_ones_each_second_is_limited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry_module, "RESOLVE_INTERVAL_S", BEAT_S)
    dialled: set[str] = set()
    monkeypatch.setattr(
        registry_module, "RpcChannel", lambda address, **options: dialled.add(address) or RpcChannel(address, **options)
    )

    class Changing(Names):
        async def resolve(self) -> list[str]:
            first = 5000 * self.num_queries
            self.addresses = [
                "127.0.0.1",
                *(f"127.{1 + at // 62500}.{at // 250 % 250}.{1 + at % 250}" for at in range(first, first + 5000)),
            ]
            return await super().resolve()

    names = Changing()
    async with routers("127.0.0.1") as (registry,), announced(registry.port, names):
        assert await wait_until(has_joined(registry), 20.0)
        assert await wait_until(lambda: names.num_queries > 5, 20.0)
        assert has_joined(registry)(), "the router is still held"
    assert len(dialled) <= 256 * names.num_queries
    assert caplog.text.count("only 256 of them are used") == 1


async def test_a_node_joins_every_router_of_a_list_although_one_of_the_names_does_not_resolve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialled: list[str] = []
    monkeypatch.setattr(
        registry_module,
        "RpcChannel",
        lambda address, **options: dialled.append(address) or RpcChannel(address, **options),
    )
    async with routers("127.0.0.1") as (first,), routers("127.0.0.2") as (second,):
        hosts = f"localhost:{first.port},127.0.0.1:{first.port},no-such-host.invalid:1,127.0.0.2:{second.port}"
        node = announcer(hosts, "default", 30.0)
        await node.start(INFO)
        assert await wait_until(has_joined(first, second), 20.0)
        assert dialled.count(f"127.0.0.1:{first.port}") == 1, "names of equal addresses share a stream"
        await node.close()


async def test_a_node_follows_a_file_of_routers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "routers"
    node = announcer(f"file:{path}", "default", 30.0)
    await node.start(INFO)
    async with routers("127.0.0.1") as (first,), routers("127.0.0.2") as (second,):
        assert await wait_until(lambda: "cannot be read ([Errno 2] No such file" in caplog.text, 10.0)
        path.write_text(f"127.0.0.1:{first.port}\n")
        assert await wait_until(has_joined(first), 20.0)
        path.write_text(f"127.0.0.1:{first.port}\n127.0.0.2:{second.port}\n")
        assert await wait_until(has_joined(second), 20.0)
        path.write_text("127.0.0.1\n")
        assert await wait_until(lambda: "'127.0.0.1' is not host:port" in caplog.text, 10.0)
        assert has_joined(first, second)()
    async with routers("127.0.0.3") as (third,):
        path.write_text(f"127.0.0.3:{third.port}\n")
        assert await wait_until(has_joined(third), 20.0)
    await node.close()


async def test_a_name_of_the_node_itself_is_no_router(caplog: pytest.LogCaptureFixture) -> None:
    server = RpcServer({ATTACH: unary(lambda _: None)})
    port = await server.start("127.0.0.1", 0)
    async with announced(port, Names("127.0.0.1")):
        assert await wait_until(lambda: f"no router at 127.0.0.1:{port}" in caplog.text, 20.0)
    await server.close()


async def test_a_node_without_a_secret_names_the_flag_if_the_router_has_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_secret(tmp_path / "secret.pem")
    server = RpcServer({}, tls.read_identity(str(tmp_path / "secret.pem")))
    port = await server.start("127.0.0.1", 0)
    async with announced(port, Names("127.0.0.1")):
        assert await wait_until(lambda: "set the same --cluster-secret-file): retrying" in caplog.text, 20.0)
    await server.close()


async def test_an_unreachable_router_is_not_blamed_on_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    async with announced(1, Names("255.255.255.255")):
        assert await wait_until(lambda: "no router at 255.255.255.255:1 (" in caplog.text, 20.0)
    assert "cluster-secret" not in caplog.text


async def test_names_are_resolved_by_the_system_in_a_thread_with_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "127.0.0.1" in await NameResolver("localhost")()
    assert await NameResolver("::1")() == ["::1"]
    with pytest.raises(OSError, match=r"not known|No address|resolution"):
        await NameResolver("no-such-host.invalid")()
    answered, threads = threading.Event(), list[str]()

    def slow(*_: object, **__: object) -> list[Any]:
        threads.append(threading.current_thread().name)
        assert answered.wait(60)
        return [(0, 0, 0, "", ("127.0.0.9", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(resolver_module, "TIMEOUT_S", 0.05)
    resolver = NameResolver("slow.test")
    for _ in range(3):
        with pytest.raises(TimeoutError, match="did not answer"):
            await resolver()
    assert threads == ["resolver"], "at most one query is under way"
    answered.set()
    monkeypatch.setattr(resolver_module, "TIMEOUT_S", 10.0)
    assert await resolver() == ["127.0.0.9"], "a late answer is used"


async def test_without_a_thread_a_name_is_not_resolved_now_but_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolver = NameResolver("localhost")
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="can't start new thread"):
            await resolver()
    assert "127.0.0.1" in await resolver()


# ---- redis --------------------------------------------------------------------------------------------------------


class ControlledRedis(FakeRedis):
    """A Redis whose commands raise `error` while it is set. Only the test advances the registry's clock `now`."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.num_reads = 0
        self.now = 100.0

    async def answer(self) -> None:
        if self.error is not None:
            raise self.error

    async def smembers(self, key: str) -> list[bytes]:
        found = await super().smembers(key)
        self.num_reads += 1
        return found

    def put(self, name: str, value: bytes, cluster: str = "c") -> None:
        self.keys[f"baton:{cluster}:node:{name}"] = value, float("inf")
        self.sets.setdefault(f"baton:{cluster}:nodes", {})[name.encode()] = None

    def names(self) -> set[bytes]:
        return set(self.sets.get("baton:c:nodes", ()))


@pytest.fixture
def redis(monkeypatch: pytest.MonkeyPatch) -> ControlledRedis:
    fake = ControlledRedis()
    monkeypatch.setattr(registry_module, "_client", lambda _: fake)
    monkeypatch.setattr(registry_module, "time", SimpleNamespace(monotonic=lambda: fake.now))
    return fake


@asynccontextmanager
async def watching(changes: list[list[str]] | None = None) -> AsyncIterator[RedisRegistry]:
    registry = RedisRegistry("redis://fake", "c", BEAT_S)
    log = [] if changes is None else changes
    await registry.start(lambda: log.append(sorted(registry.nodes)))
    try:
        yield registry
    finally:
        await registry.close()


async def reads(redis: ControlledRedis, count: int) -> None:
    """Wait until the registry has read `count` more times. It may not have processed the last reply yet."""
    goal = redis.num_reads + count
    assert await wait_until(lambda: redis.num_reads >= goal, 10.0)


async def test_nodes_that_announce_themselves_are_listed_and_leave_when_they_close(redis: ControlledRedis) -> None:
    changes: list[list[str]] = []
    async with watching(changes) as registry:
        node = announcer("redis://fake", "c", BEAT_S)
        assert isinstance(node, RedisAnnouncer)
        await joins_and_updates(node, registry)
        await node.close()
        assert (redis.keys, redis.names()) == ({}, set())
        await reads(redis, 2)
        redis.now += LEASE_S
        assert await wait_until(lambda: registry.nodes == {}, 5.0)
        assert changes == [["d0"], ["d0"], ["d0"], []]


@pytest.mark.parametrize("error", [RedisTimeoutError("frozen"), ConnectionRefusedError(), ResponseError("LOADING")])
async def test_the_last_list_is_kept_while_redis_fails(redis: ControlledRedis, error: Exception) -> None:
    redis.put("d0", encode(INFO))
    async with watching() as registry:
        assert await wait_until(lambda: registry.state == "ok" and registry.nodes == {"d0": INFO}, 5.0)
        redis.error = error
        assert await wait_until(lambda: registry.state == "down", 5.0)
        redis.flush()
        redis.now += LEASE_S
        await asyncio.sleep(2 * BEAT_S)
        assert registry.nodes == {"d0": INFO}
        redis.error = None
        await reads(redis, 2)
        assert (registry.state, registry.nodes) == ("ok", {"d0": INFO}), "an empty Redis does not prove that nodes left"
        redis.put("d0", encode(INFO))
        redis.now += LEASE_S
        await reads(redis, 2)
        assert registry.nodes == {"d0": INFO}


async def test_malformed_and_misplaced_entries_are_skipped_and_the_others_are_listed(
    redis: ControlledRedis,
) -> None:
    redis.put("d0", encode(INFO))
    redis.put("garbage", b"\xff\x00 not msgpack")
    redis.put("short", encode(Ack()))
    redis.put("impostor", encode(INFO))
    redis.put("p9", encode(replace(INFO, id="p9")), cluster="another")
    redis.sets["baton:c:nodes"] |= dict.fromkeys([b"expired", b"\xff\xfe"])
    async with watching() as registry:
        await reads(redis, 2)
        assert registry.nodes == {"d0": INFO}
        assert registry.skipped == 3
        assert registry.state == "ok"


async def test_an_unchanged_entry_is_not_decoded_again_and_keys_are_read_in_slices(
    redis: ControlledRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads_of: list[int] = []
    mget = redis.mget

    async def counting(keys: list[str]) -> list[bytes | None]:
        reads_of.append(len(keys))
        return await mget(keys)

    monkeypatch.setattr(redis, "mget", counting)
    for number in range(150):
        redis.put(f"d{number}", encode(replace(INFO, id=f"d{number}")))
    async with watching() as registry:
        assert await wait_until(lambda: len(registry.nodes) == 150, 5.0)
        before = dict(registry.nodes)
        redis.put("d7", encode(replace(INFO, id="d7", state="draining")))
        assert await wait_until(lambda: registry.nodes["d7"].state == "draining", 5.0)
        await reads(redis, 2)
        assert [name for name, info in registry.nodes.items() if info is not before[name]] == ["d7"]
        assert sorted(reads_of[:3]) == [150 - 2 * READ_AT_ONCE, READ_AT_ONCE, READ_AT_ONCE]


async def test_names_of_crashed_nodes_leave_the_index_after_a_lease(
    redis: ControlledRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "MAX_NODES", 2)
    redis.sets["baton:c:nodes"] = dict.fromkeys([b"a0", b"a1", b"\xff"])
    redis.put("d0", encode(INFO))
    async with watching() as registry:
        await reads(redis, 2)
        assert (registry.nodes, len(redis.names())) == ({}, 4), "no name has been absent for a whole lease"
        redis.error = RedisTimeoutError("frozen")
        assert await wait_until(lambda: registry.state == "down", 5.0)
        redis.now += LEASE_S
        redis.error = None
        await reads(redis, 2)
        assert len(redis.names()) == 4, "the time without answers does not count"
        redis.now += LEASE_S
        assert await wait_until(lambda: registry.nodes == {"d0": INFO}, 5.0)
        await reads(redis, 2)
        redis.now += LEASE_S
        await reads(redis, 3)
        assert redis.names() == {b"d0"}


async def test_in_a_cluster_with_a_secret_entries_that_were_not_signed_with_it_are_skipped(
    redis: ControlledRedis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ours", "theirs"):
        write_secret(tmp_path / name)
    redis.put("unsigned", encode(replace(INFO, id="unsigned")))
    peer_log.reset("baton:c:node:")
    try:
        tls.configure(str(tmp_path / "theirs"), {})
        stranger = RedisAnnouncer("redis://fake", "c", BEAT_S)
        await stranger.start(replace(INFO, id="stranger"))
        tls.configure(str(tmp_path / "ours"), {})
        node = RedisAnnouncer("redis://fake", "c", BEAT_S)
        await node.start(INFO)
        async with watching() as registry:
            assert await wait_until(lambda: (registry.nodes, registry.skipped) == ({"d0": INFO}, 2), 20.0)
            await reads(redis, 2)
            assert registry.nodes.keys() <= {"d0"}  # on a busy machine, entries may expire
            assert sum("is skipped" in record.getMessage() for record in caplog.records) == 1, "logged once"
        await stranger.close()
        await node.close()
    finally:
        tls.configure("", {})


def test_an_outage_is_logged_once_after_a_while_and_its_end_once() -> None:
    now = 100.0
    outage = Outage(lambda: now)
    assert not outage.failed()
    assert not outage.ended()
    assert not outage.failed()
    now += OUTAGE_S
    assert outage.failed()
    assert not outage.failed()
    assert outage.ended()
    assert not outage.ended()
    assert not outage.failed()  # the next outage begins now
    now += OUTAGE_S
    assert outage.failed()

"""The registry of nodes: nodes announce themselves under a lease, and routers read the list.

There are two implementations. With `EmbeddedRegistry`, the router is the registry, and a node is a member as long as it
holds a stream to the router. With `RedisRegistry`, several routers share the nodes, and each node has a key with a time
to live. While Redis is down, paused or newly restarted and empty, a router keeps its last list, and detects lost nodes
by its own streams to them. In a cluster with a secret, Redis is not trusted: entries are signed.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import redis.asyncio
from redis.exceptions import RedisError

from shared.lifecycle import TaskGroup
from shared.logs import peer_log
from shared.rpc import tls
from shared.rpc.codec import DecodeError, decode, encode
from shared.rpc.messages import JoinReply, NodeInfo
from shared.rpc.methods import JOIN, PEER_FAILURES, RpcServer, connect

log = logging.getLogger("baton.registry")
REDIS_TIMEOUT_S = 0.5
# What the client can raise for a failed Redis, or for a server that is not Redis: its parser does not convert its own
# errors on malformed replies. All are caught, so that the tasks continue and notice when Redis is back.
REDIS_FAILURES = (RedisError, OSError, TimeoutError, ValueError, TypeError, AttributeError, LookupError, RecursionError)
LEASE_HEARTBEATS = 3
FAILURES_TO_TELL = 15
MAX_NODES = 4096
MAX_TEXT, MAX_FACTS = 1024, 64
NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
ADDRESS = re.compile(r"[\w.:%-]{1,255}:(\d{1,5})", re.ASCII)


def check_node(info: NodeInfo) -> None:
    """Raise DecodeError, with the name of the field, unless every value is possible for a node.

    Whether the values are true shows only on the stream to the node itself.
    """
    address = ADDRESS.fullmatch(info.address)
    if not NAME.fullmatch(info.id) or not NAME.fullmatch(info.incarnation_id):
        raise DecodeError("NodeInfo.id and .incarnation_id must be 1 to 64 letters, digits and . _ -")
    if info.role not in {"prefill", "decode"}:
        raise DecodeError("NodeInfo.role must be prefill or decode")
    if address is None or not 1 <= int(address[1]) <= 65_535:
        raise DecodeError("NodeInfo.address must be host:port")
    for name in ("block_tokens", "block_bytes", "num_blocks", "max_model_len", "max_num_seqs"):
        if not 1 <= getattr(info, name) < 2**40:
            raise DecodeError(f"NodeInfo.{name} must be from 1 to 2**40")
    texts = (
        info.model,
        info.fingerprint,
        info.version,
        info.state,
        info.shared_pool_owner,
        *info.attributes,
        *info.attributes.values(),
    )
    if len(info.attributes) > MAX_FACTS or max(map(len, texts)) > MAX_TEXT:
        raise DecodeError(f"NodeInfo: at most {MAX_FACTS} attributes, and texts of {MAX_TEXT} characters")


class Registry(Protocol):
    """The router's side: keeps `nodes`, by id, up to date, and calls `changed` after each change."""

    kind: str
    state: str  # "ok" | "down"
    nodes: dict[str, NodeInfo]

    async def start(self, changed: Callable[[], None]) -> None: ...
    async def close(self) -> None: ...


class Announcer(Protocol):
    """A node's side: keeps `info` in the registry, also after the registry restarts, until `close` removes it."""

    async def start(self, info: NodeInfo) -> None: ...
    async def update(self, info: NodeInfo) -> None: ...
    async def close(self) -> None: ...


def announcer(url: str, cluster: str, heartbeat_s: float) -> Announcer:
    """Return the announcer for `redis://…`, or for `host:port` of a router that is its own registry."""
    if url.startswith(("redis://", "rediss://", "unix://")):
        return RedisAnnouncer(url, cluster, heartbeat_s)
    return StreamAnnouncer(url, heartbeat_s)


class EmbeddedRegistry:
    """The registry inside a router: a node joins by opening a stream, and leaves when the stream ends."""

    kind = "embedded"
    state = "ok"

    def __init__(self, router: str, host: str, port: int) -> None:
        self.nodes: dict[str, NodeInfo] = {}
        self.port = port
        self._router = router
        self._host = host
        self._changed: Callable[[], None] = lambda: None
        self._server = RpcServer({JOIN: self._join})

    async def start(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self.port = await self._server.start(self._host, self.port)

    async def close(self) -> None:
        await self._server.close()

    async def _join(self, stream: Any) -> None:
        info: NodeInfo | None = None
        try:
            async for message in stream:
                check_node(message)
                if info is not None and message.id != info.id:
                    raise DecodeError("NodeInfo.id: a stream is one node's")
                if message.id not in self.nodes and len(self.nodes) >= MAX_NODES:
                    raise DecodeError(f"NodeInfo.id: {MAX_NODES} nodes have joined; no more are taken")
                if message != info:
                    info = message
                    self.nodes[message.id] = message
                    self._changed()
                await stream.send_message(JoinReply(self._router))
        finally:
            if info is not None and self.nodes.get(info.id) is info:  # a restarted node may have replaced it
                del self.nodes[info.id]
                self._changed()


class StreamAnnouncer:
    """Holds a stream to one router. Sends the node's info at every heartbeat, and reconnects after every loss."""

    def __init__(self, address: str, heartbeat_s: float) -> None:
        self._address = address
        self._heartbeat_s = heartbeat_s
        self._info: NodeInfo | None = None
        self._wake = asyncio.Event()
        self._tasks = TaskGroup()

    async def start(self, info: NodeInfo) -> None:
        self._info = info
        self._tasks.start(self._hold())

    async def update(self, info: NodeInfo) -> None:
        self._info = info
        self._wake.set()

    async def close(self) -> None:
        await self._tasks.close()

    async def _hold(self) -> None:
        failures = 0
        while True:
            channel = connect(self._address)
            try:
                async with JOIN.open(channel) as stream:
                    while True:
                        assert self._info is not None
                        await stream.send_message(self._info)
                        async with asyncio.timeout(10 * self._heartbeat_s + 2):
                            if await stream.recv_message() is None:
                                break
                        failures = 0
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(self._wake.wait(), self._heartbeat_s)
                        self._wake.clear()
            except PEER_FAILURES as error:
                failures += 1
                if failures == FAILURES_TO_TELL:  # the first ones occur while a router starts, or ends together with us
                    log.warning("no router at %s (%s): trying on", self._address, str(error) or type(error).__name__)
            finally:
                channel.close()
            await asyncio.sleep(min(0.2, self._heartbeat_s))


def _client(url: str) -> Any:
    # With the client's defaults, a call to a frozen server takes over 12 s to fail.
    return redis.asyncio.Redis.from_url(
        url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S, retry=None
    )


def _keys(cluster: str) -> tuple[str, str]:
    return f"baton:{cluster}:node:", f"baton:{cluster}:nodes"


@dataclass(slots=True)
class Sealed:
    """A node's entry in a cluster with a secret: the encoded NodeInfo, and a signature over it and its Redis key."""

    info: bytes
    proof: bytes


def seal(info: NodeInfo, key: str, identity: tls.ClusterIdentity | None) -> bytes:
    """Return the value to store in Redis at `key`."""
    data = encode(info)
    return data if identity is None else encode(Sealed(data, identity.sign(key, data)))


def unseal(value: bytes, key: str, identity: tls.ClusterIdentity | None) -> NodeInfo:
    """Inverse of `seal`. Raises DecodeError for a value that is malformed or not signed by a member of the cluster."""
    if identity is not None:
        sealed = decode(value, Sealed)
        if not identity.is_signed(sealed.proof, key, sealed.info):
            raise DecodeError("it is not signed with the cluster's secret")
        value = sealed.info
    return decode(value, NodeInfo)


class RedisAnnouncer:
    """Holds a key in Redis with a time to live of three heartbeats, and sets it again at each heartbeat."""

    def __init__(self, url: str, cluster: str, heartbeat_s: float) -> None:
        self._client = _client(url)
        self._identity = tls.own()
        self._prefix, self._index = _keys(cluster)
        self._heartbeat_s = heartbeat_s
        self._info: NodeInfo | None = None
        self._wake = asyncio.Event()
        self._tasks = TaskGroup()

    async def start(self, info: NodeInfo) -> None:
        self._info = info
        self._tasks.start(self._beat())

    async def update(self, info: NodeInfo) -> None:
        self._info = info
        self._wake.set()

    async def close(self) -> None:
        await self._tasks.close()
        if self._info is not None:
            with contextlib.suppress(*REDIS_FAILURES):
                await self._client.delete(self._prefix + self._info.id)
                await self._client.srem(self._index, self._info.id)
        await self._client.aclose()

    async def _beat(self) -> None:
        complained = False
        while True:
            assert self._info is not None
            try:
                lease_ms = int(1000 * LEASE_HEARTBEATS * self._heartbeat_s)
                key = self._prefix + self._info.id
                await self._client.set(key, seal(self._info, key, self._identity), px=lease_ms)
                await self._client.sadd(self._index, self._info.id)
                complained = False
            except REDIS_FAILURES as error:
                if not complained:
                    log.warning("redis does not answer (%s): trying on", str(error) or type(error).__name__)
                    complained = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._heartbeat_s)
            self._wake.clear()


class RedisRegistry:
    """Reads all keys from Redis every half second.

    A node leaves the list only after its key was absent from every answer for a whole lease, so a Redis that restarts
    empty does not empty the list. The names of crashed nodes are removed from the index in Redis after the same time;
    otherwise `MAX_NODES` of them would hide all live nodes.
    """

    kind = "redis"

    def __init__(self, url: str, cluster: str, heartbeat_s: float = 0.5) -> None:
        self.nodes: dict[str, NodeInfo] = {}
        self.state = "down"
        self.skipped = 0  # malformed or unsigned entries, and those beyond MAX_NODES
        self._client = _client(url)
        self._identity = tls.own()
        self._prefix, self._index = _keys(cluster)
        self._interval_s = heartbeat_s
        self._absent_since: dict[str, float] = {}
        self._gone_since: dict[bytes, float] = {}  # names in the index that have no key
        self._changed: Callable[[], None] = lambda: None
        self._tasks = TaskGroup()

    async def start(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._tasks.start(self._watch())

    async def close(self) -> None:
        await self._tasks.close()
        await self._client.aclose()

    async def _watch(self) -> None:
        while True:
            try:
                found, gone = await self._read()
            except REDIS_FAILURES as error:
                if self.state == "ok":
                    log.warning("redis does not answer (%s): keeping the last list", str(error) or type(error).__name__)
                self.state = "down"
                self._absent_since.clear()
                self._gone_since.clear()
            else:
                self.state = "ok"
                self._take(found, time.monotonic())
                with contextlib.suppress(*REDIS_FAILURES):  # a read-only account; the next read sees a lost Redis
                    await self._tidy(gone, time.monotonic())
            await asyncio.sleep(self._interval_s)

    async def _read(self) -> tuple[dict[str, NodeInfo], list[bytes]]:
        """Return the nodes, and the names in the index that have no key."""
        every = sorted(await self._client.smembers(self._index))
        members = every[:MAX_NODES]
        self.skipped += len(every) - len(members)
        names = [name.decode("utf-8", "replace") for name in members]
        values = await self._client.mget([self._prefix + name for name in names]) if names else []
        found: dict[str, NodeInfo] = {}
        gone: list[bytes] = []
        for member, name, value in zip(members, names, values, strict=True):
            if value is None:
                gone.append(member)
                continue
            try:
                info = unseal(value, self._prefix + name, self._identity)
                check_node(info)
            except DecodeError as error:
                self.skipped += 1
                peer_log.warn(self._prefix, f"an entry in Redis is skipped: {error}")
                continue
            if info.id == name:
                found[name] = info
        return found, gone

    async def _tidy(self, gone: list[bytes], now: float) -> None:
        """Remove names that have had no key for a whole lease from the index. A live node adds its name again."""
        self._gone_since = {member: self._gone_since.get(member, now) for member in gone}
        lease_s = LEASE_HEARTBEATS * self._interval_s
        stale = [member for member, since in self._gone_since.items() if now - since > lease_s]
        if not stale:
            return
        await self._client.srem(self._index, *stale)
        values = await self._client.mget([self._prefix.encode() + member for member in stale])
        if back := [member for member, value in zip(stale, values, strict=True) if value is not None]:
            await self._client.sadd(self._index, *back)  # these set their keys again in the meantime

    def _take(self, found: dict[str, NodeInfo], now: float) -> None:
        before = dict(self.nodes)
        self.nodes.update(found)
        for name in list(self.nodes):
            if name in found:
                self._absent_since.pop(name, None)
            elif now - self._absent_since.setdefault(name, now) > LEASE_HEARTBEATS * self._interval_s:
                del self.nodes[name], self._absent_since[name]
        if self.nodes != before:
            self._changed()

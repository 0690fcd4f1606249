"""The registry of nodes: nodes announce themselves with a lease, and routers read the list of nodes.

There are two implementations. With `EmbeddedRegistry`, the router is the registry, and a node is a member as long as it
holds a stream to the router. With `RedisRegistry`, several routers share the nodes, and each node sets a key in Redis
that expires. While Redis is down, frozen or empty after a restart, a router keeps its last list, and detects lost nodes
by its own streams to them. In a cluster with a secret, Redis is not trusted: entries are signed.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from shared.lifecycle import TaskGroup
from shared.logs import peer_log
from shared.rpc import tls
from shared.rpc.codec import DecodeError, decode, encode
from shared.rpc.connection import RpcChannel
from shared.rpc.messages import Ack, NodeInfo
from shared.rpc.methods import JOIN, PEER_FAILURES, RpcServer

log = logging.getLogger("baton.registry")
REDIS_TIMEOUT_S = 0.5
# The errors that the client raises if Redis has failed, or if the server is not Redis. The client's parser may raise
# any of them for a malformed reply. All are caught, so that our tasks continue and notice when Redis is back.
# uvloop raises RuntimeError for a write to a connection that Redis or the network has reset.
REDIS_FAILURES = (RedisError, OSError, TimeoutError, ValueError, TypeError, AttributeError, LookupError, RuntimeError)
OUTAGE_S = 2.0  # a shorter outage of Redis is not logged, because a busy machine has many
LEASE_HEARTBEATS = 3
FAILURES_TO_LOG = 15  # fewer are normal while a router starts, or while it stops together with its nodes
MAX_NODES = 4096
MAX_TEXT, MAX_ATTRIBUTES = 1024, 64
NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
ADDRESS = re.compile(r"[\w.:%-]{1,255}:(\d{1,5})", re.ASCII)


def check_node(info: NodeInfo) -> None:
    """Check that each value is one that a node may have. Otherwise, raise DecodeError, which names the field.

    Whether the values are those of the node is known only from a stream to the node itself.
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
    texts = [info.model, info.fingerprint, info.version, info.state, info.shared_pool_owner]
    texts += [*info.attributes, *info.attributes.values()]
    if len(info.attributes) > MAX_ATTRIBUTES or max(map(len, texts)) > MAX_TEXT:
        raise DecodeError(f"NodeInfo: at most {MAX_ATTRIBUTES} attributes, and texts of {MAX_TEXT} characters")


class Registry:
    """The registry in a router. Keeps `nodes` (by id) up to date, and calls `changed` after each change."""

    kind: str
    state = "ok"  # or "down"
    problem = ""  # why the registry has been down for some time, as a sentence; "" while it works

    def __init__(self) -> None:
        self.nodes: dict[str, NodeInfo] = {}

    async def start(self, changed: Callable[[], None]) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class Announcer:
    """Keeps a node's `info` in the registry until `close`, and adds it again if the registry restarts."""

    info: NodeInfo

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._updated = asyncio.Event()
        self._tasks = TaskGroup()

    async def start(self, info: NodeInfo) -> None:
        self.info = info
        self._tasks.start(self._run())

    async def update(self, info: NodeInfo) -> None:
        self.info = info
        self._updated.set()

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self) -> None:
        raise NotImplementedError

    async def _wait(self) -> None:
        """Wait until the next heartbeat is due or `update` is called."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._updated.wait(), self._heartbeat_s)
        self._updated.clear()


def announcer(url: str, cluster: str, heartbeat_s: float) -> Announcer:
    """Return the announcer for `redis://…`, or for `host:port` of a router that is its own registry."""
    if url.startswith(("redis://", "rediss://", "unix://")):
        return RedisAnnouncer(url, cluster, heartbeat_s)
    return StreamAnnouncer(url, heartbeat_s)


# ---- in the router ---------------------------------------------------------------------------------------------------


class EmbeddedRegistry(Registry):
    """The registry inside a router: a node joins by opening a stream, and leaves when the stream ends."""

    kind = "embedded"

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self.port = port
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
                    raise DecodeError("NodeInfo.id: another node joined on this stream")
                if message.id not in self.nodes and len(self.nodes) >= MAX_NODES:
                    raise DecodeError(f"NodeInfo.id: {MAX_NODES} nodes have joined, which is the limit")
                if message != info:
                    info = message
                    self.nodes[message.id] = message
                    self._changed()
                await stream.send_message(Ack())
        finally:
            if info is not None and self.nodes.get(info.id) is info:  # a restarted node may have replaced the entry
                del self.nodes[info.id]
                self._changed()


class StreamAnnouncer(Announcer):
    """Holds a stream to one router. Sends the node's info at every heartbeat, and reconnects if the stream ends."""

    def __init__(self, address: str, heartbeat_s: float) -> None:
        super().__init__(heartbeat_s)
        self._address = address

    async def _run(self) -> None:
        failures = 0
        while True:
            channel = RpcChannel(self._address)
            try:
                async with JOIN.open(channel) as stream:
                    while True:
                        await stream.send_message(self.info)
                        async with asyncio.timeout(10 * self._heartbeat_s + 2):
                            if await stream.recv_message() is None:
                                break
                        if failures >= FAILURES_TO_LOG:
                            log.info("the router at %s answers again", self._address)
                        failures = 0
                        await self._wait()
            except PEER_FAILURES as error:
                failures += 1
                if failures == FAILURES_TO_LOG:
                    log.warning("no router at %s (%s): retrying", self._address, str(error) or type(error).__name__)
            finally:
                channel.close()
            await asyncio.sleep(min(0.2, self._heartbeat_s))


# ---- in Redis --------------------------------------------------------------------------------------------------------


def _client(url: str) -> Any:
    # With the client's defaults, a call to a frozen server takes over 12 s to fail.
    return redis.asyncio.Redis.from_url(
        url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S, retry=None
    )


def _keys(cluster: str) -> tuple[str, str]:
    return f"baton:{cluster}:node:", f"baton:{cluster}:nodes"


@dataclass(slots=True)
class Sealed:
    """A node's entry in a cluster with a secret: the encoded NodeInfo, and a signature over these bytes and the key."""

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
            raise DecodeError("it is not signed with the secret of this cluster")
        value = sealed.info
    return decode(value, NodeInfo)


class Outage:
    """Decides when an outage is logged: once, after it has lasted for OUTAGE_S, and once when it has ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._is_logged = False

    def failed(self) -> bool:
        """Return whether to log the outage now, after a failure."""
        now = self._clock()
        self._since = now if self._since is None else self._since
        was_logged, self._is_logged = self._is_logged, now - self._since >= OUTAGE_S
        return self._is_logged and not was_logged

    def ended(self) -> bool:
        """Return whether to log the end of an outage now, after a success."""
        was_logged, self._since, self._is_logged = self._is_logged, None, False
        return was_logged


class RedisAnnouncer(Announcer):
    """Sets a key in Redis at each heartbeat. The key expires after three heartbeats."""

    def __init__(self, url: str, cluster: str, heartbeat_s: float) -> None:
        super().__init__(heartbeat_s)
        self._client = _client(url)
        self._identity = tls.own()
        self._prefix, self._index = _keys(cluster)

    async def close(self) -> None:
        await super().close()
        with contextlib.suppress(*REDIS_FAILURES):
            await self._client.delete(self._prefix + self.info.id)
            await self._client.srem(self._index, self.info.id)
        await self._client.aclose()

    async def _run(self) -> None:
        outage = Outage()
        while True:
            try:
                lease_ms = int(1000 * LEASE_HEARTBEATS * self._heartbeat_s)
                key = self._prefix + self.info.id
                await self._client.set(key, seal(self.info, key, self._identity), px=lease_ms)
                await self._client.sadd(self._index, self.info.id)
                if outage.ended():
                    log.info("Redis answers again")
            except REDIS_FAILURES as error:
                if outage.failed():
                    log.warning("Redis does not answer (%s): retrying", str(error) or type(error).__name__)
            await self._wait()


class RedisRegistry(Registry):
    """Reads all keys from Redis every half second.

    A node leaves the list only after every answer for the duration of a lease lacked its key, so a Redis that restarts
    empty does not empty the list. After the same time, the node's name is removed from the index in Redis: only
    `MAX_NODES` names are read, and the names of crashed nodes could displace those of all live nodes.
    """

    kind = "redis"

    def __init__(self, url: str, cluster: str, heartbeat_s: float = 0.5) -> None:
        super().__init__()
        self.state = "down"
        self.error = ""  # why Redis does not answer
        self.skipped = 0  # number of entries that were malformed, unsigned or beyond MAX_NODES
        self._client = _client(url)
        self._identity = tls.own()
        self._prefix, self._index = _keys(cluster)
        self._interval_s = heartbeat_s
        self._absent_since: dict[str, float] = {}  # name in `nodes` or in the index without a key -> since when
        self._tasks = TaskGroup()

    async def start(self, changed: Callable[[], None]) -> None:
        self._tasks.start(self._watch(changed))

    async def close(self) -> None:
        await self._tasks.close()
        await self._client.aclose()

    async def _watch(self, changed: Callable[[], None]) -> None:
        outage = Outage()
        while True:
            try:
                found, missing = await self._read()
            except REDIS_FAILURES as error:
                self.error = str(error) or type(error).__name__
                self.state = "down"
                self._absent_since.clear()
                if outage.failed():
                    self.problem = f"Redis does not answer ({self.error}): the router keeps its last list of nodes."
                    changed()
            else:
                self.state, self.error = "ok", ""
                if outage.ended():
                    self.problem = ""
                    changed()
                stale = self._stale({*missing, *(self.nodes.keys() - found.keys())})
                nodes = {name: info for name, info in (self.nodes | found).items() if name not in stale}
                if nodes != self.nodes:
                    self.nodes = nodes
                    changed()
                with contextlib.suppress(*REDIS_FAILURES):  # permission may be missing; reads detect a lost connection
                    await self._remove_names([member for name, member in missing.items() if name in stale])
            await asyncio.sleep(self._interval_s)

    async def _read(self) -> tuple[dict[str, NodeInfo], dict[str, bytes]]:
        """Return the nodes by name, and the members of the index that have no key, by name."""
        members = sorted(await self._client.smembers(self._index))
        self.skipped += max(0, len(members) - MAX_NODES)
        names = {member.decode("utf-8", "replace"): member for member in members[:MAX_NODES]}
        values = await self._client.mget([self._prefix + name for name in names]) if names else []
        entries = dict(zip(names, values, strict=True))
        found: dict[str, NodeInfo] = {}
        for name, value in entries.items():
            if value is not None:
                try:
                    info = unseal(value, self._prefix + name, self._identity)
                    check_node(info)
                except DecodeError as error:
                    self.skipped += 1
                    peer_log.warn(self._prefix, f"an entry in Redis is skipped: {error}")
                else:
                    found |= {name: info} if info.id == name else {}
        return found, {name: member for name, member in names.items() if entries[name] is None}

    def _stale(self, absent: set[str]) -> set[str]:
        """Return the names that every answer has lacked for the duration of a lease."""
        now = time.monotonic()
        self._absent_since = {name: self._absent_since.get(name, now) for name in absent}
        return {name for name, since in self._absent_since.items() if now - since > LEASE_HEARTBEATS * self._interval_s}

    async def _remove_names(self, members: list[bytes]) -> None:
        """Remove names from the index. Restore a name if its node has set its key in the meantime."""
        if members:
            await self._client.srem(self._index, *members)
            values = await self._client.mget([self._prefix.encode() + member for member in members])
            if back := [member for member, value in zip(members, values, strict=True) if value is not None]:
                await self._client.sadd(self._index, *back)

"""The registry of nodes: nodes announce themselves with a lease, and routers read the list of nodes.

There are two implementations. With `EmbeddedRegistry`, each router is its own registry: a node holds a stream to each
router, and is a member as long as the stream is open. With `RedisRegistry`, each node sets an expiring key in Redis.
While Redis is down, frozen or empty after a restart, a router keeps its last list, and detects lost nodes by its own
streams to them. In a cluster with a secret, Redis is not trusted: entries are signed.
"""

import asyncio
import contextlib
import logging
import random
import re
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from shared.lifecycle import TaskGroup, listen
from shared.limits import MAX_ADAPTERS, MAX_NAME
from shared.logs import peer_log
from shared.resolver import NameResolver, Resolver, is_host_and_port
from shared.rpc import tls
from shared.rpc.codec import DecodeError, decode, encode
from shared.rpc.connection import RpcChannel, host_and_port
from shared.rpc.messages import Ack, NodeInfo, NodeListChange
from shared.rpc.methods import FOLLOW, JOIN, PEER_FAILURES, STREAM_ENDED, RpcServer

log = logging.getLogger("baton.registry")
REDIS_TIMEOUT_S = 0.5
# The errors that the Redis client raises if Redis has failed, or if the server is not Redis. At a malformed reply, the
# client's parser may raise any of these errors. Our tasks catch them all, and try again until Redis is back.
# uvloop raises RuntimeError for a write to a connection that Redis or the network has reset.
REDIS_FAILURES = (RedisError, OSError, TimeoutError, ValueError, TypeError, AttributeError, LookupError, RuntimeError)
OUTAGE_S = 2.0  # a shorter outage of Redis is not logged, because short outages are common on a busy machine
LEASE_HEARTBEATS = 3
FAILURES_TO_LOG = 15  # while a router starts or stops, fewer than this many attempts fail
RESOLVE_INTERVAL_S = 1.0
RETRY_S, SLOW_RETRY_S = 0.2, 1.0  # SLOW_RETRY_S is used after FAILURES_TO_LOG failures
MAX_ADDRESSES = 256  # maximum number of routers to which a node holds streams
MAX_NODES = 4096
READ_AT_ONCE = 64  # number of keys that are read from Redis and decoded in one turn of the event loop
MAX_TEXT, MAX_ATTRIBUTES = 1024, 64
NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
ADDRESS = re.compile(r"[\w.:%-]{1,255}:(\d{1,5})", re.ASCII)


def check_node(info: NodeInfo) -> None:
    """Raise DecodeError, which names the field, if a value is not valid for a node.

    This does not check that the node really has these values; only a stream to the node itself can show that.
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
    texts += [*info.attributes, *info.attributes.values(), *info.adapters.values()]
    if len(info.attributes) > MAX_ATTRIBUTES or max(map(len, texts)) > MAX_TEXT:
        raise DecodeError(f"NodeInfo: at most {MAX_ATTRIBUTES} attributes, and texts of {MAX_TEXT} characters")
    if len(info.adapters) > MAX_ADAPTERS or max(map(len, info.adapters), default=0) > MAX_NAME:
        raise DecodeError(f"NodeInfo: at most {MAX_ADAPTERS} adapters, with names of {MAX_NAME} characters")


class Registry:
    """The registry in a router. Keeps `nodes`, keyed by id, up to date, and calls `changed` after each change."""

    kind: str
    state = "ok"  # or "down"
    problem = ""  # a sentence that says why the registry is down; "" if it works or has been down only for a short time

    def __init__(self) -> None:
        self.nodes: dict[str, NodeInfo] = {}

    async def start(self, changed: Callable[[], None]) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class Announcer:
    """Keeps a node's `info` in the registry until `close`, and adds it again if the registry restarts."""

    info: NodeInfo

    def __init__(self) -> None:
        self._updated = asyncio.Event()  # the next call of `update` sets this event and replaces it with a new one
        self._tasks = TaskGroup()

    async def start(self, info: NodeInfo) -> None:
        self.info = info
        self._tasks.start(self._run())

    async def update(self, info: NodeInfo) -> None:
        self.info = info
        self._updated.set()
        self._updated = asyncio.Event()

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self) -> None:
        raise NotImplementedError


def is_redis(registry: str) -> bool:
    return registry.startswith(("redis://", "rediss://", "unix://"))


def announcer(registry: str, cluster: str, heartbeat_s: float, resolve: Resolver | None = None) -> Announcer:
    """Return the announcer for a value of `--registry`: `redis://…`, or the addresses of routers."""
    if is_redis(registry):
        return RedisAnnouncer(registry, cluster, heartbeat_s)
    return StreamAnnouncer(registry, resolve)


def listed_addresses(registry: str) -> list[tuple[str, int]]:
    """Return the hosts and ports in a value of `--registry`: `host:port,host:port`, or `file:` and the path of a file.

    The file has one `host:port` on each line. Raises OSError if the file cannot be read, and ValueError if an entry is
    not `host:port`.
    """
    path = registry.removeprefix("file:")
    texts = registry.split(",") if path == registry else Path(path).read_text().split()
    if wrong := [text for text in texts if not is_host_and_port(text)]:
        raise ValueError(f"{wrong[0]!r} is not host:port")
    return list(dict.fromkeys(map(host_and_port, texts)))


# ---- in the router ---------------------------------------------------------------------------------------------------


class EmbeddedRegistry(Registry):
    """The registry inside a router: a node joins by opening a stream, and leaves when its last stream ends.

    A node has several streams if the host name in its `--registry` resolves to several addresses of this router.
    """

    kind = "embedded"

    def __init__(self, host: str, port: int, listener: socket.socket | None = None) -> None:
        """`listener` is a socket that already listens, for a registry in a separate process."""
        super().__init__()
        self.port = port
        self._host = host
        self._listener = listener
        self._on_change: Callable[[], None] = lambda: None
        self._server = RpcServer({JOIN: self._join, FOLLOW: self._follow})
        self._followers: set[asyncio.Event] = set()
        self._streams: dict[Any, NodeInfo] = {}  # the last message of each stream; the latest change comes last

    async def start(self, changed: Callable[[], None]) -> None:
        self._on_change = changed
        start = partial(self._server.start, listener=self._listener)
        self.port = await listen(start, self._host, self.port, "--registry-port", "--registry-host")

    async def close(self) -> None:
        await self._server.close()

    def _changed(self) -> None:
        self._on_change()
        for event in self._followers:
            event.set()

    async def _follow(self, stream: Any) -> None:
        """Send the list of nodes, and then every change to the list, until the worker ends the stream."""
        await stream.recv_message()
        sent: dict[str, NodeInfo] = {}
        changed = asyncio.Event()
        self._followers.add(changed)
        try:
            while True:
                changed.clear()
                new = [info for name, info in self.nodes.items() if sent.get(name) is not info]
                left = [name for name in sent if name not in self.nodes]
                sent = dict(self.nodes)
                for first in range(0, len(new), READ_AT_ONCE):
                    some = new[first : first + READ_AT_ONCE]
                    await stream.send_message(NodeListChange(some, is_complete=False))
                await stream.send_message(NodeListChange(left=left))
                await changed.wait()
        finally:
            self._followers.discard(changed)

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
                    current = self.nodes.get(message.id)
                    # An update of a process does not replace the entry of another process that joined later.
                    is_hidden = info and current and current.incarnation_id != message.incarnation_id
                    info = message
                    self._streams.pop(stream, None)
                    self._streams[stream] = message
                    if not is_hidden:
                        self._set(message)
                await stream.send_message(Ack())
        finally:
            if info is not None:
                self._leave(stream, info)

    def _set(self, info: NodeInfo) -> None:
        if self.nodes.get(info.id) != info:
            self.nodes[info.id] = info
            self._changed()

    def _leave(self, stream: Any, info: NodeInfo) -> None:
        """Remove the node, unless another of its streams is open or a restarted process has replaced its entry."""
        del self._streams[stream]
        current = self.nodes.get(info.id)
        if current is None or current.incarnation_id != info.incarnation_id:
            return
        same = [each for each in reversed(self._streams.values()) if each.id == info.id]
        own = [each for each in same if each.incarnation_id == info.incarnation_id]
        other = next(iter(own or same), None)
        if other is not None:
            self._set(other)
        else:
            del self.nodes[info.id]
            self._changed()


class FollowedRegistry(Registry):
    """The registry in a worker process of a router: a copy of the list of nodes in the router's registry process.

    A stream keeps the copy up to date. While the registry process restarts, the worker keeps its last list.
    """

    kind = "embedded"

    def __init__(self, address: str) -> None:
        super().__init__()
        self.state = "down"
        self._address = address
        self._tasks = TaskGroup()

    async def start(self, changed: Callable[[], None]) -> None:
        self._tasks.start(self._run(changed))

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self, changed: Callable[[], None]) -> None:
        while True:
            channel = RpcChannel(self._address)
            try:
                async with FOLLOW.open(channel) as stream:
                    await stream.send_message(Ack())
                    await self._read(stream, changed)
            except PEER_FAILURES as error:
                log.debug("the registry at %s: %s", self._address, str(error) or type(error).__name__)
            finally:
                channel.close()
            self.state = "down"
            await asyncio.sleep(RETRY_S)

    async def _read(self, stream: Any, changed: Callable[[], None]) -> None:
        nodes: dict[str, NodeInfo] = {}
        while (change := await stream.recv_message()) is not None:
            nodes |= {info.id: info for info in change.nodes}
            for name in change.left:
                nodes.pop(name, None)
            if change.is_complete:
                self.state = "ok"
                self.nodes = dict(nodes)
                changed()


class StreamAnnouncer(Announcer):
    """Holds a stream to every router that the hosts in `--registry` resolve to, and reconnects if a stream ends.

    Every second, the names are resolved and the file, if there is one, is read. If an address is no longer listed, its
    stream stays open until the router ends it, so that an outage of the name service has no effect.
    """

    def __init__(self, registry: str, resolve: Resolver | None = None) -> None:
        super().__init__()
        self._registry = registry
        self._resolve = resolve  # replaces the resolver of the system, for all hosts
        self._resolvers: dict[str, Resolver] = {}
        self._outages = defaultdict[str, Outage](Outage)  # keys: hosts, or the value of --registry if it is a file
        self._answers: dict[tuple[str, int], set[str]] = {}  # the last answer of the name service for each host
        self._listed: set[str] = set()
        self._held: dict[str, None] = {}  # the addresses to which a stream is open or being opened
        self._joined: set[str] = set()
        self._is_over_limit = False

    async def _run(self) -> None:
        is_file = self._registry.startswith("file:")
        hosts = [] if is_file else listed_addresses(self._registry)
        while True:
            if is_file:
                hosts = await self._read_file(hosts)
            await asyncio.gather(*(self._look_up(*each) for each in hosts))
            self._follow({address for each in hosts for address in self._answers.get(each, ())})
            await asyncio.sleep(RESOLVE_INTERVAL_S)

    async def _read_file(self, before: list[tuple[str, int]]) -> list[tuple[str, int]]:
        try:
            hosts = await asyncio.to_thread(listed_addresses, self._registry)  # the file may be on a network
        except (OSError, ValueError) as error:
            self._report(self._registry, f"--registry {self._registry} cannot be read", error)
            return before
        self._report(self._registry, f"--registry {self._registry} can be read again")
        return hosts

    async def _look_up(self, host: str, port: int) -> None:
        resolve = self._resolve or self._resolvers.setdefault(host, NameResolver(host))
        try:
            found = await resolve()
        except OSError as error:
            self._report(host, f"the host {host} of --registry does not resolve", error)
        else:
            self._answers[host, port] = {f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in found}
            self._report(host, f"the host {host} of --registry resolves again")

    def _report(self, what: str, text: str, error: Exception | None = None) -> None:
        """Log the beginning and the end of an outage."""
        if error is None:
            if self._outages[what].ended():
                log.info("%s", text)
        elif self._outages[what].failed():
            log.warning("%s (%s): retrying", text, str(error) or type(error).__name__)

    def _follow(self, addresses: set[str]) -> None:
        """Open streams to the new addresses."""
        jitter_s = RETRY_S if self._listed else 0.0  # all nodes find a new router at about the same time
        self._listed = addresses
        new = sorted(addresses - self._held.keys())
        room = MAX_ADDRESSES - len(self._held)
        if len(new) > room and not self._is_over_limit:
            self._is_over_limit = True
            text = "--registry %s has %d addresses: only %d of them are used"
            log.warning(text, self._registry, len(addresses), MAX_ADDRESSES)
        for address in new[:room]:
            self._held[address] = None
            self._tasks.start(self._hold(address, random.random() * jitter_s))

    async def _hold(self, address: str, delay_s: float) -> None:
        """Keep a stream to a router open, until the router's address is no longer listed and the stream has ended."""
        failures = 0
        while True:
            await asyncio.sleep(delay_s)
            problem = await self._join(address, was_lost=failures >= FAILURES_TO_LOG)
            failures = 1 if address in self._joined else failures + 1
            self._joined.discard(address)
            if address not in self._listed:
                break
            if failures == FAILURES_TO_LOG:
                # If another address works, this is not a warning: a host name may also resolve to unusable addresses.
                level = logging.INFO if self._joined else logging.WARNING
                log.log(level, "no router at %s (%s): retrying", address, problem)
            delay_s = RETRY_S if failures < FAILURES_TO_LOG else SLOW_RETRY_S
        del self._held[address]

    async def _join(self, address: str, *, was_lost: bool) -> str:
        """Join a router and stay joined until the stream ends. Return the reason why the stream ended."""
        channel = RpcChannel(address, pings_idle=True)
        try:
            async with JOIN.open(channel) as stream:
                updated = self._updated
                await stream.send_message(self.info)
                sending = self._tasks.start(self._send_updates(stream, updated))
                try:
                    while await stream.recv_message() is not None:
                        if was_lost and address not in self._joined:
                            log.info("the router at %s answers again", address)
                        self._joined.add(address)
                finally:
                    sending.cancel()
            return "the router ended the stream"
        except PEER_FAILURES as error:
            problem = str(error) or type(error).__name__
            if tls.own() is None and isinstance(error, (ConnectionResetError, *STREAM_ENDED)):
                problem += "; if the router has a cluster secret, set the same --cluster-secret-file"
            return problem
        finally:
            channel.close()

    async def _send_updates(self, stream: Any, updated: asyncio.Event) -> None:
        """Send the info again after each update. Ignore errors, because they also end the stream in `_join`."""
        with contextlib.suppress(*PEER_FAILURES):
            while True:
                await updated.wait()
                updated = self._updated
                await stream.send_message(self.info)


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
    """A node's entry in a cluster with a secret: the encoded NodeInfo, and a signature over it and its Redis key."""

    info: bytes
    proof: bytes


def seal(info: NodeInfo, key: str, identity: tls.ClusterIdentity | None) -> bytes:
    """Return the value to store in Redis at `key`."""
    data = encode(info)
    return data if identity is None else encode(Sealed(data, identity.sign(key, data)))


def unseal(value: bytes, key: str, identity: tls.ClusterIdentity | None) -> NodeInfo:
    """Return the NodeInfo in a value that `seal` made. Raises DecodeError for a value that is malformed or is not
    signed by a member of the cluster."""
    if identity is not None:
        sealed = decode(value, Sealed)
        if not identity.is_signed(sealed.proof, key, sealed.info):
            raise DecodeError("it is not signed with the secret of this cluster")
        value = sealed.info
    return decode(value, NodeInfo)


class Outage:
    """Decides when to log an outage: when it has lasted for OUTAGE_S and, if this was logged, when it ends."""

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
        super().__init__()
        self._heartbeat_s = heartbeat_s
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
            updated = self._updated
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
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(updated.wait(), self._heartbeat_s)


class RedisRegistry(Registry):
    """Reads all keys from Redis every half second, a few at a time, and decodes only values that have changed.

    A node leaves the list only if no answer has contained its key for the duration of a lease. Nodes restore their keys
    sooner, so a Redis that restarts empty does not empty the list. When a node leaves the list, its name is also
    removed from the index in Redis. Only `MAX_NODES` names in the index are read, so the names of crashed nodes could
    displace those of live nodes."""

    kind = "redis"

    def __init__(self, url: str, cluster: str, heartbeat_s: float = 0.5) -> None:
        super().__init__()
        self.state = "down"
        self.error = ""  # why Redis does not answer
        self.skipped = 0  # number of entries in the last answer that were malformed, unsigned or beyond MAX_NODES
        self._client = _client(url)
        self._identity = tls.own()
        self._prefix, self._index = _keys(cluster)
        self._interval_s = heartbeat_s
        # For each name: the last value of its key, and the NodeInfo in this value, or None if it is invalid.
        self._entries: dict[str, tuple[bytes, NodeInfo | None]] = {}
        # For each name that is in `nodes` or in the index, but has no key: when an answer first lacked the key.
        self._absent_since: dict[str, float] = {}
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
                # Ignore failures: the router may lack the permission, and the next read reports a lost connection.
                with contextlib.suppress(*REDIS_FAILURES):
                    await self._remove_names([member for name, member in missing.items() if name in stale])
            await asyncio.sleep(self._interval_s)

    async def _read(self) -> tuple[dict[str, NodeInfo], dict[str, bytes]]:
        """Return two dicts, keyed by name: the nodes, and the members of the index for which Redis has no key."""
        members = sorted(await self._client.smembers(self._index))
        names = {member.decode("utf-8", "replace"): member for member in members[:MAX_NODES]}
        entries: dict[str, tuple[bytes, NodeInfo | None]] = {}
        ordered = list(names)
        for first in range(0, len(ordered), READ_AT_ONCE):
            some = ordered[first : first + READ_AT_ONCE]
            values = await self._client.mget([self._prefix + name for name in some])
            for name, value in zip(some, values, strict=True):
                if value is not None:
                    known = self._entries.get(name)
                    entries[name] = known if known and known[0] == value else (value, self._unsealed(name, value))
        self._entries = entries
        found = {name: info for name, (_, info) in entries.items() if info is not None}
        self.skipped = max(0, len(members) - MAX_NODES) + sum(info is None for _, info in entries.values())
        return found, {name: member for name, member in names.items() if name not in entries}

    def _unsealed(self, name: str, value: bytes) -> NodeInfo | None:
        """Return the info in an entry, or None if the entry is not valid."""
        try:
            info = unseal(value, self._prefix + name, self._identity)
            check_node(info)
            if info.id != name:
                raise DecodeError("NodeInfo.id differs from the name of the entry")
        except DecodeError as error:
            peer_log.warn(self._prefix, f"an entry in Redis is skipped: {error}")
            return None
        return info

    def _stale(self, absent: set[str]) -> set[str]:
        """Return the names that no answer has contained for the duration of a lease."""
        now = time.monotonic()
        self._absent_since = {name: self._absent_since.get(name, now) for name in absent}
        return {name for name, since in self._absent_since.items() if now - since > LEASE_HEARTBEATS * self._interval_s}

    async def _remove_names(self, members: list[bytes]) -> None:
        """Remove names from the index. If a node has set its key in the meantime, restore the node's name."""
        if members:
            await self._client.srem(self._index, *members)
            values = await self._client.mget([self._prefix.encode() + member for member in members])
            if back := [member for member, value in zip(members, values, strict=True) if value is not None]:
                await self._client.sadd(self._index, *back)

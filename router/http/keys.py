"""Who asks: the API keys of a file, as hashes, and how often an address may show a wrong one.

A line is `tenant:sha256` or `tenant:sha256:admin`, `#` begins a comment; `baton key` makes both key and line. The file
is read again when it changes, so keys come and go without a restart; while it cannot be read, the last ones hold.
"""

import hmac
import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import IPv6Network

from starlette.types import Scope

from shared.errors import ConfigError

log = logging.getLogger("baton.keys")
LINE = re.compile(r"(?P<tenant>[\w.-]{1,64}):(?P<hash>[0-9a-f]{64})(?P<admin>:admin)?", re.ASCII)
LINE_FORM = "must be tenant:sha256 or tenant:sha256:admin; `baton key TENANT` makes such a line"
MAX_KEYS = 1024  # each is compared with every request's: 0.05 us (measured)
MAX_FILE_BYTES = 256 << 10
LOOK_S = 1.0
WRONG_AT_ONCE, WRONG_PER_S = 10, 1.0
MAX_ADDRESSES, MAX_PROVEN = 10_000, 10_000
LOG_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose key it was. An admin may see and change the whole cluster; "" is everybody, where no keys are in use."""

    tenant: str
    is_admin: bool = False


ANONYMOUS = Identity("", is_admin=True)
SCOPE_KEY = "baton.identity"  # in a request's scope


def identity_of(scope: Scope) -> Identity:
    """Raises KeyError for a request that nobody has looked at: there is no identity to fall back to."""
    identity: Identity = scope[SCOPE_KEY]
    return identity


class ApiKeys:
    """The keys of a file and of a setting, one or several a tenant."""

    def __init__(self, path: str, more: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """`path` "": no file. `more`: lines with commas between. Raises ConfigError that names the line."""
        self._path = path
        self._more = more.replace(",", "\n")
        self._clock = clock
        self._stamp = self._stamped()
        self._entries = self._read()
        self._looked = clock()
        self._told = ""  # what is wrong with the file that it has now

    def identify(self, key: bytes) -> Identity | None:
        """None for a wrong key. Takes as long whichever of the keys it is, and for none of them."""
        self._look()
        digest, found = sha256(key).digest(), None
        for known, identity in self._entries:
            if hmac.compare_digest(known, digest):
                found = identity
        return found

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        stamp = self._stamped()
        if stamp == self._stamp:
            return
        try:
            self._entries = self._read()
        except ConfigError as error:  # looked at again: what it lacks may be a right, or a descriptor of ours
            if str(error) != self._told:
                log.error("%s; the keys read before stay in force", error)
            self._told = str(error)
            return
        self._stamp, self._told = stamp, ""
        log.info("%d API keys in force", len(self._entries))

    def _stamped(self) -> tuple[int, ...]:
        """Another one when the file was written, or replaced."""
        try:
            found = os.stat(self._path)
        except OSError:  # also without a file
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> list[tuple[bytes, Identity]]:
        entries: dict[bytes, Identity] = {}
        text = _text_of(self._path) if self._path else ""
        for where, lines in ((f"--api-keys-file {self._path}", text), ("--api-keys", self._more)):
            for number, line in enumerate(lines.splitlines(), 1):
                entry = line.partition("#")[0].strip()
                match = LINE.fullmatch(entry)
                if match is not None:
                    identity = Identity(match["tenant"], match["admin"] is not None)
                    if entries.setdefault(bytes.fromhex(match["hash"]), identity) is not identity:
                        raise ConfigError(f"{where}, line {number}: is an earlier line's key; a key has one tenant")
                elif entry:  # not shown: it may be a key
                    raise ConfigError(f"{where}, line {number}: {LINE_FORM}")
        if not 0 < len(entries) <= MAX_KEYS:
            raise ConfigError(f"--api-keys-file {self._path}: must hold 1 to {MAX_KEYS} keys, and holds {len(entries)}")
        return list(entries.items())


def _text_of(path: str) -> str:
    where = f"--api-keys-file {path}"
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_FILE_BYTES + 1).decode("ascii")
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: {LINE_FORM}") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{where}: is larger than {MAX_FILE_BYTES >> 10} KiB")
    return text


class WrongKeys:
    """How often an address may be wrong: a token bucket each. Who is wrong too often is not answered whether a key is
    right, unless the same address has shown that key before: nobody behind a proxy is locked out by a neighbour."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_refused = 0
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address -> what is left, when
        self._proven: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._logged = -LOG_EVERY_S
        self._num_unlogged = 0

    def wait_s(self, address: str, key: bytes) -> float:
        """How long until this address may try this key; 0: now."""
        name = _network(address)
        if name not in self._buckets or (name, sha256(key).digest()) in self._proven:
            return 0.0
        left = self._left(name)
        return 0.0 if left >= 1 else (1 - left) / WRONG_PER_S

    def right(self, address: str, key: bytes) -> None:
        proven = (_network(address), sha256(key).digest())
        self._proven[proven] = None
        self._proven.move_to_end(proven)
        if len(self._proven) > MAX_PROVEN:
            self._proven.popitem(last=False)

    def wrong(self, address: str, key: bytes) -> None:
        name = _network(address)
        self._proven.pop((name, sha256(key).digest()), None)  # a key that was withdrawn is one to wait with
        self._buckets[name] = (self._left(name) - 1, self._clock())
        self._buckets.move_to_end(name)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)

    def tell(self, address: str) -> None:
        """A request was refused. One line in a while, however many they are."""
        self.num_refused += 1
        self._num_unlogged += 1
        now = self._clock()
        if now - self._logged >= LOG_EVERY_S:
            log.warning("requests without a right API key: %d, the last from %s", self._num_unlogged, address or "?")
            self._logged, self._num_unlogged = now, 0

    def _left(self, name: str) -> float:
        left, at = self._buckets.get(name, (float(WRONG_AT_ONCE), 0.0))
        return min(WRONG_AT_ONCE, left + (self._clock() - at) * WRONG_PER_S)


def _network(address: str) -> str:
    """One client may have all addresses of an IPv6 /64."""
    if ":" not in address:
        return address
    try:
        return str(IPv6Network((address.partition("%")[0], 64), strict=False))
    except ValueError:
        return address

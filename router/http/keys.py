"""API keys and the identity of their owners. The keys' hashes are read from a file.

A line is `tenant:sha256` or `tenant:sha256:admin`, and `#` begins a comment. `baton key` creates a key and its line.
The file is read again when it changes, so that keys can be added and revoked without a restart. If it cannot be read,
the keys read before remain valid. Keys have 256 random bits, so guesses need no rate limit.
"""

import hmac
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from starlette.types import Scope

from shared.errors import ConfigError

log = logging.getLogger("baton.keys")
LINE = re.compile(r"(?P<tenant>[\w.-]{1,64}):(?P<hash>[0-9a-f]{64})(?P<admin>:admin)?", re.ASCII)
LINE_FORM = "must be tenant:sha256 or tenant:sha256:admin; `baton key TENANT` makes such a line"
MAX_KEYS = 1024  # each request's key is compared with all of them, at 0.05 us each
MAX_FILE_BYTES = 256 << 10
LOOK_S = 1.0  # between checks for a change of the file


@dataclass(frozen=True, slots=True)
class Identity:
    """The owner of a request's key. An admin may view and change the cluster. `tenant` is "" if no keys are set."""

    tenant: str
    is_admin: bool = False


ANONYMOUS = Identity("", is_admin=True)
SCOPE_KEY = "baton.identity"  # the key in the ASGI scope


def identity_of(scope: Scope) -> Identity:
    """Return the identity of a request. Raises KeyError if the request was not authenticated."""
    identity: Identity = scope[SCOPE_KEY]
    return identity


class ApiKeys:
    """The API keys of a file and of a setting. A tenant may have several. The authentication middleware calls
    `identify` on the event loop, which also reads the file again after a change."""

    def __init__(self, path: str, more: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """Read the keys. `path` may be "" for no file; `more` has further lines, separated by commas. Raises
        ConfigError, which names the invalid line."""
        self._path = path
        self._more = more.replace(",", "\n")
        self._clock = clock
        self._stamp = self._stamped()
        self._entries = self._read()
        self._looked = clock()
        self._logged = ""  # the last error that was logged since the file was readable

    def identify(self, key: bytes) -> Identity | None:
        """Return the owner of a key, or None if it is invalid. The time taken does not depend on the key."""
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
        except ConfigError as error:  # try again later: the cause may be a permission or our descriptor limit
            if str(error) != self._logged:
                log.error("%s; the keys read before stay in force", error)
            self._logged = str(error)
            return
        self._stamp, self._logged = stamp, ""
        log.info("%d API keys in force", len(self._entries))

    def _stamped(self) -> tuple[int, ...]:
        """Return a value that changes when the file is written or replaced."""
        try:
            found = os.stat(self._path)
        except OSError:  # the file may not exist
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
                        raise ConfigError(
                            f"{where}, line {number}: repeats the key of an earlier line; a key has one tenant"
                        )
                elif entry:  # the message omits the line, which may be a key
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

"""The secret of a cluster: what a process needs to know to be one of it, and how it proves that on every connection.

Both sides prove it before anything else that they say is read, once for each connection: each answers a fresh random
number of the other's with an HMAC-SHA256 (three passes, after ISO/IEC 9798-4). No clock takes part, so clocks may
differ by any amount, and no proof is worth anything on another connection or to another process: nothing has to be
remembered against replays. What follows on the connection is neither encrypted nor signed.
"""

import hmac
import ipaddress
import logging
import os
import secrets
import socket
import stat
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from shared.errors import ConfigError

log = logging.getLogger("baton.security")
MIN_CHARACTERS = 32
MIN_DIFFERENT = 10  # characters: a text that repeats itself is no secret
MAX_SECRETS = 8  # each of them is tried on a wrong proof
MAX_FILE_BYTES = 1 << 16
EXAMPLE = "replace-this-line-by-what-baton-secret-writes"

MAGIC = b"BTHS"  # no beginning of HTTP/2, nor of a KV channel
VERSION = 1
NONCE_BYTES = 16
PROOF_BYTES = 32
OPENING = struct.Struct(f"<4sI{NONCE_BYTES}s")  # magic, version, the caller's random number
CHALLENGE = struct.Struct(f"<4sI{NONCE_BYTES}s{PROOF_BYTES}s")  # and the called's, with its proof over both
MAX_PEERS_TOLD = 1024


class AuthenticationError(ConnectionError):
    """The other side did not prove the cluster's secret."""


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """The first key signs, each is accepted: so a new one can come in without a moment at which none fits."""

    keys: tuple[bytes, ...]

    def sign(self, purpose: str, *parts: bytes) -> bytes:
        """HMAC-SHA256 over `parts`; one for another `purpose`, or other borders between the parts, is another."""
        return hmac.digest(self.keys[0], _framed(purpose, parts), "sha256")

    def is_signed(self, proof: bytes, purpose: str, *parts: bytes) -> bool:
        """Compared in a time that says nothing of where `proof` is wrong."""
        text = _framed(purpose, parts)
        return any(hmac.compare_digest(hmac.digest(key, text, "sha256"), proof) for key in self.keys)


def _framed(purpose: str, parts: tuple[bytes, ...]) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in (purpose.encode(), *parts))


class Caller:
    """The side that connected: sends `opening`, takes the challenge, sends what `answer` returns."""

    def __init__(self, secret: Secret, purpose: str) -> None:
        self._secret = secret
        self._purpose = purpose
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.opening = OPENING.pack(MAGIC, VERSION, self._nonce)

    def answer(self, challenge: bytes, bound: bytes = b"") -> bytes:
        """Our proof, over `bound` too. Raises NotTrustedError unless `challenge` proves the same of the other side."""
        magic, version, nonce, proof = CHALLENGE.unpack(challenge)
        if (magic, version) != (MAGIC, VERSION):
            raise AuthenticationError("it has no cluster secret: give it the --cluster-secret-file of the others")
        if not self._secret.is_signed(proof, self._purpose + " called", self._nonce, nonce):
            raise AuthenticationError("it has another cluster secret: give both the same --cluster-secret-file")
        return self._secret.sign(self._purpose + " caller", self._nonce, nonce, bound)


class Called:
    """The side that was connected to: takes an opening, sends what `challenge` returns, and checks the proof."""

    def __init__(self, secret: Secret, purpose: str) -> None:
        self._secret = secret
        self._purpose = purpose
        self._nonces = (b"", secrets.token_bytes(NONCE_BYTES))

    def challenge(self, opening: bytes) -> bytes:
        """Raises NotTrustedError for what is no opening."""
        magic, version, nonce = OPENING.unpack(opening)
        if (magic, version) != (MAGIC, VERSION):
            raise AuthenticationError("it does not prove the cluster's secret: give it the same --cluster-secret-file")
        self._nonces = (nonce, self._nonces[1])
        proof = self._secret.sign(self._purpose + " called", *self._nonces)
        return CHALLENGE.pack(MAGIC, VERSION, self._nonces[1], proof)

    def check(self, proof: bytes, bound: bytes = b"") -> None:
        """Raises NotTrustedError unless `proof` is the caller's, for this connection and with this `bound`."""
        if not self._secret.is_signed(proof, self._purpose + " caller", *self._nonces, bound):
            raise AuthenticationError("it has another cluster secret: give both the same --cluster-secret-file")


# ---- this process's secret -----------------------------------------------------------------------------------------

_own: list[Secret] = []  # at most one: a connection that nobody thought of asks for it too


def configure(path: str, listens: Mapping[str, str]) -> None:
    """From now on every connection that this process makes or takes asks for the secret in `path`, if it is given.

    `listens` maps settings' flags to the addresses that this process will listen on. Raises ConfigError for a secret
    that is none, and without one for an address that others than this machine reach.
    """
    _own.clear()
    if path:
        _own.append(read_secret(path))
        return
    for flag, host in listens.items():
        if not is_loopback(host):
            raise ConfigError(
                f"{flag} {host}: listening beyond this machine needs a cluster secret: write one with `baton secret "
                "FILE`, and give every process --cluster-secret-file FILE"
            )


def own() -> Secret | None:
    """This process's secret, if it has one."""
    return _own[0] if _own else None


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches an address or name. Raises ConfigError when it cannot be resolved."""
    try:
        found = {str(address[0]).partition("%")[0] for *_, address in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{host}: cannot be resolved to an address to listen on: {error}") from None
    return all(ipaddress.ip_address(address).is_loopback for address in found)


def read_secret(path: str) -> Secret:
    """Of a file with one secret a line. Raises ConfigError, without a word of what is in it."""
    name = f"--cluster-secret-file {path}"
    try:
        with open(path, "rb") as file:
            found, read_only = os.fstat(file.fileno()), os.fstatvfs(file.fileno()).f_flag & os.ST_RDONLY
            lines = [line for line in map(bytes.strip, file.read(MAX_FILE_BYTES).splitlines()) if line]
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}; `baton secret FILE` writes a new one") from None
    # A container platform mounts its secrets read-only, root's, and readable: there it decides who sees the mount.
    is_mounted = found.st_uid == 0 and read_only and not found.st_mode & 0o022
    if found.st_mode & 0o077 and not is_mounted:
        raise ConfigError(f"{name}: others may read it (mode {stat.S_IMODE(found.st_mode):04o}): chmod 600 {path}")
    if not 1 <= len(lines) <= MAX_SECRETS:
        raise ConfigError(f"{name}: has {len(lines)} lines; it needs one secret a line, at most {MAX_SECRETS}")
    for number, line in enumerate(lines, 1):
        if len(line) < MIN_CHARACTERS:
            raise ConfigError(f"{name}, line {number}: has {len(line)} characters of at least {MIN_CHARACTERS}")
        if line == EXAMPLE.encode() or len(set(line)) < MIN_DIFFERENT:
            raise ConfigError(f"{name}, line {number}: is no secret: write one with `baton secret FILE`")
    return Secret(tuple(lines))


# ---- what is said of peers -----------------------------------------------------------------------------------------


class RateLimitedLog:
    """Logs what is wrong with a peer once, until it was well again: a stranger who tries on fills no log."""

    def __init__(self) -> None:
        self._told: dict[str, None] = {}
        self._lock = threading.Lock()  # KV channels complain from threads

    def warn(self, peer: str, text: str) -> None:
        with self._lock:
            is_new = peer not in self._told
            if is_new and len(self._told) >= MAX_PEERS_TOLD:
                del self._told[next(iter(self._told))]
            self._told[peer] = None
        log.log(logging.WARNING if is_new else logging.DEBUG, "%s: %s", peer, text)

    def reset(self, peer: str) -> None:
        with self._lock:
            self._told.pop(peer, None)


complaints = RateLimitedLog()

"""Mutual TLS between the processes of a cluster, and the signatures on their entries in Redis.

Each process reads a PEM file, or a directory in cert-manager's layout, with its certificate, its key and the roots that
it trusts. A peer is a member of the cluster if one of these roots signed the peer's certificate. Host names are not
checked, because the addresses of nodes change with each start and all members have the same rights.
"""

import base64
import hmac
import ipaddress
import os
import re
import socket
import ssl
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from shared.errors import ConfigError
from shared.logs import peer_log

HANDSHAKE_S = 4.0
MAX_HANDSHAKES = 512  # limit on incomplete handshakes, which even clients without a certificate can start
MAX_FILE_BYTES = 1 << 16
PRIVATE_KEY = re.compile(rb"-----BEGIN ([A-Z ]*PRIVATE KEY)-----([A-Za-z0-9+/=\s]+)-----END \1-----")
REGISTRY_PURPOSE = b"baton registry 1"


class AuthenticationError(ConnectionError):
    """The peer is not a member of this cluster, or rejects the certificate of this process."""


class ServerContext(ssl.SSLContext):
    """A server's side of TLS, which limits the number of connections that have not completed their handshake."""

    def __init__(self, _protocol: int) -> None:
        self.handshakes: dict[ServerHandshake, float] = {}  # start time of each handshake in progress, oldest first
        self.sslobject_class = ServerHandshake


class ServerHandshake(ssl.SSLObject):
    """A TLS handshake on the server. It logs rejected clients, which asyncio does not report."""

    def do_handshake(self) -> None:
        """Continue the handshake. Raises SSLError if the client is rejected or too many handshakes are in progress."""
        pending, now = cast(ServerContext, self.context).handshakes, time.monotonic()
        if self not in pending:
            while pending and now - next(iter(pending.values())) > HANDSHAKE_S:  # asyncio has closed these connections
                del pending[next(iter(pending))]
            if len(pending) >= MAX_HANDSHAKES:
                peer_log.warn("RPC clients", f"refused: {MAX_HANDSHAKES} TLS handshakes are in progress")
                raise ssl.SSLError(ssl.SSL_ERROR_SSL, "too many handshakes")
            pending[self] = now
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            del pending[self]
            peer_log.warn("an RPC client", f"refused without a certificate of this cluster: {error.reason}")
            raise
        del pending[self]
        peer_log.reset("an RPC client")


@dataclass(frozen=True, slots=True, repr=False)
class ClusterIdentity:
    """The certificate and key of this process, and the roots that it trusts.

    A file may contain several certificates and keys. This process presents the first certificate and signs with the
    first key, but accepts peers that use any of the certificates and keys. A secret can therefore be replaced while the
    processes keep accepting each other.
    """

    server_context: ssl.SSLContext
    client_context: ssl.SSLContext
    registry_keys: tuple[bytes, ...]

    def sign(self, name: str, data: bytes) -> bytes:
        """Return an HMAC-SHA256 over `data` and over `name`, the name under which Redis stores the data."""
        return _signature(self.registry_keys[0], name, data)

    def is_signed(self, proof: bytes, name: str, data: bytes) -> bool:
        return any(hmac.compare_digest(_signature(key, name, data), proof) for key in self.registry_keys)


def _signature(key: bytes, name: str, data: bytes) -> bytes:
    encoded = name.encode()
    return hmac.digest(key, len(encoded).to_bytes(4, "big") + encoded + data, "sha256")


def read_identity(path: str) -> ClusterIdentity:
    """Load a PEM file written by `baton secret`, or a directory with ca.crt, tls.crt and tls.key.

    Raises ConfigError if the file cannot be used. The message never quotes the file's contents.
    """
    flag = f"--cluster-secret-file {path}"
    file = Path(path)
    certificate, key, roots = (file, file, file)
    if file.is_dir():
        certificate, key, roots = file / "tls.crt", file / "tls.key", file / "ca.crt"
    found = PRIVATE_KEY.findall(_read_private(key, flag))
    if not found:
        raise ConfigError(f"{flag}: {key.name} contains no PEM private key; `baton secret FILE` writes one")
    try:
        contexts = []
        for context in (ServerContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(certificate, key, password="")  # by default, OpenSSL would prompt for a password
            context.load_verify_locations(roots)
            contexts.append(context)
        keys = [base64.b64decode(body) for _, body in found]
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or "not base64"
        raise ConfigError(
            f"{flag}: cannot be used as a certificate with its private key ({reason}); `baton secret FILE` writes both"
        ) from None
    server, client = contexts
    return ClusterIdentity(server, client, tuple(hmac.digest(each, REGISTRY_PURPOSE, "sha256") for each in keys))


def _read_private(path: Path, flag: str) -> bytes:
    """Read a file. Raises ConfigError if users other than its owner can read it."""
    try:
        with path.open("rb") as file:
            status, read_only = os.fstat(file.fileno()), os.fstatvfs(file.fileno()).f_flag & os.ST_RDONLY
            data = file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{flag}: cannot be read: {error.strerror}; `baton secret FILE` writes a new one") from None
    # Container platforms mount secrets read-only, readable by all and owned by root, and limit who can mount them.
    is_mounted = status.st_uid == 0 and read_only and not status.st_mode & 0o022
    if status.st_mode & 0o077 and not is_mounted:
        raise ConfigError(
            f"{flag}: other users can read it (mode {stat.S_IMODE(status.st_mode):04o}); run `chmod 600 {path}`"
        )
    return data


# ---- the identity of this process ------------------------------------------------------------------------------------

_own: list[ClusterIdentity] = []  # at most one identity, which every connection uses


def configure(path: str, listens: Mapping[str, str]) -> None:
    """Use the identity in `path`, if given, for every connection that this process opens or accepts from now on.

    `listens` maps flags to the addresses that this process will listen on. Raises ConfigError if the file cannot be
    used, or if no file is given and an address can be reached from other machines.
    """
    _own.clear()
    if path:
        _own.append(read_identity(path))
        return
    for flag, host in listens.items():
        if not is_loopback(host, flag):
            raise ConfigError(
                f"{flag} {host}: listening beyond this machine needs a cluster secret: write one with `baton secret "
                "FILE`, and give every process --cluster-secret-file FILE"
            )


def own() -> ClusterIdentity | None:
    """Return the identity of this process, if it has one."""
    return _own[0] if _own else None


def is_loopback(host: str, flag: str = "--host") -> bool:
    """Return whether only this machine can reach a host. Raises ConfigError, with the flag, if it does not resolve."""
    try:
        found = {str(address[0]).partition("%")[0] for *_, address in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{flag} {host}: cannot be resolved to an address to listen on: {error}") from None
    return all(ipaddress.ip_address(address).is_loopback for address in found)

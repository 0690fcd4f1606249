"""Test the cluster's secret: valid files, accepted peers, and the check before listening beyond loopback."""

import logging
import os
import re
import ssl
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.cli import main as baton
from cluster.secret import new_pem, own_secret, write_secret
from decode_node.__main__ import main as run_decode_node
from router.__main__ import main as run_router
from shared.config.settings import NodeSettings, RouterSettings
from shared.errors import ConfigError
from shared.logs import MAX_PEERS, RateLimitedLog
from shared.registry import seal, unseal
from shared.rpc import tls
from shared.rpc.codec import DecodeError, encode
from shared.rpc.messages import NodeInfo
from shared.rpc.tls import ClusterIdentity, read_identity
from tests.command_line import refusal

INFO = NodeInfo("d0", "b" * 32, "decode", "10.0.0.1:7000", "m", "f", 4, 64, 8, 8, 8)
PEM, OTHER_PEM = new_pem().decode(), new_pem().decode()
KEY, CERTIFICATE = (part + "\n" for part in re.findall("-----BEGIN.*?-----END [A-Z ]*-----", PEM, re.DOTALL))


def file_of(directory: Path, text: str, mode: int = 0o600) -> str:
    path = directory / "secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def identity_of(directory: Path, text: str) -> ClusterIdentity:
    return read_identity(file_of(directory, text))


# The file


@pytest.mark.parametrize(
    ("text", "mode", "complaint"),
    [
        ("", 0o600, "contains no PEM private key; `baton secret FILE` writes one"),
        ("old-secret-0123456789-abcdefghijkl", 0o600, "contains no PEM private key"),
        (CERTIFICATE, 0o600, "contains no PEM private key"),
        (KEY, 0o600, "cannot be used as a certificate with its private key"),
        (KEY.replace("M", "*", 1), 0o600, "contains no PEM private key"),
        (KEY.replace("MIG", "GIM", 1) + CERTIFICATE, 0o600, "cannot be used as a certificate"),
        (OTHER_PEM[: OTHER_PEM.index("-----BEGIN CERT")] + CERTIFICATE, 0o600, "(KEY_VALUES_MISMATCH)"),
        (PEM, 0o644, "other users can read it (mode 0644); run `chmod 600"),
        (PEM, 0o640, "other users can read it (mode 0640); run `chmod 600"),
        (PEM, 0o602, "other users can read it (mode 0602); run `chmod 600"),
    ],
)
def test_a_file_without_a_usable_identity_is_refused_in_one_line_that_does_not_quote_it(
    tmp_path: Path, text: str, mode: int, complaint: str
) -> None:
    path = file_of(tmp_path, text, mode)
    with pytest.raises(ConfigError) as refused:
        read_identity(path)
    message = str(refused.value)
    assert message.startswith(f"--cluster-secret-file {path}")
    assert complaint in message
    assert "\n" not in message
    assert not any(line.strip() in message for line in text.splitlines() if len(line.strip()) > 4)


@pytest.mark.parametrize("missing", ["ca.crt", "tls.crt", "tls.key"])
def test_a_directory_in_the_layout_of_cert_manager_is_an_identity(tmp_path: Path, missing: str) -> None:
    for name, text in {"ca.crt": CERTIFICATE, "tls.crt": CERTIFICATE, "tls.key": KEY}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    read_identity(str(tmp_path))
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match="No such file or directory"):
        read_identity(str(tmp_path))


def accept_each_other(client: ClusterIdentity, server: ClusterIdentity) -> bool:
    """Do a TLS handshake in memory. Return whether both sides accepted it."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.client_context.wrap_bio(to_client, to_server),
        server.server_context.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
    return True


def test_a_secret_is_replaced_while_all_processes_accept_each_other(tmp_path: Path) -> None:
    steps = [identity_of(tmp_path, text) for text in (PEM, PEM + OTHER_PEM, OTHER_PEM + PEM, OTHER_PEM)]
    for before, after in pairwise(steps):
        assert accept_each_other(before, after)
        assert accept_each_other(after, before)
        for one, other in ((before, after), (after, before)):
            assert unseal(seal(INFO, "k", one), "k", other) == INFO
    for one, other in ((steps[0], steps[3]), (steps[3], steps[0]), (steps[0], steps[2])):
        assert not accept_each_other(one, other)


def test_a_missing_file_is_refused_with_the_command_that_writes_one(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path / "missing" / "too"):
        with pytest.raises(ConfigError, match=r"cannot be read: .*`baton secret FILE` writes"):
            read_identity(str(path))


@pytest.mark.parametrize(
    ("owner", "mode", "read_only", "is_accepted"),
    [(0, 0o444, True, True), (0, 0o444, False, False), (0, 0o446, True, False), (1000, 0o444, True, False)],
)
def test_a_mounted_secret_may_be_readable_if_root_owns_it_and_the_mount_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, read_only: bool, is_accepted: bool
) -> None:
    path = file_of(tmp_path, PEM)
    found = SimpleNamespace(st_uid=owner, st_mode=0o100000 | mode)
    mount = SimpleNamespace(f_flag=os.ST_RDONLY if read_only else 0)
    fake = SimpleNamespace(fstat=lambda _: found, fstatvfs=lambda _: mount, ST_RDONLY=os.ST_RDONLY)
    monkeypatch.setattr(tls, "os", fake)
    if is_accepted:
        read_identity(path)
    else:
        with pytest.raises(ConfigError, match="other users can read it"):
            read_identity(path)


# Beyond loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "::1", "localhost"])
def test_loopback_needs_no_secret(host: str) -> None:
    tls.configure("", {"--host": host})
    assert tls.own() is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "2001:db8::1"])
def test_listening_beyond_loopback_needs_a_secret(tmp_path: Path, own: None, host: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--kv-host {host}: listening beyond this machine needs")):
        tls.configure("", {"--host": "127.0.0.1", "--kv-host": host})
    tls.configure(file_of(tmp_path, PEM), {"--kv-host": host})
    assert tls.own() is not None


@pytest.fixture
def own() -> Iterator[None]:
    """After the test, remove the identity that the test gave this process."""
    yield
    tls.configure("", {})


def test_an_address_that_does_not_resolve_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--host a{64}: cannot be resolved"):
        tls.configure("", {"--host": "a" * 64})


@pytest.mark.parametrize(
    ("run", "flag"),
    [
        (lambda: run_router(RouterSettings(model="m", host="0.0.0.0", port=0)), "--registry-host"),
        (lambda: run_router(RouterSettings(model="m", registry_host="0.0.0.0", port=0)), "--registry-host"),
        (lambda: run_decode_node(NodeSettings(model="m", host="0.0.0.0")), "--host"),
        (lambda: run_decode_node(NodeSettings(model="m", kv_host="0.0.0.0")), "--kv-host"),
        (lambda: run_decode_node(NodeSettings(model="m", cluster_secret_file="/no/such")), "--cluster-secret-file"),
    ],
)
def test_a_process_that_would_listen_beyond_loopback_exits_with_status_2_and_one_line(
    capsys: pytest.CaptureFixture[str], run: Callable[[], int], flag: str
) -> None:
    assert f": {flag} " in refusal(capsys, run)


# Entries in Redis


def test_an_entry_that_was_not_signed_by_the_cluster_is_malformed(tmp_path: Path) -> None:
    ours, theirs = identity_of(tmp_path, PEM), identity_of(tmp_path, OTHER_PEM)
    good = seal(INFO, "k", ours)
    assert unseal(good, "k", ours) == INFO
    for value in (
        encode(INFO),
        seal(INFO, "k", theirs),
        seal(INFO, "other", ours),
        good[:-1] + bytes([good[-1] ^ 1]),
        good.replace(b"10.0.0.1", b"10.9.9.9"),
        b"",
    ):
        with pytest.raises(DecodeError):
            unseal(value, "k", ours)
    assert unseal(seal(INFO, "k", None), "k", None) == INFO
    with pytest.raises(DecodeError):
        unseal(good, "k", None)


# Logging


def test_problems_with_a_peer_are_logged_once_until_reset(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    complaints = RateLimitedLog(logging.getLogger("baton.security"))
    for peer in ["10.0.0.1"] * 100 + ["10.0.0.2"]:
        complaints.warn(peer, "has another secret")
    assert [record.getMessage()[:8] for record in caplog.records] == ["10.0.0.1", "10.0.0.2"]
    complaints.reset("10.0.0.1")
    complaints.warn("10.0.0.1", "again")
    assert len(caplog.records) == 3
    for number in range(MAX_PEERS):
        complaints.warn(f"stranger {number}", "connects")
    caplog.clear()
    complaints.warn("10.0.0.1", "again")
    assert len(caplog.records) == 1, "its entry was evicted, so memory is bounded"


# baton secret


def test_baton_secret_writes_a_usable_file_and_never_overwrites_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "secret"
    old_umask = os.umask(0)
    try:
        assert baton(["secret", str(path)]) == 0
    finally:
        os.umask(old_umask)
    written = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    read_identity(str(path))
    assert baton(["secret", str(path), "--if-absent"]) == 0
    assert capsys.readouterr() == ("", "")
    assert baton(["secret", str(path)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert baton(["secret", str(tmp_path / "no" / "secret")]) == 1
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
    assert path.read_text() == written
    assert os.listdir(tmp_path) == ["secret"]
    assert write_secret(tmp_path / "another")
    assert (tmp_path / "another").read_text() != written


def test_baton_up_writes_its_secret_in_a_private_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = own_secret(f"{tmp_path}/private")
    assert own_secret(f"{tmp_path}/private") == first
    read_identity(first)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    if os.getuid() == 0:  # directories of root are trusted
        os.chown(open_to_all, 1234, -1)
        monkeypatch.setattr(os, "getuid", lambda: 1234)
    for mode in (0o1777, 0o777, 0o702, 0o770):
        open_to_all.chmod(mode)
        with pytest.raises(ConfigError, match="other users can write there"):
            own_secret(str(open_to_all))
    with pytest.raises(ConfigError, match=r"^--kv-directory /proc/x: "):
        own_secret("/proc/x")

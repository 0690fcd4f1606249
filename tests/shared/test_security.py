"""The cluster's secret: which files hold one, what it proves and to whom, and what listens beyond loopback without."""

import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cli import main as baton
from cluster.secret import own_secret, write_secret
from decode_node.__main__ import main as run_decode_node
from router.__main__ import main as run_router
from shared.config.settings import NodeSettings, RouterSettings
from shared.errors import ConfigError
from shared.registry import seal, unseal
from shared.rpc import security
from shared.rpc.codec import DecodeError, encode
from shared.rpc.messages import NodeInfo
from shared.rpc.security import CHALLENGE, AuthenticationError, Called, Caller, RateLimitedLog, Secret, read_secret

OLD, NEW = "old-secret-0123456789-abcdefghijkl", "new-secret-9876543210-zyxwvutsrqpo"
A, B = Secret((OLD.encode(),)), Secret((NEW.encode(),))
INFO = NodeInfo("d0", "b" * 32, "decode", "10.0.0.1:7000", "m", "f", 4, 64, 8, 8, 8)


def file_of(directory: Path, text: str, mode: int = 0o600) -> str:
    path = directory / "secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


# The file


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (OLD, (OLD,)),
        (f"{OLD}\n", (OLD,)),
        (f"\n  {NEW}  \r\n\n{OLD}\n\n", (NEW, OLD)),
    ],
)
def test_a_file_has_one_secret_a_line_the_first_of_which_signs(
    tmp_path: Path, text: str, keys: tuple[str, ...]
) -> None:
    assert read_secret(file_of(tmp_path, text)).keys == tuple(key.encode() for key in keys)


@pytest.mark.parametrize(
    ("text", "mode", "complaint"),
    [
        (OLD[:31], 0o600, "line 1: has 31 characters of at least 32"),
        (f"{OLD}\nshort", 0o600, "line 2: has 5 characters"),
        (security.EXAMPLE, 0o600, "line 1: is no secret: write one with `baton secret FILE`"),
        ("change-me-" * 4, 0o600, "line 1: is no secret"),
        ("", 0o600, "has 0 lines"),
        (" \n\n", 0o600, "has 0 lines"),
        (f"{OLD}\n" * 9, 0o600, "has 9 lines; it needs one secret a line, at most 8"),
        (OLD, 0o644, "others may read it (mode 0644): chmod 600"),
        (OLD, 0o640, "others may read it (mode 0640): chmod 600"),
        (OLD, 0o602, "others may read it (mode 0602): chmod 600"),
    ],
)
def test_a_file_that_holds_no_secret_is_refused_in_one_line_that_does_not_give_it_away(
    tmp_path: Path, text: str, mode: int, complaint: str
) -> None:
    path = file_of(tmp_path, text, mode)
    with pytest.raises(ConfigError) as refused:
        read_secret(path)
    said = str(refused.value)
    assert said.startswith(f"--cluster-secret-file {path}")
    assert complaint in said
    assert "\n" not in said
    assert not any(line.strip() in said for line in text.splitlines() if len(line.strip()) > 4)


def test_a_file_that_is_not_there_or_none_is_refused_with_the_way_to_one(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match=r"cannot be read: .*`baton secret FILE` writes"):
            read_secret(str(path))


@pytest.mark.parametrize(
    ("owner", "mode", "read_only", "is_taken"),
    [(0, 0o444, True, True), (0, 0o444, False, False), (0, 0o446, True, False), (1000, 0o444, True, False)],
)
def test_a_mounted_secret_may_be_readable_where_it_is_roots_and_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, read_only: bool, is_taken: bool
) -> None:
    path = file_of(tmp_path, OLD)
    found = SimpleNamespace(st_uid=owner, st_mode=0o100000 | mode)
    mount = SimpleNamespace(f_flag=os.ST_RDONLY if read_only else 0)
    played = SimpleNamespace(fstat=lambda _: found, fstatvfs=lambda _: mount, ST_RDONLY=os.ST_RDONLY)
    monkeypatch.setattr(security, "os", played)
    if is_taken:
        assert read_secret(path).keys == (OLD.encode(),)
    else:
        with pytest.raises(ConfigError, match="others may read it"):
            read_secret(path)


def test_a_secret_does_not_show_itself() -> None:
    assert OLD not in repr(A)
    assert OLD not in f"{Caller(A, 'rpc').__dict__}"


# Beyond loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "::1", "localhost"])
def test_loopback_needs_no_secret(host: str) -> None:
    security.configure("", {"--host": host})
    assert security.own() is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "2001:db8::1"])
def test_beyond_loopback_a_secret_is_needed(tmp_path: Path, own: None, host: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--kv-host {host}: listening beyond this machine needs")):
        security.configure("", {"--host": "127.0.0.1", "--kv-host": host})
    security.configure(file_of(tmp_path, OLD), {"--kv-host": host})
    secret = security.own()
    assert secret is not None
    assert secret.keys == A.keys


@pytest.fixture
def own() -> Iterator[None]:
    """Whatever secret the test gives this process is taken from it again."""
    yield
    security.configure("", {})


@pytest.mark.parametrize("host", ["a" * 64, "nowhere"])
def test_an_address_that_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    if host == "nowhere":
        monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match=f"{host}: cannot be resolved"):
        security.configure("", {"--host": host})


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
def test_a_process_that_would_listen_so_ends_with_status_2_and_one_line(
    capsys: pytest.CaptureFixture[str], run: Callable[[], int], flag: str
) -> None:
    assert run() == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f": {flag} " in said


# The proof


def met(
    caller_secret: Secret, called_secret: Secret, on_the_way: Callable[[str, bytes], bytes] = lambda _, data: data
) -> None:
    """Raises NotTrustedError unless both sides prove themselves; `on_the_way` may change what they say."""
    caller, called = Caller(caller_secret, "kv"), Called(called_secret, "kv")
    challenge = called.challenge(on_the_way("opening", caller.opening))
    proof = caller.answer(on_the_way("challenge", challenge), b"hello")
    called.check(on_the_way("proof", proof), on_the_way("hello", b"hello"))


def test_who_has_the_secret_is_let_in_and_who_has_another_is_not() -> None:
    met(A, A)
    with pytest.raises(AuthenticationError, match="it has another cluster secret"):
        met(A, B)


def test_a_secret_is_changed_without_a_moment_at_which_two_neighbours_differ() -> None:
    steps = [A, Secret(A.keys + B.keys), Secret(B.keys + A.keys), B]
    for before, after in pairwise(steps):
        met(before, after)
        met(after, before)
        met(before, before)
    for caller, called in ((steps[0], steps[3]), (steps[3], steps[0]), (steps[0], steps[2]), (steps[2], steps[0])):
        with pytest.raises(AuthenticationError):
            met(caller, called)


@given(
    what=st.sampled_from(["opening", "challenge", "proof", "hello"]),
    byte=st.integers(0, 1000),
    bit=st.integers(0, 7),
)
def test_no_bit_of_an_introduction_can_be_changed(what: str, byte: int, bit: int) -> None:
    def changed(name: str, data: bytes) -> bytes:
        if name != what:
            return data
        place = byte % len(data)
        return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]

    with pytest.raises(AuthenticationError):
        met(A, A, changed)


def test_what_was_said_on_one_connection_opens_no_other() -> None:
    caller, called = Caller(A, "rpc"), Called(A, "rpc")
    challenge = called.challenge(caller.opening)
    proof = caller.answer(challenge)
    called.check(proof)
    for again in (Called(A, "rpc"), Called(A, "rpc")):  # the same process, and another
        again.challenge(caller.opening)
        with pytest.raises(AuthenticationError):
            again.check(proof)
    with pytest.raises(AuthenticationError):
        Caller(A, "rpc").answer(challenge)


def test_no_side_can_be_made_to_prove_for_the_other_or_for_another_purpose() -> None:
    caller, called = Caller(A, "rpc"), Called(A, "rpc")
    challenge = called.challenge(caller.opening)
    own_proof = CHALLENGE.unpack(challenge)[3]
    with pytest.raises(AuthenticationError):
        called.check(own_proof)  # reflected
    for_kv = Called(A, "kv")
    with pytest.raises(AuthenticationError):
        caller.answer(for_kv.challenge(caller.opening))
    assert A.sign("x", b"ab", b"c") != A.sign("x", b"a", b"bc"), "borders between parts count"


# Entries in Redis


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (encode(INFO), "k"),
        (seal(INFO, "k", B), "k"),
        (seal(INFO, "other", A), "k"),
        (seal(INFO, "k", A)[:-1] + b"\0", "k"),
        (seal(replace(INFO, address="10.9.9.9:1"), "k", B), "k"),
        (b"", "k"),
    ],
)
def test_an_entry_that_no_node_of_the_cluster_signed_is_malformed(value: bytes, key: str) -> None:
    assert unseal(seal(INFO, key, A), key, A) == INFO
    assert unseal(seal(INFO, key, A), key, Secret(B.keys + A.keys)) == INFO, "while the secret is changed"
    with pytest.raises(DecodeError):
        unseal(value, key, A)


def test_a_signed_entry_is_none_for_who_has_no_secret() -> None:
    assert unseal(seal(INFO, "k", None), "k", None) == INFO
    with pytest.raises(DecodeError):
        unseal(seal(INFO, "k", A), "k", None)


# What is said of peers


def test_a_peer_is_complained_of_once_until_it_was_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    complaints = RateLimitedLog()
    for _ in range(100):
        complaints.warn("10.0.0.1", "has another secret")
    complaints.warn("10.0.0.2", "has another secret")
    assert [record.getMessage() for record in caplog.records] == [
        "10.0.0.1: has another secret",
        "10.0.0.2: has another secret",
    ]
    complaints.reset("10.0.0.1")
    complaints.warn("10.0.0.1", "again")
    assert len(caplog.records) == 3
    for number in range(5000):
        complaints.warn(f"stranger {number}", "knocks")
    assert len(complaints._told) <= security.MAX_PEERS_TOLD


# baton secret


def test_baton_secret_writes_one_that_is_taken_and_keeps_what_is_there(
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
    assert read_secret(str(path)).keys == (written.strip().encode(),)
    assert baton(["secret", str(path), "--if-absent"]) == 0
    assert capsys.readouterr() == ("", "")
    assert baton(["secret", str(path)]) == 1
    assert "is there already" in capsys.readouterr().err
    assert baton(["secret", str(tmp_path / "no" / "secret")]) == 1
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
    assert path.read_text() == written
    assert os.listdir(tmp_path) == ["secret"]
    assert write_secret(tmp_path / "another")
    assert (tmp_path / "another").read_text() != written


def test_baton_up_has_a_secret_of_its_own_in_a_directory_of_its_own(tmp_path: Path) -> None:
    first = own_secret(f"{tmp_path}/private")
    assert own_secret(f"{tmp_path}/private") == first
    read_secret(first)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o1777)
    with pytest.raises(ConfigError, match="others may write there"):
        own_secret(str(open_to_all))

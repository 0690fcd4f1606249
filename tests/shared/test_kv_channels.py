"""Test the contract of every KV channel within a process, between processes, and with peers that send bad data."""

import asyncio
import contextlib
import errno
import gc
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kv.channel import ChannelError, DescriptorError, PeerDescriptor, PeerLostError, ReservationRefusedError
from shared.kv.connections import ANSWER, HELLO, MAGIC, MAX_CONNECTIONS_PER_WRITER, VERSION, WELCOME, pack_greeting
from shared.kv.local import host_id
from shared.kv.memory import HostMemory, checksums
from shared.kv.shm import ShmChannel
from shared.kv.tcp import ACK, FRAME, TcpChannel, checked
from tests.shared.kv_peer import ALL_ROWS, NUM_ROWS, ROW_BYTES, Peer

ROOT = Path(__file__).parents[2]
LONG = 8_000  # a push that copies the pool this many times takes seconds on every channel
PATIENCE_S = 20.0  # timeout for events that take milliseconds
# The last two kinds use a fake CUDA driver.
KINDS = ["shm", "tcp", "cuda_ipc", "tcp:gpu"]
AT_START = [[row + 1] for row in ALL_ROWS]
STRANGER = "f" * 32
Start = Callable[..., Awaitable[Peer]]


def channel_of(kind: str) -> str:
    return kind.partition(":")[0]


class Process:
    """A peer in another process."""

    def __init__(self, kind: str, directory: str) -> None:
        command = [sys.executable, "-m", "tests.shared.kv_peer", kind, directory]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def do(self, *command: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return json.loads(await asyncio.to_thread(self._process.stdout.readline))

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def collected() -> None:
    """Collect the garbage of earlier tests, so that the test can count file descriptors and mappings."""
    gc.collect()


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kv") as path:  # short: a socket's path has at most 107 bytes
        yield path


@pytest.fixture
async def start(directory: str) -> AsyncIterator[Start]:
    """Return a function that starts a peer. The peer is closed after the test."""
    async with contextlib.AsyncExitStack() as cleanup:

        async def start(kind: str, **options: Any) -> Peer:
            peer = await Peer.start(kind, directory, **options)
            cleanup.push_async_callback(peer.close)
            return peer

        yield start


@pytest.fixture
def process(directory: str) -> Iterator[Callable[[str], Process]]:
    """Return a function that starts a peer in another process. The process is killed after the test."""
    with contextlib.ExitStack() as cleanup:

        def start(kind: str) -> Process:
            process = Process(kind, directory)
            cleanup.callback(process.kill)
            return process

        yield start


@contextlib.asynccontextmanager
async def peers(kind: str, number: int = 2) -> AsyncIterator[list[Peer]]:
    """Start peers for one example of a hypothesis test. A fixture would share the peers among all examples."""
    with tempfile.TemporaryDirectory(prefix="kv") as path:
        all_peers = [await Peer.start(kind, path) for _ in range(number)]
        try:
            yield all_peers
        finally:
            for peer in all_peers:
                await peer.close()


@pytest.fixture(params=KINDS)
async def pair(request: pytest.FixtureRequest, start: Start) -> tuple[Peer, Peer]:
    return await start(request.param), await start(request.param)


@pytest.fixture
async def tcp_receiver(start: Start) -> Peer:
    return await start("tcp", patience_s=0.3)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  (other threads change it, without an event)
            await asyncio.sleep(0.001)


async def works(writer: Peer, receiver: Peer) -> None:
    """Check that a push of row 3 to row 4 arrives."""
    receiver.memory.rows[4] = 0
    await writer.push(receiver, [3], [4], receiver.granted([4]))
    assert (receiver.memory.rows[4] == writer.memory.rows[3]).all()


# The contract


@pytest.mark.parametrize("kind", KINDS)
async def test_rows_arrive_in_another_process_at_their_targets_only(
    kind: str, start: Start, process: Callable[[str], Process]
) -> None:
    writer, receiver = await start(kind), process(kind)
    moves = dict(zip([7, 8, 9, 0, 31, 5], [20, 21, 2, 31, 0, 22], strict=True))
    reservation_id = secrets.token_bytes(16)
    await receiver.do("grant", reservation_id.hex(), [*moves.values()])
    _, descriptor = await receiver.do("describe")
    await writer.channel.push(bytes.fromhex(descriptor), reservation_id, [*moves], [*moves.values()])
    expected = list(AT_START)
    for source, target in moves.items():
        expected[target] = AT_START[source]
    assert await receiver.do("read") == expected
    assert writer.contents() == AT_START


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(moves=st.lists(st.tuples(st.integers(0, 31), st.integers(0, 31)), max_size=40, unique_by=lambda m: m[1]))
async def test_any_list_of_rows_is_copied_as_by_numpy(kind: str, moves: list[tuple[int, int]]) -> None:
    source, target = [move[0] for move in moves], [move[1] for move in moves]
    async with peers(kind) as (writer, receiver):
        expected = receiver.memory.rows.copy()
        expected[target] = writer.memory.rows[source]
        reservation_id = receiver.granted(target)
        for _ in range(2):  # pushing the same rows again is harmless
            await writer.push(receiver, source, target, reservation_id)
            assert (receiver.memory.rows == expected).all()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_receiver_has_many_writers_and_a_writer_many_receivers(kind: str, start: Start) -> None:
    all_peers = [await start(kind) for _ in range(4)]
    await asyncio.gather(
        *(
            writer.push(receiver, [number], [8 + number])
            for number, writer in enumerate(all_peers)
            for receiver in all_peers
            if receiver is not writer
        )
    )
    for reader, receiver in enumerate(all_peers):
        arrived = [int(receiver.memory.rows[8 + number, -1]) for number in range(4)]
        assert arrived == [9 + number if number == reader else number + 1 for number in range(4)]


async def test_rows_outside_a_pool_are_never_pushed_or_granted(pair: tuple[Peer, Peer]) -> None:
    writer, receiver = pair
    channel, known = receiver.channel, receiver.granted([0])
    for source, target in (([0], [NUM_ROWS]), ([0], [-1]), ([NUM_ROWS], [0]), ([-1], [0]), ([0, 1], [0])):
        with pytest.raises(ChannelError):
            await writer.push(receiver, source, target, known)
    with pytest.raises(ChannelError):
        await writer.push(receiver, [0], [0], bytes(15))
    assert receiver.contents() == AT_START
    for reservation_id, rows in ((bytes(15), [0]), (bytes(16), [NUM_ROWS]), (bytes(16), [-1])):
        with pytest.raises(ValueError, match=r"reservation id has 16 bytes|not all in a pool"):
            channel.grant(reservation_id, rows)
    if channel.fenced:
        with pytest.raises(ValueError, match="open already"):
            channel.grant(known, [0])
    for _ in range(2):
        channel.revoke(known)


async def test_a_different_row_size_is_refused_and_the_error_names_both(pair: tuple[Peer, Peer]) -> None:
    writer, receiver = pair
    other = receiver.described(row_bytes=ROW_BYTES // 2).pack()
    assert writer.channel.reachable(receiver.channel.descriptor())
    with pytest.raises(DescriptorError, match="have 8192 bytes, ours 16384"):
        writer.channel.reachable(other)
    with pytest.raises(DescriptorError, match="have 8192 bytes, ours 16384"):
        await writer.channel.push(other, receiver.granted(), [0], [0])
    await works(writer, receiver)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_descriptor_with_a_wrong_row_size_is_refused_by_the_receiver(kind: str, start: Start) -> None:
    writer, receiver = await start(kind, row_bytes=ROW_BYTES // 2), await start(kind)
    false = receiver.described(row_bytes=ROW_BYTES // 2)
    with pytest.raises(DescriptorError, match="do not have the size"):
        await writer.channel.push(false.pack(), receiver.granted(), [0], [1])
    assert receiver.contents() == AT_START


async def test_an_unreachable_address_is_a_channel_error(pair: tuple[Peer, Peer]) -> None:
    writer, receiver = pair
    for endpoint in ("", "x", "70000", "-1", "\0", "/no/such/socket", "9" * 30):
        nowhere = receiver.described(endpoint=endpoint, incarnation_id=secrets.token_hex(16))
        with pytest.raises(ChannelError):
            await writer.channel.push(nowhere.pack(), bytes(16), [0], [0])
    await works(writer, receiver)


# Ends of peers and pushes


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_receiver_killed_in_mid_push_fails_the_push_and_all_after_it(
    kind: str, start: Start, process: Callable[[str], Process]
) -> None:
    writer, receiver = await start(kind), process(kind)
    (_, descriptor), reservation_id = await receiver.do("describe"), secrets.token_bytes(16)
    await receiver.do("grant", reservation_id.hex(), [*ALL_ROWS])
    before, threads_before = num_mappings(), num_threads()
    arguments = bytes.fromhex(descriptor), reservation_id
    source, target = [*reversed(ALL_ROWS)] * LONG, [*ALL_ROWS] * LONG
    pushes = [asyncio.create_task(writer.channel.push(*arguments, source, target)) for _ in "ab"]
    while (await receiver.do("read"))[0] != AT_START[-1]:
        assert not pushes[0].done()
    assert num_mappings() == before + (channel_of(kind) != "tcp")
    receiver.kill()
    for push in pushes:
        with pytest.raises(PeerLostError):
            await asyncio.wait_for(push, PATIENCE_S)
    await until(lambda: num_mappings() == before)  # the mapping is removed without another push
    with pytest.raises(PeerLostError):
        await writer.channel.push(*arguments, [0], [0])
    await until(lambda: num_threads() == threads_before)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_writer_killed_in_mid_push_is_reported_once(
    kind: str, start: Start, process: Callable[[str], Process]
) -> None:
    receiver, writer = await start(kind), process(kind)
    receiver.memory.rows[:] = 0
    incarnation, _ = await writer.do("describe")
    await writer.do("push forever", receiver.channel.descriptor().hex(), receiver.granted().hex())
    await until(lambda: receiver.memory.rows[0, 0] == 1)
    assert receiver.lost == []
    writer.kill()
    await until(lambda: receiver.lost)
    receiver.memory.rows[:] = 0  # the writer must write nothing after this
    await asyncio.sleep(0.02)
    assert receiver.lost == [incarnation]
    assert not receiver.memory.rows.any()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_writer_that_closes_is_reported_and_a_receiver_that_closes_reports_nothing(
    kind: str, start: Start
) -> None:
    writer, other, receiver = [await start(kind) for _ in range(3)]
    await works(writer, receiver)
    await works(other, receiver)
    assert not receiver.channel.fence_writer(writer.incarnation)
    await works(writer, receiver)
    await writer.channel.close()
    await until(lambda: receiver.lost == [writer.incarnation])
    assert receiver.channel.fence_writer(writer.incarnation)
    await receiver.channel.close()
    await asyncio.sleep(0.01)
    assert receiver.lost == [writer.incarnation]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_restarted_receiver_is_reached_by_its_new_descriptor_only(kind: str, start: Start) -> None:
    writer, old = await start(kind), await start(kind)
    before = old.described()
    await works(writer, old)
    await old.close()
    new = await start(kind, **({"port": int(before.endpoint)} if channel_of(kind) == "tcp" else {}))
    new.channel.grant(bytes(16), [0])
    with pytest.raises(PeerLostError):
        await writer.channel.push(before.pack(), bytes(16), [9], [0])
    assert new.contents() == AT_START
    await works(writer, new)


async def test_a_push_ends_with_an_error_when_its_channel_closes(pair: tuple[Peer, Peer]) -> None:
    writer, receiver = pair
    pushes = await long_pushes(writer, receiver)
    await asyncio.wait_for(writer.channel.close(), PATIENCE_S)
    for push in pushes:
        with pytest.raises(PeerLostError):
            await push
    await until(lambda: receiver.lost == [writer.incarnation])  # the loss is reported after the last byte was written
    await was_stopped_for_good(receiver)
    await writer.channel.close()
    with pytest.raises(ChannelError, match="closed"):
        await writer.push(receiver, [0], [0])


async def test_a_cancelled_push_writes_nothing_more_and_the_next_succeeds(pair: tuple[Peer, Peer]) -> None:
    writer, receiver = pair
    moving, waiting = await long_pushes(writer, receiver)
    waiting.cancel()  # this push has not begun, so its cancellation is immediate
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not moving.done()
    for _ in range(2):  # a second cancellation changes nothing
        moving.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(moving, PATIENCE_S)
    await was_stopped_for_good(receiver)
    await works(writer, receiver)
    assert receiver.lost == []  # the connection was kept


async def long_pushes(writer: Peer, receiver: Peer) -> list[asyncio.Task[None]]:
    """Start a push that takes seconds and fills the last row at its end, and a second push that waits for the first."""
    rows = [*range(NUM_ROWS - 1)] * LONG + [NUM_ROWS - 1]
    receiver.memory.rows[:] = 0
    reservation_id = receiver.granted()
    pushes = [asyncio.create_task(writer.push(receiver, rows, rows, reservation_id)) for _ in "ab"]
    await until(lambda: receiver.memory.rows[0, 0] == 1)
    assert not any(push.done() for push in pushes)
    return pushes


async def was_stopped_for_good(receiver: Peer) -> None:
    assert not receiver.memory.rows[-1].any()
    receiver.memory.rows[:] = 0
    await asyncio.sleep(0.02)
    assert not receiver.memory.rows.any()


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_left_after_close(kind: str, directory: str) -> None:
    async def live_and_die() -> tuple[int, int, int, list[str]]:
        writer, receiver = await Peer.start(kind, directory), await Peer.start(kind, directory)
        await works(writer, receiver)
        await works(receiver, writer)
        pushes = await long_pushes(writer, receiver)
        await receiver.close()
        for push in pushes:
            with pytest.raises(PeerLostError):
                await asyncio.wait_for(push, PATIENCE_S)
        await writer.close()
        del push, pushes
        gc.collect()  # free the errors, whose tracebacks hold views of rows
        return num_files(), num_threads(), num_mappings(), os.listdir(directory)

    before = num_files(), num_threads(), num_mappings(), list[str]()
    for _ in range(3):
        assert await live_and_die() == before


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_mappings() -> int:
    """Return the number of KV memories that this process maps."""
    return Path("/proc/self/maps").read_text().count("/memfd:baton-kv")


def num_threads() -> int:
    return sum(thread.name.startswith("kv-") for thread in threading.enumerate())


# Reservations of the tcp channel


async def test_a_closed_unknown_or_foreign_reservation_accepts_no_byte(start: Start) -> None:
    writer, receiver = await start("tcp"), await start("tcp")
    with pytest.raises(ReservationRefusedError, match="has closed the reservation, or never had it"):
        await writer.push(receiver, [0], [0], secrets.token_bytes(16))  # refused at the greeting
    shut, partly = receiver.granted(), receiver.granted([0, 2, 4])
    receiver.channel.revoke(shut)
    await works(writer, receiver)
    receiver.memory.rows[4] = 5
    for reservation_id, allowed in ((bytes(16), []), (shut, []), (partly, [0, 2, 4])):
        with pytest.raises(ReservationRefusedError, match=f"{6 - len(allowed)} of 6 rows"):
            await writer.push(receiver, [9] * 6, list(range(6)), reservation_id)
        assert receiver.contents() == [AT_START[9 if row in allowed else row] for row in ALL_ROWS]
    await works(writer, receiver)
    assert receiver.lost == []


async def test_no_byte_is_written_after_a_revocation_even_in_the_middle_of_a_row(tcp_receiver: Peer) -> None:
    rows = tcp_receiver.memory.rows
    reservation_id = tcp_receiver.granted([0, 1, 2])
    with raw_writer(tcp_receiver) as raw:
        raw.sendall(frame_head(reservation_id, [0, 1, 2]) + b"\xaa" * (ROW_BYTES + 1000))
        await until(lambda: rows[1, 999] == 0xAA)
        tcp_receiver.channel.revoke(reservation_id)
        raw.sendall(b"\xbb" * (2 * ROW_BYTES - 1000) + end_of_push(reservation_id))
        assert receive_ack(raw) == (1, 2)
        assert (rows[0] == 0xAA).all()
        assert (rows[1, :1000] == 0xAA).all()
        assert (rows[1, 1000:] == 2).all()
        assert (rows[2] == 3).all()
        again = tcp_receiver.granted([1])  # row 1 is reused before late frames of the old reservation arrive
        raw.sendall(frame_head(reservation_id, [1]) + b"\xcc" * ROW_BYTES + end_of_push(reservation_id))
        assert receive_ack(raw) == (0, 1)
        assert 0xCC not in rows[1]
        raw.sendall(frame_head(again, [1]) + b"\xdd" * ROW_BYTES + end_of_push(again))
        assert receive_ack(raw) == (1, 0)
        assert (rows[1] == 0xDD).all()


# Malformed and hostile writers


def raw_connection(receiver: Peer) -> socket.socket:
    descriptor = receiver.described()
    if descriptor.channel == "tcp":
        return socket.create_connection((descriptor.host, int(descriptor.endpoint)), PATIENCE_S)
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(PATIENCE_S)
    raw.connect(descriptor.endpoint)
    return raw


def greeting_to(receiver: Peer) -> bytes:
    """Return a writer's greeting, which names a reservation without rows."""
    return pack_greeting(receiver.described(), STRANGER, receiver.granted([]))


def raw_writer(receiver: Peer) -> socket.socket:
    raw = raw_connection(receiver)
    raw.sendall(greeting_to(receiver))
    assert raw.recv(ANSWER.size, socket.MSG_WAITALL) == WELCOME
    return raw


def frame_head(reservation_id: bytes, rows: list[int]) -> bytes:
    head = FRAME.pack(MAGIC, VERSION, len(rows), reservation_id, ROW_BYTES)
    return checked(head) + struct.pack(f"<{len(rows)}I", *rows)


def end_of_push(reservation_id: bytes) -> bytes:
    return frame_head(reservation_id, [])


def receive_ack(raw: socket.socket) -> tuple[int, int]:
    magic, version, accepted, refused = ACK.unpack(raw.recv(ACK.size, socket.MSG_WAITALL))
    assert (magic, version) == (MAGIC, VERSION)
    return accepted, refused


def is_hung_up_on(raw: socket.socket) -> bool:
    """Read until the receiver closes the connection."""
    try:
        while raw.recv(65_536):
            pass
    except ConnectionResetError:
        pass  # the receiver closed with unread bytes
    return True


def hello(magic: bytes = MAGIC, version: int = VERSION, writer: bytes = STRANGER.encode()) -> bytes:
    return HELLO.pack(magic, version, ROW_BYTES, writer, b"0" * 32, bytes(16))


STRANGE_GREETINGS = {
    "text": b"GET / HTTP/1.1\r\nHost: node\r\nAccept: */*\r\n".ljust(HELLO.size, b"x"),
    "zeros": bytes(HELLO.size),
    "wrong magic": hello(magic=b"NOPE"),
    "version 0": hello(version=0),
    "version 255": hello(version=255),
    "no incarnation id": hello(writer=b"\xff" * 32),
    "another receiver": hello(),
}


async def test_an_invalid_greeting_ends_only_that_connection(pair: tuple[Peer, Peer]) -> None:
    writer, receiver = pair
    await works(writer, receiver)
    for words in STRANGE_GREETINGS.values():
        with raw_connection(receiver) as raw:
            raw.sendall(words)
            assert is_hung_up_on(raw)
    await works(writer, receiver)
    assert receiver.lost == []


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(words=st.lists(st.binary(max_size=300), max_size=4), introduced=st.booleans())
async def test_random_bytes_do_not_harm_a_receiver(kind: str, words: list[bytes], introduced: bool) -> None:
    async with peers(kind) as (writer, receiver):
        receiver.granted()
        with raw_writer(receiver) if introduced else raw_connection(receiver) as raw:
            with contextlib.suppress(OSError):  # the receiver may have closed already
                for some in words:
                    raw.sendall(some)
                raw.shutdown(socket.SHUT_WR)
            assert is_hung_up_on(raw)
        assert receiver.contents() == AT_START
        await works(writer, receiver)


@pytest.mark.parametrize(
    "words",
    [
        end_of_push(bytes(16))[:9],
        frame_head(bytes(16), [0, 1])[:-1],
        frame_head(bytes(16), [0]) + bytes(99),
        frame_head(bytes(16), [0]) + bytes(ROW_BYTES),
    ],
    ids=["half a header", "half the rows' numbers", "half a row", "all but the end"],
)
async def test_a_writer_that_is_silent_during_a_push_is_disconnected(tcp_receiver: Peer, words: bytes) -> None:
    tcp_receiver.channel.grant(bytes(16), [0, 1])
    with raw_writer(tcp_receiver) as raw:
        raw.sendall(words)
        assert is_hung_up_on(raw)
    await until(lambda: tcp_receiver.lost == [STRANGER])


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_a_writer_that_is_silent_during_its_greeting_is_disconnected(kind: str, start: Start) -> None:
    receiver = await start(kind, patience_s=0.1)
    for words in (b"", greeting_to(receiver)[:20]):
        with raw_connection(receiver) as raw:
            raw.sendall(words)
            assert is_hung_up_on(raw)
    assert receiver.lost == []


async def test_a_writer_that_sends_single_bytes_slowly_is_disconnected(tcp_receiver: Peer) -> None:
    """No single pause is too long, but the whole frame takes longer than a frame of its size may take."""
    with raw_writer(tcp_receiver) as raw:
        raw.sendall(frame_head(tcp_receiver.granted([0]), [0]))
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(400):
                raw.sendall(b"x")
                await asyncio.sleep(0.05)
            pytest.fail("the receiver read single bytes for 20 s")
    await until(lambda: tcp_receiver.lost == [STRANGER])


async def test_a_writer_that_is_silent_between_pushes_stays_connected(tcp_receiver: Peer) -> None:
    with raw_writer(tcp_receiver) as raw:
        for _ in range(2):
            await asyncio.sleep(0.5)  # longer than the receiver's timeout
            raw.sendall(end_of_push(bytes(16)))
            assert receive_ack(raw) == (0, 0)
    await until(lambda: tcp_receiver.lost)


async def test_a_writer_has_few_connections_and_is_lost_when_the_last_one_ends(pair: tuple[Peer, Peer]) -> None:
    writer, receiver = pair
    raws = [raw_writer(receiver) for _ in range(MAX_CONNECTIONS_PER_WRITER)]
    with raw_connection(receiver) as one_more:
        one_more.sendall(greeting_to(receiver))
        assert ANSWER.unpack(one_more.recv(ANSWER.size))[2] != 0
        assert is_hung_up_on(one_more)
    await works(writer, receiver)
    for raw in raws:
        assert receiver.lost == []
        raw.close()
    await until(lambda: receiver.lost == [STRANGER])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_fenced_writer_is_refused_and_others_are_not(kind: str, start: Start) -> None:
    writer, other, receiver = [await start(kind) for _ in range(3)]
    assert receiver.channel.fence_writer(writer.incarnation)
    with pytest.raises(PeerLostError, match="has declared this node dead"):
        await works(writer, receiver)
    await works(other, receiver)
    assert receiver.channel.fence_writer(writer.incarnation)


@pytest.mark.usefixtures("collected")
async def test_excess_connections_are_refused_until_others_end(start: Start) -> None:
    writer, receiver = await start("tcp"), await start("tcp")
    before = num_threads()
    crowd = [raw_connection(receiver) for _ in range(80)]
    assert all([await asyncio.to_thread(is_hung_up_on, raw) for raw in crowd[64:]])
    for raw in crowd:
        raw.close()
    await until(lambda: num_threads() == before)
    await works(writer, receiver)


# Cancelled exchanges


@pytest.mark.parametrize("kind", ["tcp", "shm"])
@settings(max_examples=12)
@given(pushes=st.lists(st.tuples(st.integers(0, 6), st.floats(0, 0.004)), min_size=1, max_size=8))
async def test_after_cancels_at_any_moment_every_push_gets_its_own_reply(
    kind: str, pushes: list[tuple[int, float]]
) -> None:
    """A later push on the connection must not receive the reply to a cancelled push."""
    async with peers(kind) as (writer, receiver):
        rows = [*ALL_ROWS]
        for refused, after_s in pushes:
            reservation_id = receiver.granted()
            long = asyncio.create_task(writer.push(receiver, rows * 300, rows * 300, reservation_id))
            await asyncio.sleep(after_s)
            long.cancel()
            if kind == "tcp" and refused:
                with pytest.raises(ReservationRefusedError, match=f"refused {refused} of {refused} rows"):
                    await writer.push(receiver, rows[:refused], rows[:refused], secrets.token_bytes(16))
            with contextlib.suppress(asyncio.CancelledError):
                await long
            receiver.channel.revoke(reservation_id)
            await works(writer, receiver)
        assert receiver.lost == [], "the connection lasted"


# Malformed receivers


@contextlib.contextmanager
def false_receiver(kind: str, directory: str, serve: Callable[[socket.socket], object]) -> Iterator[bytes]:
    """Yield the descriptor of a receiver that accepts one writer, reads its greeting, and calls `serve`."""
    is_tcp = channel_of(kind) == "tcp"
    with socket.socket(socket.AF_INET if is_tcp else socket.AF_UNIX) as server:
        server.bind(("127.0.0.1", 0) if is_tcp else f"{directory}/false")
        server.listen()
        endpoint = str(server.getsockname()[1]) if is_tcp else f"{directory}/false"

        def run() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(HELLO.size, socket.MSG_WAITALL)
                serve(connection)

        thread = threading.Thread(target=run)
        thread.start()
        place = f"{host_id()} {bytes(16).hex()}" if channel_of(kind) == "cuda_ipc" else host_id()
        host = "127.0.0.1" if is_tcp else place
        yield PeerDescriptor(channel_of(kind), host, endpoint, "0" * 32, ROW_BYTES, NUM_ROWS).pack()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("words", [b"", b"HTTP", b"HTTP/1.1 200 OK\r\n\r\n", ANSWER.pack(MAGIC, 9, 0), WELCOME])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_peer_with_invalid_replies_counts_as_lost(
    kind: str, words: bytes, directory: str, start: Start
) -> None:
    writer = await start(kind)
    with (
        false_receiver(kind, directory, lambda connection: connection.sendall(words)) as descriptor,
        pytest.raises(PeerLostError),
    ):
        await writer.channel.push(descriptor, bytes(16), [0], [0])


@pytest.mark.parametrize("ended_by", ["timeout", "cancel", "close"])
async def test_a_push_to_a_receiver_that_reads_nothing_fails(ended_by: str, directory: str, start: Start) -> None:
    writer = await start("tcp", patience_s=3 * PATIENCE_S if ended_by == "close" else 0.3)
    given_up = threading.Event()

    def read_nothing(connection: socket.socket) -> None:
        connection.sendall(WELCOME)
        given_up.wait(3 * PATIENCE_S)

    with false_receiver("tcp", directory, read_nothing) as descriptor:
        rows = [*ALL_ROWS] * LONG
        push = asyncio.create_task(writer.channel.push(descriptor, bytes(16), rows, rows))
        await asyncio.sleep(0.05)
        if ended_by == "cancel":
            push.cancel()
        if ended_by == "close":
            await asyncio.wait_for(writer.channel.close(), PATIENCE_S)
        error = asyncio.CancelledError if ended_by == "cancel" else PeerLostError
        with pytest.raises(error, match="accepted no byte for 0.3 s" if ended_by == "timeout" else None):
            await asyncio.wait_for(push, PATIENCE_S)
        given_up.set()


def unsealed() -> int:
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, NUM_ROWS * ROW_BYTES)
    return fd


def too_small() -> int:
    memory = HostMemory(NUM_ROWS - 1, ROW_BYTES)
    fd = os.dup(memory.fd)
    memory.close()
    return fd


def device() -> int:
    return os.open("/dev/zero", os.O_RDWR)


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("give", [unsealed, too_small, device])
async def test_only_a_sealed_memory_of_the_right_size_is_mapped(
    give: Callable[[], int], directory: str, start: Start
) -> None:
    writer, before, fd = await start("shm"), num_files(), give()
    with (
        false_receiver("shm", directory, lambda connection: socket.send_fds(connection, [WELCOME], [fd])) as descriptor,
        pytest.raises(PeerLostError, match="did not send a sealed memory"),
    ):
        await writer.channel.push(descriptor, bytes(16), [0], [0])
    os.close(fd)
    assert num_files() == before


# ---- how channels start, and which peers they can reach


async def test_only_live_peers_on_this_machine_are_reachable(start: Start) -> None:
    near, peer = await start("shm"), await start("shm")
    here = peer.described().pack()
    assert near.channel.reachable(here)
    far = peer.described(host="another host").pack()
    assert not near.channel.reachable(far)
    with pytest.raises(DescriptorError, match="another machine"):
        await near.channel.push(far, bytes(16), [0], [0])
    assert not near.channel.reachable(peer.described(endpoint="/no/such/socket").pack())
    await peer.close()
    assert not near.channel.reachable(here)


async def test_a_socket_is_private_and_sockets_of_killed_processes_are_removed(
    directory: str, start: Start, process: Callable[[str], Process]
) -> None:
    dead, old, live = process("shm"), process("shm"), await start("shm")
    descriptors = [bytes.fromhex((await killed.do("describe"))[1]) for killed in (dead, old)]
    young_path, old_path = (PeerDescriptor.unpack(descriptor, "shm").endpoint for descriptor in descriptors)
    for killed in (dead, old):
        killed.kill()
    for path in (old_path, live.described().endpoint):
        os.utime(path, (time.time() - 3600,) * 2)
    old_umask = os.umask(0)
    try:
        peer = await start("shm")
    finally:
        os.umask(old_umask)
    assert os.stat(peer.described().endpoint).st_mode & 0o777 == 0o600
    paths = {young_path, live.described().endpoint, peer.described().endpoint}
    assert {f"{directory}/{name}" for name in os.listdir(directory)} == paths
    assert not any(peer.channel.reachable(descriptor) for descriptor in descriptors)


@pytest.mark.usefixtures("collected")
async def test_a_channel_that_cannot_start_gives_the_reason_and_leaves_nothing(directory: str) -> None:
    memory = HostMemory(2, 64)
    before, common = (num_files(), num_threads()), (memory, secrets.token_hex(16), lambda _: None)
    for bad in (f"{directory}/missing", f"{directory}/{'long' * 40}"):
        with pytest.raises(OSError, match="cannot listen on the unix socket"):
            ShmChannel(*common, bad)
    with pytest.raises(OSError, match="Errno"):
        TcpChannel(*common, "192.0.2.1")  # no machine has this address
    assert (num_files(), num_threads()) == before
    memory.close()


# Memory and checksums


def test_memory_is_zero_writable_sealed_and_gone_when_closed() -> None:
    memory = HostMemory(5, 1000)
    assert (memory.rows.shape, memory.rows.dtype, memory.rows.any()) == ((5, 1000), np.uint8, False)
    for size in (0, 4999, 5001, 10_000):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    memory.rows[4] = 7
    assert os.pread(memory.fd, 1000, 4000) == b"\x07" * 1000
    view = memory.rows[4]
    for _ in range(2):
        memory.close()
    assert (view == 7).all()  # the view keeps the memory mapped
    with pytest.raises(ValueError, match="closed"):
        _ = memory.fd


@pytest.mark.usefixtures("collected")
def test_too_large_a_memory_is_refused_before_it_is_touched() -> None:
    before, began = num_files(), time.thread_time()
    with pytest.raises(OSError, match="lower --num-blocks or --kv-cache-memory"):
        HostMemory(2**20, 2**30)
    assert time.thread_time() - began < 5
    assert num_files() == before
    with pytest.raises(ValueError, match="at least 1"):
        HostMemory(0, 8)


@pytest.mark.usefixtures("collected")
def test_memory_that_the_kernel_refuses_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    before = num_files()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="no memory; lower --num-blocks or --kv-cache-memory"):
        HostMemory(4, 1000)
    assert num_files() == before


def test_checksums_are_xxh3_64_little_endian() -> None:
    rows = np.frombuffer(b"abcxyz", np.uint8).reshape(2, 3)
    assert checksums(rows, [0]) == 0x78AF5F94892F3950.to_bytes(8, "little")
    assert checksums(rows, [1, 0, 1]) == checksums(rows, [1]) + checksums(rows, [0]) + checksums(rows, [1])
    assert checksums(rows, []) == b""
    with pytest.raises(IndexError):
        checksums(rows, [2])

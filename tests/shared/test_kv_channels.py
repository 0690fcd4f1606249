"""One contract for every KV channel, within a process and between two; and what each must survive from strangers."""

import asyncio
import contextlib
import gc
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kv import tcp
from shared.kv.channel import ChannelError, DescriptorError, PeerDescriptor, PeerLostError, ReservationRefusedError
from shared.kv.checksum import checksums
from shared.kv.listener import (
    ANSWER,
    HELLO,
    MAGIC,
    MAX_CONNECTIONS_PER_WRITER,
    VERSION,
    WELCOME,
    check_answer,
    pack_greeting,
)
from shared.kv.local import host_id
from shared.kv.memory import HostMemory
from shared.kv.peers import ChannelPeers
from shared.kv.shm import ShmChannel, runs
from shared.kv.tcp import ACK, FRAME, MAX_FRAME_ROWS, TcpChannel, checked
from tests.shared.kv_peer import Peer

ROOT = Path(__file__).parents[2]
NUM_ROWS, ROW_BYTES = 32, 16_384
LONG = 8_000  # times the whole pool: a push that lasts for seconds, whatever the channel
PATIENCE_S = 20.0  # of the tests, for things that take milliseconds
# The last two run over a fake of the CUDA driver.
KINDS = ["shm", "tcp", "cuda_ipc", "tcp:gpu"]


def channel_of(kind: str) -> str:
    return kind.partition(":")[0]


class Process:
    """The same as Peer, in another process."""

    def __init__(self, kind: str, num_rows: int, row_bytes: int, directory: str) -> None:
        command = [sys.executable, "-m", "tests.shared.kv_peer", kind, str(num_rows), str(row_bytes), directory]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def do(self, what: str, **options: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"what": what} | options) + "\n")
        self._process.stdin.flush()
        line = await asyncio.to_thread(self._process.stdout.readline)
        return json.loads(line)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    async def close(self) -> None:
        self._process.communicate(timeout=PATIENCE_S)  # the end of its input is the end of it


async def start_peer(kind: str, where: str, directory: str) -> Peer | Process:
    if where == "process":
        return Process(kind, NUM_ROWS, ROW_BYTES, directory)
    return await Peer.start(kind, NUM_ROWS, ROW_BYTES, directory)


@pytest.fixture
def collected() -> None:
    """Nothing of earlier tests is left to the garbage collector, so that descriptors and mappings can be counted."""
    gc.collect()


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kv") as path:  # short: a socket's path has at most 107 bytes
        yield path


@contextlib.asynccontextmanager
async def peers(kind: str, number: int = 2, **options: Any) -> AsyncIterator[list[Peer]]:
    with tempfile.TemporaryDirectory(prefix="kv") as path:
        all_peers = [await Peer.start(kind, NUM_ROWS, ROW_BYTES, path, **options) for _ in range(number)]
        try:
            yield all_peers
        finally:
            for peer in all_peers:
                await peer.close()


@pytest.fixture(params=KINDS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Peer, Peer]]:
    async with peers(request.param) as (writer, receiver):
        yield writer, receiver


@pytest.fixture
async def tcp_receiver() -> AsyncIterator[Peer]:
    async with peers("tcp", 1, patience_s=0.3) as (receiver,):
        yield receiver


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():  # noqa: ASYNC110  (other threads change it, and tell nobody)
            await asyncio.sleep(0.001)


def new_ticket(receiver: Peer, rows: list[int] | None = None) -> bytes:
    ticket = secrets.token_bytes(16)
    receiver.channel.grant(ticket, list(range(NUM_ROWS)) if rows is None else rows)
    return ticket


def at_start(row: int) -> list[int]:
    return [row + 1]


async def works(writer: Peer, receiver: Peer) -> None:
    """A push of row 3 to row 4 arrives."""
    receiver.memory.rows[4] = 0
    await writer.channel.push(receiver.channel.descriptor(), new_ticket(receiver, [4]), [3], [4])
    assert (receiver.memory.rows[4] == writer.memory.rows[3]).all()


# The contract


@pytest.mark.parametrize("where", ["thread", "process"])
@pytest.mark.parametrize("kind", KINDS)
async def test_rows_arrive_where_told_and_nowhere_else(kind: str, where: str, directory: str) -> None:
    writer = await Peer.start(kind, NUM_ROWS, ROW_BYTES, directory)
    receiver = await start_peer(kind, where, directory)
    moves = dict(zip([7, 8, 9, 0, 31, 5], [20, 21, 2, 31, 0, 22], strict=True))
    ticket = secrets.token_hex(16)
    await receiver.do("open", ticket=ticket, rows=list(moves.values()))
    card = await receiver.do("card")
    assert await writer.do("push", card=card, ticket=ticket, source=[*moves], target=[*moves.values()]) == []
    expected = [at_start(row) for row in range(NUM_ROWS)]
    for source, target in moves.items():
        expected[target] = at_start(source)
    assert await receiver.do("read") == expected
    assert await writer.do("read") == [at_start(row) for row in range(NUM_ROWS)]
    await writer.close()
    await receiver.close()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(moves=st.lists(st.tuples(st.integers(0, 31), st.integers(0, 31)), max_size=40, unique_by=lambda m: m[1]))
async def test_any_list_of_rows_is_copied_as_numpy_would(kind: str, moves: list[tuple[int, int]]) -> None:
    source, target = [move[0] for move in moves], [move[1] for move in moves]
    async with peers(kind) as (writer, receiver):
        expected = receiver.memory.rows.copy()
        expected[target] = writer.memory.rows[source]
        await writer.channel.push(receiver.channel.descriptor(), new_ticket(receiver, target), source, target)
        assert (receiver.memory.rows == expected).all()


@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30),
    limit=st.integers(1, 5),
)
def test_runs_cover_every_row_once_in_order_and_are_adjacent(rows: list[tuple[int, int]], limit: int) -> None:
    source, target = [row[0] for row in rows], [row[1] for row in rows]
    pieces = list(runs(source, target, limit))
    assert [position for start, end in pieces for position in range(start, end)] == list(range(len(rows)))
    for start, end in pieces:
        assert 0 < end - start <= limit
        assert source[start:end] == list(range(source[start], source[start] + end - start))
        assert target[start:end] == list(range(target[start], target[start] + end - start))


async def test_many_pushes_at_once_all_arrive(pair: tuple[Peer, Peer]) -> None:
    writer, receiver = pair
    receiver.memory.rows[:] = 0
    card = receiver.channel.descriptor()
    tickets = [new_ticket(receiver, [row]) for row in range(NUM_ROWS)]
    pushes = (writer.channel.push(card, tickets[row], [NUM_ROWS - 1 - row], [row]) for row in range(NUM_ROWS))
    await asyncio.gather(*pushes)
    assert (receiver.memory.rows == writer.memory.rows[::-1]).all()


async def test_a_receiver_takes_rows_from_many_writers_and_a_writer_serves_many_receivers() -> None:
    for kind in KINDS:
        async with peers(kind, 4) as all_peers:
            pushes = [
                writer.channel.push(receiver.channel.descriptor(), new_ticket(receiver), [number], [8 + number])
                for number, writer in enumerate(all_peers)
                for receiver in all_peers
                if receiver is not writer
            ]
            await asyncio.gather(*pushes)
            for reader, receiver in enumerate(all_peers):
                arrived = [int(receiver.memory.rows[8 + number, -1]) for number in range(4)]
                assert arrived == [9 + number if number == reader else number + 1 for number in range(4)]


async def test_the_same_rows_twice_are_harmless(pair: tuple[Peer, Peer]) -> None:
    writer, receiver = pair
    card, ticket = receiver.channel.descriptor(), new_ticket(receiver, [5, 6])
    for _ in range(2):
        await writer.channel.push(card, ticket, [1, 2, 1, 2], [5, 6, 5, 6])
    assert await receiver.read() == [at_start({5: 1, 6: 2}.get(row, row)) for row in range(NUM_ROWS)]


async def test_a_push_of_no_rows_succeeds(pair: tuple[Peer, Peer]) -> None:
    writer, receiver = pair
    await writer.channel.push(receiver.channel.descriptor(), new_ticket(receiver), [], [])
    await works(writer, receiver)


@pytest.mark.parametrize(
    ("ticket", "source", "target"),
    [
        (bytes(16), [0], [NUM_ROWS]),
        (bytes(16), [0], [-1]),
        (bytes(16), [NUM_ROWS], [0]),
        (bytes(16), [-1], [0]),
        (bytes(16), [0, 1], [0]),
        (bytes(15), [0], [0]),
    ],
)
async def test_rows_outside_a_pool_are_never_pushed(
    pair: tuple[Peer, Peer], ticket: bytes, source: list[int], target: list[int]
) -> None:
    writer, receiver = pair
    receiver.channel.grant(bytes(16), [0])
    with pytest.raises(ChannelError):
        await writer.channel.push(receiver.channel.descriptor(), ticket, source, target)
    assert await receiver.read() == [at_start(row) for row in range(NUM_ROWS)]


async def test_a_ticket_is_opened_for_rows_of_the_pool_and_shut_more_than_once(pair: tuple[Peer, Peer]) -> None:
    channel = pair[1].channel
    for ticket, rows in ((bytes(15), [0]), (bytes(16), [NUM_ROWS]), (bytes(16), [-1])):
        with pytest.raises(ValueError, match=r"reservation id has 16 bytes|not all in a pool"):
            channel.grant(ticket, rows)
    channel.grant(bytes(16), [0])
    for _ in range(2):
        channel.revoke(bytes(16))


async def test_a_row_size_other_than_ours_is_refused_with_both_sizes_named(pair: tuple[Peer, Peer]) -> None:
    writer, receiver = pair
    card = PeerDescriptor.unpack(receiver.channel.descriptor(), writer.channel.name)
    other = PeerDescriptor(card.channel, card.host, card.endpoint, card.incarnation_id, ROW_BYTES // 2, card.num_rows)
    assert writer.channel.reachable(card.pack())
    with pytest.raises(DescriptorError, match="have 8192 bytes, ours 16384"):
        writer.channel.reachable(other.pack())
    with pytest.raises(DescriptorError, match="have 8192 bytes, ours 16384"):
        await writer.channel.push(other.pack(), new_ticket(receiver), [0], [0])
    await works(writer, receiver)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_card_that_lies_about_the_row_size_is_refused_by_the_receiver(kind: str, directory: str) -> None:
    writer = await Peer.start(kind, NUM_ROWS, ROW_BYTES // 2, directory)
    receiver = await Peer.start(kind, NUM_ROWS, ROW_BYTES, directory)
    true = PeerDescriptor.unpack(receiver.channel.descriptor(), receiver.channel.name)
    card = PeerDescriptor(true.channel, true.host, true.endpoint, true.incarnation_id, ROW_BYTES // 2, true.num_rows)
    with pytest.raises(DescriptorError, match="do not have the size"):
        await writer.channel.push(card.pack(), new_ticket(receiver), [0], [1])
    assert await receiver.read() == [at_start(row) for row in range(NUM_ROWS)]
    assert receiver.channel.num_rejected == 1
    await writer.close()
    await receiver.close()


@settings(max_examples=50)
@given(data=st.binary(max_size=200) | st.lists(st.text(max_size=9)).map(lambda row: "\n".join(row).encode()))
def test_anything_that_is_no_card_is_a_card_error(data: bytes) -> None:
    for kind in KINDS:
        with pytest.raises(DescriptorError):
            PeerDescriptor.unpack(data, channel_of(kind))


@given(host=st.text("abc:.", max_size=20), row_bytes=st.integers(1, 2**32 - 1), num_rows=st.integers(1, 2**31))
def test_a_card_survives_its_journey(host: str, row_bytes: int, num_rows: int) -> None:
    card = PeerDescriptor("tcp", host, "1234", secrets.token_hex(16), row_bytes, num_rows)
    assert PeerDescriptor.unpack(card.pack(), "tcp") == card
    with pytest.raises(DescriptorError):
        PeerDescriptor.unpack(card.pack(), "shm")


@pytest.mark.parametrize("endpoint", ["", "x", "70000", "-1", "\0", "/no/such/socket", "9" * 30])
async def test_an_address_that_leads_nowhere_is_a_channel_error(pair: tuple[Peer, Peer], endpoint: str) -> None:
    writer, receiver = pair
    card = PeerDescriptor.unpack(receiver.channel.descriptor(), writer.channel.name)
    nowhere = PeerDescriptor(card.channel, card.host, endpoint, secrets.token_hex(16), ROW_BYTES, NUM_ROWS)
    with pytest.raises(ChannelError):
        await writer.channel.push(nowhere.pack(), bytes(16), [0], [0])
    await works(writer, receiver)


# Ends


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_receiver_killed_in_mid_push_fails_the_push_and_all_after_it(kind: str, directory: str) -> None:
    writer = await Peer.start(kind, NUM_ROWS, ROW_BYTES, directory)
    receiver = Process(kind, NUM_ROWS, ROW_BYTES, directory)
    card, ticket, rows = await receiver.do("card"), secrets.token_hex(16), list(range(NUM_ROWS))
    await receiver.do("open", ticket=ticket, rows=rows)
    before, threads_before = num_mappings(), num_threads()
    arguments = bytes.fromhex(card), bytes.fromhex(ticket)
    pushes = [asyncio.create_task(writer.channel.push(*arguments, rows[::-1] * LONG, rows * LONG)) for _ in "ab"]
    while (await receiver.do("read"))[0] != at_start(NUM_ROWS - 1):
        assert not pushes[0].done()
    assert num_mappings() == before + (channel_of(kind) != "tcp")
    receiver.kill()
    for push in pushes:
        with pytest.raises(PeerLostError):
            await asyncio.wait_for(push, PATIENCE_S)
    await until(lambda: num_mappings() == before)
    with pytest.raises(PeerLostError):
        await writer.channel.push(*arguments, [0], [0])
    await until(lambda: num_threads() == threads_before)
    await receiver.close()
    await writer.close()


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_receiver_that_dies_while_nothing_moves_is_let_go_of(kind: str, directory: str) -> None:
    writer = await Peer.start(kind, NUM_ROWS, ROW_BYTES, directory)
    receiver = Process(kind, NUM_ROWS, ROW_BYTES, directory)
    before = num_mappings(), num_threads()
    ticket = secrets.token_hex(16)
    await receiver.do("open", ticket=ticket, rows=[0])
    assert await writer.push(await receiver.do("card"), ticket, [0], [0]) == []
    receiver.kill()
    await receiver.close()
    await until(lambda: (num_mappings(), num_threads()) == before)
    await writer.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_writer_killed_in_mid_push_is_told_once(kind: str, directory: str) -> None:
    receiver = await Peer.start(kind, NUM_ROWS, ROW_BYTES, directory)
    writer = Process(kind, NUM_ROWS, ROW_BYTES, directory)
    receiver.memory.rows[:] = 0
    ticket = new_ticket(receiver)
    boot = await writer.do("introduce")
    await writer.do("push_on_and_on", card=receiver.channel.descriptor().hex(), ticket=ticket.hex())
    await until(lambda: receiver.memory.rows[0, 0] == 1)
    assert receiver.lost == []
    writer.kill()
    await until(lambda: receiver.lost)
    receiver.memory.rows[:] = 0  # its writes are over, so this stays
    await asyncio.sleep(0.02)
    assert receiver.lost == [boot]
    assert not receiver.memory.rows.any()
    await writer.close()
    await receiver.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_writer_that_closes_is_told_and_a_receiver_that_closes_tells_nothing(kind: str) -> None:
    async with peers(kind, 3) as (writer, other, receiver):
        await works(writer, receiver)
        await works(other, receiver)
        assert not receiver.channel.fence_writer(writer.boot)
        await works(writer, receiver)
        await writer.channel.close()
        await until(lambda: receiver.lost == [writer.boot])
        assert receiver.channel.fence_writer(writer.boot)
        await receiver.channel.close()
        await asyncio.sleep(0.01)
        assert receiver.lost == [writer.boot]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_restarted_receiver_is_reached_by_its_new_card_and_not_by_its_old(kind: str, directory: str) -> None:
    writer = await Peer.start(kind, NUM_ROWS, ROW_BYTES, directory)
    old = await Peer.start(kind, NUM_ROWS, ROW_BYTES, directory)
    old_card = old.channel.descriptor()
    await works(writer, old)
    await old.close()
    port = {"port": int(PeerDescriptor.unpack(old_card, "tcp").endpoint)} if channel_of(kind) == "tcp" else {}
    new = await Peer.start(kind, NUM_ROWS, ROW_BYTES, directory, **port)
    new.channel.grant(bytes(16), [0])
    with pytest.raises(PeerLostError):
        await writer.channel.push(old_card, bytes(16), [9], [0])
    assert await new.read() == [at_start(row) for row in range(NUM_ROWS)]
    await works(writer, new)
    await writer.close()
    await new.close()


async def test_a_closed_channel_pushes_nothing_and_closes_again(pair: tuple[Peer, Peer]) -> None:
    writer, receiver = pair
    await works(writer, receiver)
    for _ in range(2):
        await writer.channel.close()
    with pytest.raises(ChannelError, match="closed"):
        await writer.channel.push(receiver.channel.descriptor(), new_ticket(receiver), [0], [0])


async def test_a_push_ends_with_an_error_when_its_channel_closes(pair: tuple[Peer, Peer]) -> None:
    writer, receiver = pair
    pushes = await long_pushes(writer, receiver)
    await asyncio.wait_for(writer.channel.close(), PATIENCE_S)
    for push in pushes:
        with pytest.raises(PeerLostError):
            await push
    await until(lambda: receiver.lost == [writer.boot])  # told after the last byte
    await was_stopped_for_good(receiver)


async def test_a_cancelled_push_writes_nothing_more_and_the_next_one_is_well(pair: tuple[Peer, Peer]) -> None:
    writer, receiver = pair
    moving, waiting = await long_pushes(writer, receiver)
    waiting.cancel()  # its turn has not come: nothing to wait for
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not moving.done()
    moving.cancel()
    await asyncio.sleep(0)
    moving.cancel()  # impatience does not help
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(moving, PATIENCE_S)
    await was_stopped_for_good(receiver)
    await works(writer, receiver)
    assert receiver.lost == []  # on the same connection


async def long_pushes(writer: Peer, receiver: Peer, ticket: bytes = b"") -> list[asyncio.Task[None]]:
    """One push under way that would last for seconds and then fill the last row, and one behind it."""
    card, ticket = receiver.channel.descriptor(), ticket or new_ticket(receiver)
    rows = [*range(NUM_ROWS - 1)] * LONG + [NUM_ROWS - 1]
    receiver.memory.rows[:] = 0
    pushes = [asyncio.create_task(writer.channel.push(card, ticket, rows, rows)) for _ in "ab"]
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
        writer = await Peer.start(kind, NUM_ROWS, ROW_BYTES, directory)
        receiver = await Peer.start(kind, NUM_ROWS, ROW_BYTES, directory)
        await works(writer, receiver)
        await works(receiver, writer)
        pushes = await long_pushes(writer, receiver)
        await receiver.close()
        for push in pushes:
            with pytest.raises(PeerLostError):
                await asyncio.wait_for(push, PATIENCE_S)
        await writer.close()
        del push, pushes
        gc.collect()  # the errors, with the frames in their tracebacks, and the views of rows in those
        return len(os.listdir("/proc/self/fd")), num_threads(), num_mappings(), os.listdir(directory)

    before = len(os.listdir("/proc/self/fd")), num_threads(), num_mappings(), list[str]()
    for _ in range(3):
        assert await live_and_die() == before


def num_mappings() -> int:
    """How many KV memories are mapped here."""
    return Path("/proc/self/maps").read_text().count("/memfd:baton-kv")


def num_threads() -> int:
    return sum(thread.name.startswith("kv-") for thread in threading.enumerate())


# The fence: tcp


async def test_an_unknown_a_shut_or_a_foreign_ticket_moves_no_byte() -> None:
    async with peers("tcp") as (writer, receiver):
        shut = new_ticket(receiver)
        receiver.channel.revoke(shut)
        partly = new_ticket(receiver, [0, 2, 4])
        connected = new_ticket(receiver)  # else the greeting would be refused, for the first two
        await writer.channel.push(receiver.channel.descriptor(), connected, [], [])
        for ticket, allowed in ((bytes(16), []), (shut, []), (partly, [0, 2, 4])):
            with pytest.raises(ReservationRefusedError, match=f"{6 - len(allowed)} of 6 rows"):
                await writer.channel.push(receiver.channel.descriptor(), ticket, [9] * 6, list(range(6)))
            expected = [at_start(9 if row in allowed else row) for row in range(NUM_ROWS)]
            assert await receiver.read() == expected
        await works(writer, receiver)
        assert receiver.lost == []


async def test_a_ticket_is_not_opened_twice(tcp_receiver: Peer) -> None:
    ticket = new_ticket(tcp_receiver)
    with pytest.raises(ValueError, match="open already"):
        tcp_receiver.channel.grant(ticket, [0])


async def test_no_byte_lands_after_shut_even_in_the_middle_of_a_row(tcp_receiver: Peer) -> None:
    rows = tcp_receiver.memory.rows
    ticket = new_ticket(tcp_receiver, [0, 1, 2])
    with raw_writer(tcp_receiver) as raw:
        raw.sendall(frame_head(ticket, [0, 1, 2]) + b"\xaa" * (ROW_BYTES + 1000))
        await until(lambda: rows[1, 999] == 0xAA)
        tcp_receiver.channel.revoke(ticket)
        raw.sendall(b"\xbb" * (2 * ROW_BYTES - 1000) + end_of_push(ticket))
        assert receive_ack(raw) == (1, 2)
        assert (rows[0] == 0xAA).all()
        assert (rows[1, :1000] == 0xAA).all()
        assert (rows[1, 1000:] == 2).all()
        assert (rows[2] == 3).all()
        again = new_ticket(tcp_receiver, [1])  # the rows are reused at once; the frames of the old ticket come late
        raw.sendall(frame_head(ticket, [1]) + b"\xcc" * ROW_BYTES + end_of_push(ticket))
        assert receive_ack(raw) == (0, 1)
        assert 0xCC not in rows[1]
        raw.sendall(frame_head(again, [1]) + b"\xdd" * ROW_BYTES + end_of_push(again))
        assert receive_ack(raw) == (1, 0)
        assert (rows[1] == 0xDD).all()


async def test_shut_holds_against_a_writer_at_full_speed() -> None:
    async with peers("tcp") as (writer, receiver):
        for _ in range(5):
            ticket = new_ticket(receiver)
            pushes = await long_pushes(writer, receiver, ticket)
            receiver.channel.revoke(ticket)
            await was_stopped_for_good(receiver)
            for push in pushes:
                push.cancel()
            await asyncio.wait(pushes, timeout=PATIENCE_S)
        assert receiver.lost == []


# Strangers


def raw_connection(receiver: Peer) -> socket.socket:
    card = PeerDescriptor.unpack(receiver.channel.descriptor(), receiver.channel.name)
    if card.channel == "tcp":
        return socket.create_connection((card.host, int(card.endpoint)), PATIENCE_S)
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(PATIENCE_S)
    raw.connect(card.endpoint)
    return raw


def greeting_to(receiver: Peer, boot: str = "f" * 32) -> bytes:
    """A writer's, which names a reservation of no rows."""
    reservation_id = secrets.token_bytes(16)
    receiver.channel.grant(reservation_id, [])
    card = PeerDescriptor.unpack(receiver.channel.descriptor(), receiver.channel.name)
    return pack_greeting(card, boot, reservation_id)


def raw_writer(receiver: Peer, boot: str = "f" * 32) -> socket.socket:
    raw = raw_connection(receiver)
    raw.sendall(greeting_to(receiver, boot))
    assert raw.recv(ANSWER.size, socket.MSG_WAITALL) == WELCOME
    return raw


def frame_head(ticket: bytes, rows: list[int]) -> bytes:
    return checked(FRAME.pack(MAGIC, VERSION, len(rows), ticket, ROW_BYTES)) + struct.pack(f"<{len(rows)}I", *rows)


def end_of_push(ticket: bytes) -> bytes:
    return checked(FRAME.pack(MAGIC, VERSION, 0, ticket, ROW_BYTES))


def damaged(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 2]) + frame[at + 1 :]


def receive_ack(raw: socket.socket) -> tuple[int, int]:
    magic, version, accepted, refused = ACK.unpack(raw.recv(ACK.size, socket.MSG_WAITALL))
    assert (magic, version) == (MAGIC, VERSION)
    return accepted, refused


def is_hung_up_on(raw: socket.socket) -> bool:
    """Wait for the end that the receiver makes, whatever it says before."""
    try:
        while raw.recv(65_536):
            pass
    except ConnectionResetError:
        pass  # it closed with bytes of ours unread
    return True


ME, YOU = b"f" * 32, b"0" * 32
STRANGE_HELLOS = {
    "text": b"GET / HTTP/1.1\r\nHost: node\r\nAccept: */*\r\nUser-Agent: somebody or other, at length\r\n\r\n",
    "zeros": bytes(HELLO.size),
    "wrong magic": HELLO.pack(b"NOPE", VERSION, ROW_BYTES, ME, YOU, bytes(16)),
    "version 0": HELLO.pack(MAGIC, 0, ROW_BYTES, ME, YOU, bytes(16)),
    "version 255": HELLO.pack(MAGIC, 255, ROW_BYTES, ME, YOU, bytes(16)),
    "no boot": HELLO.pack(MAGIC, VERSION, ROW_BYTES, b"\xff" * 32, YOU, bytes(16)),
    "another boot": HELLO.pack(MAGIC, VERSION, ROW_BYTES, ME, YOU, bytes(16)),
}


@pytest.mark.parametrize("words", STRANGE_HELLOS.values(), ids=STRANGE_HELLOS)
async def test_a_strange_introduction_ends_that_connection_alone(pair: tuple[Peer, Peer], words: bytes) -> None:
    writer, receiver = pair
    await works(writer, receiver)
    with raw_connection(receiver) as raw:
        raw.sendall(words)
        assert is_hung_up_on(raw)
    await until(lambda: receiver.channel.num_rejected == 1)
    await works(writer, receiver)
    assert receiver.lost == []


def strange_head(magic: bytes = MAGIC, version: int = VERSION, rows: int = 1, row_bytes: int = ROW_BYTES) -> bytes:
    return checked(FRAME.pack(magic, version, rows, bytes(16), row_bytes))


STRANGE_FRAMES = {
    "wrong magic": strange_head(magic=b"NOPE"),
    "version 0": strange_head(version=0),
    "version 255": strange_head(version=255),
    "row bytes 0": strange_head(row_bytes=0),
    "one byte more": strange_head(row_bytes=ROW_BYTES + 1),
    "4 GiB rows": strange_head(row_bytes=2**32 - 1),
    "too many rows": strange_head(rows=MAX_FRAME_ROWS + 1),
    "65,535 rows": strange_head(rows=65_535),
    "a row too long": frame_head(bytes(16), [0]) + bytes(ROW_BYTES + 1) + end_of_push(bytes(16)),
    "one more row than is sent": damaged(frame_head(bytes(16), [0]), at=6) + bytes(ROW_BYTES) + end_of_push(bytes(16)),
    "an end that is none": damaged(end_of_push(bytes(16)), at=6),
    "another ticket": damaged(end_of_push(bytes(16)), at=8),
    "garbage": bytes(range(256)) * 4,
}


@pytest.mark.parametrize("words", STRANGE_FRAMES.values(), ids=STRANGE_FRAMES)
async def test_a_strange_frame_ends_that_connection_alone(words: bytes) -> None:
    async with peers("tcp") as (writer, receiver):
        await works(writer, receiver)
        with raw_writer(receiver) as raw:
            raw.sendall(words)
            assert is_hung_up_on(raw)
        await until(lambda: receiver.lost == ["f" * 32])
        assert receiver.channel.num_rejected == 1
        await works(writer, receiver)
        assert receiver.lost == ["f" * 32]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(words=st.lists(st.binary(max_size=300), max_size=4), introduced=st.booleans())
async def test_no_bytes_at_all_harm_a_receiver(kind: str, words: list[bytes], introduced: bool) -> None:
    async with peers(kind) as (writer, receiver):
        new_ticket(receiver)
        with raw_writer(receiver) if introduced else raw_connection(receiver) as raw:
            with contextlib.suppress(OSError):  # it may have heard enough, and hung up
                for some in words:
                    raw.sendall(some)
                raw.shutdown(socket.SHUT_WR)
            assert is_hung_up_on(raw)
        assert await receiver.read() == [at_start(row) for row in range(NUM_ROWS)]
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
async def test_a_writer_that_falls_silent_in_mid_push_is_given_up(tcp_receiver: Peer, words: bytes) -> None:
    tcp_receiver.channel.grant(bytes(16), [0, 1])
    with raw_writer(tcp_receiver) as raw:
        raw.sendall(words)
        assert is_hung_up_on(raw)
    await until(lambda: tcp_receiver.lost == ["f" * 32])


async def test_a_writer_that_sends_single_bytes_slowly_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never silent for long, but the frame takes longer than a frame of that size may take."""
    monkeypatch.setattr(tcp, "LEAST_BYTES_PER_S", 1e9)
    async with peers("tcp", 1, patience_s=0.5) as (receiver,):
        ticket = new_ticket(receiver, [0])
        with raw_writer(receiver) as raw:
            raw.sendall(frame_head(ticket, [0]))
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                for _ in range(400):
                    raw.sendall(b"x")
                    await asyncio.sleep(0.05)
                pytest.fail("the receiver read single bytes for 20 s")
        await until(lambda: receiver.lost == ["f" * 32])


async def test_a_writer_that_is_silent_between_pushes_is_not_given_up(tcp_receiver: Peer) -> None:
    with raw_writer(tcp_receiver) as raw:
        for _ in range(2):
            await asyncio.sleep(0.5)  # longer than the receiver's patience
            raw.sendall(end_of_push(bytes(16)))
            assert receive_ack(raw) == (0, 0)
    await until(lambda: tcp_receiver.lost)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stranger_who_says_nothing_is_given_up(kind: str) -> None:
    async with peers(kind, 1, patience_s=0.1) as (receiver,):
        for words in (
            b"",
            greeting_to(receiver, "f" * 32)[:20],
        ):
            with raw_connection(receiver) as raw:
                raw.sendall(words)
                assert is_hung_up_on(raw)
        assert receiver.lost == []


async def test_a_writer_has_few_connections_and_is_lost_with_the_last(pair: tuple[Peer, Peer]) -> None:
    writer, receiver = pair
    raws = [raw_writer(receiver) for _ in range(MAX_CONNECTIONS_PER_WRITER)]
    with raw_connection(receiver) as one_more:
        one_more.sendall(greeting_to(receiver, "f" * 32))
        assert ANSWER.unpack(one_more.recv(ANSWER.size))[2] != 0
        assert is_hung_up_on(one_more)
    assert receiver.channel.num_rejected == 1
    await works(writer, receiver)
    for raw in raws:
        assert receiver.lost == []
        raw.close()
    await until(lambda: receiver.lost == ["f" * 32])


async def test_an_shm_writer_that_talks_is_heard_to_its_end_since_it_may_write_until_then() -> None:
    async with peers("shm", 1) as (receiver,):
        with raw_writer(receiver) as raw:
            for _ in range(3):
                raw.sendall(b"hello?")
                await asyncio.sleep(0.01)
            assert receiver.lost == []
        await until(lambda: receiver.lost == ["f" * 32])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_barred_writer_never_comes_in_and_others_do(kind: str) -> None:
    async with peers(kind) as (writer, receiver):
        assert receiver.channel.fence_writer(writer.boot)
        with pytest.raises(PeerLostError, match="treats us as dead"):
            await works(writer, receiver)
        assert receiver.channel.fence_writer(writer.boot)


@pytest.mark.usefixtures("collected")
async def test_a_crowd_of_connections_is_turned_away_and_service_returns_with_their_end() -> None:
    async with peers("tcp") as (writer, receiver):
        before = num_threads()
        crowd = [raw_connection(receiver) for _ in range(80)]
        await until(lambda: receiver.channel.num_rejected == 16)
        for raw in crowd:
            raw.close()
        await until(lambda: num_threads() == before)
        await works(writer, receiver)


# Admission


async def test_a_tcp_writer_that_names_no_open_reservation_is_turned_away(tcp_receiver: Peer) -> None:
    opened, shut = secrets.token_bytes(16), secrets.token_bytes(16)
    card = PeerDescriptor.unpack(tcp_receiver.channel.descriptor(), "tcp")
    for reservation_id in (opened, shut):
        tcp_receiver.channel.grant(reservation_id, [0])
    tcp_receiver.channel.revoke(shut)
    for number, reservation_id in enumerate((bytes(16), shut, secrets.token_bytes(16)), 1):
        with raw_connection(tcp_receiver) as raw:
            raw.sendall(pack_greeting(card, "f" * 32, reservation_id))
            with pytest.raises(ReservationRefusedError):
                check_answer(await asyncio.to_thread(raw.recv, ANSWER.size, socket.MSG_WAITALL))
            assert await asyncio.to_thread(is_hung_up_on, raw)
        await until(lambda count=number: tcp_receiver.channel.num_rejected == count)
    with raw_connection(tcp_receiver) as raw:
        raw.sendall(pack_greeting(card, "f" * 32, opened))
        assert await asyncio.to_thread(raw.recv, ANSWER.size, socket.MSG_WAITALL) == WELCOME
    assert tcp_receiver.channel.num_rejected == 3


async def test_a_push_whose_reservation_is_closed_before_it_connects_is_refused_and_the_next_one_is_well() -> None:
    async with peers("tcp") as (writer, receiver):
        with pytest.raises(ReservationRefusedError, match="does not know the reservation, or has closed it"):
            await writer.channel.push(receiver.channel.descriptor(), secrets.token_bytes(16), [0], [0])
        await works(writer, receiver)


# Cancelled exchanges


@pytest.mark.parametrize("kind", ["tcp", "shm"])
@settings(max_examples=12)
@given(pushes=st.lists(st.tuples(st.integers(0, 6), st.floats(0, 0.004)), min_size=1, max_size=8))
async def test_after_cancels_at_any_moment_every_push_is_answered_for_itself(
    kind: str, pushes: list[tuple[int, float]]
) -> None:
    """A push of many rows is cancelled; what follows on the connection must never take its answer for its own."""
    async with peers(kind) as (writer, receiver):
        card, rows = receiver.channel.descriptor(), list(range(NUM_ROWS))
        for refused, after_s in pushes:
            ticket = new_ticket(receiver)
            long = asyncio.create_task(writer.channel.push(card, ticket, rows * 300, rows * 300))
            await asyncio.sleep(after_s)
            long.cancel()
            if kind == "tcp" and refused:
                with pytest.raises(ReservationRefusedError, match=f"refused {refused} of {refused} rows"):
                    await writer.channel.push(card, secrets.token_bytes(16), rows[:refused], rows[:refused])
            with contextlib.suppress(asyncio.CancelledError):
                await long
            receiver.channel.revoke(ticket)
            await works(writer, receiver)
        assert receiver.lost == [], "the connection lasted"


async def test_a_link_whose_push_ended_in_any_other_way_is_never_used_again() -> None:
    closed: list[int] = []

    class Link:
        def __init__(self, number: int) -> None:
            self.number = number
            self.socket, self._other = socket.socketpair()

        def push(self, *_: object) -> None:
            if self.number == 0:
                raise MemoryError("in the middle of a frame")

        def interrupt(self) -> None: ...

        def close(self) -> None:
            closed.append(self.number)
            self.socket.close()
            self._other.close()

    made: list[Link] = []

    def connect(_: PeerDescriptor, __: bytes) -> Link:
        made.append(Link(len(made)))
        return made[-1]

    all_peers = ChannelPeers(ROW_BYTES, NUM_ROWS, connect)
    card = PeerDescriptor("tcp", "h", "1", "f" * 32, ROW_BYTES, NUM_ROWS)
    with pytest.raises(MemoryError):
        await all_peers.push(card, bytes(16), [0], [0])
    assert closed == [0]
    await all_peers.push(card, bytes(16), [0], [0])
    assert len(made) == 2
    await all_peers.close()
    assert closed == [0, 1]


# Receivers that are not what they seem


@contextlib.contextmanager
def false_receiver(
    kind: str, directory: str, serve: Callable[[socket.socket, bytes], None], introduction: int = HELLO.size
) -> Iterator[bytes]:
    """The card of a receiver that accepts one writer, reads its introduction, and does as `serve` says."""
    is_tcp = channel_of(kind) == "tcp"
    with socket.socket(socket.AF_INET if is_tcp else socket.AF_UNIX) as server:
        server.bind(("127.0.0.1", 0) if is_tcp else f"{directory}/false")
        server.listen()
        endpoint = str(server.getsockname()[1]) if is_tcp else f"{directory}/false"

        def run() -> None:
            connection, _ = server.accept()
            with connection:
                serve(connection, connection.recv(introduction, socket.MSG_WAITALL))

        thread = threading.Thread(target=run)
        thread.start()
        place = f"{host_id()} {bytes(16).hex()}" if channel_of(kind) == "cuda_ipc" else host_id()
        yield PeerDescriptor(
            channel_of(kind), "127.0.0.1" if is_tcp else place, endpoint, "0" * 32, ROW_BYTES, NUM_ROWS
        ).pack()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def answering(words: bytes) -> Callable[[socket.socket, bytes], None]:
    return lambda connection, _: connection.sendall(words)


@pytest.mark.parametrize("words", [b"", b"HTTP", b"HTTP/1.1 200 OK\r\n\r\n", ANSWER.pack(MAGIC, 9, 0), WELCOME])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_peer_that_answers_otherwise_is_a_peer_lost(kind: str, words: bytes, directory: str) -> None:
    writer = await Peer.start(kind, NUM_ROWS, ROW_BYTES, directory)
    with false_receiver(kind, directory, answering(words)) as card, pytest.raises(PeerLostError):
        await writer.channel.push(card, bytes(16), [0], [0])
    await writer.close()


async def test_an_answer_that_counts_wrong_is_a_peer_lost(directory: str) -> None:
    writer = await Peer.start("tcp", NUM_ROWS, ROW_BYTES, directory)

    def boast(connection: socket.socket, _: bytes) -> None:
        connection.sendall(WELCOME + ACK.pack(MAGIC, VERSION, 2, 0))
        while connection.recv(65_536):
            pass

    with (
        false_receiver("tcp", directory, boast) as card,
        pytest.raises(PeerLostError, match="acknowledgement is invalid"),
    ):
        await writer.channel.push(card, bytes(16), [0], [0])
    await writer.close()


@pytest.mark.parametrize("ended_by", ["patience", "cancel", "close"])
async def test_a_receiver_that_reads_nothing_is_given_up(ended_by: str, directory: str) -> None:
    patience_s = 3 * PATIENCE_S if ended_by == "close" else 0.3
    writer = await Peer.start("tcp", NUM_ROWS, ROW_BYTES, directory, patience_s=patience_s)
    given_up = threading.Event()

    def say_welcome_and_sleep(connection: socket.socket, _: bytes) -> None:
        connection.sendall(WELCOME)
        given_up.wait(3 * PATIENCE_S)

    with false_receiver("tcp", directory, say_welcome_and_sleep) as card:
        rows = list(range(NUM_ROWS)) * LONG
        push = asyncio.create_task(writer.channel.push(card, bytes(16), rows, rows))
        await asyncio.sleep(0.05)
        if ended_by == "cancel":
            push.cancel()
        if ended_by == "close":
            await asyncio.wait_for(writer.channel.close(), PATIENCE_S)
        error = asyncio.CancelledError if ended_by == "cancel" else PeerLostError
        with pytest.raises(error, match="accepted no byte for 0.3 s" if ended_by == "patience" else None):
            await asyncio.wait_for(push, PATIENCE_S)
        given_up.set()
    await writer.close()


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
async def test_only_a_sealed_memory_of_the_right_size_is_mapped(give: Callable[[], int], directory: str) -> None:
    writer = await Peer.start("shm", NUM_ROWS, ROW_BYTES, directory)
    before = len(os.listdir("/proc/self/fd"))
    fd = give()

    def serve(connection: socket.socket, _: bytes) -> None:
        socket.send_fds(connection, [WELCOME], [fd])

    with (
        false_receiver("shm", directory, serve) as card,
        pytest.raises(PeerLostError, match="did not send a sealed memory"),
    ):
        await writer.channel.push(card, bytes(16), [0], [0])
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before
    await writer.close()


# Starts, and what is near


async def test_reachable_is_a_live_peer_on_this_machine(directory: str) -> None:
    near = await Peer.start("shm", NUM_ROWS, ROW_BYTES, directory)
    peer = await Peer.start("shm", NUM_ROWS, ROW_BYTES, directory)
    assert isinstance(near.channel, ShmChannel)
    card = PeerDescriptor.unpack(peer.channel.descriptor(), "shm")
    assert near.channel.reachable(card.pack())
    far = PeerDescriptor("shm", "another host", card.endpoint, card.incarnation_id, ROW_BYTES, NUM_ROWS).pack()
    assert not near.channel.reachable(far)
    with pytest.raises(DescriptorError, match="another machine"):
        await near.channel.push(far, bytes(16), [0], [0])
    hidden = PeerDescriptor("shm", card.host, "/no/such/socket", card.incarnation_id, ROW_BYTES, NUM_ROWS)
    assert not near.channel.reachable(hidden.pack())
    with pytest.raises(DescriptorError, match="have 1 bytes"):
        near.channel.reachable(PeerDescriptor("shm", card.host, card.endpoint, card.incarnation_id, 1, NUM_ROWS).pack())
    await peer.close()
    assert not near.channel.reachable(card.pack())
    assert near.channel.num_rejected == 0
    await near.close()


async def test_a_socket_is_for_its_user_only_and_leftovers_of_the_dead_are_harmless(directory: str) -> None:
    dead = Process("shm", NUM_ROWS, ROW_BYTES, directory)
    dead_card = bytes.fromhex(await dead.do("card"))
    dead.kill()
    await dead.close()
    assert len(os.listdir(directory)) == 1
    old_umask = os.umask(0)
    try:
        peer = await Peer.start("shm", NUM_ROWS, ROW_BYTES, directory)
    finally:
        os.umask(old_umask)
    path = PeerDescriptor.unpack(peer.channel.descriptor(), "shm").endpoint
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert isinstance(peer.channel, ShmChannel)
    assert not peer.channel.reachable(dead_card)
    await peer.close()


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_a_channel_that_cannot_start_says_why_and_leaves_nothing(kind: str, directory: str) -> None:
    memory = HostMemory(2, 64)
    before = len(os.listdir("/proc/self/fd")), num_threads()
    boot, lost = secrets.token_hex(16), list[str]()
    if kind == "shm":
        for bad in (f"{directory}/missing", f"{directory}/{'long' * 40}"):
            with pytest.raises(OSError, match="cannot listen on the unix socket"):
                await ShmChannel.start(memory, boot, lost.append, bad)
        with pytest.raises(ValueError, match="incarnation id has 32"):
            await ShmChannel.start(memory, "me", lost.append, directory)
    else:
        with pytest.raises(OSError, match="Errno"):
            await TcpChannel.start(memory, boot, lost.append, "192.0.2.1")  # nobody has this address
        with pytest.raises(ValueError, match="give the one at which"):
            await TcpChannel.start(memory, boot, lost.append, "0.0.0.0")
        with pytest.raises(ValueError, match="incarnation id has 32"):
            await TcpChannel.start(memory, "me", lost.append, "127.0.0.1")
    assert (len(os.listdir("/proc/self/fd")), num_threads()) == before
    memory.close()


async def test_a_node_that_listens_on_every_address_names_the_one_for_its_peers(directory: str) -> None:
    memory = HostMemory(NUM_ROWS, ROW_BYTES)
    boot, lost = secrets.token_hex(16), list[str]()
    channel = await TcpChannel.start(memory, boot, lost.append, "0.0.0.0", advertised="127.0.0.1")
    writer = await Peer.start("tcp", NUM_ROWS, ROW_BYTES, directory)
    channel.grant(bytes(16), [1])
    await writer.channel.push(channel.descriptor(), bytes(16), [0], [1])
    assert memory.rows[1].all()
    await writer.close()
    await channel.close()
    memory.close()


# Memory and checksums


def test_memory_is_zero_writable_sealed_and_gone_when_closed() -> None:
    memory = HostMemory(5, 1000)
    assert memory.rows.shape == (5, 1000)
    assert memory.rows.dtype == np.uint8
    assert not memory.rows.any()
    for size in (0, 4999, 5001, 10_000):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    memory.rows[4] = 7
    assert os.pread(memory.fd, 1000, 4000) == b"\x07" * 1000
    view = memory.rows[4]
    for _ in range(2):
        memory.close()
    assert (view == 7).all()  # those who look at it still see it
    with pytest.raises(ValueError, match="closed"):
        _ = memory.fd


@pytest.mark.parametrize(("num_rows", "row_bytes"), [(0, 8), (8, 0), (-1, 8)])
def test_memory_of_no_size_is_refused(num_rows: int, row_bytes: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        HostMemory(num_rows, row_bytes)


@pytest.mark.usefixtures("collected")
def test_memory_that_is_not_there_is_refused_before_it_is_touched() -> None:
    before, began = len(os.listdir("/proc/self/fd")), time.thread_time()
    with pytest.raises(OSError, match="lower --num-blocks or --kv-cache-memory"):
        HostMemory(2**20, 2**30)
    assert time.thread_time() - began < 5
    assert len(os.listdir("/proc/self/fd")) == before


def test_checksums_are_xxh3_64_little_endian() -> None:
    rows = np.frombuffer(b"abcxyz", np.uint8).reshape(2, 3)
    assert checksums(rows, [0]) == 0x78AF5F94892F3950.to_bytes(8, "little")
    assert checksums(rows, [1, 0, 1]) == checksums(rows, [1]) + checksums(rows, [0]) + checksums(rows, [1])
    assert checksums(rows, []) == b""
    with pytest.raises(IndexError):
        checksums(rows, [2])


@given(row=st.binary(min_size=1, max_size=5000), bit=st.integers(0))
def test_a_flipped_bit_changes_the_checksum(row: bytes, bit: int) -> None:
    rows = np.frombuffer(row * 2, np.uint8).reshape(2, -1).copy()
    byte, shift = divmod(bit % (8 * len(row)), 8)
    assert checksums(rows, [0]) == checksums(rows, [1])
    rows[1, byte] ^= 1 << shift
    assert checksums(rows, [0]) != checksums(rows, [1])


async def test_sockets_of_dead_processes_are_swept_up_and_those_of_living_ones_stay(directory: str) -> None:
    old = time.time() - 3600
    dead, young, live = (Path(directory) / name for name in ("dead", "young", "live"))
    sockets = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    for path, one in zip((dead, young, live), sockets, strict=True):
        one.bind(str(path))
        if path is not young:
            os.utime(path, (old, old))
    sockets[2].listen()
    (Path(directory) / "file").touch()
    peer = await Peer.start("shm", NUM_ROWS, ROW_BYTES, directory)
    assert set(os.listdir(directory)) >= {"young", "live", "file"}
    assert not dead.exists()
    await peer.close()
    for one in sockets:
        one.close()

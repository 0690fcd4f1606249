"""Pushes over tcp in any order and of any content (K4, K5, K7, K8): only rows of an open ticket ever change."""

import asyncio
import contextlib
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kv import tcp
from shared.kv.listener import MAGIC, VERSION, MalformedError
from shared.kv.tcp import ACK, FRAME
from tests.fuzz.kv import PlayedReceiver
from tests.shared.test_kv_channels import frame_head, new_ticket, peers, raw_writer, until

ROWS, ROW_BYTES = 8, 16
TICKETS = [bytes([number]) * 16 for number in range(3)]
Frame = tuple[int, list[int], int]  # ticket, rows, what they are filled with


@pytest.fixture(scope="module")
def receiver() -> Iterator[PlayedReceiver]:
    receiver = PlayedReceiver(ROWS, ROW_BYTES)
    yield receiver
    receiver.close()


def packed(frame: Frame) -> bytes:
    ticket, rows, fill = frame
    head = FRAME.pack(MAGIC, VERSION, len(rows), TICKETS[ticket], ROW_BYTES)
    return head + struct.pack(f"<{len(rows)}I", *rows) + bytes([fill]) * (ROW_BYTES * len(rows))


anywhere = st.integers(0, ROWS + 1) | st.sampled_from([2**31, 2**32 - 1])
frames = st.tuples(st.integers(0, 2), st.lists(anywhere, max_size=5), st.integers(1, 255))
endings = st.sampled_from([b"", b"\0", b"BTKV", FRAME.pack(MAGIC, 9, 0, TICKETS[0], ROW_BYTES), bytes(99)])
openings = st.dictionaries(st.integers(0, 1), st.lists(st.integers(0, ROWS - 1), unique=True))
turns = st.lists(st.tuples(openings, st.lists(frames, max_size=6), endings), min_size=1, max_size=3)


@settings(max_examples=150)
@given(turns=turns)
def test_only_rows_of_an_open_ticket_change_whatever_is_pushed(
    receiver: PlayedReceiver, turns: list[tuple[dict[int, list[int]], list[Frame], bytes]]
) -> None:
    """Each turn opens some tickets, hears one connection, and shuts them: what comes for them later is late."""
    receiver.memory.rows[:] = 0
    expected = np.zeros((ROWS, ROW_BYTES), np.uint8)
    for opened, pushed, ending in turns:
        for ticket, rows in opened.items():
            receiver.channel.grant(TICKETS[ticket], rows)
        accepted = refused = 0
        acks = []
        for ticket, rows, fill in pushed:
            mine = [row for row in rows if row in opened.get(ticket, ())]
            expected[mine] = fill
            accepted, refused = accepted + len(mine), refused + len(rows) - len(mine)
            if not rows:  # the end of a push
                acks.append((accepted, refused))
                accepted = refused = 0
        said = b"".join(map(packed, pushed))
        if len(ending) >= FRAME.size:
            with pytest.raises(MalformedError):
                receiver.hear(said + ending)
        else:
            answers = receiver.hear(said + ending)
            assert answers == [ACK.pack(MAGIC, VERSION, *ack) for ack in acks]
        assert (receiver.memory.rows == expected).all()
        for ticket in opened:
            receiver.channel.revoke(TICKETS[ticket])


async def test_a_writer_of_a_byte_now_and_then_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """K9: it is never silent for long, and yet its frame is not whole in the time that such a frame may take."""
    monkeypatch.setattr(tcp, "LEAST_BYTES_PER_S", 1e9)
    async with peers("tcp", 1, patience_s=0.5) as (receiver,):
        ticket = new_ticket(receiver, [0])
        with raw_writer(receiver) as raw:
            raw.sendall(frame_head(ticket, [0]))
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                for _ in range(400):
                    raw.sendall(b"x")
                    await asyncio.sleep(0.05)
                pytest.fail("20 s of single bytes were taken")
        await until(lambda: receiver.lost == ["f" * 32])


def test_a_frame_cut_anywhere_changes_no_row_that_is_not_its_own(receiver: PlayedReceiver) -> None:
    receiver.channel.grant(TICKETS[0], [2])
    whole = packed((0, [2, 3], 7))
    for length in range(len(whole)):
        receiver.memory.rows[:] = 0
        receiver.hear(whole[:length])
        assert not receiver.memory.rows[[0, 1, 3, 4, 5, 6, 7]].any()
    receiver.channel.revoke(TICKETS[0])

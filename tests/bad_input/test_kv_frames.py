"""Test that pushes over TCP, in any order and with any content, change only rows of granted reservations."""

import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kv.connections import MAGIC, VERSION, MalformedError
from shared.kv.tcp import ACK, FRAME
from tests.fuzz.kv import FakeReceiver

ROWS, ROW_BYTES = 8, 16
RESERVATIONS = [bytes([number]) * 16 for number in range(3)]
Frame = tuple[int, list[int], int]  # reservation number, row numbers, and the byte that fills the rows


@pytest.fixture(scope="module")
def receiver() -> Iterator[FakeReceiver]:
    receiver = FakeReceiver(ROWS, ROW_BYTES)
    yield receiver
    receiver.close()


def packed(frame: Frame) -> bytes:
    reservation, rows, fill = frame
    head = FRAME.pack(MAGIC, VERSION, len(rows), RESERVATIONS[reservation], ROW_BYTES)
    return head + struct.pack(f"<{len(rows)}I", *rows) + bytes([fill]) * (ROW_BYTES * len(rows))


anywhere = st.integers(0, ROWS + 1) | st.sampled_from([2**31, 2**32 - 1])
frames = st.tuples(st.integers(0, 2), st.lists(anywhere, max_size=5), st.integers(1, 255))
endings = st.sampled_from([b"", b"\0", b"BTKV", FRAME.pack(MAGIC, 9, 0, RESERVATIONS[0], ROW_BYTES), bytes(99)])
grants = st.dictionaries(st.integers(0, 1), st.lists(st.integers(0, ROWS - 1), unique=True))
turns = st.lists(st.tuples(grants, st.lists(frames, max_size=6), endings), min_size=1, max_size=3)


@settings(max_examples=150)
@given(turns=turns)
def test_only_rows_of_a_granted_reservation_change(
    receiver: FakeReceiver, turns: list[tuple[dict[int, list[int]], list[Frame], bytes]]
) -> None:
    """In each round, the receiver grants some reservations, reads one connection, and revokes the reservations."""
    receiver.memory.rows[:] = 0
    expected = np.zeros((ROWS, ROW_BYTES), np.uint8)
    for granted, pushed, ending in turns:
        for reservation, rows in granted.items():
            receiver.channel.grant(RESERVATIONS[reservation], rows)
        accepted = refused = 0
        acks = []
        for reservation, rows, fill in pushed:
            mine = [row for row in rows if row in granted.get(reservation, ())]
            expected[mine] = fill
            accepted, refused = accepted + len(mine), refused + len(rows) - len(mine)
            if not rows:  # the end of a push
                acks.append((accepted, refused))
                accepted = refused = 0
        data = b"".join(map(packed, pushed))
        if len(ending) >= FRAME.size:
            with pytest.raises(MalformedError):
                receiver.receive(data + ending)
        else:
            answers = receiver.receive(data + ending)
            assert answers == [ACK.pack(MAGIC, VERSION, *ack) for ack in acks]
        assert (receiver.memory.rows == expected).all()
        for reservation in granted:
            receiver.channel.revoke(RESERVATIONS[reservation])


def test_a_truncated_frame_changes_only_its_own_rows(receiver: FakeReceiver) -> None:
    receiver.channel.grant(RESERVATIONS[0], [2])
    whole = packed((0, [2, 3], 7))
    for length in range(len(whole)):
        receiver.memory.rows[:] = 0
        receiver.receive(whole[:length])
        assert not receiver.memory.rows[[0, 1, 3, 4, 5, 6, 7]].any()
    receiver.channel.revoke(RESERVATIONS[0])

"""Test the wire format: the encoding of each message is pinned, and the error for invalid input names the field."""

import dataclasses

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.rpc import messages
from shared.rpc.codec import DecodeError, decode, encode
from shared.rpc.messages import (
    Ack,
    CommitRequest,
    pack_ids,
    unpack_ids,
)
from tests.shared.message_examples import EXAMPLES


@pytest.mark.parametrize(("message", "wire"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_the_bytes_of_a_message_never_change(message: object, wire: str) -> None:
    assert encode(message).hex() == wire
    assert decode(bytes.fromhex(wire), type(message)) == message


def test_every_message_has_an_example() -> None:
    kinds = {kind for kind in vars(messages).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    assert kinds == {type(message) for message, _ in EXAMPLES}


def test_missing_fields_take_their_defaults_and_extra_fields_are_skipped() -> None:
    """These rules let adjacent versions exchange messages, because new fields are always appended."""
    assert decode(msgpack.packb([]), Ack) == Ack()
    assert decode(msgpack.packb([*dataclasses.astuple(Ack()), "of a later version", {"x": [1]}]), Ack) == Ack()


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ([1], "CommitRequest is not an array of at least 3 fields"),
        ({"ticket": b""}, "CommitRequest is not an array"),
        ([b"t", "4", b""], "CommitRequest.first_token is str, not int"),
        ([b"t", True, b""], "CommitRequest.first_token is bool, not int"),
        ([b"t", 4.0, b""], "CommitRequest.first_token is float, not int"),
        (["t", 4, b""], "CommitRequest.reservation_id is str, not bytes"),
        ([b"t", None, b""], "CommitRequest.first_token is NoneType"),
    ],
)
def test_the_error_for_a_value_of_a_wrong_type_names_the_field(value: object, complaint: str) -> None:
    with pytest.raises(DecodeError, match=complaint):
        decode(msgpack.packb(value), CommitRequest)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode(Ack()) + b"\x00",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000 + b"\x00",
        b"\xd4\x01\x00",
        b"\x91\xa2\xff\xfe",
    ],
    ids=["empty", "never used", "trailing", "huge array", "deep", "extension", "not utf-8"],
)
def test_malformed_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(data, Ack)


@settings(max_examples=300)
@given(st.binary(max_size=200), st.sampled_from([type(message) for message, _ in EXAMPLES]))
def test_random_bytes_decode_or_are_refused(data: bytes, kind: type) -> None:
    try:
        message = decode(data, kind)
    except DecodeError:
        return
    assert decode(encode(message), kind) == message


def test_token_ids_are_sent_as_int32() -> None:
    assert unpack_ids(pack_ids([0, 1, 2**31 - 1])) == [0, 1, 2**31 - 1]
    with pytest.raises(ValueError, match="negative"):
        unpack_ids(b"\xff\xff\xff\xff")
    with pytest.raises(ValueError):  # noqa: PT011 - the array module defines the message
        unpack_ids(b"\x00\x00\x00")

"""Test the wire format: the encoding of each message is pinned, and adjacent versions read each other's messages."""

import dataclasses
from typing import Any

import msgpack
import pytest

from shared.rpc import messages
from shared.rpc.codec import decode, encode
from shared.rpc.messages import Ack, NodeUpdate, TokenDelta, pack_ids, unpack_ids
from tests.shared.message_examples import EXAMPLES


def complete(message: Any) -> list[Any]:
    return [getattr(message, field.name) for field in dataclasses.fields(message)]


@pytest.mark.parametrize(("message", "wire"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_the_fields_and_defaults_of_a_message_never_change(message: Any, wire: str) -> None:
    """The examples have all fields, as earlier versions sent them."""
    assert msgpack.packb(message, default=complete).hex() == wire
    assert decode(bytes.fromhex(wire), type(message)) == message
    assert decode(encode(message), type(message)) == message


def test_the_last_fields_are_omitted_if_they_have_their_defaults() -> None:
    assert msgpack.unpackb(encode(Ack())) == []
    assert msgpack.unpackb(encode(NodeUpdate([TokenDelta("r", tokens=b"t")]))) == [[["r", 0, b"t"]]]
    assert msgpack.unpackb(encode(TokenDelta("r", retry=True))) == ["r", 0, b"", "", "", False, 0, [], [], True]


def test_every_message_has_an_example() -> None:
    kinds = {kind for kind in vars(messages).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    assert kinds == {type(message) for message, _ in EXAMPLES}


def test_missing_fields_take_their_defaults_and_extra_fields_are_skipped() -> None:
    """These rules let adjacent versions exchange messages, because new fields are always appended."""
    assert decode(msgpack.packb([]), Ack) == Ack()
    assert decode(msgpack.packb([*dataclasses.astuple(Ack()), "of a later version", {"x": [1]}]), Ack) == Ack()


def test_token_ids_are_sent_as_int32() -> None:
    assert unpack_ids(pack_ids([0, 1, 2**31 - 1])) == [0, 1, 2**31 - 1]
    with pytest.raises(ValueError, match="negative"):
        unpack_ids(b"\xff\xff\xff\xff")
    with pytest.raises(ValueError):  # noqa: PT011 - the array module defines the message
        unpack_ids(b"\x00\x00\x00")

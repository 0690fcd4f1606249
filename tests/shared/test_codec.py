"""The wire: every message's bytes are pinned, and whatever is not a message is refused with its field's name."""

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
    JoinReply,
    Logprobs,
    NodeInfo,
    NodeStats,
    NodeUpdate,
    PushedNotice,
    RenewReply,
    RenewRequest,
    RequestEvent,
    ReserveReply,
    ReserveRequest,
    RouterCommand,
    SamplingParams,
    SetRoleRequest,
    StepRecord,
    StopRequest,
    SubmitRequest,
    TokenDelta,
    pack_ids,
    unpack_ids,
)

SUBMIT = SubmitRequest("r", "router", pack_ids([1, 2]), 2, 5, SamplingParams(0.5, logit_bias={7: -1.0}, seed=3))

EXAMPLES: list[tuple[object, str]] = [
    (
        SamplingParams(0.5, logit_bias={7: -1.0}, seed=3),
        "9bcb3fe0000000000000cb3ff000000000000000cb000000000000000003cb3ff0000000000000cb0000000000000000cb00000000000000008107cbbff0000000000000c0c0",
    ),
    (
        SUBMIT,
        "9da172a6726f75746572c408010000000200000002059bcb3fe0000000000000cb3ff000000000000000cb000000000000000003cb3ff0000000000000cb0000000000000000cb00000000000000008107cbbff0000000000000c0c000c400c40000a0c3a0",
    ),
    (RouterCommand("router", aborts=["r"]), "93a6726f757465729091a172"),
    (Logprobs(4, -0.5, 1, [4], [-0.5]), "9504cbbfe000000000000001910491cbbfe0000000000000"),
    (TokenDelta("r", 3, pack_ids([9]), "stop"), "9aa17203c40409000000a473746f70a0c2009090c2"),
    (
        NodeStats(running=2, channels={"d": "shm"}),
        "dc001ea572656164790200000000000000000000000000000000000081a164a373686d00909000000000a0a0",
    ),
    (
        StepRecord(
            *(7, 10**18, 1500, 40, 1450, 64, "slo", 1, 32, 528, 2, 70, 0, 3, 1, 5, 4, 3, 2),
            members=pack_ids([4, 0, 32]),
        ),
        "dc001407cf0de0b6b3a7640000cd05dc28cd05aa40a3736c6f0120cd0210024600030105040302c40c040000000000000020000000",
    ),
    (
        RequestEvent("r", "transfer", 10**18, 250, -1, 2, 512, "h:1", "shm"),
        "9aa172a87472616e73666572cf0de0b6b3a7640000ccfaff02cd0200a3683a31a373686da0",
    ),
    (NodeUpdate([TokenDelta("r")]), "94919aa17200c400a0a0c2009090c2c09090"),
    (
        NodeInfo("n", "b", "decode", "h:1", "m", "f", 16, 64, 9, 512, 8),
        "9fa16ea162a66465636f6465a3683a31a16da166104009cd020008a0a5726561647980a0",
    ),
    (JoinReply("router"), "91a6726f75746572"),
    (
        ReserveRequest(SUBMIT, "w", "f"),
        "939da172a6726f75746572c408010000000200000002059bcb3fe0000000000000cb3ff000000000000000cb000000000000000003cb3ff0000000000000cb0000000000000000cb00000000000000008107cbbff0000000000000c0c000c400c40000a0c3a0a177a166",
    ),
    (ReserveReply(b"t", 1, pack_ids([5]), {"shm": b"c"}), "96c4017401c4040500000081a373686dc40163a0c400"),
    (CommitRequest(b"t", 4, b"s"), "93c4017404c40173"),
    (PushedNotice(b"t", b"s"), "92c40174c40173"),
    (RenewRequest("w", b"tt"), "92a177c4027474"),
    (RenewReply("", True, b"t"), "93a0c3c40174"),
    (StopRequest(b"t", "why", "r"), "93c40174a3776879a172"),
    (SetRoleRequest("decode"), "92a66465636f6465cb403e000000000000"),
    (Ack(), "92a0c2"),
]


@pytest.mark.parametrize(("message", "wire"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_the_bytes_of_a_message_never_change(message: object, wire: str) -> None:
    assert encode(message).hex() == wire
    assert decode(bytes.fromhex(wire), type(message)) == message


def test_every_message_has_an_example() -> None:
    kinds = {kind for kind in vars(messages).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    assert kinds == {type(message) for message, _ in EXAMPLES}


def test_a_shorter_array_takes_defaults_and_a_longer_one_is_cut() -> None:
    assert decode(msgpack.packb([]), Ack) == Ack()
    assert decode(msgpack.packb(["router", "from a later version", {"x": [1]}]), JoinReply) == JoinReply("router")


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
def test_what_does_not_fit_is_refused_by_field(value: object, complaint: str) -> None:
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


def test_token_ids_travel_as_int32() -> None:
    assert unpack_ids(pack_ids([0, 1, 2**31 - 1])) == [0, 1, 2**31 - 1]
    with pytest.raises(ValueError, match="negative"):
        unpack_ids(b"\xff\xff\xff\xff")
    with pytest.raises(ValueError):  # noqa: PT011 - the array module's own words
        unpack_ids(b"\x00\x00\x00")

"""Test that malformed control messages are rejected before use, and that the error names the field."""

import math
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from node.validation import RANGES, check_submit
from shared.limits import MAX_IMAGES
from shared.registry import check_node
from shared.rpc.codec import MAX_ITEMS, MAX_MESSAGE_BYTES, DecodeError, decode, encode
from shared.rpc.messages import (
    Ack,
    CommitRequest,
    Media,
    NodeInfo,
    NodeStats,
    NodeUpdate,
    RouterCommand,
    SamplingParams,
    SubmitRequest,
    ThinkingBudget,
    TokenDelta,
    pack_ids,
)

MIB = 1 << 20
SUBMIT = SubmitRequest("r", "router", pack_ids([1, 2]), 2, 5, SamplingParams(0.5, logit_bias={7: -1.0}, seed=3))
INFO = NodeInfo("d0", "boot-1", "decode", "127.0.0.1:1", "m", "print", 4, 64, 100, 512, 8)


def array(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big")


BOMBS: dict[str, tuple[bytes, type]] = {
    "10 M empty maps in place of a text": (b"\x91" + array(10 * MIB) + b"\x80" * 10 * MIB, Ack),
    "10 M empty maps as a list of deltas": (b"\x91" + array(10 * MIB) + b"\x80" * 10 * MIB, NodeUpdate),
    "10 M empty maps in a field of a later version": (b"\x92\xa0" + array(10 * MIB) + b"\x80" * 10 * MIB, Ack),
    "16 M fields": (array(16 * MIB - 9) + b"\xa0" * (16 * MIB - 9), Ack),
    "a list of 16 M numbers": (b"\x91" + array(15 * MIB) + b"\x00" * 15 * MIB, RouterCommand),
    "nested arrays of a million": (b"\x91" + array(MIB) * 3 * MIB, Ack),
    "nested arrays of a million, skipped": (b"\x92\xa0" + array(MIB) * 3 * MIB, Ack),
    "depth 100,000": (b"\x91" * 100_000 + b"\x00", Ack),
    "a map of 4 G": (b"\x92\xa1x\xdf\xff\xff\xff\xff", NodeStats),
    "a text of 4 G": (b"\x91\xdb\xff\xff\xff\xff", Ack),
}


@pytest.mark.parametrize(("data", "kind"), BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_rejected_before_it_is_built(data: bytes, kind: type) -> None:
    decode(encode(Ack()), Ack)
    began = time.thread_time()
    with pytest.raises(DecodeError, match=kind.__name__):
        decode(data, kind)
    took_s = time.thread_time() - began
    assert took_s < 0.010 * max(1.0, len(data) / MIB) + 0.05, "10 ms per MiB"
    tracemalloc.start()
    with pytest.raises(DecodeError):
        decode(data, kind)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * len(data) + 64 * 1024


def test_the_most_expensive_valid_message_is_cheap() -> None:
    """The message has the maximum number of deltas, and each delta has the minimum size: two bytes."""
    count = MAX_ITEMS // 16
    began = time.thread_time()
    assert len(decode(b"\x91" + array(count) + b"\x91\xa0" * count, NodeUpdate).deltas) == count
    assert time.thread_time() - began < 2.0
    with pytest.raises(DecodeError, match="too many"):
        decode(b"\x91" + array(count + 1) + b"\x91\xa0" * (count + 1), NodeUpdate)


STRANGE: dict[str, tuple[object, type, str]] = {
    "an extension": (msgpack.ExtType(1, b"x"), Ack, "Ack"),
    "a timestamp": ([msgpack.Timestamp(1), False], Ack, "Ack.error"),
    "an array instead of a text": ([["x"], False], Ack, "Ack.error"),
    "a map for a message": ({"error": ""}, Ack, "Ack is not an array"),
    "bytes for a text": ([b"x", False], Ack, "Ack.error is bytes, not str"),
    "a text for bytes": (["t", 1, b""], CommitRequest, "CommitRequest.reservation_id is str, not bytes"),
    "too few fields": ([1], CommitRequest, "CommitRequest is not an array of at least 3 fields"),
    "nothing for a number": ([b"t", None, b""], CommitRequest, "CommitRequest.first_token is NoneType"),
    "a text for a number": ([b"t", "4", b""], CommitRequest, "CommitRequest.first_token is str, not int"),
    "a number of 64 bits for a text": ([2**64 - 1, False], Ack, "Ack.error is int"),
    "true for a number": ([b"t", True, b""], CommitRequest, "CommitRequest.first_token is bool"),
    "NaN for a number": ([b"t", math.nan, b""], CommitRequest, "CommitRequest.first_token is float"),
    "an empty list for a number": ([b"t", [], b""], CommitRequest, "CommitRequest.first_token is list"),
}


@pytest.mark.parametrize(("value", "kind", "complaint"), STRANGE.values(), ids=STRANGE)
def test_a_value_of_another_type_is_rejected_by_field(value: object, kind: type, complaint: str) -> None:
    with pytest.raises(DecodeError, match=complaint):
        decode(msgpack.packb(value), kind)


def with_channels(pairs: bytes) -> bytes:
    """Return an encoded NodeStats in which `pairs` replaces the bytes of the map `channels`."""
    whole = encode(NodeStats(channels={"d": "shm"}))
    assert whole.count(b"\x81\xa1d\xa3shm") == 1
    return whole.replace(b"\x81\xa1d\xa3shm", pairs)


@pytest.mark.parametrize(
    ("pairs", "complaint"),
    [
        (b"\x82\xa1d\xa3shm\xa1d\xa3tcp", "NodeStats.channels has a duplicate key"),
        (b"\x81\x01\xa3shm", "NodeStats.channels is int, not str"),
        (b"\x81\xc4\x01d\xa3shm", "NodeStats.channels is bytes, not str"),
        (b"\x81\x90\xa3shm", "NodeStats.channels is list, not str"),
        (b"\x90", "NodeStats.channels is not a dict"),
    ],
)
def test_a_malformed_map_is_rejected(pairs: bytes, complaint: str) -> None:
    with pytest.raises(DecodeError, match=complaint):
        decode(with_channels(pairs), NodeStats)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (encode(Ack()) + b"\xc0", "follow its end"),
        (encode(Ack()) * 2, "follow its end"),
        (bytes(MAX_MESSAGE_BYTES + 1), "at most 67108864"),
        (b"", "Ack"),
        (b"\xc1", "Ack"),
        (b"\x91\xa2\xff\xfe", "Ack"),
    ],
    ids=["a byte follows", "two messages", "over the limit", "empty", "an unused code", "not UTF-8"],
)
def test_malformed_bytes_are_rejected(data: bytes, complaint: str) -> None:
    with pytest.raises(DecodeError, match=complaint):
        decode(data, Ack)


def test_every_truncated_message_is_rejected() -> None:
    whole = encode(NodeUpdate([TokenDelta("r", logprobs=[])], NodeStats()))
    for length in range(len(whole)):
        with pytest.raises(DecodeError):
            decode(whole[:length], NodeUpdate)


# ---- numbers -------------------------------------------------------------------------------------------------------

IMAGE = Media(0, 1, 2, bytes(16), 2, 1, bytes(6))
WRONG_SUBMITS: list[tuple[SubmitRequest, str]] = [
    *((replace(SUBMIT, sampling=replace(SUBMIT.sampling, **{name: value})), f"ampling(Params)?.{name}")
      for name, (low, high) in RANGES.items() for value in (int(low) - 1, int(high) + 1, math.nan)
      if not low <= value <= high and not abs(value) >= 2**63),
    (replace(SUBMIT, sampling=SamplingParams(temperature=math.inf)), "sampling.temperature is inf: it must be from 0 to 100"),
    (replace(SUBMIT, sampling=SamplingParams(logit_bias={10: 1.0})), "token of sampling.logit_bias is 10: .* from 0 to 9"),
    (replace(SUBMIT, sampling=SamplingParams(logit_bias={-1: 1.0})), "token of sampling.logit_bias is -1"),
    (replace(SUBMIT, sampling=SamplingParams(allowed_tokens=pack_ids([10]))), "token of sampling.allowed_tokens is 10"),
    (replace(SUBMIT, sampling=SamplingParams(bad_words=[pack_ids([1, 10])])), "token of sampling.bad_words is 10"),
    (replace(SUBMIT, sampling=SamplingParams(bad_words=[b""])), "length of sampling.bad_words is 0"),
    (replace(SUBMIT, sampling=SamplingParams(bad_words=[b"\0\0\0"])), "bytes"),
    (replace(SUBMIT, sampling=SamplingParams(bad_words=[pack_ids([1])] * 257)), "number of sampling.bad_words is 257"),
    *(
        (replace(SUBMIT, sampling=SamplingParams(thinking=replace(ThinkingBudget(1, 1, pack_ids([2])), **fields))), says)
        for fields, says in (
            ({"num_tokens": -1}, "sampling.thinking.num_tokens is -1"),
            ({"begin": -2}, "sampling.thinking.begin is -2"),
            ({"start": 10}, "sampling.thinking.start is 10"),
            ({"ends": b""}, "number of sampling.thinking.ends is 0"),
            ({"ends": pack_ids([3, 10])}, "token of sampling.thinking.ends is 10"),
        )
    ),
    (replace(SUBMIT, grammar="x" * (MIB + 1)), "length of grammar is 1048577: it must be from 0 to 1048576"),
    (replace(SUBMIT, sampling=SamplingParams(logit_bias={1: math.nan})), "value of sampling.logit_bias is nan"),
    (replace(SUBMIT, sampling=SamplingParams(logit_bias=dict.fromkeys(range(301), 0.0))), "number of sampling.logit_bias"),
    (replace(SUBMIT, max_tokens=0), "max_tokens is 0"),
    (replace(SUBMIT, max_tokens=2**63), "max_tokens .*is 92233720368547758"),
    (replace(SUBMIT, min_tokens=-1), "min_tokens is -1"),
    (replace(SUBMIT, priority=2**40), "priority is 1099511627776"),
    (replace(SUBMIT, num_prompt=0), "num_prompt is 0"),
    (replace(SUBMIT, num_prompt=3), "num_prompt is 3"),
    (replace(SUBMIT, tokens=b""), "number of tokens is 0"),
    (replace(SUBMIT, tokens=b"\x01"), "multiple"),
    (replace(SUBMIT, tokens=b"\xff" * 4, num_prompt=1), "negative"),
    (replace(SUBMIT, tokens=pack_ids([10]), num_prompt=1), "token id 10 is beyond the vocabulary of 10"),
    (replace(SUBMIT, tokens=pack_ids([1] * 33)), "number of tokens is 33"),
    (replace(SUBMIT, stop_tokens=bytes(4 * 5000)), "number of stop_tokens is 5000"),
    (replace(SUBMIT, id=""), "length of id is 0"),
    (replace(SUBMIT, id="r" * 300), "length of id is 300"),
    (replace(SUBMIT, salt=bytes(300)), "length of salt is 300"),
    (replace(SUBMIT, traceparent="t" * 300), "length of traceparent is 300"),
    (replace(SUBMIT, decode_node="file:///etc/passwd"), "decode_node is 'file"),
    (replace(SUBMIT, decode_node="host"), "decode_node is 'host'"),
    (replace(SUBMIT, stop_tokens=b"\xff" * 4), "negative"),
    (replace(SUBMIT, media=[IMAGE] * (MAX_IMAGES + 1)), "number of media is 257"),
    (replace(SUBMIT, media=[replace(IMAGE, rows=0)]), "media.rows is 0"),
    (replace(SUBMIT, media=[replace(IMAGE, columns=-1)]), "media.columns is -1"),
    (replace(SUBMIT, media=[replace(IMAGE, offset=1)]), "media.offset is 1: it must be from 0 to 0"),
    (replace(SUBMIT, media=[IMAGE, IMAGE]), "media.offset is 0: it must be from 2 to 0"),
    (replace(SUBMIT, media=[replace(IMAGE, digest=b"")]), "length of media.digest is 0"),
    (replace(SUBMIT, media=[replace(IMAGE, width=0)]), "media.width is 0"),
    (replace(SUBMIT, media=[replace(IMAGE, height=2)]), "length of media.pixels is 6: it must be from 12 to 12"),
    (replace(SUBMIT, media=[replace(IMAGE, pixels=bytes(49 * MIB))]), "bytes of media is 51380224"),
]  # fmt: skip


@pytest.mark.parametrize(("submit", "complaint"), WRONG_SUBMITS, ids=[complaint for _, complaint in WRONG_SUBMITS])
def test_a_request_that_no_router_sends_is_rejected_by_field(submit: SubmitRequest, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as rejected:
        check_submit(decode(encode(submit), SubmitRequest), max_model_len=32, vocab_size=10)
    assert "\n" not in str(rejected.value)
    assert len(str(rejected.value)) < 200


def test_everything_that_the_api_allows_is_accepted() -> None:
    widest = SamplingParams(2.0, 5e-324, 2**31 - 1, 1.0, 2**63 - 1, 100.0, 2.0, -2.0, {9: -100.0}, 20, 20)
    for sampling in (SamplingParams(), SamplingParams(0.0, repetition_penalty=1e-5), widest):
        assert check_submit(replace(SUBMIT, sampling=sampling), 32, 10) == [1, 2]


# ---- nodes ---------------------------------------------------------------------------------------------------------

WRONG_NODES: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, f"NodeInfo.{name} must be from 1") for name in ("block_tokens", "num_blocks", "max_model_len")
      for value in (0, -1, 2**63)),
    *(({"address": address}, "NodeInfo.address must be host:port") for address in (
        "", ":", "h:", "h:0", "h:70000", "h:-1", "h:1x", "h:\u0661", "h", "http://h:1/", "a b:1", "h:1\n", "x" * 300 + ":1")),
    *(({"id": name}, "NodeInfo.id") for name in ("", "a b", "../x", "x" * 65, "n\n")),
    ({"incarnation_id": ""}, "NodeInfo.id and .incarnation_id"),
    ({"role": "king"}, "NodeInfo.role must be prefill or decode"),
    ({"attributes": {str(number): "" for number in range(65)}}, "at most 64 attributes"),
    ({"attributes": {"x": "y" * 1025}}, "texts of 1024"),
    ({"fingerprint": "y" * 1025}, "texts of 1024"),
    ({"adapters": {str(number): "" for number in range(1025)}}, "at most 1024 adapters"),
    ({"adapters": {"x" * 1025: "y"}}, "names of 1024"),
    ({"adapters": {"x": "y" * 1025}}, "texts of 1024"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "complaint"), WRONG_NODES, ids=[str(changes)[:40] for changes, _ in WRONG_NODES])
def test_an_invalid_node_is_not_listed(changes: dict[str, Any], complaint: str) -> None:
    check_node(INFO)
    with pytest.raises(DecodeError, match=complaint):
        check_node(decode(encode(replace(INFO, **changes)), NodeInfo))

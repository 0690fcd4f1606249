"""Fuzz targets: messages from peers over the control plane and the KV channel."""

from contextlib import suppress
from functools import cache

from node.validation import check_submit
from shared.kv.channel import DescriptorError, PeerDescriptor
from shared.kv.connections import HELLO, MAGIC, VERSION, Greeting, MalformedError
from shared.kv.tcp import FRAME
from shared.registry import check_node
from shared.rpc.codec import DecodeError, decode, encode
from shared.rpc.messages import NodeInfo, SubmitRequest
from tests.fuzz.kv import FakeReceiver
from tests.fuzz.target import target
from tests.shared.message_examples import EXAMPLES

KINDS = [type(message) for message, _ in EXAMPLES]


@target(*(bytes([number]) + bytes.fromhex(wire) for number, (_, wire) in enumerate(EXAMPLES)), rejects=DecodeError)
def control_messages(data: bytes) -> None:
    """Decode a message. The first byte selects its type, and the remaining bytes are the message."""
    if not data:
        return
    kind = KINDS[data[0] % len(KINDS)]
    again = encode(decode(data[1:], kind))
    assert encode(decode(again, kind)) == again


@target(encode(NodeInfo("n", "b", "decode", "h:1", "m", "f", 16, 64, 9, 512, 8, attributes={"a": "b"})))
def registry_entries(data: bytes) -> None:
    with suppress(DecodeError):
        info = decode(data, NodeInfo)
        check_node(info)
        host, _, port = info.address.rpartition(":")
        assert host
        assert 1 <= int(port) <= 65_535


@target(*(bytes.fromhex(wire) for message, wire in EXAMPLES if isinstance(message, SubmitRequest)))
def submits(data: bytes) -> None:
    with suppress(ValueError):  # includes DecodeError
        submit = decode(data, SubmitRequest)
        tokens = check_submit(submit, max_model_len=64, vocab_size=10)
        assert 0 < len(tokens) <= 64
        assert 0 <= min(tokens) <= max(tokens) < 10
        assert 0 <= submit.sampling.temperature <= 100, "no NaN"


# ---- the KV channel ----------------------------------------------------------------------------------------------------


@target(*(PeerDescriptor(name, "127.0.0.1", "5000", "0" * 32, 64, 8).pack() for name in ("tcp", "shm", "cuda_ipc")))
def descriptors(data: bytes) -> None:
    for channel in ("tcp", "shm", "cuda_ipc"):
        with suppress(DescriptorError):
            descriptor = PeerDescriptor.unpack(data, channel)
            assert PeerDescriptor.unpack(descriptor.pack(), channel) == descriptor
            assert 0 < descriptor.num_rows < 2**32


RESERVATION = bytes(range(16))


@cache
def _receiver() -> FakeReceiver:
    receiver = FakeReceiver(8, 16)
    receiver.channel.grant(RESERVATION, [1, 2])
    return receiver


def _frame(rows: list[int]) -> bytes:
    return FRAME.pack(MAGIC, VERSION, len(rows), RESERVATION, 16) + b"".join(row.to_bytes(4, "little") for row in rows)


@target(_frame([1, 2]) + bytes(32) + _frame([]), _frame([1, 3]) + bytes(32), _frame([]) * 3)
def frames(data: bytes) -> None:
    receiver = _receiver()
    with suppress(MalformedError):
        receiver.receive(data)
    assert not receiver.memory.rows[[0, 3, 4, 5, 6, 7]].any(), "rows outside the reservation"


@target(
    HELLO.pack(MAGIC, VERSION, 16, b"f" * 32, b"0" * 32, RESERVATION),
    HELLO.pack(MAGIC, VERSION, 15, b"f" * 32, b"0" * 32, RESERVATION),
)
def greetings(data: bytes) -> None:
    with suppress(MalformedError):
        greeting = Greeting.unpack(data[: HELLO.size].ljust(HELLO.size, b"\0"))
        assert len(greeting.writer) == 32

"""Fuzz targets: what peers say, over the control plane and the KV channel."""

from contextlib import suppress
from functools import cache
from typing import Any

from node.validation import check_submit
from shared.kv.channel import DescriptorError, PeerDescriptor
from shared.kv.listener import HELLO, MAGIC, VERSION, MalformedError
from shared.kv.tcp import FRAME
from shared.registry import check_node
from shared.rpc.codec import DecodeError, decode, encode
from shared.rpc.messages import NodeInfo, SubmitRequest
from tests.fuzz.kv import PlayedReceiver
from tests.fuzz.target import one_line, target
from tests.shared.test_codec import EXAMPLES

KINDS = [type(message) for message, _ in EXAMPLES]


@target(*(bytes([number]) + bytes.fromhex(wire) for number, (_, wire) in enumerate(EXAMPLES)))
def control_messages(data: bytes) -> None:
    """The first byte says which message the rest is taken for."""
    if not data:
        return
    kind = KINDS[data[0] % len(KINDS)]
    try:
        message = decode(data[1:], kind)
    except DecodeError as error:
        one_line(error)
        return
    again = encode(message)
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
    with suppress(ValueError):  # Malformed is one
        submit = decode(data, SubmitRequest)
        tokens = check_submit(submit, max_model_len=64, vocab_size=10)
        assert 0 < len(tokens) <= 64
        assert 0 <= min(tokens) <= max(tokens) < 10
        assert 0 <= submit.sampling.temperature <= 100, "no NaN"


# ---- the KV channel ----------------------------------------------------------------------------------------------------


@target(*(PeerDescriptor(name, "127.0.0.1", "5000", "0" * 32, 64, 8).pack() for name in ("tcp", "shm", "cuda_ipc")))
def cards(data: bytes) -> None:
    for channel in ("tcp", "shm", "cuda_ipc"):
        with suppress(DescriptorError):
            card = PeerDescriptor.unpack(data, channel)
            assert PeerDescriptor.unpack(card.pack(), channel) == card
            assert 0 < card.num_rows < 2**32


TICKET = bytes(range(16))


@cache
def _receiver() -> PlayedReceiver:
    receiver = PlayedReceiver(8, 16)
    receiver.channel.grant(TICKET, [1, 2])
    return receiver


def _frame(rows: list[int]) -> bytes:
    return FRAME.pack(MAGIC, VERSION, len(rows), TICKET, 16) + b"".join(row.to_bytes(4, "little") for row in rows)


@target(_frame([1, 2]) + bytes(32) + _frame([]), _frame([1, 3]) + bytes(32), _frame([]) * 3)
def frames(data: bytes) -> None:
    receiver = _receiver()
    with suppress(MalformedError):
        receiver.hear(data)
    assert not receiver.memory.rows[[0, 3, 4, 5, 6, 7]].any(), "rows outside of the ticket"


class PlayedSocket:
    """A writer that says `data` and hangs up."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def settimeout(self, _: float) -> None:
        pass

    def recv(self, size: int) -> bytes:
        piece, self._data = self._data[:size], self._data[size:]
        return piece

    def sendall(self, data: bytes) -> None:
        assert len(data) < 128


@target(
    HELLO.pack(MAGIC, VERSION, 16, b"f" * 32, b"0" * 32, TICKET),
    HELLO.pack(MAGIC, VERSION, 15, b"f" * 32, b"0" * 32, TICKET),
)
def introductions(data: bytes) -> None:
    listener: Any = _receiver().channel._listener
    with suppress(MalformedError, EOFError):
        boot = listener._introduction(PlayedSocket(data))
        if boot is not None:
            listener._release(boot)
            assert len(boot) == 32

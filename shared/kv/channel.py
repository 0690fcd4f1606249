"""The interface of a KV channel, which moves rows of bytes from our pool into the pool of a peer."""

import string
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Protocol, Self

RESERVATION_ID_BYTES = 16
MAX_DESCRIPTOR_BYTES = 1024
DESCRIPTOR_VERSION = "baton-kv-1"


class ChannelError(Exception):
    """A push failed, wholly or in part. The message is meant for an operator."""


class DescriptorError(ChannelError):
    """The descriptor is malformed, or its pool is on another machine or has another row size."""


class ReservationRefusedError(ChannelError):
    """The peer does not accept these rows under this reservation. The connection remains usable."""


class PeerLostError(ChannelError):
    """The peer has ended or disconnected, or was silent for too long. The next push connects again."""


class KVChannel(Protocol):
    """The KV transfers of one process in both directions: peers write into our pool, and we write into theirs.

    A pool is a 2-D byte matrix, and a push copies whole rows. If `fenced` is true, the receiver drops rows that arrive
    for a revoked reservation. Otherwise, writes are one-sided. The receiver may then reuse the rows of a revoked
    reservation only after the writer has reported that it stopped, or after `fence_writer` has returned True. The
    callback `on_writer_lost` reports the end of a writer's last connection.
    """

    name: str
    fenced: bool

    def descriptor(self) -> bytes:
        """Receiver: return a description of our pool. The peer's channel of the same name can parse it."""

    def grant(self, reservation_id: bytes, rows: Sequence[int]) -> None:
        """Receiver: allow writes to these rows under `reservation_id` (16 bytes, hard to guess, never used again).

        Raises ValueError if the id does not have 16 bytes or is already open, or if a row is outside our pool.
        """

    def revoke(self, reservation_id: bytes) -> None:
        """Receiver: end a reservation. If `fenced` is true, nothing is written under it after this call. Idempotent."""

    def fence_writer(self, incarnation_id: str) -> bool:
        """Receiver: refuse the process with this incarnation id from now on, because it is considered dead.

        If the process is connected, only return False. The process can then write until `on_writer_lost` is called.
        """

    def reachable(self, descriptor: bytes) -> bool:
        """Writer: return whether a push to the owner of `descriptor` could succeed. Raises DescriptorError."""

    async def push(
        self, descriptor: bytes, reservation_id: bytes, source: Sequence[int], target: Sequence[int]
    ) -> None:
        """Writer: copy our rows `source` to the peer's rows `target`, and wait until they can be read there.

        Raises ChannelError. After the call has ended, even by cancellation, nothing more is written.
        """

    async def close(self) -> None:
        """End both directions: fail the pushes in progress, and close the connections to peers. Idempotent."""


@dataclass(frozen=True, slots=True)
class PeerDescriptor:
    """The address of a peer's pool. Each channel defines what `host` and `endpoint` mean. A restart of the peer changes
    `incarnation_id`."""

    channel: str
    host: str
    endpoint: str
    incarnation_id: str
    row_bytes: int
    num_rows: int

    def pack(self) -> bytes:
        return "\n".join(map(str, (DESCRIPTOR_VERSION, *astuple(self)))).encode()

    @classmethod
    def unpack(cls, data: bytes, channel: str) -> Self:
        """Return the descriptor in `data`, which comes from a peer. Raises DescriptorError if `data` is not a
        descriptor of `channel`."""
        try:
            version, name, host, endpoint, incarnation_id, *counts = data[:MAX_DESCRIPTOR_BYTES].decode().split("\n")
            row_bytes, num_rows = map(_count, counts)
        except ValueError as error:  # includes UnicodeDecodeError
            raise DescriptorError(f"not the descriptor of a KV channel: {error}") from error
        if (version, name) != (DESCRIPTOR_VERSION, channel) or not is_incarnation_id(incarnation_id):
            raise DescriptorError(f"not the descriptor of a {channel} channel: {version} {name}")
        return cls(name, host, endpoint, incarnation_id, row_bytes, num_rows)

    def check_row_bytes(self, row_bytes: int) -> None:
        if self.row_bytes != row_bytes:
            raise DescriptorError(
                f"the peer's KV rows have {self.row_bytes} bytes, ours {row_bytes}: both sides need the same model, "
                "KV dtype and block size"
            )


def is_incarnation_id(text: str) -> bool:
    return len(text) == 32 and set(text) <= set(string.hexdigits)


def check_open(reservation_id: bytes, rows: Sequence[int], num_rows: int) -> None:
    """Raise ValueError if `reservation_id` does not have 16 bytes, or if a row is outside a pool of `num_rows` rows."""
    if len(reservation_id) != RESERVATION_ID_BYTES:
        raise ValueError(f"a reservation id has {RESERVATION_ID_BYTES} bytes, not {len(reservation_id)}")
    if rows and not 0 <= min(rows) <= max(rows) < num_rows:
        raise ValueError(f"rows {min(rows)} to {max(rows)} are not all in a pool of {num_rows} rows")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**32):
        raise ValueError(f"{text[:20]!r} is not a count")
    return int(text)

"""What a KV channel is: it moves rows of bytes from our pool into a peer's, and knows nothing else of them."""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

RESERVATION_ID_BYTES = 16
MAX_DESCRIPTOR_BYTES = 1024
DESCRIPTOR_VERSION = "baton-kv-1"


class ChannelError(Exception):
    """A push did not happen, or not wholly. The text says why, in words for an operator."""


class DescriptorError(ChannelError):
    """The card is not one this channel can write to: garbled, another machine's, or of another row size."""


class ReservationRefusedError(ChannelError):
    """The peer takes no rows, or not these, under this ticket; the connection is well."""


class PeerLostError(ChannelError):
    """The peer ended, hung up, or was silent for too long. Another push may connect anew."""


class KVChannel(Protocol):
    """Both directions of one process: peers write into our pool, and we write into theirs.

    A KV block is one row of a 2-D byte matrix. `fenced` says who stops a stale writer. True: the receiver drops the
    rows of a shut ticket itself. False: writes are one-sided, so the rows of a shut ticket may be used again only
    when the writer said that it stopped, or its loss was told (`on_writer_lost`, given at the start).
    """

    name: str
    fenced: bool

    def descriptor(self) -> bytes:
        """Receiver: how a peer may write into our pool. Opaque to everyone but the peer's channel of that name."""
        ...

    def grant(self, ticket: bytes, rows: Sequence[int]) -> None:
        """Receiver: these rows of ours may be filled under `ticket` (16 bytes, hard to guess, never used again).

        Raises ValueError for a ticket of another length or already open, or a row outside our pool.
        """
        ...

    def revoke(self, ticket: bytes) -> None:
        """Receiver: when this returns, no further byte of the ticket lands (if `fenced`). Idempotent."""
        ...

    def fence_writer(self, boot: str) -> bool:
        """Receiver: refuse the process with this boot id from now on, as it is taken for dead.

        False: it is connected at this moment, so it can write until its loss is told, and is not barred.
        """
        ...

    def reachable(self, card: bytes) -> bool:
        """Writer: whether a push to the card's owner could work from here. Raises CardError for an unfit card."""
        ...

    async def push(self, card: bytes, ticket: bytes, source: Sequence[int], target: Sequence[int]) -> None:
        """Writer: copy our rows `source` to the peer's rows `target`; done when they are readable there.

        Raises ChannelError. However it ends, by cancellation too, this push writes nothing more afterwards.
        """
        ...

    async def close(self) -> None:
        """End both directions: pushes under way fail, peers see us gone. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class PeerDescriptor:
    """Where a peer's pool is: `host` and `endpoint` are a channel's own, `boot` fences off its past lives."""

    channel: str
    host: str
    endpoint: str
    incarnation_id: str
    row_bytes: int
    num_rows: int

    def pack(self) -> bytes:
        fields = (self.channel, self.host, self.endpoint, self.incarnation_id, self.row_bytes, self.num_rows)
        return "\n".join(map(str, (DESCRIPTOR_VERSION, *fields))).encode()

    @classmethod
    def unpack(cls, data: bytes, channel: str) -> Self:
        """Inverse of `pack`. Raises CardError for anything that is not a card of `channel`: peers send these."""
        try:
            version, name, host, endpoint, boot, row_bytes, num_rows = data[:MAX_DESCRIPTOR_BYTES].decode().split("\n")
            card = cls(name, host, endpoint, boot, _count(row_bytes), _count(num_rows))
        except ValueError as error:  # UnicodeDecodeError is one
            raise DescriptorError(f"not the card of a KV channel: {error}") from error
        if (version, name) != (DESCRIPTOR_VERSION, channel) or not is_incarnation_id(boot):
            raise DescriptorError(f"not the card of a {channel} channel: {version} {name}")
        return card

    def check_row_bytes(self, row_bytes: int) -> None:
        if self.row_bytes != row_bytes:
            raise DescriptorError(
                f"the peer's KV rows have {self.row_bytes} bytes, ours {row_bytes}: both sides need the same model, "
                "KV dtype and block size"
            )


def is_incarnation_id(text: str) -> bool:
    return len(text) == 32 and set(text) <= set(string.hexdigits)


def check_incarnation_id(boot: str) -> None:
    if not is_incarnation_id(boot):
        raise ValueError(f"a boot id has 32 hexadecimal digits, unlike {boot!r}")


def check_open(ticket: bytes, rows: Sequence[int], num_rows: int) -> None:
    """Raises ValueError unless `ticket` has its 16 bytes and every row is in a pool of `num_rows`."""
    if len(ticket) != RESERVATION_ID_BYTES:
        raise ValueError(f"a ticket has {RESERVATION_ID_BYTES} bytes, not {len(ticket)}")
    if rows and not 0 <= min(rows) <= max(rows) < num_rows:
        raise ValueError(f"rows {min(rows)} to {max(rows)} are not all in a pool of {num_rows}")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**32):
        raise ValueError(f"{text[:20]!r} is not a count")
    return int(text)

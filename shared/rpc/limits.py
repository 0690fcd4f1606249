"""What grpclib lacks against floods and nonsense: a budget of frames for a connection, and headers that are looked at
before a call is believed.

The budget is for rapid resets (CVE-2023-44487) and floods of pings, settings and empty frames.
"""

import contextlib
import re
import time
from collections.abc import Callable
from typing import Any, cast

import grpclib.protocol
import grpclib.server
from grpclib.const import Status
from grpclib.protocol import Stream as H2Stream
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import Event
from h2.exceptions import DenialOfServiceError
from h2.exceptions import ProtocolError as H2ProtocolError
from hyperframe.frame import DataFrame, Frame, RstStreamFrame

FRAMES_AT_ONCE = 10_000
FRAMES_PER_S = 5_000  # several times what 1,000 calls a second need
SMALL_BYTES = 64  # a data frame below this counts as one that carries nothing
RESET_FRAMES = 10  # what a reset counts: beginning and ending a call is what costs
REFUSED_FRAMES = 20
MAX_TIMEOUT_S = 3600
TIMEOUT = re.compile(r"(\d{1,20})([HMSmun])", re.ASCII)
UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
HEADERS = {":method", ":path", "content-type", "te", "grpc-timeout", "user-agent"}  # all that is believed of a call
Headers = list[tuple[str, str]]


class BudgetedConnection(H2Connection):
    """HTTP/2 with a budget for frames that carry next to nothing. Over it, the connection ends with GOAWAY
    ENHANCE_YOUR_CALM."""

    MAX_CLOSED_STREAMS = 1024  # remembered, 64 times fewer than h2 would: one is added with each handoff

    def __init__(self, config: H2Configuration | None = None) -> None:
        super().__init__(config=config)
        self._frames_left = float(FRAMES_AT_ONCE)
        self._earned_at = time.monotonic()

    def spend(self, frames: int) -> None:
        """Raises DenialOfServiceError when there are none left. What was earned is looked up only then."""
        self._frames_left -= frames
        if self._frames_left < 0:
            now = time.monotonic()
            self._frames_left = min(FRAMES_AT_ONCE, self._frames_left + FRAMES_PER_S * (now - self._earned_at))
            self._earned_at = now
            if self._frames_left < 0:
                raise DenialOfServiceError("too many frames that carry nothing")

    def _receive_frame(self, frame: Frame) -> list[Event]:
        if not isinstance(frame, DataFrame) or len(frame.data) < SMALL_BYTES:
            self.spend(RESET_FRAMES if isinstance(frame, RstStreamFrame) else 1)
        return super()._receive_frame(frame)


cast(Any, grpclib.protocol).H2Connection = BudgetedConnection  # grpclib has no hook for it


class CarefulHandler(grpclib.server.Handler):
    """Of one connection's calls. `refusal`: why none of them is taken; empty when they are."""

    refusal = ""

    def cancel(self, stream: H2Stream) -> None:
        if stream in self._tasks:  # else it is over, and let go of in a moment
            super().cancel(stream)

    def accept(self, stream: H2Stream, headers: Headers, release_stream: Callable[[], Any]) -> None:
        self.__gc_step__()
        try:
            if self.refusal:
                raise _Refused(Status.UNAUTHENTICATED, self.refusal)
            known = _believed(headers)
        except _Refused as refused:
            with contextlib.suppress(H2ProtocolError):  # the next frame finds out
                cast(BudgetedConnection, stream._h2_connection).spend(REFUSED_FRAMES)
            work = _answer(stream, *refused.args)
        else:
            work = grpclib.server.request_handler(
                self.mapping, stream, known, self.codec, self.status_details_codec, self.dispatch, lambda: None
            )
        task = self._tasks[stream] = self.loop.create_task(work)
        # Not left to the handler: one that is cancelled before it begins would never let go of the stream.
        task.add_done_callback(lambda _: release_stream())


class _Refused(Exception):
    """A call that nobody handles: its status, and why."""


def _believed(headers: Headers) -> Headers:
    """The headers that a call needs, its timeout within bounds. Raises _Refused."""
    known = [(name, value) for name, value in headers if name in HEADERS]
    names = [name for name, _ in known]
    if len(set(names)) < len(names) or not {":method", ":path"} <= set(names):
        raise _Refused(Status.INVALID_ARGUMENT, "a call has one :method and one :path, and no header twice")
    return [(name, _timeout(value) if name == "grpc-timeout" else value) for name, value in known]


def _timeout(text: str) -> str:
    match = TIMEOUT.fullmatch(text)
    if match is None:
        raise _Refused(Status.INVALID_ARGUMENT, "grpc-timeout: must be a whole number and one of H, M, S, m, u, n")
    seconds = int(match[1]) * UNIT_S[match[2]]
    if not seconds:
        raise _Refused(Status.DEADLINE_EXCEEDED, "grpc-timeout: is over before the call")
    return text if seconds < MAX_TIMEOUT_S else f"{MAX_TIMEOUT_S}S"


async def _answer(stream: H2Stream, status: Status, why: str) -> None:
    with contextlib.suppress(H2ProtocolError):  # it was reset meanwhile
        trailers = [("grpc-status", str(status.value)), ("grpc-message", why)]
        await stream.send_headers(
            [(":status", "200"), ("content-type", "application/grpc+msgpack"), *trailers], end_stream=True
        )
        if stream.closable:
            stream.reset_nowait()

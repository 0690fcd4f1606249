"""Decides whether an engine is alive. Nothing here reads a clock; callers pass the current time in seconds.

A slow engine is not dead: the process that answers `/metrics` and `/health` also serves all streams, and may take
seconds to answer under load. An engine is lost if its port refuses connections, if it reports that it is unhealthy, or
if its number of steps has fallen, which shows a restart. It is also lost if it fails one request after another while
its `/health` reports no problem. A draining vLLM server does this. An engine is stuck if it makes no progress. Progress
is a step, an event of an answer, or a change of the engine's load. The load is needed because vLLM's number of steps
omits steps that compute only a part of a prompt, but vLLM reports its load after every step. While the engine has no
requests, an answer to `/metrics` counts as progress too.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

MAX_FAULTS, WINDOW_S = 3, 10.0  # MAX_FAULTS faults of one kind within WINDOW_S seconds end the incarnation
# "malformed": an answer violates the protocol. "refused": the engine refused or gave up a valid request for a reason
# other than its load.
Fault = Literal["malformed", "refused"]
TEXTS: dict[Fault, str] = {"malformed": "gave malformed answers to", "refused": "refused or gave up"}


@dataclass(slots=True)
class EngineHealth:
    """The state of one incarnation of an engine."""

    stuck_s: float
    progress_at: float
    failure: str = ""  # the reason why the engine is lost, or "" while it is alive
    _num_steps: float = -1.0
    _load: tuple[float, ...] = ()
    _faults: dict[Fault, deque[float]] = field(default_factory=lambda: {"malformed": deque(), "refused": deque()})

    def streamed(self, now: float) -> None:
        """Record an event of an answer."""
        self.progress_at = now

    def scraped(self, now: float, num_steps: float, load: tuple[float, ...], num_requests: int) -> None:
        """Record an answer to `/metrics`. `load` contains the metrics that the engine sets after each step, and
        `num_requests` is the number of requests that this process runs on the engine."""
        if num_steps < self._num_steps:
            self.lost("it was restarted")
        if (num_steps, load) != (self._num_steps, self._load) or not num_requests:
            self.progress_at, self._num_steps, self._load = now, num_steps, load

    def failed(self, now: float, fault: Fault) -> None:
        """Record a request that failed because of a fault of the engine."""
        times = self._faults[fault]
        times.append(now)
        while now - times[0] > WINDOW_S:
            times.popleft()
        if len(times) >= MAX_FAULTS:
            self.lost(f"it {TEXTS[fault]} {MAX_FAULTS} requests within {WINDOW_S:g} s")

    def answered(self, began: float) -> None:
        """Record a complete answer to a request that was sent at `began`. Refusals before `began` no longer count."""
        refused = self._faults["refused"]
        while refused and refused[0] <= began:
            refused.popleft()

    def lost(self, reason: str) -> None:
        self.failure = self.failure or reason

    def check(self, now: float) -> str:
        """Return the reason why the engine is lost or stuck, or ""."""
        if now - self.progress_at > self.stuck_s:
            self.lost(f"it made no progress for {self.stuck_s:g} s")
        return self.failure

"""What a sample has been through, and where it may go on: whom it avoids, who still holds its KV, when it is given up.

A node that died takes its requests with it, and they go on at once. Everything else that goes on elsewhere is a retry,
and retries of all requests together are kept to a small share of them: they must not be what overloads the nodes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from router.dispatch.attempt import HANDOFF, Attempt, AttemptFailed
from router.nodes.connection import NodeConnection
from shared.errors import RequestError, UnavailableError

MAX_DEATHS = 2  # of nodes under a request, before it counts as their cause
RETRY_SHARE = 0.1  # of the requests
RETRIES_PER_S = 3.0  # beside that
BURST_S = 10.0  # so long they may be saved up
MAX_RETRY_WAIT_S = 10.0


class RetryBudget:
    """Of all requests together: a tenth of them, and 3 a second. Finagle's, but a retry waits for its turn."""

    def __init__(self) -> None:
        self._now = 0.0
        self._level = RETRIES_PER_S * BURST_S

    def requested(self) -> None:
        self._level = min(self._level + RETRY_SHARE, RETRIES_PER_S * BURST_S)

    def take(self, now: float) -> float:
        """Seconds to wait before one more retry. Raises Unavailable when too many wait already."""
        passed_s, self._now = max(0.0, now - self._now), now
        self._level = min(self._level + passed_s * RETRIES_PER_S, RETRIES_PER_S * BURST_S)
        wait_s = max(0.0, 1.0 - self._level) / RETRIES_PER_S
        if wait_s > MAX_RETRY_WAIT_S:
            raise UnavailableError(
                "Too many requests fail on the nodes at once; try again later.", wait_s, code="retries"
            )
        self._level -= 1.0
        return wait_s


@dataclass(slots=True)
class Failover:
    """Of one sample. `avoid`: nodes that it is not placed on where others are. `holder`: the prefill node that has its
    prompt's KV still, "" where none does."""

    max_attempts: int
    avoid: set[str] = field(default_factory=set)
    prefix_node: str = ""
    failures: int = 0
    _at_fault: set[str] = field(default_factory=set)  # prefill nodes whose handoff failed
    _crashed: list[NodeConnection] = field(default_factory=list)

    def record_failure(self, attempt: Attempt, lost: AttemptFailed, decode_nodes: Iterable[str]) -> None:
        """Learns from an attempt that is lost. `decode_nodes`: who could generate. Raises Unavailable or Rejected when
        it was the last one."""
        # A node that lives, and moves what it has begun, has done its part: not so one that died of it.
        self.failures += lost.is_gone or not attempt.has_output
        self._blame(attempt, lost, decode_nodes)
        if lost.is_suspect and (link := attempt.connection_to(lost.node)) is not None:
            self._suspect(attempt, link)
        if self.failures >= self.max_attempts:
            raise UnavailableError(f"The request was given up after {self.max_attempts} attempts.", code="node_lost")

    def _blame(self, attempt: Attempt, lost: AttemptFailed, decode_nodes: Iterable[str]) -> None:
        """A handoff has two ends. One that is gone is at fault. Where both live the decode node is taken first, as with
        another one the blocks are only sent again; the prefill node when that failed too, or there is no other."""
        prefill, decode = attempt.prefill, attempt.decode
        self.prefix_node = ""
        if prefill is None or decode is None:
            self.avoid.add(lost.node)
            return
        gone = {link.info.id for link in (prefill, decode) if not link.is_alive}
        if gone or not lost.reason.startswith(HANDOFF):
            self.avoid |= gone or {lost.node}
        else:
            self.avoid.add(decode.info.id)
            if prefill.info.id in self._at_fault or all(name in self.avoid for name in decode_nodes):
                self.avoid.add(prefill.info.id)
            self._at_fault.add(prefill.info.id)
        if prefill.info.id not in self.avoid:
            self.prefix_node = prefill.info.id

    def _suspect(self, attempt: Attempt, link: NodeConnection) -> None:
        """A node died while it computed this sample, of which it had told nothing yet. Where that happens twice, the
        sample is the likeliest cause. A node that is back in the same life had lost its connection only."""
        if attempt.produced_by(link):  # it did well there for a while
            self._crashed = []
            return
        self._crashed = [earlier for earlier in self._crashed if not earlier.is_alive]
        self._crashed.append(link)
        if len(self._crashed) >= MAX_DEATHS:
            raise RequestError(
                f"{MAX_DEATHS} nodes died while they computed this request; it is not tried again.",
                code="poison",
                status=422,
            )

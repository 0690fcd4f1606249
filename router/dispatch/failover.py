"""Failover: decides which nodes a sample avoids after a failure, and when the sample is no longer retried.

Requests on a node that crashes are retried at once. The number of all other retries is limited to a small share of the
requests, so that retries cannot overload the nodes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from router.dispatch.attempt import HANDOFF, Attempt, AttemptFailed
from router.nodes.connection import NodeConnection
from shared.errors import RequestError, UnavailableError

MAX_CRASHES = 2  # a request is the likely cause if this many nodes crash while they compute it
# Two crashes within this time may have another cause, such as a failed host. In this case, the request is the likely
# cause only after a third crash.
TOGETHER_S = 1.0
RETRY_SHARE = 0.1  # number of retries that each request adds to the budget
RETRIES_PER_S = 3.0  # number of retries that are added to the budget per second
BURST_S = 10.0  # the budget never exceeds the number of retries that are added in this time
MAX_RETRY_WAIT_S = 10.0


class RetryBudget:
    """The retry budget that all requests share: one retry for every ten requests, and three retries per second. It
    works like the retry budget of Finagle, except that a retry over the budget waits instead of failing."""

    def __init__(self) -> None:
        self._now = 0.0
        self._level = RETRIES_PER_S * BURST_S

    def requested(self) -> None:
        """Count a new request."""
        self._level = min(self._level + RETRY_SHARE, RETRIES_PER_S * BURST_S)

    def take(self, now: float) -> float:
        """Charge a retry, and return the seconds to wait before it. Raises UnavailableError if the wait is too long."""
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
    """Tracks the failures of one sample. The sample is placed on a node in `avoid` only if no other node is available.
    `prefix_node` is the id of the prefill node that still has the prompt's KV, or "" if no node has it."""

    max_attempts: int
    avoid: set[str] = field(default_factory=set)
    prefix_node: str = ""
    failures: int = 0
    _at_fault: set[str] = field(default_factory=set)  # prefill nodes whose handoff failed
    _crashed: list[tuple[NodeConnection, float]] = field(default_factory=list)  # crashed nodes, with the crash times

    def record_failure(self, attempt: Attempt, failure: AttemptFailed, decode_nodes: Iterable[str], now: float) -> None:
        """Record a failed attempt. `decode_nodes` are the decode nodes that take requests; `now` is in seconds. Raises
        UnavailableError or RequestError if no further attempt is allowed."""
        # A live node may produce tokens and then give the request back, for example because it drains. This does not
        # count as a failure.
        self.failures += failure.is_gone or not attempt.has_output
        self._assign_fault(attempt, failure, decode_nodes)
        if failure.is_suspect:
            node = next(node for node in attempt.nodes if node.info.id == failure.node)
            self._record_crash(attempt, node, now)
        if self.failures >= self.max_attempts:
            raise UnavailableError(f"The request failed after {self.max_attempts} attempts.", code="node_lost")

    def _assign_fault(self, attempt: Attempt, failure: AttemptFailed, decode_nodes: Iterable[str]) -> None:
        """Decide which nodes the sample avoids after a failure.

        If a node was lost, avoid only this node. If both nodes of a failed handoff are alive, avoid the decode node
        first, because the prefill node can send the same blocks to another decode node. Avoid the prefill node too if
        its handoff fails again, or if there is no other decode node.
        """
        prefill, decode = attempt.prefill, attempt.decode
        self.prefix_node = ""
        if prefill is None or decode is None:
            self.avoid.add(failure.node)
            return
        gone = {node.info.id for node in (prefill, decode) if not node.is_alive}
        if gone or not failure.reason.startswith(HANDOFF):
            self.avoid |= gone or {failure.node}
        else:
            self.avoid.add(decode.info.id)
            if prefill.info.id in self._at_fault or all(name in self.avoid for name in decode_nodes):
                self.avoid.add(prefill.info.id)
            self._at_fault.add(prefill.info.id)
        if prefill.info.id not in self.avoid:
            self.prefix_node = prefill.info.id

    def _record_crash(self, attempt: Attempt, node: NodeConnection, now: float) -> None:
        """Record that a node crashed while it computed the request. Raises RequestError if the request is the likely
        cause.

        The request is the likely cause after two crashes, or after three if the first two happened at about the same
        time. If the crashed node had generated a token in this attempt, the count starts again at 0. If a node comes
        back in the same incarnation, only its connection was lost, so the node no longer counts as crashed."""
        if attempt.produced_by(node):
            self._crashed = []
            return
        self._crashed = [(earlier, at) for earlier, at in self._crashed if not earlier.is_alive]
        self._crashed.append((node, now))
        times = [at for _, at in self._crashed]
        together = len(times) >= MAX_CRASHES and times[MAX_CRASHES - 1] - times[0] < TOGETHER_S
        if len(times) >= MAX_CRASHES + together:
            raise RequestError(
                f"{len(times)} nodes died while they computed this request; it is not retried.",
                code="poison",
                status=422,
            )


def inexact_reason(attempt: Attempt) -> str:
    """Return why an attempt might generate different tokens than the failed attempt would have generated, or "" if the
    tokens will be the same.

    Baton's own nodes seed the random draw of each token with the token's position, so they continue exactly. A vLLM
    server may use one random generator for a whole request, and applies penalties only to the tokens of one call. The
    proxy node of a vLLM server reports in `resumes` which requests the server can continue exactly.
    """
    sampling = attempt.request.sampling
    found = [node.info.attributes["resumes"] for node in attempt.nodes if "resumes" in node.info.attributes]
    if found and (sampling.presence_penalty or sampling.frequency_penalty):
        return "penalties"
    kind = "seeded" if sampling.temperature > 0 else "greedy"
    return "" if all(kind in resumes for resumes in found) else kind

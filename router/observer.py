"""The router's observer: it receives reports about requests and nodes, and adds routes to the router's API."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.routing import BaseRoute

from shared.rpc.messages import NodeInfo, NodeUpdate


class RouterObserver:
    """Receives events about requests and nodes. This base class ignores all events; the dashboard is a subclass.

    The router's entry point creates an observer, and passes it to the pool, the dispatcher and the app. All methods run
    on the router's event loop, where a slow method would delay tokens. They must be fast and must not raise.
    """

    # ---- nodes --------------------------------------------------------------------------------------------------

    def node_updated(self, info: NodeInfo, update: NodeUpdate) -> None:
        """Process the stats, step records and events in a message from a node. The message may also have token deltas,
        which the observer ignores."""

    def wants_records(self, node: str, num_nodes: int) -> bool:
        """Return whether the node should send step records and events from now on. The pool has `num_nodes` nodes."""
        return False

    def node_lost(self, node: str) -> None:
        """Process the loss of the stream to a node. The "ended" events of some of its requests may never arrive."""

    # ---- requests -----------------------------------------------------------------------------------------------

    def accepted(
        self, id: str, num_prompt: int, num_samples: int, traceparent: str = "", waited_s: float = 0.0
    ) -> None:
        """Record that a prompt of an HTTP request was accepted, `waited_s` seconds after the HTTP request arrived."""

    def placed(
        self, attempt: str, prefill: str | None, decode: str, reason: str, local_s: float = 0.0, remote_s: float = 0.0
    ) -> None:
        """Record the nodes chosen for an attempt. `local_s` and `remote_s` are the predicted seconds until the second
        token if the decode node (local) or a prefill node (remote) computes the prompt; 0 means no prediction."""

    def inexact(self, attempt: str, why: str) -> None:
        """Record that an attempt might continue an answer with different tokens than the failed attempt. `why` is the
        reason: "seeded", "greedy" or "penalties"."""

    def output(self, id: str, sample: int, num_tokens: int) -> None:
        """Record that tokens of a sample were sent to the client."""

    def ended(self, id: str, sample: int, how: str, error: Exception | None = None) -> None:
        """Record how a sample ended: "stop", "length", "abort" (the client disconnected), "refused" (before any node
        received it) or "error". For "refused" and "error", `error` is the reason."""

    # ---- the API ------------------------------------------------------------------------------------------------

    queries: Mapping[str, Mapping[str, Any]] = {}
    """The query parameters of the added GET routes with JSON answers, for /openapi.json: path, name, and schema."""

    def routes(self, status: Callable[[], dict[str, Any]]) -> Sequence[BaseRoute]:
        """Return routes to add to the API, for admins. `status` returns the document of /v1/status."""
        return ()

    def extend_status(self, status: dict[str, Any]) -> dict[str, Any]:
        """Return the document of /v1/status with the observer's own fields."""
        return status

    def close(self) -> None:
        """End the streams of the added routes, which would otherwise never end. Called when the server drains."""

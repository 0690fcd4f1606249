"""Names the bottleneck of a cluster in one sentence, from its status document alone.

If the numbers do not show a cause, the sentence only states the symptom.
"""

from typing import Any

Node = dict[str, Any]
Status = dict[str, Any]

BUSY = 0.85  # a node whose busy share of the last seconds is above this has no capacity left
SLACK = 0.5  # a node whose busy share is below this has capacity left
FULL = 0.97  # share of KV blocks held by requests
SLOW_SECOND, SLOW_SECOND_MS = 3.0, 50.0  # a second token is late above this multiple of the usual gap and this time


def bottleneck(status: Status) -> str:
    """Return the first finding that applies to a document of /v1/status, or that the cluster keeps up or is idle."""
    view = ClusterView(status)
    if not view.nodes:
        if lost := len(status.get("nodes") or []):
            return f"No node is ready; {lost} {'is' if lost == 1 else 'are'} listed."
        return "No node has joined: nothing can be served."
    findings = (_blocks, _prefill_pool, _chunks_between, _decode_pool, _transfer, _late_without_queue, _missed)
    return next((text for finding in findings if (text := finding(view))), None) or _calm(view)


class ClusterView:
    """The parts of a status that the findings read, with defaults for absent values."""

    def __init__(self, status: Status) -> None:
        self.nodes: list[Node] = [
            node for node in status.get("nodes") or [] if node.get("alive") and node.get("state") == "ready"
        ]
        self.prefill = [node for node in self.nodes if node.get("role") == "prefill"]
        self.decode = [node for node in self.nodes if node.get("role") == "decode"]
        self.requests: int = (status.get("requests") or {}).get("running") or 0
        latency = status.get("latency") or {}
        slo = latency.get("slo") or {}
        self.p50, self.p99 = _percentiles(latency, "p50"), _percentiles(latency, "p99")
        self.missed = [
            name
            for name in ("ttft_ms", "tbt_ms")
            if slo.get(name) and self.p99[name] is not None and self.p99[name] > slo[name]
        ]
        self.slo: dict[str, float] = {name: slo.get(name) or 0.0 for name in ("ttft_ms", "tbt_ms")}

    def over(self, name: str) -> str:
        """Return text such as "TTFT p99 812 ms (SLO 500)"."""
        return f"{name[:-3].upper()} p99 {self.p99[name]:.0f} ms (SLO {self.slo[name]:.0f})"


def _percentiles(latency: dict[str, Any], which: str) -> dict[str, Any]:
    return {name: (latency.get(name) or {}).get(which) for name in ("ttft_ms", "tbt_ms", "ttst_ms")}


def _busy(nodes: list[Node]) -> float | None:
    """Return the mean busy share, or None if a node has not reported it."""
    shares = [float(node["busy"]) for node in nodes if node.get("busy") is not None]
    return sum(shares) / len(shares) if shares and len(shares) == len(nodes) else None


def _queue(nodes: list[Node]) -> int:
    return sum(node.get("waiting") or 0 for node in nodes)


def _held(node: Node) -> float:
    blocks = node.get("blocks") or {}
    held = sum(blocks.get(name) or 0 for name in ("owned", "reserved", "quarantined"))
    return held / blocks["total"] if blocks.get("total") else 0.0


def _move(nodes: list[Node], role: str) -> str:
    """Return the advice to move the least busy node to the other pool, or "" if the other nodes are too busy for it."""
    share = len(nodes) / max(1, len(nodes) - 1)
    if len(nodes) < 2 or share * (_busy(nodes) or 0.0) >= BUSY or share * max(map(_held, nodes)) >= FULL:
        return ""
    idle = min(nodes, key=lambda node: (node.get("busy") or 0.0, node.get("running") or 0))
    return f" Move one node to {role}: `baton role {idle['id']} {role}`."


def _blocks(view: ClusterView) -> str | None:
    full = [node for node in view.nodes if _held(node) >= FULL and node.get("waiting")]
    if not full:
        return None
    names = ", ".join(node["id"] for node in full)
    held = sum(map(_held, full)) / len(full)
    return (
        f"KV blocks are the bottleneck: requests hold {held:.0%} of those on {names}, and {_queue(full)} wait. "
        "Give nodes more blocks, or add a node."
    )


def _prefill_pool(view: ClusterView) -> str | None:
    if not view.prefill:
        return None
    waiting, busy, decode = _queue(view.prefill), _busy(view.prefill), _busy(view.decode)
    if waiting < len(view.prefill) or busy is None or busy < BUSY:
        return None
    if decode is None or decode >= SLACK or _queue(view.decode):
        return f"The prefill pool is at its limit: {waiting} queued, {busy:.0%} busy."
    rest = f", while the decode pool is {1 - decode:.0%} idle.{_move(view.decode, 'prefill')}"
    return f"The prefill pool is the bottleneck: {waiting} queued and {busy:.0%} busy{rest}"


def _chunks_between(view: ClusterView) -> str | None:
    """Find a decode node that runs prompt chunks and decodes in the same steps."""
    batches = [(node["id"], node.get("batch") or {}) for node in view.decode]
    mixed = [name for name, batch in batches if batch.get("prefills") and batch.get("decodes")]
    if "tbt_ms" not in view.missed or not mixed:
        return None
    hint = "" if view.prefill else " Prefill nodes would keep them apart."
    return (
        f"Tokens come late, {view.over('tbt_ms')}, and {mixed[0]} runs prompt chunks "
        f"in the same steps as decodes.{hint}"
    )


def _decode_pool(view: ClusterView) -> str | None:
    busy, waiting, prefill = _busy(view.decode), _queue(view.decode), _busy(view.prefill)
    if busy is None or busy < BUSY or not (waiting >= len(view.decode) or "tbt_ms" in view.missed):
        return None
    seen = f"{waiting} queued and {busy:.0%} busy" if waiting else f"{busy:.0%} busy, {view.over('tbt_ms')}"
    if not view.prefill:
        return f"The nodes are at their limit: {seen}. Add a node."
    if prefill is None or prefill >= SLACK or _queue(view.prefill):
        return f"The decode pool is at its limit: {seen}."
    return (
        f"The decode pool is the bottleneck: {seen}, while the prefill pool is {1 - prefill:.0%} idle."
        f"{_move(view.prefill, 'decode')}"
    )


def _transfer(view: ClusterView) -> str | None:
    """Find slow handoffs. If the usual gap is 0, tokens arrive in groups, and the second token's time means nothing."""
    second, usual = view.p50["ttst_ms"], view.p50["tbt_ms"]
    is_handed_over = view.prefill and any(node.get("handoffs") for node in view.nodes)
    if not is_handed_over or _queue(view.decode) or not second or not usual:
        return None
    if second < max(SLOW_SECOND * usual, SLOW_SECOND_MS) or second <= view.slo["tbt_ms"]:
        return None
    return (
        f"The handoff is slow: the second token comes after {second:.0f} ms (p50), later ones after {usual:.0f} ms, "
        "and no decode node has a queue. Look at the KV transfers."
    )


def _late_without_queue(view: ClusterView) -> str | None:
    shares = [node.get("busy") for node in view.nodes]
    if "ttft_ms" not in view.missed or _queue(view.nodes) or None in shares:
        return None
    most = max(share or 0.0 for share in shares)
    if most >= SLACK:
        return None
    return (
        f"{view.over('ttft_ms')}, yet no node has a queue and none is more than {most:.0%} busy: "
        "either such prompts take so long alone, or time is lost outside the nodes. "
        "The timeline of a slow request shows which."
    )


def _missed(view: ClusterView) -> str | None:
    if not view.missed:
        return None
    return f"Over the SLO: {' and '.join(map(view.over, view.missed))}. The load of the nodes does not show why."


def _calm(view: ClusterView) -> str:
    running = max(view.requests, sum(node.get("running") or 0 for node in view.nodes))
    nodes = f"{len(view.nodes)} node{'s' * (len(view.nodes) != 1)}"
    if not running:
        return f"Idle: {nodes} ready, no requests."
    busy = _busy(view.nodes)
    load = f", {busy:.0%} busy" if busy is not None else ""
    queue = _queue(view.nodes)
    met = " and within the SLO" if any(view.slo[name] and view.p99[name] is not None for name in view.slo) else ""
    head = f"Keeping up{met}" if queue < len(view.nodes) else "At work"  # a queue means that requests wait
    return f"{head}: {running} request{'s' * (running != 1)} on {nodes}{load}, {queue or 'none'} queued."

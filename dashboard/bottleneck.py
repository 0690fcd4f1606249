"""A description of a cluster's bottleneck in one sentence, derived from its status document alone.

If the numbers do not show a cause, the sentence only states the symptom.
"""

from collections.abc import Iterator
from typing import Any

Node = dict[str, Any]
Status = dict[str, Any]

BUSY = 0.85  # a node that was busy for a larger share of the last few seconds has no capacity left
SLACK = 0.5  # a node that was busy for a smaller share of the last seconds has capacity left
FULL = 0.97  # a node is full if requests hold at least this share of its KV blocks
RECENT_MS = 600_000
FEW = 20  # with fewer requests in the last minute, the latency of handoffs is not judged
# The second token is late if it comes at least SLOW_SECOND times the usual gap, and at least SLOW_SECOND_MS, after the
# first token.
SLOW_SECOND, SLOW_SECOND_MS = 3.0, 50.0
GROUPED_MS = 1.0  # a smaller usual gap means that tokens reach the router in groups, so gaps cannot be compared
UNEVEN = 0.2  # if the busy shares of the nodes differ by more than this, the sentence gives their range


def bottleneck(status: Status) -> str:
    """Return the first finding that applies to a /v1/status document or, if no finding applies, describe the cluster's
    load. Also name the nodes that were lost in the last 10 minutes, even if a new process has replaced them."""
    since_ms = (status.get("router") or {}).get("time_ms", 0) - RECENT_MS
    states = {node["id"]: node.get("state") for node in status.get("nodes") or []}
    times = [(node["id"], node.get("since_ms")) for node in status.get("nodes") or [] if states[node["id"]] == "lost"]
    times += [(event["node"], event["time_ms"]) for event in status.get("events") or [] if event["kind"] == "lost"]
    lost = {node for node, time_ms in times if time_ms is not None and time_ms >= since_ms}
    is_back = states.keys() - {node for node, state in states.items() if state in {"lost", "left"}}
    names = [f"{node} (is back)" if node in is_back else node for node in sorted(lost)]
    return _finding(status) + (f" Lost in the last 10 minutes: {', '.join(names)}." if names else "")


def _finding(status: Status) -> str:
    listed = [node for node in status.get("nodes") or [] if node.get("state") not in {"left", "lost"}]
    nodes = [node for node in listed if node.get("alive") and node.get("state") == "ready"]
    if not nodes and listed:
        return f"No node is ready; {len(listed)} {'is' if len(listed) == 1 else 'are'} listed."
    if not nodes:
        return f"No node {'is left' if status.get('nodes') else 'has joined'}: nothing can be served."
    prefill, decode = (Pool([node for node in nodes if node.get("role") == role]) for role in ("prefill", "decode"))
    if status.get("mode") == "disaggregated" and not decode.nodes:
        return "No decode node is ready: prefill nodes generate too."
    has_had_prefill = any(node.get("role") == "prefill" for node in status.get("nodes") or [])
    if status.get("mode") == "disaggregated" and has_had_prefill and not prefill.nodes:
        return "No prefill node is ready: decode nodes compute prompts too."
    latency = Latency(status.get("latency") or {})
    for findings in (_pools(Pool(nodes), prefill, decode, latency), _latencies(Pool(nodes), prefill, decode, latency)):
        if text := next(findings, None):
            return text
    return _calm(Pool(nodes), (status.get("requests") or {}).get("running") or 0, status.get("totals") or {}, latency)


class Pool:
    """How many requests wait and how busy the nodes are, for the nodes of one role or for all nodes."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.queue = sum(node.get("waiting") or 0 for node in nodes)
        shares = [node.get("busy") for node in nodes]
        known = [float(share) for share in shares if share is not None]
        is_known = bool(known) and None not in shares  # every node has reported how busy it is
        self.busy: float | None = sum(known) / len(known) if is_known else None
        self.least: float | None = min(known) if is_known else None
        self.most: float | None = max(known) if is_known else None

    @property
    def is_idle(self) -> bool:
        return self.busy is not None and self.busy < SLACK and not self.queue

    def advice(self, role: str) -> str:
        """Return the advice to move the least busy node to `role`. Return "" if the other nodes cannot take over the
        load of that node."""
        share = len(self.nodes) / max(1, len(self.nodes) - 1)
        if len(self.nodes) < 2 or share * (self.busy or 0.0) >= BUSY or share * max(map(_held, self.nodes)) >= FULL:
            return ""
        idle = min(self.nodes, key=lambda node: (node.get("busy") or 0.0, node.get("running") or 0))
        return f" Move one node to {role}: `baton role {idle['id']} {role}`."


class Latency:
    """The latencies in a status document, and which of them exceed their SLO."""

    def __init__(self, latency: dict[str, Any]) -> None:
        def percentile(name: str, which: str) -> Any:
            return (latency.get(name) or {}).get(which)

        slo = latency.get("slo") or {}
        self.tbt_slo = slo.get("tbt_ms") or 0.0
        self.second, self.usual = percentile("ttst_ms", "p50"), percentile("tbt_ms", "p50")
        p99 = {name: percentile(name, "p99") for name in ("ttft_ms", "tbt_ms") if slo.get(name)}
        self.is_measured = any(value is not None for value in p99.values())
        self.is_usual = (percentile("ttst_ms", "n") or 0) >= FEW
        self.over = {  # maps each latency over its SLO to a text such as "TTFT p99 812 ms (SLO 500)"
            name: f"{name[:-3].upper()} p99 {value:.0f} ms (SLO {slo[name]:.0f})"
            for name, value in p99.items()
            if value is not None and value > slo[name]
        }


def _held(node: Node) -> float:
    blocks = node.get("blocks") or {}
    held = sum(blocks.get(name) or 0 for name in ("owned", "reserved", "quarantined"))
    return held / blocks["total"] if blocks.get("total") else 0.0


def _pools(every: Pool, prefill: Pool, decode: Pool, latency: Latency) -> Iterator[str]:
    """Yield the findings about KV blocks, and about nodes without spare capacity."""
    if full := [node for node in every.nodes if _held(node) >= FULL and node.get("waiting")]:
        yield (
            f"KV blocks are the bottleneck: requests hold {sum(map(_held, full)) / len(full):.0%} of those on "
            f"{', '.join(node['id'] for node in full)}, and {Pool(full).queue} wait. "
            "Give nodes more blocks, or add a node."
        )
    if prefill.queue >= len(prefill.nodes) and (prefill.busy or 0.0) >= BUSY:
        if not decode.is_idle:
            yield f"The prefill pool is at its limit: {prefill.queue} queued, {prefill.busy:.0%} busy."
        yield (
            f"The prefill pool is the bottleneck: {prefill.queue} queued and {prefill.busy:.0%} busy, while the decode "
            f"pool is {1 - (decode.busy or 0.0):.0%} idle.{decode.advice('prefill')}"
        )
    late = latency.over.get("tbt_ms")
    batches = [(node["id"], node.get("batch") or {}) for node in decode.nodes]
    mixed = [name for name, batch in batches if batch.get("prefills") and batch.get("decodes")]
    if late and mixed:
        hint = "" if prefill.nodes else " Separate prefill nodes would avoid this."
        yield f"Tokens come late, {late}, and {mixed[0]} runs prompt chunks in the same steps as decodes.{hint}"
    if (decode.busy or 0.0) >= BUSY and (decode.queue >= len(decode.nodes) or late):
        seen = (
            f"{decode.queue} queued and {decode.busy:.0%} busy" if decode.queue else f"{decode.busy:.0%} busy, {late}"
        )
        if not prefill.nodes:
            yield f"The nodes are at their limit: {seen}. Add a node."
        if not prefill.is_idle:
            yield f"The decode pool is at its limit: {seen}."
        yield (
            f"The decode pool is the bottleneck: {seen}, while the prefill pool is "
            f"{1 - (prefill.busy or 0.0):.0%} idle.{prefill.advice('decode')}"
        )


def _latencies(every: Pool, prefill: Pool, decode: Pool, latency: Latency) -> Iterator[str]:
    """Yield the findings about late tokens."""
    is_handed_over = prefill.nodes and any(node.get("handoffs") for node in every.nodes)
    second, usual = latency.second or 0.0, latency.usual or 0.0
    is_late = second >= max(SLOW_SECOND * usual, SLOW_SECOND_MS) and second > latency.tbt_slo
    if is_handed_over and not decode.queue and usual >= GROUPED_MS and is_late and latency.is_usual:
        yield (
            f"The handoff is slow: the second token comes after {second:.0f} ms (p50), later ones after {usual:.3g} ms,"
            " and no decode node has a queue. Look at the KV transfers."
        )
    if "ttft_ms" in latency.over and not every.queue and every.most is not None and every.most < SLACK:
        yield (
            f"{latency.over['ttft_ms']}, yet no node has a queue and none is more than {every.most:.0%} busy: "
            "either these prompts take this long even without load, or the delay is outside the nodes. "
            "The timeline of a slow request shows which."
        )
    if latency.over:
        yield f"Over the SLO: {' and '.join(latency.over.values())}. The load of the nodes does not show why."


def _calm(every: Pool, requests: int, totals: dict[str, Any], latency: Latency) -> str:
    running = max(requests, sum(node.get("running") or 0 for node in every.nodes))
    nodes = f"{len(every.nodes)} node{'s' * (len(every.nodes) != 1)}"
    if not running:
        return f"Idle: {nodes} ready, no requests."
    load = ""
    if every.busy is not None and every.most is not None and every.least is not None:
        is_uneven = every.most - every.least > UNEVEN
        load = f", {every.least:.0%} to {every.most:.0%} busy" if is_uneven else f", {every.busy:.0%} busy"
    met = " and within the SLO" if latency.is_measured else ""
    queued, refused = max(every.queue, totals.get("queued") or 0), totals.get("refused_per_s") or 0.0
    is_keeping_up = queued < len(every.nodes) and not refused  # a long queue means delays
    head = f"Keeping up{met}" if is_keeping_up else "At work"
    tail = f" {refused:.1f} requests/s are refused." if refused else ""
    return f"{head}: {running} request{'s' * (running != 1)} on {nodes}{load}, {queued or 'none'} queued.{tail}"

"""What a node says of itself at each heartbeat: `NodeStats`, put together from who counts what."""

from dataclasses import dataclass, field

from node.recorder import SchedulerSnapshot
from scheduler.request import RequestState
from scheduler.scheduler import Scheduler
from shared.rpc.messages import NodeStats


@dataclass(slots=True)
class HandoffCounters:
    """Counts of the handoffs, for `NodeStats`, and how long pushes take."""

    handoffs: int = 0
    handoffs_failed: int = 0
    blocks_moved: int = 0
    bytes_moved: int = 0
    channels: dict[str, str] = field(default_factory=dict)
    channel_fallbacks: int = 0
    transfer: list[float] = field(default_factory=list)  # as in `NodeStats`
    rows_corrupt: int = 0


def node_stats(scheduler: Scheduler, seen: SchedulerSnapshot, ticker: HandoffCounters) -> NodeStats:
    """`scheduler` is the engine's thread's: only numbers are read of it. State and what else is the node's own are for
    the caller to fill in."""
    ledger, counters, cost = seen.ledger, scheduler.counters, scheduler.cost
    rows = tuple(scheduler.requests.values())
    return NodeStats(
        "",
        seen.running,
        seen.waiting,
        sum(len(row.tokens) for row in rows if row.state is RequestState.WAITING and not row.receive_kv),
        ledger.free,
        ledger.cached,
        ledger.owned,
        ledger.reserved,
        ledger.quarantined,
        ledger.total,
        counters.steps,
        counters.prompt_tokens,
        counters.generated_tokens,
        counters.cache_queries,
        counters.cache_hits,
        counters.preemptions,
        ticker.handoffs,
        ticker.handoffs_failed,
        ticker.blocks_moved,
        ticker.bytes_moved,
        dict(ticker.channels),
        ticker.channel_fallbacks,
        cost.packed() if cost is not None else [],
        list(ticker.transfer),
        rows_corrupt=ticker.rows_corrupt,
    )

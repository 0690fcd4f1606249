"""What a node says of itself at each heartbeat: `Load`, put together from who counts what."""

from dataclasses import dataclass, field

from engine.records import Seen
from scheduler.request import State
from scheduler.scheduler import Scheduler
from shared.messages import Load


@dataclass(slots=True)
class Ticker:
    """Counts of the handoffs, for `Load`, and how long pushes take."""

    handoffs: int = 0
    handoffs_failed: int = 0
    blocks_moved: int = 0
    bytes_moved: int = 0
    channels: dict[str, str] = field(default_factory=dict)
    channel_fallbacks: int = 0
    transfer: list[float] = field(default_factory=list)  # as in `Load`
    rows_corrupt: int = 0


def load_of(scheduler: Scheduler, seen: Seen, ticker: Ticker) -> Load:
    """`scheduler` is the engine's thread's: only numbers are read of it. State and what else is the node's own are for
    the caller to fill in."""
    ledger, counters, cost = seen.ledger, scheduler.counters, scheduler.cost
    rows = tuple(scheduler.requests.values())
    return Load(
        "",
        seen.running,
        seen.waiting,
        sum(len(row.tokens) for row in rows if row.state is State.WAITING and not row.lands),
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

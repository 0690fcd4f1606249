"""Who goes to the nodes now, who waits in the router, and who is turned away at once. Pure: the time is an argument.

Nodes get what they can run and a little more, so that what waits is ordered here: by priority, then fairly between
tenants by tokens (start-time fair queueing: Goyal, Vin and Cheng 1996), then by arrival. Nobody overtakes the one whose
turn it is, so a long request does not starve. Tokens are those of KV, in which all costs are counted.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from math import exp, inf
from typing import NamedTuple

RATE_S = 10.0  # over about so long the nodes' pace is measured
BEGUN = 0.25  # of what new nodes hold is done, so long as none of it is finished: half of it on average, so be careful
CAUTION = 2.0  # a wait may last so many times what was predicted: better turned away at once than after it
FORGET = 0.98  # of what is known of earlier requests' time on the nodes, with each that ends
QUEUED_KV = 4  # so many times the nodes' KV may wait, where no other limit is set …
LEAST_QUEUED_TOKENS = 1 << 18  # … and no less than this, however small that is: 10 MB


class PoolCapacity(NamedTuple):
    """What the nodes should hold at once, all together."""

    requests: int = 0
    kv_tokens: int = 0
    prompt_tokens: int = 0  # not computed yet
    prompts: int = 0  # so many of them whatever their length


class EntryState(Enum):
    WAITING = "waiting"
    GRANTED = "granted"


@dataclass(slots=True, eq=False)
class QueueEntry:
    """One prompt and its `left` samples. It waits for its turn until `expires`, and holds its place until all ended."""

    tenant: str
    priority: int  # smaller goes first
    prompt_tokens: int
    sample_tokens: int  # that one sample is expected to add
    num_left: int
    expires: float
    deadline: float = inf  # of its whole answer
    granted_at: float | None = None  # None also once its time on the nodes says nothing of them
    state: EntryState = EntryState.WAITING
    has_pending_prefill: bool = True  # its computation

    @property
    def cost(self) -> int:
        return self.prompt_tokens + self.num_left * self.sample_tokens

    @property
    def is_granted(self) -> bool:
        return self.state is EntryState.GRANTED


class QueueFullError(Exception):
    """There is no place for it, not even to wait. In `wait_s` seconds there may be."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"no place within {wait_s:g} s")
        self.wait_s = wait_s


@dataclass(slots=True)
class PriorityLevel:
    """All that wait with one priority, by tenant."""

    queues: dict[str, deque[QueueEntry]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    def share(self, tenant: str, cost: int) -> int:
        """Tokens that go before, and with, a tenant's next request when tenants take turns."""
        tenants = len(self.queues) + (tenant not in self.queues)
        return min(sum(self.tokens.values()) + cost, (self.tokens.get(tenant, 0) + cost) * tenants)


class ThroughputEstimator:
    """Tokens a second that the nodes finish while somebody waits, for each request that they should hold at once. Quiet
    times change nothing of it."""

    def __init__(self) -> None:
        self._now = self._busy_s = self._tokens = 0.0

    def pass_time(self, now: float, is_busy: bool) -> None:
        past_s, self._now = max(0.0, now - self._now), max(now, self._now)
        if is_busy:
            kept = exp(-past_s / RATE_S)
            self._busy_s = RATE_S + (self._busy_s - RATE_S) * kept
            self._tokens *= kept

    def finished(self, tokens: float) -> None:
        self._tokens += tokens

    def tokens_per_s(self, held: float) -> float:
        """Infinite at first. Nodes that were empty when the first had to wait have finished little, and begun much."""
        begun = BEGUN * held * (1 - self._busy_s / RATE_S)
        return (self._tokens + begun) / self._busy_s if self._busy_s else inf


class Admission:
    """Owns who waits and what is held. What returns tickets has granted them: their owners are to be told."""

    def __init__(self, max_queued_tokens: int = 0) -> None:
        """`max_queued_tokens` 0: QUEUED_KV times the nodes' KV, and no less than LEAST_QUEUED_TOKENS."""
        self.capacity = PoolCapacity()
        self.held_requests = self.held_tokens = self.owed_tokens = self.owed_prompts = 0
        self.queued_requests = self.queued_tokens = 0
        self._max_queued_tokens = max_queued_tokens
        self._levels: dict[int, PriorityLevel] = {}
        self._served: dict[str, float] = {}  # tenant -> tokens, as a virtual time
        self._virtual = 0.0  # of the latest grant: who comes back after a pause has saved nothing up
        self._pace = ThroughputEstimator()
        self._stayed_s = self._generated = 0.0  # of the latest samples: on the nodes, and what came of it

    # ---- what happens -------------------------------------------------------------------------------------------

    def offer(self, ticket: QueueEntry, now: float) -> list[QueueEntry]:
        """Grants it or lets it wait. Raises Overloaded when it would wait past `expires`, or too much waits already."""
        if not self._levels and self._fits(ticket):
            self._grant(ticket, now)
            return [ticket]
        self._pace.pass_time(now, bool(self._levels))
        self._check(ticket, now)
        level = self._levels.setdefault(ticket.priority, PriorityLevel())
        level.queues.setdefault(ticket.tenant, deque()).append(ticket)
        level.tokens[ticket.tenant] = level.tokens.get(ticket.tenant, 0) + ticket.cost
        self.queued_requests += ticket.num_left
        self.queued_tokens += ticket.cost
        return self._granted(now)

    def resize(self, capacity: PoolCapacity, now: float) -> list[QueueEntry]:
        """Nodes came or went."""
        self._pace.pass_time(now, bool(self._levels))
        self.capacity = capacity
        return self._granted(now)

    def credit_prefix_hit(self, ticket: QueueEntry, cached_tokens: int) -> None:
        """So much of its prompt is on its node already, and shared with others."""
        shared = min(cached_tokens, ticket.prompt_tokens)
        if ticket.is_granted:
            self.held_tokens -= shared
            self.owed_tokens -= shared if ticket.has_pending_prefill else 0
            ticket.prompt_tokens -= shared

    def prompt_computed(self, ticket: QueueEntry, now: float) -> list[QueueEntry]:
        """Its prompt is."""
        if not (ticket.is_granted and ticket.has_pending_prefill):
            return []
        self._pace.pass_time(now, bool(self._levels))
        self._settle_prompt(ticket)
        return self._granted(now)

    def release(self, ticket: QueueEntry, generated: int, now: float) -> list[QueueEntry]:
        """One of its samples is over, wherever it was."""
        self._pace.pass_time(now, bool(self._levels))
        if not ticket.is_granted:
            self._leave(ticket)
            return self._granted(now)
        is_last = ticket.num_left == 1
        tokens = ticket.sample_tokens + (ticket.prompt_tokens if is_last else 0)
        if is_last:
            self._settle_prompt(ticket)
        ticket.num_left -= 1
        self.held_requests -= 1
        self.held_tokens -= tokens
        self._served[ticket.tenant] += generated - ticket.sample_tokens  # what was charged, put right
        if self._levels:
            self._pace.finished(tokens / max(1, self.capacity.requests))
        if ticket.granted_at is not None and generated:
            self._stayed_s = FORGET * self._stayed_s + now - ticket.granted_at
            self._generated = FORGET * self._generated + generated
        return self._granted(now)

    def paused(self, ticket: QueueEntry, now: float) -> list[QueueEntry]:
        """One of its samples holds nothing for a while, until `resumed`."""
        self._pace.pass_time(now, bool(self._levels))
        ticket.granted_at = None
        self.held_requests -= 1
        self.held_tokens -= ticket.sample_tokens
        return self._granted(now)

    def resumed(self, ticket: QueueEntry) -> None:
        self.held_requests += 1
        self.held_tokens += ticket.sample_tokens

    # ---- what follows -------------------------------------------------------------------------------------------

    def expected_wait_s(self, ticket: QueueEntry) -> float:
        """Until its turn, were it offered now. 0: nobody has waited yet, so that nothing is known."""
        slots = max(1, self.capacity.requests)
        pace = slots * self._pace.tokens_per_s(self.held_tokens / slots)
        ahead = sum(sum(level.tokens.values()) for at, level in self._levels.items() if at < ticket.priority)
        level = self._levels.get(ticket.priority)
        ahead += level.share(ticket.tenant, ticket.cost) if level else ticket.cost
        return ahead / pace if pace else inf

    def expected_latency_s(self, ticket: QueueEntry) -> float:
        """On the nodes, until its answer is complete."""
        return ticket.sample_tokens * self._stayed_s / self._generated if self._generated else 0.0

    def _check(self, ticket: QueueEntry, now: float) -> None:
        wait_s = self.expected_wait_s(ticket)
        latest = min(ticket.expires, ticket.deadline - CAUTION * self.expected_latency_s(ticket))
        if now + CAUTION * wait_s > latest:
            raise QueueFullError(wait_s)
        limit = self._max_queued_tokens or max(LEAST_QUEUED_TOKENS, QUEUED_KV * self.capacity.kv_tokens)
        if self.queued_tokens + ticket.cost <= limit:
            return
        # The queue is full: who has less than a tenant's share of it may come all the same.
        tenants = {tenant for level in self._levels.values() for tenant in level.queues} | {ticket.tenant}
        own = sum(level.tokens.get(ticket.tenant, 0) for level in self._levels.values())
        if (own + ticket.cost) * len(tenants) > limit:
            raise QueueFullError(max(1.0, wait_s))

    def _fits(self, ticket: QueueEntry) -> bool:
        room = self.capacity
        if not self.held_requests:
            return True  # whatever its size: more will not come
        return (
            self.held_requests + ticket.num_left <= room.requests
            and self.held_tokens + ticket.cost <= room.kv_tokens
            and (self.owed_prompts < room.prompts or self.owed_tokens + ticket.prompt_tokens <= room.prompt_tokens)
        )

    def _granted(self, now: float) -> list[QueueEntry]:
        granted: list[QueueEntry] = []
        while self._levels:
            level = self._levels[min(self._levels)]
            tenant = min(level.queues, key=lambda name: max(self._served.get(name, 0.0), self._virtual))
            ticket = level.queues[tenant][0]
            if not self._fits(ticket):
                break
            self._remove(ticket)
            self._grant(ticket, now)
            granted.append(ticket)
        return granted

    def _grant(self, ticket: QueueEntry, now: float) -> None:
        ticket.state = EntryState.GRANTED
        ticket.granted_at = now
        self.held_requests += ticket.num_left
        self.held_tokens += ticket.cost
        self.owed_tokens += ticket.prompt_tokens
        self.owed_prompts += 1
        self._virtual = max(self._virtual, self._served.get(ticket.tenant, 0.0))
        self._served[ticket.tenant] = self._virtual + ticket.cost

    def _settle_prompt(self, ticket: QueueEntry) -> None:
        if ticket.has_pending_prefill:
            ticket.has_pending_prefill = False
            self.owed_tokens -= ticket.prompt_tokens
            self.owed_prompts -= 1

    def _leave(self, ticket: QueueEntry) -> None:
        """One sample of a ticket that waits is given up; the ticket with its last one."""
        if ticket.num_left == 1:
            self._remove(ticket)
        else:
            self._levels[ticket.priority].tokens[ticket.tenant] -= ticket.sample_tokens
            self.queued_tokens -= ticket.sample_tokens
            self.queued_requests -= 1
        ticket.num_left -= 1

    def _remove(self, ticket: QueueEntry) -> None:
        level = self._levels[ticket.priority]
        queue = level.queues[ticket.tenant]
        queue.remove(ticket)
        level.tokens[ticket.tenant] -= ticket.cost
        self.queued_tokens -= ticket.cost
        self.queued_requests -= ticket.num_left
        if not queue:
            del level.queues[ticket.tenant], level.tokens[ticket.tenant]
        if not level.queues:
            del self._levels[ticket.priority]

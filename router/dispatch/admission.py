"""Admission: decides which requests go to the nodes now, which wait in the router, and which are refused at once.

The nodes get the requests that they can run and a few more. All other requests wait in the router's queue. The queue is
ordered by priority, then by the number of tokens granted to the tenant so far (start-time fair queueing: Goyal, Vin and
Cheng 1996), and then by arrival. If the first request in this order does not fit, no smaller request overtakes
it, so that large requests do not starve. The cost of a request is the number of tokens that it is expected to hold in
the KV cache.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from math import exp, inf
from typing import TYPE_CHECKING

from router.nodes.placement import PoolCapacity
from shared.errors import UnavailableError

if TYPE_CHECKING:  # the module needs network libraries, which a simulation in a browser does not have
    from router.dispatch.requests import GenerationRequest

RATE_S = 10.0  # time constant, in seconds, of the moving average of the nodes' throughput
BEGUN = 0.25  # a new queue assumes that the nodes have finished this share of the tokens that they hold
CAUTION = 2.0  # safety factor: a request is refused if CAUTION times its predicted wait is too long
FORGET = 0.98  # each sample that ends multiplies the weight of earlier samples by this factor
QUEUED_KV = 4  # default limit of the queue, as a multiple of the nodes' KV capacity
LEAST_QUEUED_TOKENS = 1 << 18  # the queue's default limit is at least this number; a queue of this size takes 10 MB
MAX_RETRY_AFTER_S = 60.0


class AdmissionRefusedError(UnavailableError):
    """The request was refused before any node received it. The client should retry it after `wait_s` seconds."""

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message, min(wait_s, MAX_RETRY_AFTER_S), status=429, code="overloaded")


def deadline_error() -> UnavailableError:
    return UnavailableError("The request timed out.", status=504, code="deadline")


@dataclass(slots=True, eq=False)
class QueueEntry:
    """One prompt and its `num_left` unfinished samples. The entry waits in the queue until it is granted or until the
    monotonic time `expires`. Once the entry is granted, each sample has a slot until the sample ends."""

    tenant: str
    priority: int  # smaller numbers are served first
    prompt_tokens: int
    sample_tokens: int  # expected number of tokens that one sample generates
    num_left: int
    expires: float
    deadline: float = inf  # monotonic time at which the request fails if it has not ended
    # Monotonic time of the grant, or None before the grant. A pause sets this field to None again, because the measured
    # time on the node would otherwise include the pause.
    granted_at: float | None = None
    has_pending_prefill: bool = True
    cached_tokens: int = 0  # tokens of the prompt that were subtracted from `prompt_tokens`
    granted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def cost(self) -> int:
        return self.prompt_tokens + self.num_left * self.sample_tokens

    @property
    def is_granted(self) -> bool:
        return self.granted.is_set()


@dataclass(slots=True)
class PriorityLevel:
    """The waiting entries of one priority, by tenant."""

    queues: dict[str, deque[QueueEntry]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    def share(self, tenant: str, cost: int) -> int:
        """Assume that the tenants take turns. Return how many tokens of this level are then served until a new request
        of the tenant has been served. The result includes the new request's own tokens (`cost`)."""
        tenants = len(self.queues) + (tenant not in self.queues)
        return min(sum(self.tokens.values()) + cost, (self.tokens.get(tenant, 0) + cost) * tenants)


class ThroughputEstimator:
    """Estimates the nodes' throughput: the tokens that they finish per second and slot. The nodes have one slot for
    each request that they can run at once. The estimator measures only while requests are queued, because the nodes are
    not fully used at other times."""

    def __init__(self) -> None:
        self._now = self._busy_s = 0.0
        self.finished_tokens = 0.0  # finished tokens per slot; this number decays with time

    def pass_time(self, now: float, is_busy: bool) -> None:
        """Advance the clock to `now`. `is_busy` says whether requests were queued since the last call. If not, the
        time since that call does not count for the throughput."""
        past_s, self._now = max(0.0, now - self._now), max(now, self._now)
        if is_busy:
            kept = exp(-past_s / RATE_S)
            self._busy_s = RATE_S + (self._busy_s - RATE_S) * kept
            self.finished_tokens *= kept

    def tokens_per_s(self, held: float) -> float:
        """Return the throughput per slot, or infinity before the first measurement. `held` is the number of tokens that
        the nodes hold, divided by the number of slots. When a queue has just formed, few requests have finished, so the
        share BEGUN of `held` counts as finished too."""
        begun = BEGUN * held * (1 - self._busy_s / RATE_S)
        return (self.finished_tokens + begun) / self._busy_s if self._busy_s else inf


class AdmissionQueue:
    """The queue in front of the nodes. It holds the waiting entries, and counts the requests and tokens of the granted
    entries.

    The dispatcher enqueues each request, waits for its slot, and releases each sample exactly once. The node pool calls
    `resize` when the pool's capacity changes. All methods run on the router's event loop. Methods that may grant slots
    take the current time as an argument, and return the entries that they granted. The cost of a granted entry is
    counted until the entry's last sample is released.
    """

    def __init__(self, max_wait_s: float = inf, max_queued_tokens: int = 0) -> None:
        """Create an empty queue. If `max_queued_tokens` is 0, the limit is QUEUED_KV times the nodes' KV capacity in
        tokens, and at least LEAST_QUEUED_TOKENS."""
        self.capacity = PoolCapacity()
        self.held_requests = self.held_tokens = self.pending_prefill_tokens = self.pending_prefills = 0
        self.queued_requests = 0
        self._cached_tokens = 0  # tokens that were subtracted from `held_tokens`, because they are in a prefix cache
        self._max_wait_s = max_wait_s
        self._max_queued_tokens = max_queued_tokens
        self._levels: dict[int, PriorityLevel] = {}
        self._served: dict[str, float] = {}  # virtual time of each tenant, in tokens
        self._virtual = 0.0  # virtual time of the latest grant; an idle tenant's virtual time is raised to this value
        self._throughput = ThroughputEstimator()
        self._stayed_s = self._generated = self._num_stayed = 0.0  # decaying sums: seconds on nodes, tokens, samples

    @property
    def queued_tokens(self) -> int:
        return sum(sum(level.tokens.values()) for level in self._levels.values())

    @property
    def _is_busy(self) -> bool:
        """Whether there are queued requests and also nodes. Without nodes, no throughput can be measured."""
        return bool(self._levels and self.capacity.requests)

    @property
    def mean_stay_s(self) -> float:
        """The mean time that recently ended samples stayed on their nodes, or 0 if no sample has ended yet."""
        return self._stayed_s / self._num_stayed if self._num_stayed else 0.0

    @property
    def queued_prompt_tokens(self) -> int:
        queues = (queue for level in self._levels.values() for queue in level.queues.values())
        return sum(entry.prompt_tokens for queue in queues for entry in queue)

    @property
    def queued_tenants(self) -> frozenset[str]:
        return frozenset(tenant for level in self._levels.values() for tenant in level.queues)

    # ---- one request --------------------------------------------------------------------------------------------

    def enqueue(self, request: "GenerationRequest") -> QueueEntry:
        """Create an entry for the request, offer it to the queue, and return it. The entry is then granted or waiting.
        Raises AdmissionRefusedError in the same cases as `offer`, unless another router has accepted the request."""
        now = time.monotonic()
        entry = self.entry(
            len(request.prompt),
            request.max_tokens,
            now,
            tenant=request.tenant,
            priority=request.priority,
            num_samples=request.n,
            deadline=inf if request.deadline is None else request.deadline,
        )
        if request.is_accepted or request.first_sample:  # the client's first samples may run already
            entry.expires = entry.deadline
        self.offer(entry, now, may_refuse=not request.is_accepted)
        return entry

    def entry(
        self,
        prompt_tokens: int,
        max_tokens: int,
        now: float,
        *,
        tenant: str = "",
        priority: int = 0,
        num_samples: int = 1,
        deadline: float = inf,
    ) -> QueueEntry:
        """Create an entry for a request that arrives now. The caller passes it to `offer`."""
        return QueueEntry(
            tenant=tenant,
            priority=priority,
            prompt_tokens=prompt_tokens,
            sample_tokens=max(1, max_tokens // 2),  # the same estimate as in `LoadCharge`
            num_left=num_samples,
            expires=min(now + self._max_wait_s, deadline),
            deadline=deadline,
        )

    async def wait_for_slot(self, entry: QueueEntry) -> None:
        """Wait until the entry is granted. Raises UnavailableError if the entry still waits at `entry.expires`."""
        if entry.is_granted:
            return
        try:
            async with asyncio.timeout(entry.expires - time.monotonic() if entry.expires < inf else None):
                await entry.granted.wait()
        except TimeoutError:
            if entry.expires >= entry.deadline:
                raise deadline_error() from None
            raise UnavailableError("The request waited too long in the queue.", 2.0, code="queue_timeout") from None

    def offer(self, entry: QueueEntry, now: float, *, may_refuse: bool = True) -> list[QueueEntry]:
        """Grant the entry or queue it. With `may_refuse`, raise AdmissionRefusedError if the entry's predicted wait is
        too long, or if the queue is full."""
        if not self._levels and self._fits(entry):
            self._grant(entry, now)
            return [entry]
        self._throughput.pass_time(now, self._is_busy)
        if may_refuse:
            self._check(entry, now)
        level = self._levels.setdefault(entry.priority, PriorityLevel())
        level.queues.setdefault(entry.tenant, deque()).append(entry)
        level.tokens[entry.tenant] = level.tokens.get(entry.tenant, 0) + entry.cost
        self.queued_requests += entry.num_left
        return self._granted(now)

    def resize(self, capacity: PoolCapacity, now: float) -> list[QueueEntry]:
        """Set the capacity of the nodes after nodes have joined or left."""
        self._throughput.pass_time(now, self._is_busy)
        self.capacity = capacity
        return self._granted(now)

    def credit_prefix_hit(self, entry: QueueEntry, cached_tokens: int) -> None:
        """Reduce the cost of a granted entry by the first `cached_tokens` tokens of its prompt, because the chosen node
        already has them in its prefix cache."""
        shared = min(cached_tokens, entry.prompt_tokens)
        self.held_tokens -= shared
        self.pending_prefill_tokens -= shared if entry.has_pending_prefill else 0
        entry.prompt_tokens -= shared
        entry.cached_tokens += shared
        self._cached_tokens += shared

    def prompt_computed(self, entry: QueueEntry, now: float) -> list[QueueEntry]:
        """Record that the prompt of a granted entry is computed. Later calls do nothing."""
        if not entry.has_pending_prefill:
            return []
        self._throughput.pass_time(now, self._is_busy)
        self._settle_prompt(entry)
        return self._granted(now)

    def release(self, entry: QueueEntry, generated: int, now: float) -> list[QueueEntry]:
        """Record that a sample of the entry ended. The entry may be waiting or granted."""
        self._throughput.pass_time(now, self._is_busy)
        if not entry.is_granted:
            self._leave(entry)
            return self._granted(now)
        is_last = entry.num_left == 1
        tokens = entry.sample_tokens + (entry.prompt_tokens if is_last else 0)
        if is_last:
            self._settle_prompt(entry)
        entry.num_left -= 1
        self.held_requests -= 1
        self.held_tokens -= tokens
        self._served[entry.tenant] += generated - entry.sample_tokens  # charge the actual number of tokens
        # Cached tokens count as finished, because the costs of waiting entries include whole prompts.
        cached = entry.cached_tokens if is_last else 0
        self._cached_tokens -= cached
        if self._is_busy:
            self._throughput.finished_tokens += (tokens + cached) / self.capacity.requests
        if entry.granted_at is not None and generated:
            self._stayed_s = FORGET * self._stayed_s + now - entry.granted_at
            self._generated = FORGET * self._generated + generated
            self._num_stayed = FORGET * self._num_stayed + 1
        return self._granted(now)

    def pause(self, entry: QueueEntry, now: float) -> list[QueueEntry]:
        """Record that a sample of the entry gives up its slot until `resume` is called."""
        self._throughput.pass_time(now, self._is_busy)
        entry.granted_at = None
        self.held_requests -= 1
        self.held_tokens -= entry.sample_tokens
        return self._granted(now)

    def resume(self, entry: QueueEntry) -> None:
        """Give a sample its slot back, even if this exceeds the capacity."""
        self.held_requests += 1
        self.held_tokens += entry.sample_tokens

    # ---- predictions ---------------------------------------------------------------------------------------------

    def expected_wait_s(self, entry: QueueEntry) -> float:
        """Return the predicted seconds until the entry gets a slot, or 0 before the first measurement."""
        slots = max(1, self.capacity.requests)
        rate = slots * self._throughput.tokens_per_s((self.held_tokens + self._cached_tokens) / slots)
        ahead = sum(sum(level.tokens.values()) for at, level in self._levels.items() if at < entry.priority)
        level = self._levels.get(entry.priority)
        ahead += level.share(entry.tenant, entry.cost) if level else entry.cost
        return ahead / rate if rate else inf

    def expected_latency_s(self, entry: QueueEntry) -> float:
        """Return the predicted seconds that a node takes for one sample, or 0 before the first measurement."""
        return entry.sample_tokens * self._stayed_s / self._generated if self._generated else 0.0

    def _check(self, entry: QueueEntry, now: float) -> None:
        wait_s = self.expected_wait_s(entry)
        latest = min(entry.expires, entry.deadline - CAUTION * self.expected_latency_s(entry))
        if now + CAUTION * wait_s > latest:
            text = "The queue is too long to answer this request in time; try again later."
            raise AdmissionRefusedError(text, wait_s)
        limit = self._max_queued_tokens or max(LEAST_QUEUED_TOKENS, QUEUED_KV * self.capacity.kv_tokens)
        if self.queued_tokens + entry.cost <= limit:
            return
        # The queue is full. The request is refused only if its tenant would use more than an equal share of the queue.
        tenants = self.queued_tenants | {entry.tenant}
        own = sum(level.tokens.get(entry.tenant, 0) for level in self._levels.values())
        if (own + entry.cost) * len(tenants) > limit:
            raise AdmissionRefusedError("The queue is full; try again later.", max(1.0, wait_s))

    def _fits(self, entry: QueueEntry) -> bool:
        room = self.capacity
        if not self.held_requests:
            return True  # the nodes have no other requests, so a wait would not free any capacity
        return (
            self.held_requests + entry.num_left <= room.requests
            and self.held_tokens + entry.cost <= room.kv_tokens
            and (
                self.pending_prefills < room.prompts
                or self.pending_prefill_tokens + entry.prompt_tokens <= room.prompt_tokens
            )
        )

    def _granted(self, now: float) -> list[QueueEntry]:
        granted: list[QueueEntry] = []
        while self._levels:
            level = self._levels[min(self._levels)]
            tenant = min(level.queues, key=lambda name: max(self._served.get(name, 0.0), self._virtual))
            entry = level.queues[tenant][0]
            if not self._fits(entry):
                break
            self._remove(entry)
            self._grant(entry, now)
            granted.append(entry)
        return granted

    def _grant(self, entry: QueueEntry, now: float) -> None:
        entry.granted.set()
        entry.granted_at = now
        self.held_requests += entry.num_left
        self.held_tokens += entry.cost
        self.pending_prefill_tokens += entry.prompt_tokens
        self.pending_prefills += 1
        self._virtual = max(self._virtual, self._served.get(entry.tenant, 0.0))
        self._served[entry.tenant] = self._virtual + entry.cost

    def _settle_prompt(self, entry: QueueEntry) -> None:
        if entry.has_pending_prefill:
            entry.has_pending_prefill = False
            self.pending_prefill_tokens -= entry.prompt_tokens
            self.pending_prefills -= 1

    def _leave(self, entry: QueueEntry) -> None:
        """Remove a sample of a waiting entry. The entry leaves the queue with its last sample."""
        if entry.num_left == 1:
            self._remove(entry)
        else:
            self._levels[entry.priority].tokens[entry.tenant] -= entry.sample_tokens
            self.queued_requests -= 1
        entry.num_left -= 1

    def _remove(self, entry: QueueEntry) -> None:
        level = self._levels[entry.priority]
        queue = level.queues[entry.tenant]
        queue.remove(entry)
        level.tokens[entry.tenant] -= entry.cost
        self.queued_requests -= entry.num_left
        if not queue:
            del level.queues[entry.tenant], level.tokens[entry.tenant]
        if not level.queues:
            del self._levels[entry.priority]

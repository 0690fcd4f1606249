"""One request's journey, top to bottom: place it, send it, stream what comes back, go on elsewhere when a node dies.

The router owns the request: the prompt and the tokens so far are here, so any node may be lost at any moment.
"""

import asyncio
import itertools
import logging
import random
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from router.dispatch.attempt import HANDOFF, Attempt, AttemptFailed, ClientBackpressure, SampleState
from router.dispatch.failover import Failover, RetryBudget
from router.dispatch.queue import MAX_RETRY_AFTER_S, AdmissionQueue
from router.dispatch.requests import GenerationRequest
from router.dispatch.run import AdmissionRefusedError, GenerationRun, deadline_error
from router.history.history import RequestHistory
from router.nodes.connection import NodeConnection
from router.nodes.pool import NodePool
from scheduler.placement import Placement
from shared import failpoints
from shared.errors import RequestError, UnavailableError
from shared.rpc.messages import SubmitRequest, pack_ids

log = logging.getLogger("baton.dispatch")
WAIT_NEW_S = 1.0  # for a node, before a new request is turned away
WAIT_UNDER_WAY_S = 30.0  # for a node, before a request that already runs is given up
RETRY_PAUSE_S = 0.05  # times the attempts so far, more or less by half
NEWS_S = 0.2  # within so long after a failed handoff it is mostly known which end died
SEED_STEP = 0x9E3779B97F4A7C15  # spreads the seeds of samples (the golden ratio, as in splitmix64)


@dataclass(slots=True)
class RequestCounts:
    """Requests by how they ended; one sample is one request here."""

    running: int = 0
    total: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0  # they would have waited too long
    moved: int = 0  # attempts that went on elsewhere
    retried: int = 0  # of these: not since their node died
    paused: int = 0  # attempts that ended as their client did not read


@dataclass(frozen=True, slots=True)
class DispatchRules:
    """`disaggregate`: see `scheduler.placement.place`. `ttft_slo_s`: a request whose first token is predicted later
    is refused; 0: none is. `max_queue_s`, `max_queued_tokens`: see `router.dispatch.admission`."""

    max_attempts: int = 5
    disaggregate: str = "auto"
    ttft_slo_s: float = 0.0
    max_queue_s: float = 30.0
    max_queued_tokens: int = 0


class Dispatcher:
    def __init__(self, fleet: NodePool, model: str, rules: DispatchRules, records: RequestHistory) -> None:
        self._pool = fleet
        self._model = model
        self._rules = rules
        self._history = records
        self._counts = RequestCounts()
        self._placements: dict[str, int] = {}  # reason -> how many
        self._queue = AdmissionQueue(fleet, rules.max_queue_s, rules.ttft_slo_s, rules.max_queued_tokens)
        self._retry_budget = RetryBudget()

    async def submit(self, generation: GenerationRequest) -> GenerationRun:
        """Raises Unavailable when no node takes requests or it would wait too long, Rejected when it can never fit."""
        late_s = inf if generation.deadline is None else generation.deadline - time.monotonic()
        if late_s <= 0:
            raise deadline_error()
        await self._wait_for_node(min(WAIT_NEW_S, late_s))
        self._counts.total += generation.n
        try:
            ticket = self._queue.enqueue(generation)
        except (AdmissionRefusedError, RequestError) as error:
            self._count("refused" if isinstance(error, AdmissionRefusedError) else "failed", generation.n)
            raise
        self._counts.running += generation.n
        self._retry_budget.requested()
        return GenerationRun(generation, ticket, self.run_attempts, self._queue.on_prompt_computed, self._ended)

    def ready(self) -> bool:
        return any(self._pool.routable())

    def status(self) -> dict[str, object]:
        counts = self._counts
        requests = {name: getattr(counts, name) for name in RequestCounts.__dataclass_fields__}
        return {
            "model": self._model,
            "router": self._pool.router,
            **self._pool.status(),
            "requests": requests,
            "placements": dict(self._placements),
            "queue": self._queue.status(),
        }

    async def _wait_for_node(self, wait_s: float) -> None:
        if self.ready():
            return
        try:
            async with asyncio.timeout(wait_s):
                while not self.ready():
                    await self._pool.change()
        except TimeoutError:
            raise UnavailableError(
                "No node of this cluster takes requests right now.", retry_after_s=2.0, code="node_lost"
            ) from None

    def _ended(self, run: GenerationRun, sample: SampleState, how: str) -> None:
        """Every sample that was accepted ends here, once."""
        self._queue.release(run.ticket, len(sample.tokens))
        self._counts.running -= 1
        self._count(how)

    def _count(self, how: str, times: int = 1) -> None:
        setattr(self._counts, how, getattr(self._counts, how) + times)

    # ---- one sample ---------------------------------------------------------------------------------------------

    async def run_attempts(self, run: GenerationRun, sample: SampleState) -> None:
        """Attempts until the sample is finished. Raises Unavailable or Rejected."""
        await self._queue.wait_for_slot(run.ticket, run.generation.deadline)
        failover = Failover(self._rules.max_attempts)
        for number in itertools.count():
            await self._wait_for_node(WAIT_UNDER_WAY_S)
            attempt = Attempt(
                sample, f"{run.generation.id}.{sample.index}.{number}", is_new=number == 0 and sample.index == 0
            )
            try:
                await self._attempt(run, attempt, failover)
                return
            except AttemptFailed as lost:
                await self._retry_or_raise(attempt, lost, failover, number)
            except ClientBackpressure:
                self._counts.paused += 1
                async with self._queue.paused(run.ticket):
                    await run.until_read()

    async def _attempt(self, run: GenerationRun, attempt: Attempt, failover: Failover) -> None:
        run.attempts[attempt.sample.index] = attempt
        try:
            self._start(run, attempt, failover)
            await attempt.done
            self._pool.served(*filter(None, (attempt.prefill, attempt.decode)))
        finally:
            del run.attempts[attempt.sample.index]
            self._end(attempt)

    async def _retry_or_raise(self, attempt: Attempt, lost: AttemptFailed, failover: Failover, number: int) -> None:
        """Returns when the next attempt may begin. Raises Unavailable or Rejected when there is to be none."""
        self._counts.moved += 1
        self._history.migrated(attempt.id, lost.reason)
        log.warning("request %s goes on elsewhere: %s", attempt.id, lost)
        pause_s = RETRY_PAUSE_S * min(number, self._rules.max_attempts) * random.uniform(0.5, 1.5)
        if lost.node and not lost.is_gone:
            pause_s = max(pause_s, await self._retry_wait_s(attempt, lost))
        failover.record_failure(attempt, lost, (link.info.id for link in self._pool.routable()[1]))
        await asyncio.sleep(pause_s)

    async def _retry_wait_s(self, attempt: Attempt, lost: AttemptFailed) -> float:
        """By a node that lives: a handoff failed, or it is busy. Waits a moment for the news that an end of the attempt
        is gone: then the other is not to blame, and what goes on elsewhere is no retry. Returns how long a retry has
        to wait for its turn."""
        ends = [link for link in (attempt.prefill, attempt.decode) if link is not None]
        with suppress(TimeoutError):
            async with asyncio.timeout(NEWS_S):
                while not any(link.is_leaving or not link.is_alive for link in ends):
                    await self._pool.change()
                return 0.0
        if lost.reason.startswith(HANDOFF):
            self._pool.failed(*ends)
        self._counts.retried += 1
        return self._retry_budget.take(time.monotonic())

    def _start(self, run: GenerationRun, attempt: Attempt, failover: Failover) -> None:
        """Places the attempt and sends it. Sent to P, it names D; sent to D alone, it names nobody."""
        generation, sample = run.generation, attempt.sample
        tokens = generation.prompt + sample.tokens
        row = array("i", tokens)  # as it is hashed, and as it is sent
        prefill, decode = self._place(run, attempt, row, failover)
        attempt.prefill, attempt.decode = prefill, decode
        submit = SubmitRequest(
            attempt.id,
            self._pool.router,
            row.tobytes(),
            len(generation.prompt),
            generation.max_tokens,
            replace(generation.sampling, seed=(generation.sampling.seed + sample.index * SEED_STEP) % 2**63),
            generation.min_tokens,
            pack_ids(sorted(generation.stop_tokens)),
            generation.salt,
            generation.priority,
            decode.info.address if prefill is not None else "",
            generation.share_prefix,
            generation.traceparent,
        )
        if sample.index or sample.tokens:  # told once
            submit.sampling.prompt_logprobs = None
        attempt.charge(len(tokens), generation.max_tokens - len(sample.tokens))
        failpoints.reach("router.placed", attempt.id)
        if prefill is not None:
            decode.listen(attempt.id, attempt)
            prefill.submit(submit, attempt)
        else:
            decode.submit(submit, attempt)

    def _place(
        self, run: GenerationRun, attempt: Attempt, row: "array[int]", failover: Failover
    ) -> tuple[NodeConnection | None, NodeConnection]:
        sibling, avoid = run.kv_node, failover.avoid
        if attempt.sample.index and sibling in self._pool.routable()[1] and sibling.info.id not in avoid:
            self._record_placement(attempt, Placement(None, sibling.info.id, "sibling"))
            return None, sibling  # the prompt's KV is there already
        proposal = self._pool.place(
            attempt.id, row, run.generation.salt, avoid, self._rules.disaggregate, failover.prefix_node
        )
        if proposal is None:
            raise AttemptFailed("no node is left", "")
        found = proposal.placement
        if attempt.is_new:
            self._check_slo(found)
            self._queue.credit_prefix_hit(run.ticket, proposal.cached_tokens)
        self._record_placement(attempt, found)
        self._pool.prefixes.record(proposal.hashes, *filter(None, (found.prefill, found.decode)))
        attempt.cached_tokens = proposal.cached_tokens
        return (None if found.prefill is None else self._pool.connection(found.prefill)), self._pool.connection(
            found.decode
        )

    def _check_slo(self, found: Placement) -> None:
        """Raises Refused when the first token is predicted later than the SLO. Without a prediction all may come, and
        with one that is stale one may: else a node once taken for too slow would refuse everybody for ever."""
        slo_s, estimate = self._rules.ttft_slo_s, found.estimate
        if not slo_s or estimate is None or estimate.first_token_s <= slo_s:
            return
        if self._pool.connection(found.prefill or found.decode).is_stale:
            return
        late_s = min(estimate.first_token_s - slo_s, MAX_RETRY_AFTER_S)
        raise AdmissionRefusedError(
            f"The first token is predicted in {estimate.first_token_s * 1000:.0f} ms, later than the "
            f"{slo_s * 1000:.0f} ms that this cluster promises; try again later.",
            retry_after_s=late_s,
            status=429,
            code="overloaded",
        )

    def _record_placement(self, attempt: Attempt, found: Placement) -> None:
        self._placements[found.reason] = self._placements.get(found.reason, 0) + 1
        local_s, remote_s = (
            estimate.ready_s if estimate is not None and estimate.keeps_tbt else 0.0
            for estimate in (found.local, found.remote)
        )
        self._history.placed(attempt.id, found.prefill, found.decode, found.reason, local_s, remote_s)

    @staticmethod
    def _end(attempt: Attempt) -> None:
        """Nothing of the attempt goes on anywhere."""
        attempt.uncharge()
        for link in (attempt.prefill, attempt.decode):
            if link is None:
                continue
            if attempt.sample.is_finished:
                link.forget(attempt.id)
            else:
                link.abort(attempt.id)

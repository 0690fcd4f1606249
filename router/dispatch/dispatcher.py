"""Runs each request on the nodes: admits it, places it, sends it, streams its tokens, and retries if a node fails.

The router keeps a request's prompt and the generated tokens, so that the request survives the loss of any node.
"""

import asyncio
import itertools
import logging
import random
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from math import inf
from typing import Any, TypeVar

from router.dispatch.admission import AdmissionQueue, deadline_error
from router.dispatch.attempt import HANDOFF, AdmittedRequest, Attempt, AttemptFailed, ClientBackpressure, SampleState
from router.dispatch.failover import Failover, RetryBudget, inexact_reason
from router.dispatch.requests import GenerationRequest, TokenStream, is_refusal
from router.dispatch.rules import DispatchRules
from router.metrics.request_metrics import SlidingCounts
from router.nodes.connection import ANY_VERSION, ModelVersion, NodeConnection
from router.nodes.load import kv_capacity_tokens
from router.nodes.placement import PlacementCandidate, needs_peer
from router.nodes.pool import NodePool
from router.observer import RouterObserver
from scheduler.placement import Placement
from scheduler.prefix import MediaSpan
from shared import failpoints
from shared.errors import BatonError, RequestError, UnavailableError
from shared.rpc.messages import SubmitRequest, pack_ids

log = logging.getLogger("baton.dispatch")
WAIT_NEW_S = 1.0  # how long a new request waits for a node before it is refused
WAIT_UNDER_WAY_S = 30.0  # how long an accepted request waits for a node before it fails
RETRY_PAUSE_S = 0.05  # delay of a retry for each attempt before the failed one (0 after the first); varies by 50 %
NEWS_S = 0.2  # after a failure, wait at most this long for the router to notice that a node is lost
SEED_STEP = 0x9E3779B97F4A7C15  # difference between the seeds of successive samples (golden ratio, as in splitmix64)
COUNTS = (
    *("running", "total", "finished", "cancelled", "failed"),
    "refused",  # samples of requests that were refused before any node received them
    "moved",  # attempts that failed, and may be followed by another attempt
    "retried",  # attempts in `moved` that failed although no node was lost
    "paused",  # attempts that ended because their client did not read fast enough
)
Found = TypeVar("Found")


class Dispatcher:
    """Generates the tokens of every admitted request, and retries on other nodes after failures.

    The HTTP handlers call `admit` for each request and read its streams. All work is done in the task that reads the
    streams, on the router's event loop. Each sample's tokens are delivered in order and exactly once. After the context
    of `admit` has exited, no node and no queue holds the request or counts its load, and the end of each sample has
    been counted once.
    """

    def __init__(
        self, pool: NodePool, queue: AdmissionQueue, model: str, rules: DispatchRules, observer: RouterObserver
    ) -> None:
        self._pool = pool
        self._queue = queue
        self._model = model
        self._rules = rules
        self._observer = observer
        self._counts = dict.fromkeys(COUNTS, 0)
        self._inexact = Counter[str]()  # number of retries whose tokens may differ from the failed attempt's, by reason
        self._placements = Counter[str]()  # number of attempts, by the reason of their placement
        self._retry_budget = RetryBudget()
        self.adapter_requests = Counter[str]()  # number of requests in progress, by their LoRA adapter's digest
        self.arrivals = SlidingCounts()  # tokens and samples that reached the queue, for `ScalingSignals`

    def ready(self, role: str = "") -> bool:
        """Return whether any node of the role takes requests. If `role` is "", nodes of both roles count."""
        prefill, decode = self._pool.routable()
        return bool({"prefill": prefill, "decode": decode}.get(role, prefill or decode))

    def adapters(self) -> dict[str, str]:
        """Return the name and the digest of each LoRA adapter that any node has or had."""
        return self._pool.adapters

    async def learn_adapters(self) -> None:
        """If the router has just started, wait until a node joins, because the router learns the LoRA adapters from the
        nodes. Raises UnavailableError after WAIT_NEW_S seconds."""
        await self._wait_for(lambda: self._pool.has_met_nodes or None, WAIT_NEW_S)

    def status(self) -> dict[str, Any]:
        """Return the dispatcher's part of `/v1/status`."""
        return {
            "model": self._model,
            "router": self._pool.router,
            **self._pool.status(),
            "requests": dict(self._counts),
            "placements": dict(self._placements),
            "inexact_retries": dict(self._inexact),
            "queue": {"requests": self._queue.queued_requests, "tokens": self._queue.queued_tokens},
        }

    # ---- one request --------------------------------------------------------------------------------------------

    def count_refused(self) -> None:
        """Count a request that was refused before it was parsed."""
        self._counts["total"] += 1
        self._counts["refused"] += 1

    @asynccontextmanager
    async def admit(self, request: GenerationRequest) -> AsyncIterator[list[TokenStream]]:
        """Admit a request, and provide one `TokenStream` for each sample.

        Closing a stream ends its sample early. Leaving the context ends all samples at once, on every node. Raises
        UnavailableError if no node takes requests or if the request would wait too long, and RequestError if the
        request is too large for every node. At the request's deadline, the body of the `with` block is cancelled and
        UnavailableError is raised.
        """
        self._counts["total"] += request.n
        try:
            late_s = inf if request.deadline is None else request.deadline - time.monotonic()
            if late_s <= 0:
                raise deadline_error()
            wait_s = WAIT_UNDER_WAY_S if request.is_accepted else WAIT_NEW_S
            await self._wait_for(lambda: self.ready() or None, min(wait_s, late_s))
            self._check_fits(request)
            self._check_adapter(request)
            self.arrivals.add("prompt", len(request.prompt))
            self.arrivals.add("samples", request.n)
            entry = self._queue.enqueue(request)
        except asyncio.CancelledError:
            self._counts["cancelled"] += request.n
            raise
        except BatonError as error:
            self._counts[_outcome(error, request)] += request.n
            raise
        self._counts["running"] += request.n
        self.adapter_requests[request.adapter] += 1
        self._retry_budget.requested()
        admitted = AdmittedRequest(request, entry, self._queue, self._counts)
        streams = [self.generate(admitted, sample) for sample in admitted.samples]
        deadline = asyncio.timeout(None if request.deadline is None else request.deadline - time.monotonic())
        try:
            async with deadline:
                yield streams
        except TimeoutError:
            if not deadline.expired():
                raise
            raise deadline_error() from None
        finally:
            self.adapter_requests[request.adapter] -= 1
            admitted.close("failed" if deadline.expired() else "cancelled")
            for stream in streams:
                await stream.aclose()

    async def generate(self, admitted: AdmittedRequest, sample: SampleState) -> TokenStream:
        """Yield the tokens of one sample. After a failure, continue on other nodes from the last delivered token.

        Sample 0 runs alone until its prompt is computed. The other samples are then placed on the node that has the
        prompt's KV. Raises UnavailableError or RequestError if the sample cannot be completed.
        """
        try:
            if sample.index:
                await admitted.first_is_computed.wait()
            await self._queue.wait_for_slot(admitted.entry)
            failover = Failover(self._rules.max_attempts)
            for number in itertools.count():
                attempt = Attempt(admitted, sample, number)
                row = array("i", admitted.request.prompt + sample.tokens)  # placement and `_submit` need an array
                try:
                    await self._place(admitted, attempt, row, failover)
                    if sample.tokens and (why := inexact_reason(attempt)):
                        self._rules.check_exact(why)
                        self._inexact[why] += 1
                        self._observer.inexact(attempt.id, why)
                    self._submit(attempt, row)
                    async for delta in attempt:
                        yield delta
                    self._pool.served(*attempt.nodes)
                    return
                except AttemptFailed as failure:
                    await self._wait_to_retry(attempt, failure, failover, number)
                except ClientBackpressure:
                    self._counts["paused"] += 1
                    await admitted.wait_until_read()
                    admitted.resume(sample)
                finally:
                    attempt.close()
        except GeneratorExit:  # the reader needs no more tokens of this sample
            self._pool.served(*(attempt.nodes if attempt.produced_by(attempt.decode) else ()))
            admitted.end(sample, "finished")
            raise
        except Exception as error:
            admitted.end(sample, outcome := _outcome(error, admitted.request))
            if outcome == "refused":  # no node has received any sample
                admitted.close(outcome)
            raise
        finally:
            if sample.index == 0:
                admitted.first_is_computed.set()

    async def _wait_for(self, find: Callable[[], Found | None], wait_s: float) -> Found:
        """Call `find` now and after each change of the pool, and return its first result that is not None. Raises
        UnavailableError after `wait_s` seconds."""
        if (found := find()) is not None:
            return found
        try:
            async with asyncio.timeout(wait_s):
                while found is None:
                    await self._pool.change()
                    found = find()
                return found
        except TimeoutError:
            text, code = "No node is ready for this request; try again soon.", "node_lost"
            if role := self._pool.missing_role:
                text = f"No {role} node is ready, and the other nodes cannot work alone; try again soon."
                raise UnavailableError(text, retry_after_s=2.0, code=f"no_{role}_node") from None
            if not self._pool.has_been_ready:
                text, code = "No node has been ready yet: the nodes are starting; try again soon.", "starting"
            raise UnavailableError(text, retry_after_s=2.0, code=code) from None

    def _check_fits(self, request: GenerationRequest) -> None:
        """Raise RequestError if the request is too large even for a node without other requests."""
        prefill, decode = self._pool.routable()
        largest = max(decode or prefill, key=lambda node: kv_capacity_tokens(node.info), default=None)
        tokens = len(request.prompt) + request.max_tokens
        if largest is None or tokens <= kv_capacity_tokens(largest.info):
            return
        size = largest.info.block_tokens
        raise RequestError(
            f"{tokens} tokens need {-(-tokens // size)} blocks of {size} tokens, and the KV cache has "
            f"{largest.info.num_blocks - 1}: shorten the request or give the nodes more --kv-cache-memory",
            "max_tokens",
            "request_too_large",
        )

    def _check_adapter(self, request: GenerationRequest) -> None:
        """Raise RequestError if the request's adapter has been unloaded since the request arrived."""
        if request.adapter and request.adapter not in self._pool.adapters.values():
            raise RequestError("The model was unloaded.", "model", "model_not_found", 404)

    # ---- one attempt --------------------------------------------------------------------------------------------

    async def _place(self, admitted: AdmittedRequest, attempt: Attempt, row: "array[int]", failover: Failover) -> None:
        """Wait until nodes are available for the attempt, and assign them to it. The wait does not count as an attempt.

        Raises UnavailableError if the wait is too long, and AdmissionRefusedError if the first token is predicted to
        come too late.
        """
        request = attempt.request
        sibling, (computing, generating) = admitted.kv_node, self._pool.routable()
        if (
            attempt.sample.index
            and sibling in generating
            and sibling.info.id not in failover.avoid
            and sibling.caches_prefixes
            and (not attempt.sample.tokens or sibling.version == attempt.sample.version)
            and not needs_peer(sibling.info)
        ):
            # With recurrent layers, only the prefill node has the state from which further samples start.
            source = admitted.prompt_node if sibling.info.attributes.get("recurrent") == "true" else None
            if source not in computing or source.info.shared_pool_owner or source.info.id in failover.avoid:
                source = None
            self._record_placement(attempt, Placement(source.info.id if source else None, sibling.info.id, "sibling"))
            attempt.sample.version = sibling.version
            attempt.begin(source, sibling)
            return

        # All tokens of a sample must come from one model version. If possible, a request has only one version.
        has_tokens = any(each.tokens for each in admitted.samples)
        wanted = [attempt.sample.version] if attempt.sample.tokens else [request.version] * has_tokens + [ANY_VERSION]
        spans = [MediaSpan(one.offset, one.rows, one.columns, one.digest) for one in request.media]

        def choose(version: ModelVersion) -> PlacementCandidate | None:
            return self._pool.choose(
                attempt.id,
                row,
                request.salt,
                failover.avoid,
                self._rules.disaggregate,
                failover.prefix_node,
                request.adapter,
                version,
                spans,
                len(request.prompt) + request.max_tokens,
            )

        candidate = await self._wait_for(lambda: next(filter(None, map(choose, wanted)), None), WAIT_UNDER_WAY_S)
        placement = candidate.placement
        nodes = self._pool.connections
        prefill: NodeConnection | None = nodes.get(placement.prefill or "")
        decode = nodes[placement.decode]
        if request.sampling.pooling and prefill is not None and not prefill.info.shared_pool_owner:
            decode, prefill = prefill, None  # a vector needs no decoding, so the prefill node runs the whole request
        if attempt.is_first:
            if not (request.is_accepted or request.first_sample):  # the client may have tokens of the first samples
                self._rules.check_slo(placement, is_stale=(prefill or decode).load.is_stale)
            self._queue.credit_prefix_hit(admitted.entry, candidate.cached_tokens)
            self.arrivals.add("cached", candidate.cached_tokens)
        self._record_placement(attempt, placement)
        request.version = attempt.sample.version = decode.version
        attempt.begin(prefill, decode, candidate.cached_tokens)
        self._pool.prefixes.record(candidate.hashes, *(each.info.id for each in attempt.nodes if each.caches_prefixes))

    def _record_placement(self, attempt: Attempt, placement: Placement) -> None:
        self._placements[placement.reason] += 1
        local_s, remote_s = (
            estimate.ready_s if estimate is not None and estimate.keeps_tbt else 0.0
            for estimate in (placement.local, placement.remote)
        )
        if attempt.sample.index == 0:
            attempt.request.nodes = placement.prefill, placement.decode
        self._observer.placed(attempt.id, placement.prefill, placement.decode, placement.reason, local_s, remote_s)

    def _submit(self, attempt: Attempt, row: "array[int]") -> None:
        """Send the attempt. The message contains a decode node's address only if a prefill node computes the prompt."""
        request, sample, prefill, decode = attempt.request, attempt.sample, attempt.prefill, attempt.decode
        assert decode is not None
        seed = request.sampling.seed + (request.first_sample + sample.index) * SEED_STEP
        sampling = replace(request.sampling, seed=seed % 2**63)
        if sample.index or sample.tokens:  # prompt logprobs are delivered only with the first token of sample 0
            sampling.prompt_logprobs = None
        submit = SubmitRequest(
            id=attempt.id,
            router=self._pool.router,
            tokens=row.tobytes(),
            num_prompt=len(request.prompt),
            max_tokens=request.max_tokens,
            sampling=sampling,
            min_tokens=request.min_tokens,
            stop_tokens=pack_ids(sorted(request.stop_tokens)),
            salt=request.salt,
            priority=request.priority,
            decode_node="" if prefill is None else decode.info.address,
            share_prefix=request.share_prefix,
            traceparent=request.traceparent,
            grammar=request.grammar,
            speculative=request.speculative,
            adapter=request.adapter,
            # A node with the prompt's KV gets the pixels too: it may have to recompute an image, for example if the
            # image ends in a block that is not full.
            media=[
                replace(one, encoder=self._pool.encoder_address(prefill or decode, one.digest)) for one in request.media
            ],
            tenant=request.tenant,
        )
        failpoints.reach("router.placed", attempt.id)
        if prefill is None:
            decode.submit(submit, attempt)
        else:
            decode.listen(attempt.id, attempt)
            prefill.submit(submit, attempt)

    # ---- after a failure ----------------------------------------------------------------------------------------

    async def _wait_to_retry(self, attempt: Attempt, failure: AttemptFailed, failover: Failover, number: int) -> None:
        """Wait until the next attempt may start. Raises UnavailableError or RequestError if no further attempt is
        allowed."""
        self._counts["moved"] += 1
        # If a node is lost or leaves, the journal logs this once, so a warning for each of its requests is not needed.
        is_logged = failure.is_gone or any(node.is_leaving for node in attempt.nodes)
        log.log(logging.INFO if is_logged else logging.WARNING, "request %s is retried: %s", attempt.id, failure)
        pause_s = RETRY_PAUSE_S * min(number, self._rules.max_attempts) * random.uniform(0.5, 1.5)
        if not failure.is_gone and not await self._has_lost_node(attempt):
            if failure.reason.startswith(HANDOFF):
                self._pool.failed(*attempt.nodes)
            self._counts["retried"] += 1
            pause_s = max(pause_s, self._retry_budget.take(time.monotonic()))
        decode_nodes = (node.info.id for node in self._pool.routable()[1])
        failover.record_failure(attempt, failure, decode_nodes, time.monotonic())
        await asyncio.sleep(pause_s)

    async def _has_lost_node(self, attempt: Attempt) -> bool:
        """Wait up to NEWS_S seconds until a node of the attempt is lost or leaving. Return False if none is.

        A node may report a failed handoff before the router notices that the other node is lost. The lost node is then
        at fault, and the retry does not count against the budget.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(NEWS_S):
                while not any(node.is_leaving or not node.is_alive for node in attempt.nodes):
                    await self._pool.change()
                return True
        return False


def _outcome(error: Exception, request: GenerationRequest) -> str:
    return "refused" if is_refusal(error, request) else "failed"

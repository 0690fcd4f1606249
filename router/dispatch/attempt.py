"""One attempt to generate a sample on one or two nodes, and the state that the attempts of a request share."""

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from router.dispatch.admission import AdmissionQueue, QueueEntry
from router.dispatch.requests import GenerationRequest
from router.nodes.connection import ANY_VERSION, ModelVersion, NodeConnection
from router.nodes.load import LoadCharge
from shared import failpoints
from shared.errors import RequestError, UnavailableError
from shared.rpc.messages import Logprobs, TokenDelta, unpack_ids

HANDOFF = "handoff: "  # prefix of the errors by which nodes report a failed handoff
UNREAD_BYTES = 128 << 10  # maximum size of a request's unread deltas, not counting the buffers of the connection
FULL_S = 0.05  # a request may exceed UNREAD_BYTES for this time before it is paused, so that a burst can be sent
SLOW_S = 30.0  # a paused request fails if its client reads nothing for this time


@dataclass(eq=False)
class AttemptFailed(Exception):
    """The attempt failed, but another attempt may succeed. `node` is the id of the node that was lost (if `is_gone`
    is set) or that reported the failure. If `is_suspect` is set, the node crashed while it computed this request."""

    reason: str
    node: str
    is_gone: bool = False
    is_suspect: bool = False

    def __str__(self) -> str:
        return self.reason


class ClientBackpressure(Exception):
    """The client does not read fast enough. The client's request is paused until the client has read more."""


@dataclass(slots=True)
class SampleState:
    """The state of one sample, with the tokens that all its attempts have generated so far."""

    index: int
    tokens: list[int] = field(default_factory=list)
    version: ModelVersion = ANY_VERSION  # of the decode node of the last attempt
    outcome: str = ""  # "" until the sample has ended
    is_paused: bool = False  # the sample holds no slot, because its client does not read
    attempt: "Attempt | None" = None  # the current attempt


class AdmittedRequest:
    """The state that the samples of one request share, from admission until the last sample has ended.

    The dispatcher creates an `AdmittedRequest`, which counts the end of each sample and releases the sample's slot
    exactly once. It also limits the unread output of all samples together. If the client does not read, the current
    attempts end, and new attempts begin once the client has read most of the output. All methods run on the router's
    event loop."""

    def __init__(
        self, request: GenerationRequest, entry: QueueEntry, queue: AdmissionQueue, counts: dict[str, int]
    ) -> None:
        """Start to track an admitted request. `counts` maps "running" to the number of unfinished samples of all
        requests, and each outcome to the number of samples that ended with that outcome."""
        self.request = request
        self.entry = entry
        self.samples = [SampleState(index) for index in range(request.n)]
        self.samples[0].tokens += request.generated
        self.samples[0].version = request.version
        self.kv_node: NodeConnection | None = None  # the decode node that has the prompt's KV
        self.prompt_node: NodeConnection | None = None  # the prefill node that computed the prompt, if any
        self.sharers = Counter[int]()  # see `LoadCharge`
        # Set when sample 0's prompt is computed. The other samples wait for this event. If the client wants prompt
        # logprobs, the event is set later, with sample 0's first token, because they come with this token.
        self.first_is_computed = asyncio.Event()
        self._queue = queue
        self._counts = counts
        self._unread_bytes = 0
        self._num_reads = 0
        self._has_read = asyncio.Event()
        self._overflow: asyncio.TimerHandle | None = None
        self._slow: asyncio.TimerHandle | None = None
        self._error: UnavailableError | None = None

    def prompt_computed(self) -> None:
        self._queue.prompt_computed(self.entry, time.monotonic())

    def end(self, sample: SampleState, outcome: str) -> None:
        """Count the sample's end as "finished", "cancelled", "failed" or "refused", and release its slot. Later calls
        do nothing."""
        if sample.outcome:
            return
        sample.outcome = outcome
        self.resume(sample)
        self._queue.release(self.entry, len(sample.tokens), time.monotonic())
        self._counts["running"] -= 1
        self._counts[outcome] += 1

    def close(self, outcome: str) -> None:
        """End all samples that have not ended yet."""
        for sample in self.samples:
            self.end(sample, outcome)
            sample.attempt = None  # the attempt refers to the sample
        for timer in (self._overflow, self._slow):
            if timer is not None:
                timer.cancel()

    # ---- the client's pace --------------------------------------------------------------------------------------

    def buffered(self, size: int) -> None:
        self._unread_bytes += size
        if self._unread_bytes > UNREAD_BYTES and self._overflow is None:
            self._overflow = asyncio.get_running_loop().call_later(FULL_S, self._pause)

    def read(self, size: int) -> None:
        self._unread_bytes -= size
        self._num_reads += 1
        self._has_read.set()

    async def wait_until_read(self) -> None:
        """Wait until the client has read most of the buffered output. Raises UnavailableError if the client stops
        reading."""
        while self._unread_bytes > UNREAD_BYTES // 4 and self._error is None:
            self._has_read.clear()
            await self._has_read.wait()
        if self._error is not None:
            raise self._error

    def resume(self, sample: SampleState) -> None:
        if sample.is_paused:
            sample.is_paused = False
            self._queue.resume(self.entry)

    def _pause(self) -> None:
        self._overflow = None
        if self._unread_bytes <= UNREAD_BYTES:
            return
        for sample in self.samples:
            if sample.attempt is not None and sample.attempt.end(ClientBackpressure()):
                sample.is_paused = True
                self._queue.pause(self.entry, time.monotonic())
        if self._slow is None:
            self._watch()

    def _watch(self) -> None:
        self._slow = asyncio.get_running_loop().call_later(SLOW_S, self._check_reads, self._num_reads)

    def _check_reads(self, num_reads: int) -> None:
        """Fail the request if it is paused and its client has read nothing since the timer started. `num_reads` is the
        number of reads at that time."""
        self._slow = None
        if not any(sample.is_paused for sample in self.samples):
            return
        if self._num_reads > num_reads:
            self._watch()
            return
        self._error = UnavailableError(f"The client has read nothing for {SLOW_S:g} s.", status=408, code="slow_reader")
        for sample in self.samples:
            if sample.attempt is not None:
                sample.attempt.close(self._error)
        self._has_read.set()
        self.close("failed")


class Attempt:
    """One attempt to generate a sample. The attempt is an async iterator that yields each of its deltas once and in
    order.

    The dispatcher creates and reads the attempt. The attempt runs on one or two nodes. The connections to these nodes
    pass deltas to it (`DeltaListener`), in any order. The attempt ends when the sample finishes or the attempt fails.
    It then releases its nodes at once, even if its reader is slow. The reader still gets the deltas that were received
    before the end. If the attempt failed, the reader then gets the error. All methods run on the router's event loop.
    """

    def __init__(self, admitted: AdmittedRequest, sample: SampleState, number: int) -> None:
        self.request = admitted.request
        self.sample = sample
        self.id = f"{self.request.id}.{self.request.first_sample + sample.index}.{number}"
        self.is_first = number == 0 and sample.index == 0  # the first attempt of the whole request
        self.prefill: NodeConnection | None = None
        self.decode: NodeConnection | None = None
        self._admitted = admitted
        self._start = len(sample.tokens)
        self._charge: LoadCharge | None = None  # the load that the attempt adds to its nodes, once they are assigned
        self._handed_off = False
        self._producers: set[NodeConnection] = set()
        self._early: dict[int, tuple[NodeConnection, TokenDelta]] = {}  # deltas that wait for earlier ones, by position
        self._prompt_logprobs: list[Logprobs] = []
        self._ready: deque[tuple[int, TokenDelta]] = deque()  # deltas in order, each with its size
        self._is_over = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def nodes(self) -> list[NodeConnection]:
        return [node for node in (self.prefill, self.decode) if node is not None]

    @property
    def has_output(self) -> bool:
        return len(self.sample.tokens) > self._start

    def produced_by(self, node: NodeConnection | None) -> bool:
        """Return whether any token of this attempt came from this node."""
        return node in self._producers

    def begin(self, prefill: NodeConnection | None, decode: NodeConnection, cached_tokens: int | None = None) -> None:
        """Assign the nodes, and charge the attempt to their load. `cached_tokens` is the expected length of the cached
        prefix on the node that computes the prompt. None means that this node has the prompt's KV, so that the prefix
        consists of all full blocks before the prompt's last token."""
        self.prefill, self.decode = prefill, decode
        prefill_load = None if prefill is None else prefill.load
        num_done = len(self.sample.tokens)
        num_tokens, may_add = len(self.request.prompt) + num_done, self.request.max_tokens - num_done
        size, caches = decode.info.block_tokens, decode.caches_prefixes and self.request.share_prefix
        shared = (len(self.request.prompt) - 1) // size * size if caches else 0
        cached = shared if cached_tokens is None else cached_tokens
        self._charge = LoadCharge(
            prefill_load, decode.load, num_tokens, cached, may_add, shared, self._admitted.sharers
        )
        self.sample.attempt = self

    def end(self, error: Exception | None) -> bool:
        """End the attempt, and stop it on every node that still runs it. Return False if it had already ended."""
        if self._is_over:
            return False
        self._is_over, self._error = True, error
        if self._charge is not None:
            self._prompt_computed(self._charge)
            self._charge.end()
        for node in self.nodes:
            if error is None and self.sample.outcome == "finished":
                node.forget(self.id)
            else:
                node.abort(self.id)
        self._wake()
        return True

    def close(self, error: Exception | None = None) -> None:
        """End the attempt, and drop the unread deltas. If a reader continues to read, it gets the error."""
        self.end(error)
        self._error = error
        while self._ready:
            self._admitted.read(self._ready.popleft()[0])

    # ---- the reader's side --------------------------------------------------------------------------------------

    def __aiter__(self) -> "Attempt":
        return self

    async def __anext__(self) -> TokenDelta:
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._is_over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        size, delta = self._ready.popleft()
        self._admitted.read(size)
        return delta

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- the nodes' side ----------------------------------------------------------------------------------------

    def on_delta(self, connection: NodeConnection, delta: TokenDelta) -> None:
        try:
            self._process(connection, delta)
        except ValueError:
            raise  # a malformed message invalidates the connection
        except Exception as error:  # noqa: BLE001 - fails only this request
            self.end(error)

    def on_node_lost(self, connection: NodeConnection) -> None:
        if connection is self.prefill and self._handed_off and self.has_output:
            return  # the decode node has the KV, and the first token has arrived: the prefill node is no longer needed
        computes = self.decode if self.prefill is None or self._handed_off else self.prefill
        is_suspect = connection is computes and connection.has_crashed
        node = connection.info.id
        self.end(AttemptFailed(f"node {node} is gone", node, is_gone=True, is_suspect=is_suspect))

    def _process(self, connection: NodeConnection, delta: TokenDelta) -> None:
        if self._is_over:
            return
        self._handed_off = self._handed_off or delta.handed_off or (connection is self.decode and bool(delta.tokens))
        if delta.error:
            if connection is self.decode or not self._handed_off:
                self.end(_failure(connection, delta))
            return  # ignore this error: the prefill node's handoff succeeded, but the node did not receive the reply
        assert self._charge is not None
        # The logprobs of a prompt's first chunks arrive before the prompt is computed.
        has_token = bool(delta.finish) or (self.prefill is None and bool(delta.tokens))
        if not self._charge.is_prompt_computed and (self._handed_off or has_token):
            self._prompt_computed(self._charge)
            if self.sample.index == 0:
                if self._handed_off or self.prefill is None:
                    self._admitted.kv_node, self._admitted.prompt_node = self.decode, self.prefill
                if self.sample.tokens or self.request.sampling.prompt_logprobs is None:
                    self._admitted.first_is_computed.set()
        self._prompt_logprobs += delta.prompt_logprobs
        if not delta.tokens and not delta.finish:
            return
        self._early[delta.position] = connection, delta
        while (ready := self._early.pop(len(self.sample.tokens), None)) is not None:
            self._publish(*ready)
            if ready[1].finish:
                self._admitted.end(self.sample, "finished")
                self.end(None)
                return

    def _prompt_computed(self, charge: LoadCharge) -> None:
        if not charge.is_prompt_computed:
            charge.prompt_computed()
            self._admitted.prompt_computed()

    def _publish(self, connection: NodeConnection, delta: TokenDelta) -> None:
        failpoints.reach("router.received", self.id)
        is_first = not self.sample.tokens
        self.sample.tokens += unpack_ids(delta.tokens)
        self._producers.add(connection)
        if is_first and self.sample.index == 0 and self._admitted.kv_node is not None:
            self._admitted.first_is_computed.set()
        # Deliver all prompt logprobs with the sample's first token, so that a retry does not deliver them again.
        delta.prompt_logprobs, self._prompt_logprobs = (self._prompt_logprobs if is_first else []), []
        if not is_first:
            delta.cached_tokens = 0
        size = size_of(delta)
        self._ready.append((size, delta))
        self._admitted.buffered(size)
        self._wake()


def _failure(connection: NodeConnection, delta: TokenDelta) -> Exception:
    if delta.retry:
        return AttemptFailed(delta.error, connection.info.id)
    if delta.error == "no_token":
        text = "No token is allowed at some position of the answer: the request's parameters exclude all tokens"
        return RequestError(f"{text}, or the grammar is too complex.", code="no_token")
    if delta.error in {"internal", "numerical"}:
        return UnavailableError(f"The model failed on this request ({delta.error}).", status=500)
    return RequestError(delta.error)


def size_of(delta: TokenDelta) -> int:
    """Return the approximate number of bytes of memory that the delta takes."""
    size = 384 + 10 * len(delta.tokens) + len(delta.vector)
    if delta.logprobs or delta.prompt_logprobs:
        size += sum(200 + 80 * len(entry.top_tokens) for entry in delta.logprobs + delta.prompt_logprobs)
    return size

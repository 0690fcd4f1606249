"""The requests in progress on this node: registers them, gives them to the engine, and ends them."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from engine.engine import INTERNAL, Engine
from engine.media import ImageSupport, PromptImage
from engine.token_masks import TokenMatcher
from node.image_encoding import ImageEncoding
from node.recorder import StepRecorder
from node.router_sessions import RouterSessions
from node.stats import NodeState
from node.validation import check_submit
from scheduler.prefix import MediaSpan
from scheduler.request import Request, RequestState
from scheduler.scheduler import Scheduler
from shared import failpoints
from shared.clock import now_ns
from shared.fair_threads import FairThreads
from shared.grammar import GrammarTokenizer
from shared.logs import fields
from shared.rpc.messages import Media, SubmitRequest, TokenDelta, unpack_ids

log = logging.getLogger("baton.node")
MAX_REQUESTS = 8192  # a node with this many requests rejects new ones
MAX_TOKENS = 1 << 23  # maximum number of submitted tokens of all requests together: 300 MB at 36 bytes per token
PIXEL_BYTES_PER_TOKEN = 128  # this many bytes of images count as one token, so MAX_TOKENS allows 1 GiB of images
MAX_POOLS = 16  # the default limit is at least the number of tokens that fit into this many of the node's KV pools


class OverloadedError(ValueError):
    """This node does not accept the request now, but another node may."""


# Ends the handoff of an aborted request, given the request's id. Returns True if the callee itself returns the
# request's blocks to the scheduler.
AbortHandoff = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Limits on the requests of this node, and options for computing these requests."""

    vocab_size: int
    share_prefixes: bool = True
    shared_pool: bool = False  # handoffs copy no KV: a prefill node computes in the decode node's pool
    max_requests: int = MAX_REQUESTS
    max_tokens: int | None = None  # None: `MAX_TOKENS`, or the size of `MAX_POOLS` pools if that is more
    poolings: tuple[str, ...] = ("",)  # see `Runner.poolings`
    grammars: GrammarTokenizer | None = None  # None: grammars are ignored, because no real model generates the tokens
    images: ImageSupport | None = None  # None: requests with images are refused


@dataclass(slots=True)
class ActiveRequest:
    """One request in progress. `num_tokens` counts submitted tokens, and images as PIXEL_BYTES_PER_TOKEN defines."""

    request: Request
    router: str
    num_tokens: int
    abort_handoff: AbortHandoff | None  # `RoleAdapter.on_abort`; None for a request without a handoff
    matcher: "asyncio.Future[TokenMatcher] | None" = None  # done when the request's grammar is compiled
    encoding: "asyncio.Task[None] | None" = None  # done when the request's images are encoded


def _refusal(pooling: str) -> str:
    if pooling in {"", "logits"}:
        return "This checkpoint has no output head, so it can only make embeddings (/v1/embeddings)."
    return "Embeddings need hidden states, which the nodes' runner does not return for this model: see `baton models`."


class ActiveRequests:
    """The requests in progress, keyed by id.

    The node and its role adapter use this class on the event loop. Commands for the scheduler are posted to the
    engine's thread and run there in order. A request is registered once and ends once: the first call of `finish`,
    `fail` or `abort` removes its entry, and later calls do nothing. An exception in code that serves one request fails
    only that request, with the error "internal".
    """

    def __init__(
        self,
        state: NodeState,
        engine: Engine,
        sessions: RouterSessions,
        recorder: StepRecorder,
        rules: RequestRules,
        images: ImageEncoding | None = None,
    ) -> None:
        """`images` is None if the node encodes no images."""
        self.num_tokens = 0  # sum of the `num_tokens` of all entries
        self._entries: dict[str, ActiveRequest] = {}
        self._state = state
        self._engine = engine
        self._sessions = sessions
        self._recorder = recorder
        self._rules = rules
        self._images = images
        pool_tokens = state.info.num_blocks * state.info.block_tokens
        self._max_tokens = rules.max_tokens or max(MAX_TOKENS, MAX_POOLS * pool_tokens)
        self._loop = asyncio.get_running_loop()
        self._compiler = FairThreads(1, "grammar")

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def is_from(self, router: str, request_id: str) -> bool:
        entry = self._entries.get(request_id)
        return entry is not None and entry.router == router

    def has_adapter(self, digest: str) -> bool:
        """Return whether a request uses this LoRA adapter."""
        return any(entry.request.adapter == digest for entry in self._entries.values())

    # ---- start --------------------------------------------------------------------------------------------------

    def register(
        self,
        router: str,
        submit: SubmitRequest,
        abort_handoff: AbortHandoff | None = None,
        *,
        send_kv: bool = False,
        receive_kv: bool = False,
    ) -> Request:
        """Register a request, and give it to the engine.

        If the request borrows another node's blocks, it is only registered; the caller must call `enqueue` later.
        Raises ValueError if the request is malformed or its router is not attached. Raises OverloadedError if this node
        does not accept the request but another node may.
        """
        log.debug("request received", extra=fields(request=submit.id, traceparent=submit.traceparent))
        if not self._sessions.is_attached(router):
            raise ValueError("this router is not connected to this node")
        if refusal := self._state.refusal(is_handoff=receive_kv):
            raise OverloadedError(refusal)
        rules = self._rules
        tokens = check_submit(submit, self._state.info.max_model_len, rules.vocab_size)
        if (pooling := submit.sampling.pooling) not in rules.poolings:
            raise ValueError(_refusal(pooling))
        num_tokens = len(tokens) + sum(len(one.pixels) for one in submit.media) // PIXEL_BYTES_PER_TOKEN
        self._check_limits(submit.id, num_tokens)
        if submit.adapter and submit.adapter not in self._state.info.adapters.values():
            raise OverloadedError("this node does not have the request's LoRA adapter")
        shares = submit.share_prefix and rules.share_prefixes
        request = Request(
            submit.id,
            tokens,
            submit.num_prompt,
            submit.max_tokens,
            min_tokens=submit.min_tokens,
            stop_tokens=frozenset(unpack_ids(submit.stop_tokens)),
            salt=submit.salt if shares else submit.salt + b"\0" + submit.id.encode(),
            adapter=submit.adapter,
            priority=submit.priority,
            receive_kv=receive_kv,
            send_kv=send_kv,
            shared_pool=rules.shared_pool and (receive_kv or send_kv),
            needs_prompt_logprobs=submit.sampling.prompt_logprobs is not None or submit.sampling.pooling == "mean",
            speculates=submit.speculative,
            sampling=submit.sampling,
        )
        if submit.media:
            self._add_images(request, submit.media)
        matcher = self._compile(submit)
        self._entries[request.id] = ActiveRequest(request, router, num_tokens, abort_handoff, matcher)
        self.num_tokens += num_tokens
        try:
            failpoints.reach("node.accepted", request.id)
            if not request.borrows_blocks:
                self.enqueue(request)
        except BaseException:
            self._pop(request.id)
            raise
        return request

    def _add_images(self, request: Request, media: list[Media]) -> None:
        support, has_pixels = self._rules.images, media[0].pixels != b""
        if support is None and has_pixels:
            raise ValueError("the nodes of this cluster cannot encode images: see their logs, or omit the images")
        is_atomic = support is not None and support.is_atomic
        request.media = tuple(MediaSpan(one.offset, one.rows, one.columns, one.digest, is_atomic) for one in media)
        if has_pixels:
            request.images = [PromptImage(one) for one in media]

    def _check_limits(self, request_id: str, num_tokens: int) -> None:
        if request_id in self._entries:
            raise ValueError(f"request {request_id} is already on this node")
        if len(self._entries) >= self._rules.max_requests or self.num_tokens + num_tokens > self._max_tokens:
            raise OverloadedError(
                f"this node has {len(self._entries)} requests with {self.num_tokens} tokens in total: no more fit"
            )

    def _compile(self, submit: SubmitRequest) -> "asyncio.Future[TokenMatcher] | None":
        """Begin to compile the grammar, if any, on another thread. A large grammar can take a second."""
        if not submit.grammar or self._rules.grammars is None:
            return None
        compiling = self._compiler.submit(submit.tenant, TokenMatcher, self._rules.grammars, submit.grammar)
        return asyncio.wrap_future(compiling, loop=self._loop)

    def enqueue(self, request: Request) -> None:
        """Give a registered request to the engine, once its grammar is compiled."""
        entry = self._entries.get(request.id)
        if entry is None or entry.matcher is None:
            self._encode(request)
            return
        matcher = entry.matcher

        def compiled(_: object) -> None:
            error = None if matcher.cancelled() else matcher.exception()
            if self._entries.get(request.id) is not entry:
                return  # the request was aborted
            if error is None:
                request.matcher = matcher.result()
                self._encode(request)
            else:
                self.fail(request.id, str(error) if isinstance(error, ValueError) else INTERNAL, retry=False)

        matcher.add_done_callback(compiled)

    def _encode(self, request: Request) -> None:
        """Encode the images whose KV is not completely in the prefix cache, and then give the request to the engine.

        The engine continues to run steps in the meantime.
        """
        encoding = self._images
        if encoding is None or request.images is None:
            self._enqueue(request)
            return

        def start(images: list[PromptImage]) -> None:
            entry = self._entries.get(request.id)
            if entry is None:
                return
            if not images:
                self._enqueue(request)
                return
            entry.encoding = encoding.start(images)
            entry.encoding.add_done_callback(lambda done: self.guard(request.id, finish, done))

        def finish(done: "asyncio.Task[None]") -> None:
            if done.cancelled():  # the request was aborted, or the node is closing
                return
            done.result()
            if request.id in self._entries:
                self._enqueue(request)

        def find(scheduler: Scheduler) -> None:
            cached = max(request.num_computed, scheduler.cached_tokens(request))
            pairs = zip(request.media, request.images, strict=True)
            images = [image for span, image in pairs if span.end > cached]
            self._loop.call_soon_threadsafe(start, images)

        self.post_for(request, find)

    def _enqueue(self, request: Request) -> None:
        received_ns = now_ns()

        def add(scheduler: Scheduler) -> None:
            if request.state is RequestState.DONE:  # `release` ended it; another request may have its blocks now
                return
            try:
                scheduler.add(request)
                self._recorder.added(request, received_ns)
            except ValueError as error:
                self._recorder.event(request.id, "queued", received_ns, count=len(request.tokens))
                self._loop.call_soon_threadsafe(self.fail, request.id, str(error), False)

        self.post_for(request, add)

    def post_for(self, request: Request, command: Callable[[Scheduler], object]) -> None:
        """Run a command on the engine's thread; if it raises an exception, only `request` fails."""

        def guarded(scheduler: Scheduler) -> None:
            try:
                command(scheduler)
            except Exception:
                log.exception("request %s failed", request.id)
                self._loop.call_soon_threadsafe(self.fail, request.id, INTERNAL, False)

        self._engine.post(guarded)

    def guard(self, request_id: str, call: Callable[..., object], *args: object) -> None:
        """Call a function; if it raises an exception, only the request with this id fails."""
        try:
            call(*args)
        except Exception:
            log.exception("request %s failed", request_id)
            self.fail(request_id, INTERNAL, retry=False)

    # ---- output -------------------------------------------------------------------------------------------------

    def send(self, delta: TokenDelta) -> None:
        """Send a delta to the request's router; drop the delta if the request has ended."""
        entry = self._entries.get(delta.id)
        if entry is not None:
            self.send_to(entry.router, delta)

    def send_to(self, router: str, delta: TokenDelta) -> None:
        """Send a delta to a router. If the router has stopped reading, abort its requests."""
        if not self._sessions.send(router, delta):
            self.abort_router(router)

    # ---- end ----------------------------------------------------------------------------------------------------

    def finish(self, request_id: str, reason: str, at_ns: int | None = None) -> None:
        """Remove a request that ended at `at_ns` (default: now), without aborting it in the scheduler."""
        if self._pop(request_id) is not None:
            self._recorder.event(request_id, "ended", at_ns, reason=reason)

    def fail(self, request_id: str, reason: str, retry: bool) -> None:
        """Report to the router that this node cannot finish the request, and abort the request.

        `retry` means that the request might succeed on another node.
        """
        self.send(TokenDelta(request_id, error=reason, retry=retry))
        self.abort(request_id, reason)

    def fail_all(self, reason: str) -> int:
        """Fail every request, so that its router retries it on another node. Return the number of requests."""
        request_ids = list(self._entries)
        for request_id in request_ids:
            self.fail(request_id, reason, retry=True)
        return len(request_ids)

    def abort_router(self, router: str) -> None:
        """Abort all requests of a router."""
        for request_id in [key for key, entry in self._entries.items() if entry.router == router]:
            self.abort(request_id)

    def abort(self, request_id: str, reason: str = "aborted") -> None:
        """Abort a request in any state. Do nothing if it has ended."""
        at_ns = now_ns()
        entry = self._pop(request_id)
        if entry is None:
            return
        writer_stopped = True
        try:
            is_handled = entry.abort_handoff is not None and entry.abort_handoff(request_id)
        except Exception:
            log.exception("aborting request %s failed", request_id)
            # Another node may still write into the blocks, so the scheduler quarantines them.
            is_handled = writer_stopped = False
        if is_handled:
            self._recorder.event(request_id, "ended", at_ns, reason=reason)
            return

        def end(scheduler: Scheduler) -> None:
            scheduler.abort(entry.request, writer_stopped=writer_stopped)
            # The engine's thread records "queued", so it must also record "ended". Otherwise "ended" might come first.
            self._recorder.event(request_id, "ended", at_ns, reason=reason)

        self._engine.post(end)

    def release(self, request: Request) -> "asyncio.Future[None]":
        """Abort a request in the scheduler. If it is not there yet, it will not be added. The returned future is done
        when no launched step can write to the request's blocks any more."""
        done: asyncio.Future[None] = self._loop.create_future()
        publisher = self._state.publisher
        self._engine.post(lambda scheduler: publisher.release(scheduler, request, done))
        return done

    def _pop(self, request_id: str) -> ActiveRequest | None:
        """Remove a request, and cancel the work for it that has not begun."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self.num_tokens -= entry.num_tokens
            if entry.matcher is not None:
                entry.matcher.cancel()
            if entry.encoding is not None:
                entry.encoding.cancel()
        return entry

"""Generates stored responses, and lets any number of clients follow them.

A run is a task that generates one response, and holds the response's lease. It appends each delta to the log in the
store. Handlers do not read from the run. For each client, they replay the log. A client of any router therefore gets
the same events, before and after another router takes the response over.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, TypeVar

from router.dispatch.requests import GenerationRequest
from router.http.asgi import Identity, described
from router.http.bodies import ChatBody
from router.http.generation import ServedModels
from router.http.output import OutputProcessor, PromptOutput
from router.http.parsing import THREADS
from router.http.response_bodies import Item, ResponsesBody, items_of, turns_of
from router.http.response_events import Event, ResponseEvents
from router.metrics.request_metrics import SampleTimings, SloTargets
from router.nodes.connection import ANY_VERSION, ModelVersion
from router.responses_store import CANCELLED, LEASE_S, POLL_S, ResponsesStore, StoredResponse
from shared.errors import RequestError, UnavailableError
from shared.lifecycle import TaskGroup
from shared.rpc.messages import SamplingParams, TokenDelta, pack_ids, unpack_ids

log = logging.getLogger("baton.responses")
Result = TypeVar("Result")
# If the store does not answer, a call is repeated every STORE_PAUSE_S seconds, for up to STORE_PATIENCE_S seconds.
STORE_PAUSE_S, STORE_PATIENCE_S = 0.2, 60.0
TAKEN_AT_ONCE = 16  # maximum number of responses that are taken over at once
REPLAYED_AT_ONCE = 16  # number of entries of a log that the event loop processes without a pause


@dataclass(slots=True)
class RequestSlots:
    """The number of API requests in progress, and its limit. Responses that run in the background count too.

    If all slots are used, a tenant may still use an equal share of them, as in the queue. Requests in progress can
    therefore exceed the limit while a tenant with many requests has not finished them.
    """

    limit: int
    used: int = 0
    by_tenant: Counter[str] = field(default_factory=Counter)  # only of tenants with requests in progress

    def take(self, tenant: str) -> None:
        self.used += 1
        self.by_tenant[tenant] += 1

    def release(self, tenant: str) -> None:
        self.used -= 1
        self.by_tenant[tenant] -= 1
        if not self.by_tenant[tenant]:
            del self.by_tenant[tenant]

    def is_over_limit(self, tenant: str) -> bool:
        """Return whether to refuse a request of the tenant. The request must already have taken its slot."""
        return self.used > self.limit and self.by_tenant[tenant] * len(self.by_tenant) > self.limit


def body_of(stored: StoredResponse) -> ResponsesBody:
    """Return the body of the request. Raises ValueError if this version cannot read it."""
    return ResponsesBody.model_validate_json(stored.body)


def chat_of(stored: StoredResponse) -> ChatBody:
    """Return the chat that generates the response. Raises RequestError or ValueError if this version cannot read it."""
    return body_of(stored).to_chat(items_of(stored.context))


async def fit(
    body: ResponsesBody, context: Sequence[Item], build: Callable[[ChatBody], Awaitable[list[GenerationRequest]]]
) -> tuple[ChatBody, GenerationRequest]:
    """Return the chat that generates a response, and the request that `build` returns for this chat.

    If the chat is too long for the model, and the truncation is "auto", leave out as few of the oldest turns as
    possible. The last turn is never left out. Raises RequestError.
    """

    async def attempt(begin: int) -> tuple[ChatBody, GenerationRequest]:
        chat = body.to_chat(context, begin)
        (request,) = await build(chat)
        return chat, request

    found, turns = None, [0, *turns_of([*context, *body.items])[1:]]
    middle = 0  # first, try the whole conversation
    while turns:
        try:
            found, turns = await attempt(turns[middle]), turns[:middle]
        except RequestError as error:
            if body.truncation != "auto" or error.code != "context_length_exceeded":
                raise
            turns, too_long = turns[middle + 1 :], error
        middle = len(turns) // 2
    if found is None:
        raise too_long
    return found


@dataclass(frozen=True, slots=True)
class ResponseRun:
    """One run of a stored response, which continues after the deltas in `known`. `owner` is the name under which
    the run holds the response's lease."""

    stored: StoredResponse
    request: GenerationRequest
    known: Sequence[TokenDelta]
    owner: str
    is_background: bool


class Replay:
    """Builds the events of a stored response from its log."""

    def __init__(self, models: ServedModels, stored: StoredResponse) -> None:
        body, chat, prompt = body_of(stored), chat_of(stored), unpack_ids(stored.prompt)
        generation = models.of(body.model)
        request = GenerationRequest(stored.id, prompt, stored.max_tokens, SamplingParams(), chat.min_tokens)
        self.tokens: list[int] = []
        model = generation.name_for(body)
        self.events = ResponseEvents(stored.id, stored.created, body, model, generation.tokenizer, len(prompt))
        timings = SampleTimings(SloTargets(), 0.0)
        self._choice = OutputProcessor(0, PromptOutput(request), generation.tokenizer, chat, timings)
        self._cached_tokens = 0

    def add(self, delta: TokenDelta) -> list[Event]:
        """Return the events for an entry of the log."""
        self.tokens += unpack_ids(delta.tokens)
        if delta.error:
            return self.events.fail("cancelled" if delta.error == CANCELLED else "failed", delta.error)
        self._cached_tokens = max(self._cached_tokens, delta.cached_tokens)
        return self.events.add(self._choice.process(delta), self._cached_tokens)


class ResponseRuns:
    """The stored responses that this router generates.

    The handlers of the Responses API call `create`, `follow` and `cancel`; the router calls `open` and `close`. If the
    store is shared, one task renews the leases of this router's runs, and another takes over responses whose router
    died. All methods run on the router's event loop. After `close`, other routers may take over unfinished responses.
    """

    def __init__(self, models: ServedModels, store: ResponsesStore, owner: str, slots: RequestSlots) -> None:
        """`owner` is the id of this router. The router gets a new id each time it starts."""
        self.store = store
        # Errors of foreground runs that failed before their first token, keyed by response. Handlers remove them.
        self.errors: dict[str, Exception] = {}
        self._models = models
        self._owner = owner
        self._slots = slots
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._owners: dict[str, str] = {}  # the names under which the runs hold their leases, keyed by response
        self._group = TaskGroup()
        self._news: dict[str, asyncio.Event] = {}  # set when an entry was appended to the log, keyed by response

    def open(self) -> None:
        if self.store.is_shared:
            self._group.start(self._renew())
            self._group.start(self._take_over())

    async def close(self) -> None:
        owners = dict(self._owners)
        await self._group.close()
        with suppress(UnavailableError):
            await self.store.release(owners)
        await self.store.close()

    async def create(self, stored: StoredResponse, request: GenerationRequest, *, is_background: bool) -> None:
        """Store a response and start to generate it. If the store fails or the caller is cancelled, the client gets no
        id. The response is then cancelled, because the store may have created it nevertheless."""
        creating = asyncio.ensure_future(self.store.create(stored, self._owner))
        try:
            await asyncio.shield(creating)
        except BaseException:
            self._group.start(self._cancel_created(creating, stored.id))
            raise
        self._start(ResponseRun(stored, request, (), self._owner, is_background))

    async def cancel(self, response_id: str) -> None:
        """End a response with the status "cancelled", unless it has ended."""
        await self.store.end(response_id, TokenDelta(response_id, error=CANCELLED))
        if (task := self._tasks.get(response_id)) is not None:
            task.cancel()
        self._wake(response_id)

    def abandon(self, response_id: str) -> None:
        """Cancel a response whose client is gone, as soon as the store answers."""
        self._group.start(_patiently(lambda: self.cancel(response_id)))

    async def _cancel_created(self, creating: asyncio.Future[None], response_id: str) -> None:
        await asyncio.gather(creating, return_exceptions=True)
        await _patiently(lambda: self.cancel(response_id))

    async def replay(self, stored: StoredResponse) -> Replay:
        """Return a replay that has processed the response's whole log, which takes a second for long logs."""
        return await THREADS.run(stored.tenant, self._replayed, stored, await self.store.read(stored.id, 0))

    def _replayed(self, stored: StoredResponse, deltas: Sequence[TokenDelta]) -> Replay:
        replay = Replay(self._models, stored)
        replay.events.start()
        for delta in deltas:
            replay.add(delta)
        return replay

    async def snapshot(self, stored: StoredResponse) -> dict[str, Any]:
        """Return the response so far, as the API shows it."""
        replay = await self.replay(stored)
        response = replay.events.response
        is_queued = response["background"] and response["status"] == "in_progress" and not replay.tokens
        return response | ({"status": "queued"} if is_queued else {})

    async def follow(self, stored: StoredResponse) -> AsyncGenerator[list[Event], None]:
        """Yield the events of a response until it ends or is deleted. Nothing is yielded before the first delta."""
        replay, num_read, deadline = Replay(self._models, stored), 0, time.monotonic() + STORE_PATIENCE_S
        events = replay.events.start()
        while not replay.events.is_complete:
            news = self._news.setdefault(stored.id, asyncio.Event()) if stored.id in self._tasks else asyncio.Event()
            try:
                found = await self.store.read(stored.id, num_read)
                is_deleted = not found and await self.store.get(stored.id) is None
                deadline = time.monotonic() + STORE_PATIENCE_S
            except UnavailableError:
                if time.monotonic() > deadline:
                    raise
                found, is_deleted = [], False
            if is_deleted:
                return
            for number, delta in enumerate(found, 1):
                yield events + replay.add(delta)
                events = []
                if number % REPLAYED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # let other requests run while a long log is replayed
            num_read += len(found)
            if not found:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LEASE_S if stored.id in self._tasks else POLL_S):
                        await news.wait()

    # ---- runs ----------------------------------------------------------------------------------------------------

    def _start(self, run: ResponseRun) -> None:
        name = run.stored.id
        if run.is_background:
            self._slots.take(run.stored.tenant)
        if (earlier := self._tasks.get(name)) is not None:  # the earlier run lost its lease while this router froze
            earlier.cancel()
        task = self._group.start(self._generate(run))
        self._tasks[name], self._owners[name] = task, run.owner

        def ended(_: asyncio.Task[None]) -> None:
            if run.is_background:
                self._slots.release(run.stored.tenant)
            if self._tasks.get(name) is task:
                del self._tasks[name], self._owners[name]
            self._wake(name)

        task.add_done_callback(ended)

    async def _generate(self, run: ResponseRun) -> None:
        """Generate the rest of a response. Stop if another router has taken the response over."""
        name, request = run.stored.id, run.request
        chat = chat_of(run.stored)
        generation = self._models.of(chat.model)
        output = generation.output(chat, request.id, [request], time.monotonic())
        for number, delta in enumerate(run.known, 1):
            output.choices[0].process(delta)
            if number % REPLAYED_AT_ONCE == 0:
                await asyncio.sleep(0)
        position = len(run.known)
        try:
            async with generation.deltas(output) as deltas:
                async for choice, text in deltas:
                    delta = TokenDelta(name, choice.num_tokens - len(text.tokens), pack_ids(text.tokens))
                    # The log does not record that a stop string ended the response. A replay finds the string again,
                    # at the latest at its end, in the text that it has held back.
                    delta.finish = "length" if isinstance(text.stop_reason, str) else text.finish or ""
                    delta.logprobs, delta.cached_tokens = text.logprobs, choice.prompt.cached_tokens
                    delta.version = list(request.version)
                    if not await self._append(run, position, delta, ends=text.finish is not None):
                        return
                    position += 1
        except Exception as error:  # noqa: BLE001 - the response ends with this error
            if not run.is_background and position == 0:
                self.errors[name] = error
            _, value, _ = described(error, name)
            last = TokenDelta(name, error=value["error"]["message"])
            await self._append(run, position, last, ends=True)

    async def _append(self, run: ResponseRun, position: int, delta: TokenDelta, *, ends: bool) -> bool:
        """Append to the log. Return False if the lease is lost, or if the store does not answer in time."""
        append, name = self.store.append, run.stored.id
        is_kept = await _patiently(lambda: append(name, run.owner, position, delta, ends=ends))
        self._wake(name)
        return bool(is_kept)

    def _wake(self, response_id: str) -> None:
        if (news := self._news.pop(response_id, None)) is not None:
            news.set()

    async def _renew(self) -> None:
        """Renew the leases of this router's runs, and stop the runs that have lost their leases."""
        while True:
            with suppress(UnavailableError):  # try again later; the runs also wait for the store
                for name in await self.store.renew(self._owners):
                    if (task := self._tasks.get(name)) is not None:
                        task.cancel()
            await asyncio.sleep(LEASE_S / 4)

    async def _take_over(self) -> None:
        """Take over responses whose lease has expired. Take over a few at a time, because a new lease is renewed only
        after its response has started to run. The lease must not expire before that."""
        while True:
            names: list[str] = []
            limit = min(TAKEN_AT_ONCE, self._slots.limit - self._slots.used)
            with suppress(UnavailableError):
                if limit > 0 and any(each.dispatcher.ready() for each in self._models.services):
                    owner = f"{self._owner}-{token_hex(4)}"
                    names = await self.store.adopt(owner, limit)
                    for name in names:
                        try:
                            await self._adopt(name, owner)
                        except (RequestError, ValueError) as error:  # another version of Baton may have stored it
                            log.warning("cannot continue response %s: %s", name, error)
                            text = "The response cannot be continued: its model was unloaded, or Baton was updated."
                            await self.store.end(name, TokenDelta(name, error=text))
            await asyncio.sleep(0 if len(names) == TAKEN_AT_ONCE else LEASE_S / 4)

    async def _adopt(self, response_id: str, owner: str) -> None:
        stored = await self.store.get(response_id)
        if stored is None:
            await self.store.delete(response_id)
            return
        known = await self.store.read(response_id, 0)
        # Use a new id, because nodes may still run the request of the router that died.
        run_id = f"{response_id}-{token_hex(4)}"
        body, identity = body_of(stored), Identity(stored.tenant, stored.is_admin)
        body.seed = stored.seed
        if body.model and body.model not in self._models.names():
            await self._models.learn_adapters()
        build = self._models.of(body.model).build
        _, request = await fit(body, items_of(stored.context), lambda chat: build(chat, run_id, identity))
        request.prompt, request.max_tokens, request.is_accepted = unpack_ids(stored.prompt), stored.max_tokens, True
        request.generated = tuple(token for delta in known for token in unpack_ids(delta.tokens))
        request.version = next((ModelVersion(*each.version) for each in reversed(known) if each.version), ANY_VERSION)
        log.info("took over response %s after %d tokens", response_id, len(request.generated))
        self._start(ResponseRun(stored, request, known, owner, is_background=True))


async def _patiently(call: Callable[[], Awaitable[Result]]) -> Result | None:
    """Repeat a call to the store until the store answers. Return None if it does not answer in time."""
    deadline = time.monotonic() + STORE_PATIENCE_S
    while time.monotonic() < deadline:
        with suppress(UnavailableError):
            return await call()
        await asyncio.sleep(STORE_PAUSE_S)
    return None

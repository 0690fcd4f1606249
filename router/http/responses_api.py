"""OpenAI's Responses API. With a store, responses can be read, cancelled, deleted and continued, and can run in the
background.

A response of another tenant gives the status 404, like a response that does not exist.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from router.dispatch.requests import GenerationRequest
from router.http.asgi import SCOPE_KEY, STREAM_HEADERS, ResponseWriter, described
from router.http.bodies import ChatBody
from router.http.generation import GenerationService
from router.http.messages import MAX_MESSAGES, object_in, renamed_parameters
from router.http.parsing import THREADS
from router.http.response_bodies import Item, ResponsesBody, items_of, items_to_json
from router.http.response_events import ResponseEvents, items_with_ids
from router.http.response_runs import ResponseRuns, body_of, fit
from router.http.responses import dump_in_parts, typed_events
from router.responses_store import StoredResponse
from shared.errors import RequestError
from shared.rpc.messages import pack_ids

# Parameters of chat completions, and their names in the Responses API.
PARAMS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
PARAMS |= {"response_format.json_schema.schema": "text.format.schema"}
named_parameters = partial(renamed_parameters, PARAMS, images="input", schema="parameters")
PATH = "/v1/responses/{id}"
RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
MAX_LIMIT = 100
# Limits of a conversation, because a longer one would delay all requests of the router
MAX_CONTEXT_ITEMS, MAX_CONTEXT_BYTES = 4 * MAX_MESSAGES, 16 << 20
ENDINGS = {f"response.{status}" for status in ("completed", "incomplete", "failed", "cancelled")}
NEEDS_STORE = "needs a store of responses; start the router with --responses-store"


@dataclass(frozen=True)
class ResponsesApi:
    """The handlers of the Responses API. They run on the router's event loop. `runs` is None without a store."""

    generation: GenerationService
    runs: ResponseRuns | None = None

    def routes(self) -> list[Route]:
        """Return the routes below /v1/responses."""
        return [
            Route(PATH, self.get, methods=["GET"]),
            Route(PATH, self.delete, methods=["DELETE"]),
            Route(PATH + "/cancel", self.cancel, methods=["POST"]),
            Route(PATH + "/input_items", self.input_items, methods=["GET"]),
        ]

    async def create(self, body: ResponsesBody, reply: ResponseWriter) -> None:
        """Handle POST /v1/responses."""
        if body.background and body.store is False:
            raise RequestError("`background` requires `store`.", "background")
        for name in ("store", "background", "previous_response_id"):
            if self.runs is None and getattr(body, name):
                raise RequestError(f"`{name}` {NEEDS_STORE}.", name, "unsupported_parameter")
        context = await self._context(body.previous_response_id, reply.identity.tenant)
        response_id = f"resp_{token_hex(16)}"
        with named_parameters():
            requests = self.generation.requests
            chat, request = await fit(body, context, lambda chat: requests(chat, response_id, reply))
        if self.runs is None or body.store is False:
            body.store = False
            await self._answer(body, chat, request, response_id, reply)
            return
        body.store = True
        stored = StoredResponse(
            id=response_id,
            tenant=reply.identity.tenant,
            is_admin=reply.identity.is_admin,
            created=int(time.time()),
            body=body.model_dump_json(exclude_unset=True, by_alias=True).encode(),
            context=items_to_json(context),
            prompt=pack_ids(request.prompt),
            max_tokens=request.max_tokens,
            seed=request.sampling.seed,
        )
        await self._answer_stored(self.runs, body, stored, request, reply)

    async def _answer(
        self, body: ResponsesBody, chat: ChatBody, request: GenerationRequest, response_id: str, reply: ResponseWriter
    ) -> None:
        """Answer without storing the response."""
        tokenizer, model = self.generation.tokenizer, self.generation.name_for(body)
        events = ResponseEvents(response_id, int(time.time()), body, model, tokenizer, len(request.prompt))
        started = events.start()
        output = self.generation.output(chat, response_id, [request], reply.arrived)
        try:
            async with self.generation.deltas(output, reply) as deltas:
                async for choice, delta in deltas:
                    new = [*started, *events.add(delta, choice.prompt.cached_tokens)]
                    started = []
                    if body.stream:
                        await reply.events(await _encoded(new, body, reply.identity.tenant))
        except Exception as error:
            if started or not body.stream:  # the reply can still have an error status
                raise
            _, value, _ = described(error, response_id)
            last = events.fail("failed", value["error"]["message"])
            await reply.events(await _encoded(last, body, reply.identity.tenant))
        if body.stream:
            await reply.end()
        else:
            await _reply_with(events.response, body, reply)

    async def _answer_stored(
        self,
        runs: ResponseRuns,
        body: ResponsesBody,
        stored: StoredResponse,
        request: GenerationRequest,
        reply: ResponseWriter,
    ) -> None:
        """Answer with a stored response. A response in the background continues even if the client disconnects."""
        if body.background:
            request.deadline = None
        await runs.create(stored, request, is_background=body.background)
        if body.background and not body.stream:
            await reply.json(await runs.snapshot(stored))
            return
        last: dict[str, Any] = {}
        try:
            async with aclosing(runs.follow(stored)) as groups:
                async for events in groups:
                    last = events[-1] if events else last  # a delta may have no events, while its text is held back
                    if (error := runs.errors.pop(stored.id, None)) is not None and events[0]["sequence_number"] == 0:
                        await runs.store.delete(stored.id)  # the client never got the id
                        raise error
                    if body.stream:
                        await reply.events(await _encoded(events, body, stored.tenant))
        except asyncio.CancelledError:  # the client is gone
            if not body.background:
                runs.abandon(stored.id)
            raise
        finally:
            runs.errors.pop(stored.id, None)
        if last.get("type") not in ENDINGS:
            raise RequestError("The response was deleted.", code="response_not_found", status=404)
        if body.stream:
            await reply.end()
        else:
            await _reply_with(last["response"], body, reply)

    async def get(self, request: Request) -> Response:
        """Handle GET /v1/responses/{id}. With `stream`, send the events after event number `starting_after`."""
        query = dict(request.query_params)
        stream, after = query.pop("stream", "false"), query.pop("starting_after", "-1")
        for name in ("include", "include[]", "include_obfuscation"):
            query.pop(name, None)
        if query:
            raise RequestError(f"Unknown parameter: `{min(query)[:64]}`.", min(query)[:64], "unknown_parameter")
        if stream not in ("true", "false"):
            raise RequestError("`stream` must be true or false.", "stream")
        if after != "-1" and (stream == "false" or not after.isascii() or not after.isdigit() or len(after) > 9):
            raise RequestError(
                "`starting_after` must be the number of an event, and is only allowed with `stream`.", "starting_after"
            )
        runs, stored = await self._stored(request)
        if stream == "false":
            return await _snapshot(runs, stored)
        return StreamingResponse(_events_after(runs, stored, int(after)), headers=STREAM_HEADERS)

    async def delete(self, request: Request) -> Response:
        """Handle DELETE /v1/responses/{id}. An unfinished response is cancelled first."""
        runs, stored = await self._stored(request)
        await runs.cancel(stored.id)
        await runs.store.delete(stored.id)
        return JSONResponse({"id": stored.id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Handle POST /v1/responses/{id}/cancel. A response that has ended stays as it is."""
        runs, stored = await self._stored(request)
        if not body_of(stored).background:
            raise RequestError("Only a response with `background` can be cancelled.", "id")
        await runs.cancel(stored.id)
        return await _snapshot(runs, stored)

    async def input_items(self, request: Request) -> Response:
        """Handle GET /v1/responses/{id}/input_items."""
        (_, stored), query = await self._stored(request), request.query_params
        limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
        if not limit.isascii() or not limit.isdigit() or len(limit) > 3 or not 1 <= int(limit) <= MAX_LIMIT:
            raise RequestError(f"`limit` must be from 1 to {MAX_LIMIT}.", "limit")
        if order not in ("asc", "desc"):
            raise RequestError("`order` must be asc or desc.", "order")
        own = [*items_of(stored.context), *body_of(stored).items]
        items = items_with_ids([item.model_dump(exclude_none=True) for item in own], stored.id)
        items = items if order == "asc" else items[::-1]
        names = [item["id"] for item in items]
        if after is not None and after not in names:
            raise RequestError("`after` is not the id of an input item.", "after")
        start = 0 if after is None else names.index(after) + 1
        page = items[start : start + int(limit)]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return JSONResponse({"object": "list", "data": page, "has_more": start + len(page) < len(items), **ends})

    async def _stored(self, request: Request) -> tuple[ResponseRuns, StoredResponse]:
        """Return `runs` and the stored response that the path names. Raises RequestError."""
        return await self._load(request.path_params["id"], request.scope[SCOPE_KEY].tenant, "id")

    async def _load(self, response_id: str, tenant: str, param: str) -> tuple[ResponseRuns, StoredResponse]:
        """Return `runs` and a stored response of the tenant. Raises RequestError if there is no such response."""
        if self.runs is None:
            raise RequestError(f"This path {NEEDS_STORE}.", param, "not_found", 404)
        stored = await self.runs.store.get(response_id) if RESPONSE_ID.fullmatch(response_id) else None
        if stored is None or stored.tenant != tenant:
            raise RequestError("The response does not exist.", param, "response_not_found", 404)
        return self.runs, stored

    async def _context(self, response_id: str | None, tenant: str) -> list[Item]:
        """Return the items of the conversation up to the end of an earlier response."""
        if response_id is None:
            return []
        runs, stored = await self._load(response_id, tenant, "previous_response_id")
        images = self.generation.images
        most = MAX_CONTEXT_BYTES + (0 if images is None else images.limits.body_bytes)
        if len(stored.context) + len(stored.body) > most:
            text = f"The conversation has more than {most >> 20} MiB; start a new one."
            raise RequestError(text, "previous_response_id", "invalid_value")
        response = (await runs.replay(stored)).events.response
        if response["status"] not in ("completed", "incomplete"):
            text = f"The previous response has the status {response['status']}; it must be completed or incomplete."
            raise RequestError(text, "previous_response_id", "invalid_value")
        # The arguments of a call may be incomplete or invalid JSON. Chat templates require an object.
        output = [
            item | {"arguments": "{}"} if object_in(item.get("arguments") or "{}") is None else item
            for item in response["output"]
        ]
        try:
            answer = ResponsesBody.model_validate({"input": output}).items
        except ValidationError:
            text = "The previous response has an item that cannot be part of a request."
            raise RequestError(text, "previous_response_id", "invalid_value") from None
        context = [*items_of(stored.context), *body_of(stored).items, *answer]
        if len(context) > MAX_CONTEXT_ITEMS:
            text = f"The conversation has more than {MAX_CONTEXT_ITEMS} items; start a new one."
            raise RequestError(text, "previous_response_id", "invalid_value")
        return context


async def _encoded(events: Sequence[dict[str, Any]], body: ResponsesBody, tenant: str) -> bytes:
    """Return server-sent events. The events at the end of an item may repeat the logprobs of a long text, so they are
    encoded on a thread."""
    if body.has_logprobs and any(each["type"].endswith(".done") for each in events):
        return await THREADS.run(tenant, typed_events, events, partial(dump_in_parts, depth=6))
    return typed_events(events)


async def _reply_with(response: dict[str, Any], body: ResponsesBody, reply: ResponseWriter) -> None:
    if body.has_logprobs:
        text = await THREADS.run(reply.identity.tenant, dump_in_parts, response)
        await reply.encoded_json(text.encode())
    else:
        await reply.json(response)


async def _snapshot(runs: ResponseRuns, stored: StoredResponse) -> Response:
    """Return the response so far. It may have the logprobs of a long text, so it is encoded on a thread."""
    text = await THREADS.run(stored.tenant, dump_in_parts, await runs.snapshot(stored))
    return Response(text, media_type="application/json")


async def _events_after(runs: ResponseRuns, stored: StoredResponse, number: int) -> AsyncIterator[bytes]:
    """Yield the events after event `number`, as server-sent events."""
    try:
        body = body_of(stored)
        async with aclosing(runs.follow(stored)) as groups:
            async for events in groups:
                if new := [event for event in events if event["sequence_number"] > number]:
                    yield await _encoded(new, body, stored.tenant)
    except Exception as error:  # noqa: BLE001 - the status of the reply is already sent
        _, value, _ = described(error, stored.id)
        yield typed_events([{"type": "error", **value}])

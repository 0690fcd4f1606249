"""OpenAI's Responses API: POST /v1/responses."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import token_hex

from router.http.asgi import ResponseWriter, described
from router.http.bodies import Body
from router.http.generation import GenerationService
from router.http.response_bodies import ResponsesBody
from router.http.response_events import ResponseEvents, encode_event
from shared.errors import RequestError

PARAMS = {"messages": "input", "max_tokens": "max_output_tokens"}  # names of a chat's parameters in this API


@contextmanager
def named_parameters() -> Iterator[None]:
    """Change the parameter that an error about a chat names to that of this API."""
    try:
        yield
    except RequestError as error:
        error.param = PARAMS.get(error.param or "", error.param)
        raise


@dataclass(frozen=True)
class ResponsesApi:
    """The handlers of the Responses API. They run on the router's event loop."""

    generation: GenerationService

    async def create(self, body: Body, reply: ResponseWriter) -> None:
        """Handle POST /v1/responses."""
        assert isinstance(body, ResponsesBody)
        for name in ("store", "background", "previous_response_id"):
            if getattr(body, name):
                raise RequestError(f"`{name}` is not supported.", name, "unsupported_parameter")
        response_id = f"resp_{token_hex(16)}"
        with named_parameters():
            chat = body.to_chat([])
            requests = await self.generation.requests(chat, response_id, reply)
        tokenizer, model = self.generation.tokenizer, body.model or self.generation.model.name
        events = ResponseEvents(response_id, int(time.time()), body, model, tokenizer, len(requests[0].prompt))
        started = events.start()
        output = self.generation.output(chat, response_id, requests, reply.arrived)
        try:
            async with self.generation.deltas(output, reply) as deltas:
                async for choice, delta in deltas:
                    new = [*started, *events.add(delta, choice.prompt.cached_tokens)]
                    started = []
                    if body.stream:
                        await reply.events(b"".join(map(encode_event, new)))
        except Exception as error:
            if started or not body.stream:  # the status of the reply shows the error
                raise
            _, value, _ = described(error, response_id)
            failed = events.fail("failed", "server_error", value["error"]["message"])
            await reply.events(b"".join(map(encode_event, failed)))
        if body.stream:
            await reply.end()
        else:
            await reply.json(events.response)

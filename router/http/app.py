"""The routes of the REST API and their handlers. This is the only place where errors become HTTP statuses."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from router.dispatch.requests import GenerationBackend, ModelCard
from router.http.asgi import ClientDisconnected, ResponseWriter, deadline_of, described, label_of, while_connected
from router.http.asgi import read_body as read_bytes
from router.http.auth import AuthMiddleware
from router.http.bodies import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, read_body
from router.http.keys import ApiKeys
from router.http.openapi import openapi_route
from router.http.output import RequestOutput
from router.http.parsing import build_requests, check_ids, encode, run_in_thread
from router.http.responses import ResponseFormatter
from router.metrics.request_metrics import RequestMetrics, SloTargets, Snapshot
from router.observer import RouterObserver
from router.text.tokenizer import Tokenizer
from shared.errors import RequestError, UnavailableError

BODY_BYTES, BODY_BYTES_PER_TOKEN = 256 << 10, 16
PARSED_AT_ONCE = 64 << 10  # a larger body is parsed on a thread
BODY_TIMEOUT_S = 10.0


def build_app(
    dispatcher: GenerationBackend,
    tokenizer: Tokenizer,
    model: ModelCard,
    *,
    registry: CollectorRegistry | None = None,
    observer: RouterObserver | None = None,
    slo: Callable[[], SloTargets] = SloTargets,
    more_routes: Sequence[Route] = (),
    keys: ApiKeys | None = None,
    max_concurrent_requests: int = 1024,
    request_timeout_s: float = 0.0,
    body_timeout_s: float = BODY_TIMEOUT_S,
) -> Starlette:
    """Build the whole REST API as an ASGI app.

    `/metrics` shows `registry`. `observer` is the one to which the dispatcher and the nodes report. `slo` returns the
    targets for a request that arrives now. `more_routes` require an admin's key.

    For servers with two ports, `state.api` has only the routes for tenants, and `state.admin` only those that observe
    or change the cluster.
    """
    registry = CollectorRegistry() if registry is None else registry
    observer = RouterObserver() if observer is None else observer
    metrics = RequestMetrics(model.name, slo)
    registry.register(metrics)
    rim = ApiHandlers(dispatcher, tokenizer, model, registry, observer, metrics)
    post = partial(JsonEndpoint, rim, RequestLimits(max_concurrent_requests, request_timeout_s, body_timeout_s))
    api = [
        Route("/v1/completions", post(CompletionBody, rim.completions), methods=["POST"]),
        Route("/v1/chat/completions", post(ChatBody, rim.completions), methods=["POST"]),
        Route("/tokenize", post(TokenizeBody, rim.tokenize), methods=["POST"]),
        Route("/detokenize", post(DetokenizeBody, rim.detokenize), methods=["POST"]),
        Route("/v1/models", rim.models),
        Route("/v1/models/{name:path}", rim.one_model),
        openapi_route(observer.queries),
    ]
    health = [Route("/health", rim.health), Route("/ready", rim.ready)]
    admin = [
        Route("/v1/status", rim.status),
        Route("/metrics", rim.metrics),
        *observer.routes(rim.whole_status),
        *more_routes,
    ]
    guarded = partial(_guarded, guard=Middleware(AuthMiddleware, keys=keys, tenants_routes=api, metrics=metrics))
    app = guarded([*api, *health, *admin])
    app.state.api, app.state.admin = guarded([*api, *health]), guarded([*admin, *health])
    return app


def _guarded(routes: list[Route], guard: Middleware) -> Starlette:
    app = Starlette(
        routes=routes,
        middleware=[guard],
        exception_handlers={HTTPException: _tell, RequestError: _tell, UnavailableError: _tell, Exception: _tell},
    )
    app.router.redirect_slashes = False
    return app


def _tell(request: Request, error: Exception) -> Response:
    label = label_of(request.scope, token_hex(16))
    status, value, headers = described(error, label)
    return JSONResponse(value, status, headers | {"x-request-id": label})


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of requests with a body. Times are in seconds; with `request_timeout_s` 0, requests have no timeout."""

    max_concurrent_requests: int
    request_timeout_s: float
    body_timeout_s: float


class ApiHandlers:
    """The handlers of the API's routes, and the state that they share.

    `build_app` creates one for the app, and every handler runs on the router's event loop. It holds the model's card,
    the count of requests in progress, which `JsonEndpoint` limits, and the request metrics. Errors pass through: the
    endpoint or the app's exception handler turns them into responses.
    """

    def __init__(
        self,
        dispatcher: GenerationBackend,
        tokenizer: Tokenizer,
        model: ModelCard,
        registry: CollectorRegistry,
        observer: RouterObserver,
        metrics: RequestMetrics,
    ) -> None:
        self.model = model
        self.max_body_bytes = BODY_BYTES + BODY_BYTES_PER_TOKEN * model.max_model_len
        self.num_at_work = 0
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._registry = registry
        self._observer = observer
        self._request_metrics = metrics

    async def completions(self, body: Body, reply: ResponseWriter) -> None:
        """Handle POST /v1/completions and /v1/chat/completions."""
        assert isinstance(body, CompletionBody | ChatBody)
        request_id = ("chatcmpl-" if isinstance(body, ChatBody) else "cmpl-") + token_hex(16)
        reply.name(request_id)
        requests = await build_requests(
            body, self.model, self._tokenizer, request_id, reply.traceparent, reply.identity, reply.deadline
        )
        output = RequestOutput(
            request_id, body, requests, self._tokenizer, self._request_metrics, self._observer, reply.arrived
        )
        reply.add_log_fields(output.log_fields)
        formatter = ResponseFormatter(output, body, self._tokenizer, self.model.name, int(time.time()))
        try:
            async with output.open(self._dispatcher) as deltas:
                async for choice, delta in deltas:
                    if body.stream:
                        await reply.events(formatter.events(choice, delta))
                    else:
                        formatter.collect(choice, delta)
        finally:
            used = (output.num_prompt_tokens, output.num_cached, output.num_generated)
            self._request_metrics.used(reply.identity.tenant, *used)
        if body.stream:
            await reply.events(formatter.ending())
            await reply.end()
        else:
            await reply.json(formatter.answer())

    async def tokenize(self, body: Body, reply: ResponseWriter) -> None:
        """Handle POST /tokenize, with the fields of vLLM."""
        assert isinstance(body, TokenizeBody)
        if body.prompt is not None:
            ids = await encode(self._tokenizer, body.prompt, body.add_special_tokens is not False)
        else:
            ids = await run_in_thread(
                self._tokenizer.encode_chat,
                body.messages or [],
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                add_special_tokens=body.add_special_tokens is True,
            )
        names = [self._tokenizer.token_name(token) for token in ids] if body.return_token_strs else None
        await reply.json(
            {"count": len(ids), "max_model_len": self.model.max_model_len, "tokens": ids, "token_strs": names}
        )

    async def detokenize(self, body: Body, reply: ResponseWriter) -> None:
        """Handle POST /detokenize, with the fields of vLLM. The text includes special tokens."""
        assert isinstance(body, DetokenizeBody)
        check_ids(body.tokens, self.model, "tokens")
        await reply.json({"prompt": self._tokenizer.decode(body.tokens, skip_special_tokens=False)})

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        if request.path_params["name"] != self.model.name:
            raise RequestError("The model does not exist.", "model", "model_not_found", 404)
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        model = self.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "baton",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_model_len,
        }

    async def status(self, _request: Request) -> Response:
        return JSONResponse(self.whole_status())

    def whole_status(self) -> dict[str, Any]:
        """Return the dispatcher's status, the latencies of the last minute, and the observer's fields."""
        status = self._dispatcher.status() | {"latency": self._request_metrics.latency()}
        return self._observer.extend_status(status)

    async def health(self, _request: Request) -> Response:
        """Report that the router is running. `/ready` reports whether a node can take requests."""
        return Response(status_code=200)

    async def ready(self, _request: Request) -> Response:
        ready = self._dispatcher.ready()
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def metrics(self, _request: Request) -> Response:
        snapshot = Snapshot(self._registry)
        text = await asyncio.to_thread(generate_latest, snapshot)  # the slow part: keep it off the event loop
        return Response(text, media_type=CONTENT_TYPE_LATEST)


class JsonEndpoint:
    """A route that takes a JSON body. It limits the number of requests in progress, and the size and duration of their
    bodies. It cancels the handler when the client disconnects, and answers every error."""

    def __init__(
        self,
        rim: ApiHandlers,
        bounds: RequestLimits,
        kind: type[Body],
        answer: Callable[[Body, ResponseWriter], Awaitable[None]],
    ) -> None:
        self._rim = rim
        self._bounds = bounds
        self._kind = kind
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = ResponseWriter(scope, send, label_of(scope, token_hex(16)))
        rim, bounds = self._rim, self._bounds
        rim.num_at_work += 1
        try:
            if rim.num_at_work > bounds.max_concurrent_requests:
                raise UnavailableError("Too many requests are at work; try again soon.", status=429)
            reply.deadline = deadline_of(scope, reply.arrived, bounds.request_timeout_s)
            raw = await read_bytes(scope, receive, rim.max_body_bytes, bounds.body_timeout_s)
            await while_connected(receive, self._work(raw, reply))
        except ClientDisconnected:
            return
        except Exception as error:  # noqa: BLE001 - every request gets a response
            await reply.fail(error)
        finally:
            rim.num_at_work -= 1
            reply.log()

    async def _work(self, raw: bytes, reply: ResponseWriter) -> None:
        name = self._rim.model.name
        if len(raw) > PARSED_AT_ONCE:
            body = await run_in_thread(read_body, self._kind, raw, name)
        else:
            body = read_body(self._kind, raw, name)
        await self._answer(body, reply)

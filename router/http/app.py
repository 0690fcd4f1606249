"""The routes of the REST API and their handlers."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import URL
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from router.http.adapters import AdapterRoutes
from router.http.anthropic import AnthropicApi
from router.http.asgi import ResponseWriter, deadline_of, read_body, to_response, while_connected
from router.http.auth import ApiCors, ApiKeys, AuthMiddleware
from router.http.bodies import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_body, unknown_model
from router.http.generation import GenerationService, ModelParts, ServedModels
from router.http.openapi import DETOKENIZE, DOCS, POSTS, RERANK, SCORE, TOKENIZE, document_routes
from router.http.parsing import THREADS, check_ids, encode, encode_chat, run_in_thread
from router.http.pooling import PoolingApi
from router.http.response_runs import RequestSlots, ResponseRuns
from router.http.responses import ResponseFormatter
from router.http.responses_api import ResponsesApi
from router.http.whole_router import WholeRouter
from router.metrics.merged import status_of_models
from router.metrics.request_metrics import RequestMetrics, SloTargets, Snapshot
from router.nodes.adapters import AdapterSync
from router.observer import RouterObserver
from router.responses_store import ResponsesStore
from router.text.grammar_check import GrammarChecker
from shared.clock import now_ns
from shared.errors import RequestError, UnavailableError
from shared.version import package_version

BODY_BYTES, BODY_BYTES_PER_TOKEN = 256 << 10, 16
MAX_PATH, MAX_LISTED = 64, 7  # how many characters of an unknown path, and how many known paths, an error shows
PARSED_AT_ONCE = 64 << 10  # bytes; a larger body is parsed on a thread
Handler = Callable[[Any, ResponseWriter], Awaitable[None]]  # takes a body of the type that POSTS lists for the path


def build_app(
    models: Sequence[ModelParts],
    *,
    registry: CollectorRegistry | None = None,
    observer: RouterObserver | None = None,
    slo: Callable[[], SloTargets] = SloTargets,
    more_routes: Sequence[BaseRoute] = (),
    keys: ApiKeys | None = None,
    allowed_origins: Sequence[str] = (),
    responses_store: ResponsesStore | None = None,
    max_concurrent_requests: int = 1024,
    request_timeout_s: float = 0.0,
    body_timeout_s: float = 10.0,
    workers: WholeRouter | None = None,
    adapters: AdapterSync | None = None,
) -> Starlette:
    """Build the whole REST API as an ASGI app.

    Each model serves the requests that name it. The first model also serves requests that name no model. `/metrics`
    shows `registry`. The dispatchers and the node pools must report to the same `observer`. `slo` returns the latency
    targets for a request that arrives now. `more_routes` require an admin's key. Web pages of `allowed_origins` may
    call the routes for tenants. If `workers` is given, routes whose answers differ between workers merge the answers of
    all workers. `adapters` is None if LoRA adapters cannot be loaded while the router runs.

    `state.responses` is a `ResponseRuns` that the caller must open and close, or None without a store. `state.worker`
    is an app that serves the unmerged answers of this worker to the other workers.

    For a router with two ports, `state.api` is an app with only the routes for tenants, and `state.admin` is an app
    with only the routes that observe or change the cluster. Both apps include the health routes.
    """
    registry = CollectorRegistry() if registry is None else registry
    observer = RouterObserver() if observer is None else observer
    served, slots = ServedModels(_services(models, registry, observer, slo)), RequestSlots(max_concurrent_requests)
    handlers = ApiHandlers(served, registry, request_timeout_s, slots)
    runs = None if responses_store is None else ResponseRuns(served, responses_store, token_hex(8), slots)
    api = [
        *_body_routes(handlers, runs, body_timeout_s),
        Route("/v1/models", handlers.list_models),
        Route("/v1/models/{name:path}", handlers.one_model),
        Route("/version", handlers.version),
        *document_routes(observer.queries),
    ]
    ping = Route("/ping", handlers.health, methods=["GET", "POST"])
    health = [Route("/health", handlers.health), Route("/ready", handlers.ready), ping]
    own = [*handlers.admin_routes(), *observer.routes(handlers.whole_status), *more_routes]
    own += AdapterRoutes(served, adapters).routes()
    paths = [each.path for each in own if isinstance(each, Route)]
    admin = [*(workers.routes(paths) if workers is not None else ()), *own]  # the first matching route is used
    guard = Middleware(AuthMiddleware, keys=keys, tenants_routes=api, admin_routes=admin, metrics=served.first.metrics)
    cors = [Middleware(ApiCors, origins=allowed_origins, routes=api)] if allowed_origins else []
    app = _guarded([*api, *health, *admin], [*cors, guard])
    app.state.responses = runs
    app.state.api = _guarded([*api, *health], [*cors, guard])
    app.state.admin = _guarded([*admin, *health], [guard])
    app.state.worker = _guarded(own, [])
    return app


def _services(
    models: Sequence[ModelParts], registry: CollectorRegistry, observer: RouterObserver, slo: Callable[[], SloTargets]
) -> list[GenerationService]:
    """Create a service for each model, register its metrics in `registry`, and return the services."""
    grammars = GrammarChecker()
    registry.register(grammars)
    services: list[GenerationService] = []
    for each in models:
        metrics = RequestMetrics(each.card.name, slo, first=services[0].metrics if services else None)
        registry.register(metrics)
        services.append(
            GenerationService(each.dispatcher, each.tokenizer, each.card, observer, metrics, grammars, each.images)
        )
    return services


def _body_routes(handlers: "ApiHandlers", runs: ResponseRuns | None, body_timeout_s: float) -> list[Route]:
    """Return the routes that take a JSON body, and the routes of stored responses."""
    responses = [ResponsesApi(service, runs) for service in handlers.models.services]
    posts = [_posts(service, each) for service, each in zip(handlers.models.services, responses, strict=True)]
    routes = [
        Route(path, JsonEndpoint(handlers, body_timeout_s, kind, [each[path] for each in posts]), methods=["POST"])
        for path, (kind, _, _) in POSTS.items()
    ]
    return [*routes, *responses[0].routes()]


def _posts(service: GenerationService, responses: ResponsesApi) -> dict[str, Handler]:
    """Return a model's handler for each path in POSTS."""
    generate, messages, pooling = CompletionsApi(service), AnthropicApi(service), PoolingApi(service)
    return {
        "/v1/completions": generate.completions,
        "/v1/chat/completions": generate.completions,
        "/v1/responses": responses.create,
        "/v1/messages": messages.create,
        "/v1/messages/count_tokens": messages.count_tokens,
        "/v1/embeddings": pooling.embeddings,
        **dict.fromkeys(RERANK, pooling.rerank),
        **dict.fromkeys(SCORE, pooling.score),
        **dict.fromkeys(TOKENIZE, generate.tokenize),
        **dict.fromkeys(DETOKENIZE, generate.detokenize),
    }


def _guarded(routes: Sequence[BaseRoute], middleware: Sequence[Middleware]) -> Starlette:
    handlers: dict[Any, Any] = dict.fromkeys((RequestError, UnavailableError, Exception), to_response)
    handlers[HTTPException] = partial(_no_route, [route.path for route in routes if isinstance(route, Route)])
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


def _no_route(paths: Sequence[str], request: Request, error: Exception) -> Response:
    """Return the error for a path that does not exist, or that does not support the method."""
    assert isinstance(error, HTTPException)
    if error.status_code not in (404, 405):
        return to_response(request, error)
    path = request.url.path[:MAX_PATH]
    if path.endswith("/") and (bare := path.rstrip("/")) in paths:
        return RedirectResponse(str(URL(path=bare, query=request.url.query)), 307)
    if error.status_code == 405:
        allowed = " or ".join(sorted((error.headers or {}).get("Allow", "GET, HEAD").split(", ")))
        text, code = f"{path} does not support {request.method}; use {allowed}.", "method_not_supported"
    else:
        listed = [*paths[:MAX_LISTED], *(each for each in paths if each == DOCS)]
        text, code = f"{request.method} {path} does not exist; this server has {', '.join(listed)}.", "unknown_url"
    answer = to_response(request, RequestError(text, code=code, status=error.status_code))
    answer.headers.update(error.headers or {})
    return answer


@dataclass(frozen=True)
class CompletionsApi:
    """One model's handlers for completions, chats and tokenization."""

    generation: GenerationService

    async def completions(self, body: CompletionBody | ChatBody, reply: ResponseWriter) -> None:
        """Handle POST /v1/completions and /v1/chat/completions."""
        request_id = ("chatcmpl-" if isinstance(body, ChatBody) else "cmpl-") + token_hex(16)
        requests = await self.generation.requests(body, request_id, reply)
        output = self.generation.output(body, request_id, requests, reply.arrived)
        model, created = self.generation.name_for(body), int(time.time())
        formatter = ResponseFormatter(output, body, self.generation.tokenizer, model, created)
        async with self.generation.deltas(output, reply) as deltas:
            async for choice, delta in deltas:
                if body.stream and delta.is_first and choice.prompt.logprobs:  # an echoed prompt may be long
                    tenant = reply.identity.tenant
                    await reply.events(await THREADS.run(tenant, formatter.events, choice, delta))
                elif body.stream:
                    await reply.events(formatter.events(choice, delta))
                else:
                    formatter.collect(choice, delta)
        if body.stream:
            await reply.events(formatter.ending())
            await reply.end()
        elif body.num_logprobs is not None or any(prompt.logprobs for prompt in output.prompts):
            await reply.encoded_json(await THREADS.run(reply.identity.tenant, formatter.encoded_answer))
        else:
            await reply.json(formatter.answer())

    async def tokenize(self, body: TokenizeBody, reply: ResponseWriter) -> None:
        """Handle POST /tokenize, with the fields of vLLM."""
        tokenizer, tenant, names = self.generation.tokenizer, reply.identity.tenant, None
        if body.prompt is not None:
            ids = await encode(tokenizer, body.prompt, body.add_special_tokens is not False, tenant)
        else:
            ids, _ = await encode_chat(tokenizer, body, self.generation.images, tenant)
        if body.return_token_strs:
            names = await run_in_thread(tenant, lambda: [*map(tokenizer.token_name, ids)])
        context = self.generation.model.max_model_len
        await reply.json({"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": names})

    async def detokenize(self, body: DetokenizeBody, reply: ResponseWriter) -> None:
        """Handle POST /detokenize, with the fields of vLLM. The text includes special tokens."""
        check_ids(body.tokens, self.generation.model, "tokens")
        tokenizer = self.generation.tokenizer
        text = await run_in_thread(
            reply.identity.tenant, lambda: tokenizer.decode(body.tokens, skip_special_tokens=False)
        )
        await reply.json({"prompt": text})


@dataclass
class ApiHandlers:
    """The handlers of the routes without a request body, and the state that all routes share.

    `build_app` creates one object for the app, and every handler runs on the router's event loop. The object holds the
    models, and the number of requests in progress, which `JsonEndpoint` limits. Handlers do not catch errors: the
    endpoint or the app's exception handler converts them to responses.
    """

    models: ServedModels
    registry: CollectorRegistry
    request_timeout_s: float  # 0 means no limit
    slots: RequestSlots
    started_ms: int = field(default_factory=lambda: now_ns() // 10**6)

    async def list_models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self.models.names()]})

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not name:  # /v1/models/
            return await self.list_models(request)
        await self._check(name)
        return JSONResponse(self._card(name))

    async def _check(self, name: str) -> None:
        """Raise RequestError if no model or adapter has this name. Raises UnavailableError if that is not known yet."""
        if name not in self.models.names():
            await self.models.learn_adapters()
        if name not in self.models.names():
            raise unknown_model(name, self.models.names())

    def _card(self, name: str) -> dict[str, Any]:
        model = self.models.of(name).model
        return {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "baton",
            "root": model.name,
            "parent": None if name == model.name else model.name,
            "max_model_len": model.max_model_len,
        }

    def admin_routes(self) -> list[BaseRoute]:
        return [Route("/v1/status", self.status), Route("/metrics", self.metrics), Route("/load", self.load)]

    async def status(self, _request: Request) -> Response:
        return JSONResponse(self.whole_status())

    def whole_status(self) -> dict[str, Any]:
        """Return the document of /v1/status: the state of all models, recent totals and latencies, and the observer's
        fields."""
        first = self.models.first
        status = status_of_models([each.dispatcher.status() for each in self.models.services])
        alive = [node for node in status["nodes"] if node["alive"]]
        gauges = {
            "queued": status["queue"]["requests"] + sum(node["waiting"] for node in alive),
            "running": sum(node["running"] for node in alive),
        }
        status["totals"] = first.metrics.totals() | gauges
        status["router"] = {
            "id": status["router"],
            "version": package_version(),
            "started_ms": self.started_ms,
            "time_ms": now_ns() // 10**6,
            "max_model_len": first.model.max_model_len,
        }
        return first.observer.extend_status(status | {"latency": first.metrics.latency()})

    async def health(self, _request: Request) -> Response:
        """Report that the router is running. `/ready` reports whether a node can take requests."""
        return Response(status_code=200)

    async def ready(self, request: Request) -> Response:
        """Report whether every model has nodes that take requests. With `role`, only the nodes of this role count; with
        `model`, only the nodes of this model."""
        role = request.query_params.get("role")
        if role not in {None, "prefill", "decode"}:
            raise RequestError("`role` must be `prefill` or `decode`.", "role")
        name = request.query_params.get("model")
        if name is not None:
            await self._check(name)
        services = self.models.services if name is None else [self.models.of(name)]
        ready = all(each.dispatcher.ready(role or "") for each in services)
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def version(self, _request: Request) -> Response:
        return JSONResponse({"version": package_version() or "unknown"})

    async def load(self, _request: Request) -> Response:
        """Return the number of requests in progress, in vLLM's format."""
        return JSONResponse({"server_load": self.slots.used})

    async def metrics(self, _request: Request) -> Response:
        snapshot = Snapshot(self.registry)
        text = await asyncio.to_thread(generate_latest, snapshot)  # on a thread, because it is slow
        return Response(text, media_type=CONTENT_TYPE_LATEST)


@dataclass(frozen=True)
class JsonEndpoint:
    """A route that takes a JSON body. It limits the number of requests in progress, the size of a body, and the time in
    which a body must arrive. It cancels the handler when the client disconnects, and sends a response for every error.
    """

    shared: ApiHandlers
    body_timeout_s: float
    kind: type[Body]
    handlers: Sequence[Handler]  # one for each model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, slots, slot = self.shared.models.services, self.shared.slots, ExitStack()
        reply = ResponseWriter(scope, send, slot.close)
        max_body_bytes = BODY_BYTES + BODY_BYTES_PER_TOKEN * max(each.model.max_model_len for each in services)
        max_body_bytes += self.kind.more_bytes
        max_body_bytes += max(each.images.limits.body_bytes if each.images is not None else 0 for each in services)
        tenant = reply.identity.tenant
        slots.take(tenant)
        slot.callback(slots.release, tenant)
        try:
            if slots.is_over_limit(tenant):
                services[0].metrics.refused()
                services[0].dispatcher.count_refused()
                raise UnavailableError("Too many requests are in progress; try again soon.", status=429)
            reply.deadline = deadline_of(scope, reply.arrived, self.shared.request_timeout_s)
            raw = await read_body(scope, receive, max_body_bytes, self.body_timeout_s)
            await while_connected(receive, self._handle(raw, reply))
        except ClientDisconnect:
            return
        except asyncio.CancelledError:  # the router drains, and --drain-timeout-s has passed
            await reply.fail(UnavailableError("The router was shut down; try again.", code="shutting_down"))
        except Exception as error:  # noqa: BLE001 - every request gets a response
            await reply.fail(error)
        finally:
            slot.close()
            reply.log()

    async def _handle(self, raw: bytes, reply: ResponseWriter) -> None:
        names, tenant = self.shared.models.names(), reply.identity.tenant
        try:
            body = await self._parse(raw, names, tenant)
        except RequestError as error:
            if error.code != "model_not_found":
                raise
            await self.shared.models.learn_adapters()
            if (known := self.shared.models.names()) == names:
                raise
            body = await self._parse(raw, known, tenant)
        await self.handlers[self.shared.models.index_of(body.model)](body, reply)

    async def _parse(self, raw: bytes, names: list[str], tenant: str) -> Body:
        if len(raw) > PARSED_AT_ONCE:
            return await run_in_thread(tenant, parse_body, self.kind, raw, names)
        return parse_body(self.kind, raw, names)

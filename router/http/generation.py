"""The models that a router serves, and the service that generates each model's answers for the handlers of all APIs."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from router.dispatch.dispatcher import Dispatcher
from router.dispatch.requests import GenerationRequest, ModelCard
from router.http.asgi import Identity, ResponseWriter
from router.http.bodies import Body, ChatBody, CompletionBody
from router.http.output import Output, RequestOutput
from router.http.parsing import before, build_requests
from router.metrics.request_metrics import RequestMetrics
from router.observer import RouterObserver
from router.text.grammar_check import GrammarChecker
from router.text.images import ImageReader
from router.text.tokenizer import Tokenizer
from shared.errors import RequestError


@dataclass(frozen=True)
class ModelParts:
    """The parts of the router that belong to one model."""

    dispatcher: Dispatcher
    tokenizer: Tokenizer
    card: ModelCard
    images: ImageReader | None = None  # None if the model takes no images


@dataclass(frozen=True)
class GenerationService:
    """Generates the answers of one model, and counts the tokens that each tenant uses."""

    dispatcher: Dispatcher
    tokenizer: Tokenizer
    model: ModelCard
    observer: RouterObserver
    metrics: RequestMetrics
    grammars: GrammarChecker = field(default_factory=GrammarChecker)
    images: ImageReader | None = None  # None if the model takes no images

    def name_for(self, body: Body) -> str:
        """Return the model's name for a response: the name in the request, or else the model's own name."""
        return body.model or self.model.name

    def adapters(self) -> dict[str, str]:
        """Return the digest of each LoRA adapter, keyed by name. An adapter with the model's own name is not served."""
        return {name: digest for name, digest in self.dispatcher.adapters().items() if name != self.model.name}

    def adapter_of(self, body: Body) -> str:
        """Return the digest of the LoRA adapter that a request names, or "" if the request names no adapter. Raises
        RequestError if the adapter was unloaded since the request arrived."""
        if not body.model or body.model == self.model.name:
            return ""
        if (digest := self.adapters().get(body.model)) is None:
            raise RequestError("The model was unloaded.", "model", "model_not_found", 404)
        return digest

    def model_names(self) -> list[str]:
        """Return the names that a request can give as its model: the model's own name and the names of LoRA
        adapters."""
        return [self.model.name, *sorted(self.adapters())]

    async def requests(
        self, body: CompletionBody | ChatBody, request_id: str, reply: ResponseWriter
    ) -> list[GenerationRequest]:
        """Set the id of the reply, and return a request for each prompt of the body. Raises RequestError."""
        reply.name(request_id)
        return await self.build(body, request_id, reply.identity, reply.traceparent, reply.deadline)

    async def build(
        self,
        body: CompletionBody | ChatBody,
        request_id: str,
        identity: Identity,
        traceparent: str = "",
        deadline: float | None = None,
    ) -> list[GenerationRequest]:
        """Return a request for each prompt of the body. Raises RequestError, or UnavailableError at the deadline."""
        adapter = self.adapter_of(body)
        async with before(deadline):
            return await build_requests(
                body,
                self.model,
                self.tokenizer,
                request_id,
                traceparent,
                identity,
                deadline,
                self.grammars,
                adapter,
                self.images,
            )

    def output(
        self, body: CompletionBody | ChatBody, request_id: str, requests: list[GenerationRequest], arrived: float
    ) -> RequestOutput:
        return RequestOutput(request_id, body, requests, self.tokenizer, self.metrics, self.observer, arrived)

    @asynccontextmanager
    async def deltas(
        self, output: RequestOutput, reply: ResponseWriter | None = None, *, is_new: bool = True
    ) -> AsyncIterator[AsyncGenerator[Output, None]]:
        """Generate the output, and provide its text as it arrives. Count the tokens for the client's tenant, and add
        the output's fields to the access log of the reply. `is_new` is false for all outputs of an HTTP request except
        the first, so that the request is counted once."""
        try:
            async with output.open(self.dispatcher) as deltas:
                yield deltas
        finally:
            if reply is not None:
                reply.log_fields = output.log_fields()
            num_prompt = 0 if output.is_refused else output.num_prompt_tokens
            used = (num_prompt, output.num_cached, output.num_generated)
            self.metrics.used(output.prompts[0].request.tenant, *used, num_requests=int(is_new))


class ServedModels:
    """The models of a router, each with its own service. The first model is the default."""

    def __init__(self, services: Sequence[GenerationService]) -> None:
        self.services = services
        self.first = services[0]

    def names(self) -> list[str]:
        """Return the names that a request can give as its model."""
        return [name for service in self.services for name in service.model_names()]

    async def learn_adapters(self) -> None:
        """Wait until a node of every model has joined, because nodes report the adapters. Raises UnavailableError
        after a timeout."""
        for each in self.services:
            await each.dispatcher.learn_adapters()

    def index_of(self, name: str | None) -> int:
        """Return the position of the service that has this model or adapter; 0 for an unknown name."""
        return next((number for number, each in enumerate(self.services) if name in each.model_names()), 0)

    def of(self, name: str | None) -> GenerationService:
        """Return the service that has this model or adapter, or the first service for an unknown name."""
        return self.services[self.index_of(name)]

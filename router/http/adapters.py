"""The admin routes that load and unload LoRA adapters, with vLLM's names and fields."""

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from router.http.asgi import read_body
from router.http.generation import ServedModels
from router.nodes.adapters import AdapterSync
from shared.errors import RequestError
from shared.limits import MAX_NAME

BODY_BYTES, BODY_S = 16_384, 10.0
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class LoadAdapterBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapterBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lora_name: Name
    lora_int_id: int | None = None  # without effect, as in vLLM


B = TypeVar("B", bound=BaseModel)


class AdapterRoutes:
    """The handlers of the two routes. Adapters belong to the router's first model.

    `adapters` is None if --allow-runtime-lora-updating is not set. In this case, both routes answer 404.
    """

    def __init__(self, models: ServedModels, adapters: AdapterSync | None) -> None:
        self._models = models
        self._adapters = adapters

    def routes(self) -> list[Route]:
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        adapters, body = self._allowed(), await _read(request, LoadAdapterBody)
        if body.load_inplace:
            raise RequestError("`load_inplace` is not supported: unload the adapter first.", "load_inplace")
        if body.lora_name in self._models.names():
            text = f"The lora adapter '{body.lora_name[:64]}' has already been loaded, or a model has this name."
            raise RequestError(text, "lora_name")
        await adapters.load(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        adapters, body = self._allowed(), await _read(request, UnloadAdapterBody)
        if body.lora_name not in self._models.first.adapters():
            text = f"The lora adapter '{body.lora_name[:64]}' cannot be found."
            raise RequestError(text, "lora_name", "model_not_found", 404)
        adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _allowed(self) -> AdapterSync:
        if self._adapters is None:
            text = "Adapters cannot be loaded or unloaded: start the cluster with --allow-runtime-lora-updating."
            raise RequestError(text, code="unknown_url", status=404)
        return self._adapters


async def _read(request: Request, kind: type[B]) -> B:
    raw = await read_body(request.scope, request.receive, BODY_BYTES, BODY_S)
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else None
        raise RequestError(f"`{name or 'body'}`: {first['msg'][:200]}.", name) from None

"""The API as an OpenAPI 3.1 document, generated from the models of request bodies and of responses.

The dashboard's event stream and the routes for operators are left out.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.http.bodies import (
    IGNORED,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenId,
    TokenizeBody,
)

Schema = dict[str, Any]
FinishReason = Literal["stop", "length"]
StopReason = str | int | None
PromptLogprobs = list[dict[str, dict[str, Any]] | None]


class ResponseModel(BaseModel):
    """The base of all responses. A field with a default may be absent."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    error: ErrorDetail


class CachedTokens(ResponseModel):
    cached_tokens: int


class Usage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Choice(ResponseModel):
    """The fields of a choice in both completions and chat completions."""

    index: int
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: list[TokenId] = []


class CompletionLogprobTable(ResponseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobTable | None
    prompt_token_ids: list[TokenId] = []
    prompt_logprobs: PromptLogprobs = []


class ChatTopLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(ResponseModel):
    content: list[ChatTokenLogprob]
    refusal: None


class AssistantMessage(ResponseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class CompletionResponse(ResponseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatResponse(ResponseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[TokenId] = []
    prompt_logprobs: PromptLogprobs = []


class TokenizeResponse(ResponseModel):
    count: int
    max_model_len: int
    tokens: list[TokenId]
    token_strs: list[str] | None


class DetokenizeResponse(ResponseModel):
    prompt: str


class ModelResponse(ResponseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelsResponse(ResponseModel):
    object: Literal["list"]
    data: list[ModelResponse]


class ReadyResponse(ResponseModel):
    ready: bool


class AnyResponse(BaseModel):
    """A JSON object whose fields are not part of the API."""

    model_config = ConfigDict(extra="allow")


STREAM: Schema = {"text/event-stream": {}}  # an event for each chunk, then an error or [DONE]
POSTS: dict[str, tuple[type[Body], type[BaseModel], Schema]] = {
    "/v1/completions": (CompletionBody, CompletionResponse, STREAM),
    "/v1/chat/completions": (ChatBody, ChatResponse, STREAM),
    "/tokenize": (TokenizeBody, TokenizeResponse, {}),
    "/detokenize": (DetokenizeBody, DetokenizeResponse, {}),
}
GETS: dict[str, type[BaseModel]] = {
    "/v1/models": ModelsResponse,
    "/v1/models/{name}": ModelResponse,
    "/v1/status": AnyResponse,
    "/ready": ReadyResponse,
}


def openapi_route(queries: Mapping[str, Mapping[str, Any]]) -> Route:
    """Return the route of /openapi.json."""
    document = openapi(queries)

    async def serve(_request: Request) -> Response:
        return JSONResponse(document)

    return Route("/openapi.json", serve)


def openapi(queries: Mapping[str, Mapping[str, Any]]) -> Schema:
    """Generate the document. `queries` has further GET routes, with the schemas of their query parameters."""
    paths: Schema = {}
    for path, (body, answer, other) in POSTS.items():
        content = {"application/json": {"schema": _reference(body)}}
        request = {"required": True, "content": content}
        paths[path] = {"post": {"requestBody": request, "responses": _responses(answer, other)}}
    for path, answer in (GETS | dict.fromkeys(queries, AnyResponse)).items():
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        text = {"type": "string", "minLength": 1}
        parameters = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
        parameters += [{"name": name, "in": "query", "schema": kind} for name, kind in queries.get(path, {}).items()]
        paths[path] = {"get": {"parameters": parameters, "responses": _responses(answer, {})}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": "1"},
        "paths": paths,
        "components": {"schemas": _schemas(), "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _schemas() -> Schema:
    bodies = [body for body, _, _ in POSTS.values()]
    answers = {answer for _, answer, _ in POSTS.values()} | set(GETS.values()) | {ErrorResponse}
    models = [*bodies, *sorted(answers, key=lambda model: model.__name__)]
    _, document = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    schemas: Schema = document["$defs"]
    for body in bodies:
        schema = schemas[body.__name__]
        optional = schema["properties"].keys() - set(schema.get("required", ()))
        for name in optional:  # null stands for a field that is not given
            schema["properties"][name] = {"anyOf": [schema["properties"][name], {"type": "null"}]}
        schema["properties"] |= {name: {"description": "Accepted and ignored."} for name in sorted(IGNORED)}
    return schemas


def _reference(model: type[BaseModel]) -> Schema:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _responses(answer: type[BaseModel], other: Schema) -> Schema:
    """Return the responses of an operation; all errors have one form."""
    return {
        "200": {"description": "OK", "content": {"application/json": {"schema": _reference(answer)}} | other},
        "default": {"description": "Error", "content": {"application/json": {"schema": _reference(ErrorResponse)}}},
    }

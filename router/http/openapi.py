"""The API as an OpenAPI 3.1 document. The schemas of request bodies are generated from their models.

The document omits the dashboard's event stream, /metrics and the admin routes.
"""

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.http.bodies import IGNORED, Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

Schema = dict[str, Any]
REFERENCE = "#/components/schemas/{model}"


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def record(optional: Schema | None = None, **required: Schema) -> Schema:
    """Return the schema of an object. The fields in `optional` may be missing."""
    properties = required | (optional or {})
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT, WHOLE, NUMBER, NULL, ANY = ({"type": kind} for kind in ("string", "integer", "number", "null", "object"))
TOKEN_IDS = list_of({"type": "integer", "minimum": 0})
OF_PROMPT = {"prompt_token_ids": TOKEN_IDS, "prompt_logprobs": list_of(nullable(ANY))}  # if requested
USAGE = record(
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), WHOLE),
    prompt_tokens_details=record(cached_tokens=WHOLE),
)
LOGPROB_TABLE = record(
    text_offset=list_of(WHOLE),
    token_logprobs=list_of(nullable(NUMBER)),
    tokens=list_of(TEXT),
    top_logprobs=list_of(nullable({"type": "object", "additionalProperties": NUMBER})),
)
LOGPROB: Schema = {"token": TEXT, "logprob": NUMBER, "bytes": list_of(WHOLE)}
CHAT_LOGPROBS = record(content=list_of(record(**LOGPROB, top_logprobs=list_of(record(**LOGPROB)))), refusal=NULL)
CHOICE: Schema = {"index": WHOLE, "finish_reason": {"enum": ["stop", "length"]}}
CHOICE |= {"stop_reason": {"anyOf": [TEXT, WHOLE, NULL]}}
COMPLETION_CHOICE = record({"token_ids": TOKEN_IDS} | OF_PROMPT, **CHOICE, text=TEXT, logprobs=nullable(LOGPROB_TABLE))
MESSAGE = record(role={"const": "assistant"}, content=TEXT, refusal=NULL)
CHAT_CHOICE = record({"token_ids": TOKEN_IDS}, **CHOICE, message=MESSAGE, logprobs=nullable(CHAT_LOGPROBS))
ANSWER = {"id": TEXT, "created": WHOLE, "model": TEXT, "usage": USAGE}
COMPLETION = record(**ANSWER, object={"const": "text_completion"}, choices=list_of(COMPLETION_CHOICE))
CHAT = record(OF_PROMPT, **ANSWER, object={"const": "chat.completion"}, choices=list_of(CHAT_CHOICE))
TOKENS = record(count=WHOLE, max_model_len=WHOLE, tokens=TOKEN_IDS, token_strs=nullable(list_of(TEXT)))
MODEL = record(
    object={"const": "model"}, id=TEXT, created=WHOLE, owned_by=TEXT, root=TEXT, parent=NULL, max_model_len=WHOLE
)
ERROR = record(error=record(message=TEXT, type=TEXT, param=nullable(TEXT), code=nullable(TEXT)))
STREAM: Schema = {"text/event-stream": {}}  # one event for each chunk, and a last event, which is an error or [DONE]
POSTS: dict[str, tuple[type[Body], Schema, Schema]] = {
    "/v1/completions": (CompletionBody, COMPLETION, STREAM),
    "/v1/chat/completions": (ChatBody, CHAT, STREAM),
    "/tokenize": (TokenizeBody, TOKENS, {}),
    "/detokenize": (DetokenizeBody, record(prompt=TEXT), {}),
}
GETS: dict[str, Schema] = {
    "/v1/models": record(object={"const": "list"}, data=list_of(MODEL)),
    "/v1/models/{name}": MODEL,
    "/v1/status": ANY,
    "/ready": record(ready={"type": "boolean"}),
}


def openapi_route(queries: Mapping[str, Mapping[str, Any]]) -> Route:
    """Return the route of /openapi.json."""
    document = openapi(queries)

    async def serve(_request: Request) -> Response:
        return JSONResponse(document)

    return Route("/openapi.json", serve)


def openapi(queries: Mapping[str, Mapping[str, Any]]) -> Schema:
    """Generate the document. `queries` contains further GET routes, each with the schemas of its query parameters."""
    paths: Schema = {}
    for path, (body, answer, other) in POSTS.items():
        operation = {"requestBody": {"required": True, "content": _json(_reference(body.__name__))}}
        paths[path] = {"post": operation | _responses(answer, other)}
    for path, answer in (GETS | dict.fromkeys(queries, ANY)).items():
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        text = {"type": "string", "minLength": 1}
        parameters = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
        parameters += [{"name": name, "in": "query", "schema": kind} for name, kind in queries.get(path, {}).items()]
        paths[path] = {"get": {"parameters": parameters} | _responses(answer, {})}
    security = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": "1"},
        "paths": paths,
        "components": {"schemas": _bodies() | {"Error": ERROR}, "securitySchemes": security},
        "security": [{"key": []}, {}],
    }


def _bodies() -> Schema:
    """Return the schemas of the bodies. An optional field may be null, which means that it is not given."""
    bodies = [body for body, _, _ in POSTS.values()]
    _, document = models_json_schema([(body, "validation") for body in bodies], ref_template=REFERENCE)
    schemas: Schema = document["$defs"]
    for schema in (schemas[body.__name__] for body in bodies):
        for name in schema["properties"].keys() - set(schema.get("required", ())):
            schema["properties"][name] = nullable(schema["properties"][name])
        schema["properties"] |= {name: {"description": "Accepted and ignored."} for name in sorted(IGNORED)}
    return schemas


def _responses(answer: Schema, other: Schema) -> Schema:
    """Return the responses of an operation. All errors have the same schema."""
    ok = {"description": "OK", "content": _json(answer) | other}
    return {"responses": {"200": ok, "default": {"description": "Error", "content": _json(_reference("Error"))}}}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _reference(name: str) -> Schema:
    return {"$ref": REFERENCE.format(model=name)}

"""The API as an OpenAPI 3.1 document, for clients and for tests that send whatever it allows, and what it does not.

Bodies are described by the models that read them; the fields that these read by hand, and all answers, are described
here. The dashboard's stream and what only operators may do are left out.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.history.history import MAX_REQUESTS
from router.history.step_ring import CAPACITY
from router.http.bodies import (
    IGNORED,
    MAX_BIASES,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_PARTS,
    MAX_PROMPTS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    ROLES,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

Schema = dict[str, Any]


def _object(optional: Schema | None = None, **fields: Schema) -> Schema:
    properties = fields | (optional or {})
    return {"type": "object", "properties": properties, "required": list(fields), "additionalProperties": False}


def _list(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    bounds = {"minItems": least} | ({"maxItems": most} if most is not None else {})
    return {"type": "array", "items": items, **bounds}


def _any(*kinds: Schema) -> Schema:
    return {"anyOf": list(kinds)}


def _text(least: int = 0, most: int | None = None) -> Schema:
    return {"type": "string", "minLength": least} | ({"maxLength": most} if most is not None else {})


TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
NULL: Schema = {"type": "null"}
FLAG: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}
IDS = _list({"type": "integer", "minimum": 0})
ROWS = _list(ANY_OBJECT)

# ---- what bodies read by hand --------------------------------------------------------------------------------------

_PART = _object(type={"const": "text"}, text=TEXT)
_MESSAGE = _object(
    {"name": _any(_text(1, MAX_NAME), NULL)},
    role={"enum": list(ROLES)},
    content=_any(TEXT, _list(_PART, 1, MAX_PARTS)),
)
_PROMPT = _any(_text(1), _list({**INTEGER, "minimum": 0}, 1))
BY_HAND: dict[str, Schema] = {
    "cache_salt": _text(1, 256),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_BIASES,
    },
    "messages": _list(_MESSAGE, 1, MAX_MESSAGES),
    "stop": _any(_text(1, MAX_STOP_CHARACTERS), _list(_text(1, MAX_STOP_CHARACTERS), 0, MAX_STOPS)),
    "stop_token_ids": {**IDS, "maxItems": MAX_STOP_TOKENS},
    "tokens": IDS,
}
PROMPTS = {CompletionBody: _any(_PROMPT, _list(_PROMPT, 1, MAX_PROMPTS)), TokenizeBody: TEXT}

# ---- answers ---------------------------------------------------------------------------------------------------------

_ERROR = _object(error=_object(message=TEXT, type=TEXT, param=_any(TEXT, NULL), code=_any(TEXT, NULL)))
_USAGE = _object(
    prompt_tokens=INTEGER,
    completion_tokens=INTEGER,
    total_tokens=INTEGER,
    prompt_tokens_details=_object(cached_tokens=INTEGER),
)
_PROMPT_LOGPROBS = _list(_any(NULL, {"type": "object", "additionalProperties": ANY_OBJECT}))
_COMPLETION_LOGPROBS = _object(
    text_offset=_list(INTEGER),
    token_logprobs=_list(_any(NUMBER, NULL)),
    tokens=_list(TEXT),
    top_logprobs=_list(_any(NULL, {"type": "object", "additionalProperties": NUMBER})),
)
_CHAT_TOKEN = {"token": TEXT, "logprob": NUMBER, "bytes": _list(INTEGER)}
_CHAT_LOGPROBS = _object(
    content=_list(_object(**_CHAT_TOKEN, top_logprobs=_list(_object(**_CHAT_TOKEN)))), refusal=NULL
)


def _choice(logprobs: Schema, optional: Schema, **fields: Schema) -> Schema:
    return _object(
        {"token_ids": IDS} | optional,
        index=INTEGER,
        logprobs=_any(logprobs, NULL),
        finish_reason={"enum": ["stop", "length"]},
        stop_reason=_any(TEXT, INTEGER, NULL),
        **fields,
    )


def _answer(kind: str, choice: Schema, optional: Schema) -> Schema:
    return _object(
        optional, id=TEXT, object={"const": kind}, created=INTEGER, model=TEXT, choices=_list(choice), usage=_USAGE
    )


_ASKED = {"prompt_token_ids": IDS, "prompt_logprobs": _PROMPT_LOGPROBS}
_CHAT_CHOICE = _choice(_CHAT_LOGPROBS, {}, message=_object(role={"const": "assistant"}, content=TEXT, refusal=NULL))
_CARD = _object(
    id=TEXT,
    object={"const": "model"},
    created=INTEGER,
    owned_by=TEXT,
    root=TEXT,
    parent=NULL,
    max_model_len=INTEGER,
)
ANSWERS: dict[str, Schema] = {
    "Completion": _answer("text_completion", _choice(_COMPLETION_LOGPROBS, _ASKED, text=TEXT), {}),
    "Chat": _answer("chat.completion", _CHAT_CHOICE, _ASKED),
    "Tokens": _object(count=INTEGER, max_model_len=INTEGER, tokens=IDS, token_strs=_any(_list(TEXT), NULL)),
    "Text": _object(prompt=TEXT),
    "Model": _CARD,
    "Models": _object(object={"const": "list"}, data=_list(_CARD)),
    "Ready": _object(ready=FLAG),
    "Requests": _object(requests=ROWS),
    "Steps": _object(node=TEXT, fields=_list(TEXT), steps=_list(_list({}))),
    "Any": ANY_OBJECT,
    "Error": _ERROR,
}
STREAM: Schema = {"text/event-stream": {}}  # a chunk an event, or an error; then [DONE]
POSTS: dict[str, tuple[type[Body], str, Schema]] = {
    "/v1/completions": (CompletionBody, "Completion", STREAM),
    "/v1/chat/completions": (ChatBody, "Chat", STREAM),
    "/tokenize": (TokenizeBody, "Tokens", {}),
    "/detokenize": (DetokenizeBody, "Text", {}),
}
GETS: dict[str, str] = {
    "/v1/models": "Models",
    "/v1/models/{name}": "Model",
    "/v1/status": "Any",
    "/v1/requests": "Requests",
    "/v1/requests/{id}/timeline": "Any",
    "/v1/steps": "Steps",
    "/v1/steps/{node}/{number}": "Any",
    "/trace": "Any",
    "/ready": "Ready",
}
_TIME = {"type": "string", "pattern": "^[1-9][0-9]{0,2}(ms|s)?$"}
QUERIES: dict[str, Schema] = {
    "/v1/requests": {"limit": {**INTEGER, "minimum": 1, "maximum": MAX_REQUESTS}},
    "/v1/steps": {
        "node": TEXT,
        "limit": {**INTEGER, "minimum": 1, "maximum": CAPACITY},
        "since_ms": {**NUMBER, "minimum": 0, "maximum": 1e13},
    },
    "/trace": {"last": _TIME},
}


def openapi_route() -> Route:
    """GET /openapi.json."""
    document = openapi()

    async def serve(_request: Request) -> Response:
        return JSONResponse(document)

    return Route("/openapi.json", serve)


def openapi() -> Schema:
    """The whole document."""
    schemas: Schema = dict(ANSWERS)
    paths: Schema = {}
    for path, (kind, answer, other) in POSTS.items():
        schemas |= _body_schemas(kind)
        body = {"required": True, "content": {"application/json": {"schema": _named(kind.__name__)}}}
        paths[path] = {"post": {"requestBody": body, "responses": _responses(answer, other)}}
    for path, answer in GETS.items():
        inside = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        parameters = [{"name": name, "in": "path", "required": True, "schema": _text(1)} for name in inside]
        parameters += [{"name": name, "in": "query", "schema": kind} for name, kind in QUERIES.get(path, {}).items()]
        paths[path] = {"get": {"parameters": parameters, "responses": _responses(answer, {})}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _named(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _responses(answer: str, other: Schema) -> Schema:
    """Errors have one form, whatever went wrong."""
    return {
        "200": {"description": "OK", "content": {"application/json": {"schema": _named(answer)}} | other},
        "default": {"description": "Error", "content": {"application/json": {"schema": _named("Error")}}},
    }


def _body_schemas(kind: type[Body]) -> Schema:
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    inner: Schema = schema.pop("$defs", {})
    by_hand = BY_HAND | ({"prompt": PROMPTS[kind]} if kind in PROMPTS else {})
    for name, field in schema["properties"].items():
        if name in by_hand:
            field.update(by_hand[name] if name in schema.get("required", ()) else _any(by_hand[name], NULL))
    ignored = {name: {"description": "Accepted and ignored."} for name in sorted(IGNORED)}
    schema["properties"] |= ignored
    return inner | {kind.__name__: schema}

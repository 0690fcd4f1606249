"""The API as an OpenAPI 3.1 document. The schemas of request bodies are generated from their models.

The document omits the dashboard's event stream, /metrics and the admin routes.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from router.http.anthropic import CountTokensBody, MessagesBody
from router.http.bodies import IGNORED, Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.http.pooling import EmbeddingBody, RerankBody, ScoreBody
from router.http.response_bodies import ResponsesBody
from router.http.responses import dump

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
# These fields are in a response if the client requests them.
OF_PROMPT = {"prompt_token_ids": TOKEN_IDS, "prompt_logprobs": list_of(nullable(ANY))}
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
CHOICE: Schema = {"index": WHOLE, "finish_reason": {"enum": ["stop", "length", "tool_calls"]}}
CHOICE |= {"stop_reason": {"anyOf": [TEXT, WHOLE, NULL]}}
COMPLETION_CHOICE = record({"token_ids": TOKEN_IDS} | OF_PROMPT, **CHOICE, text=TEXT, logprobs=nullable(LOGPROB_TABLE))
TOOL_CALL = record(id=TEXT, type={"const": "function"}, function=record(name=TEXT, arguments=TEXT))
MESSAGE = record(
    {"reasoning_content": TEXT, "reasoning": TEXT, "tool_calls": list_of(TOOL_CALL)},
    role={"const": "assistant"},
    content=nullable(TEXT),
    refusal=NULL,
)
CHAT_CHOICE = record({"token_ids": TOKEN_IDS}, **CHOICE, message=MESSAGE, logprobs=nullable(CHAT_LOGPROBS))
ANSWER = {"id": TEXT, "created": WHOLE, "model": TEXT, "usage": USAGE}
COMPLETION = record(**ANSWER, object={"const": "text_completion"}, choices=list_of(COMPLETION_CHOICE))
CHAT = record(OF_PROMPT, **ANSWER, object={"const": "chat.completion"}, choices=list_of(CHAT_CHOICE))
RESPONSE: Schema = {  # only its main fields; OpenAI documents all of them
    "type": "object",
    "properties": {"id": TEXT, "object": {"const": "response"}, "status": TEXT, "output": list_of(ANY)},
    "required": ["id", "object", "created_at", "status", "model", "output", "usage", "error"],
}
ANSWERED_MESSAGE = record(
    **dict.fromkeys(("id", "model"), TEXT),
    **dict.fromkeys(("stop_reason", "stop_sequence"), nullable(TEXT)),
    type={"const": "message"},
    role={"const": "assistant"},
    content=list_of(ANY),
    usage=ANY,
)
TOKENS = record(count=WHOLE, max_model_len=WHOLE, tokens=TOKEN_IDS, token_strs=nullable(list_of(TEXT)))
MODEL = record(
    object={"const": "model"}, id=TEXT, created=WHOLE, owned_by=TEXT, root=TEXT, parent=NULL, max_model_len=WHOLE
)
ERROR = record(  # Anthropic's API adds a type
    {"type": {"const": "error"}},
    error=record(message=TEXT, type=TEXT, param=nullable(TEXT), code=nullable(TEXT)),
)
DOCS = "/docs"
TOKENIZE, DETOKENIZE = ("/tokenize", "/v1/tokenize"), ("/detokenize", "/v1/detokenize")
RERANK, SCORE = ("/v1/rerank", "/rerank", "/v2/rerank"), ("/v1/score", "/score")
PROMPT_USAGE = record(**dict.fromkeys(("prompt_tokens", "total_tokens", "completion_tokens"), WHOLE))
LISTED = {"id": TEXT, "object": {"const": "list"}, "created": WHOLE, "model": TEXT, "usage": PROMPT_USAGE}
VECTOR = {"anyOf": [list_of(NUMBER), TEXT]}
EMBEDDING = record(object={"const": "embedding"}, index=WHOLE, embedding=VECTOR)
SCORED = record(object={"const": "score"}, index=WHOLE, score=NUMBER)
RANKED = record({"document": record(text=TEXT)}, index=WHOLE, relevance_score=NUMBER)
POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
STREAM: Schema = {"text/event-stream": {}}  # one event for each chunk; completions end with an error event or [DONE]
# For each POST route: its body, the schema of its JSON answer, and the schemas of its other answers by content type.
POSTS: dict[str, tuple[type[Body], Schema, Schema]] = {
    "/v1/completions": (CompletionBody, COMPLETION, STREAM),
    "/v1/chat/completions": (ChatBody, CHAT, STREAM),
    "/v1/responses": (ResponsesBody, RESPONSE, STREAM),
    "/v1/messages": (MessagesBody, ANSWERED_MESSAGE, STREAM),
    "/v1/messages/count_tokens": (CountTokensBody, record(input_tokens=WHOLE), {}),
    "/v1/embeddings": (EmbeddingBody, record(**LISTED, data=list_of(EMBEDDING)), {}),
    **dict.fromkeys(RERANK, (RerankBody, record(id=TEXT, model=TEXT, usage=PROMPT_USAGE, results=list_of(RANKED)), {})),
    **dict.fromkeys(SCORE, (ScoreBody, record(**LISTED, data=list_of(SCORED)), {})),
    **dict.fromkeys(TOKENIZE, (TokenizeBody, TOKENS, {})),
    **dict.fromkeys(DETOKENIZE, (DetokenizeBody, record(prompt=TEXT), {})),
}
GETS: dict[str, Schema] = {
    "/v1/models": record(object={"const": "list"}, data=list_of(MODEL)),
    "/v1/models/{name}": MODEL,
    "/v1/status": ANY,
    "/version": record(version=TEXT),
    "/load": record(server_load=WHOLE),
    "/ready": record(ready={"type": "boolean"}),
}


def document_routes(queries: Mapping[str, Mapping[str, Any]]) -> list[Route]:
    """Return the routes of /openapi.json and of /docs, which shows the same document as a page.

    The document is generated at the first request, so that a router starts sooner. The handlers are not coroutines, so
    Starlette calls them on a thread."""

    @cache
    def document() -> Schema:
        return openapi(queries)

    def serve(_request: Request) -> Response:
        return JSONResponse(document())

    def read(_request: Request) -> Response:
        return HTMLResponse("".join(_page(document())), headers={"content-security-policy": POLICY})

    return [Route("/openapi.json", serve), Route(DOCS, read)]


def openapi(queries: Mapping[str, Mapping[str, Any]]) -> Schema:
    """Generate the document. `queries` contains further GET routes, each with the schemas of its query parameters."""
    paths: Schema = {}
    for path, (body, answer, other) in POSTS.items():
        operation = {"requestBody": {"required": True, "content": _json(_reference(body.__name__))}}
        paths[path] = {"post": operation | _responses(answer, other)}
    queries = {"/ready": {"role": {"enum": ["prefill", "decode"]}, "model": {"type": "string"}}, **queries}
    for path, answer in (dict.fromkeys(queries, ANY) | GETS).items():
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
    """Return the schemas of the bodies. An optional field may be null, which means that it is not set."""
    bodies = dict.fromkeys(body for body, _, _ in POSTS.values())
    _, document = models_json_schema([(body, "validation") for body in bodies], ref_template=REFERENCE)
    schemas: Schema = document["$defs"]
    for schema in (schemas[body.__name__] for body in bodies):
        for name in schema["properties"].keys() - set(schema.get("required", ())):
            schema["properties"][name] = nullable(schema["properties"][name])
        ignored = sorted(IGNORED - schema["properties"].keys())
        schema["properties"] |= {name: {"description": "Accepted and ignored."} for name in ignored}
    return schemas


def _responses(answer: Schema, other: Schema) -> Schema:
    """Return the responses of an operation. All errors have the same schema."""
    ok = {"description": "OK", "content": _json(answer) | other}
    return {"responses": {"200": ok, "default": {"description": "Error", "content": _json(_reference("Error"))}}}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _reference(name: str) -> Schema:
    return {"$ref": REFERENCE.format(model=name)}


def _page(document: Schema) -> Iterator[str]:
    """Yield the parts of /docs: a list of the operations, and a table of fields for each body. The page has no style
    and no script, because its Content-Security-Policy allows neither."""
    yield '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Baton</title><h1>Baton API</h1>'
    yield "<p>OpenAI's API: the base URL of a client is the address of this server, followed by <code>/v1</code>. "
    yield 'The responses are described in <a href="openapi.json">openapi.json</a>.</p><h2>Operations</h2><ul>'
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"<li><code>{method.upper()} {escape(path)}</code>"
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            yield f" with a {_compact(body['schema'])}" if body else ""
            for parameter in operation.get("parameters", ()):
                yield f"; {parameter['in']} parameter <code>{parameter['name']}</code>: {_compact(parameter['schema'])}"
    yield "</ul>"
    for name, schema in document["components"]["schemas"].items():
        yield f'<h2 id="{name}">{name}</h2><table><tr><th align="left">field<th align="left">value'
        needed = set(schema.get("required", ()))
        for field, kind in sorted(schema["properties"].items(), key=lambda item: item[0] not in needed):
            yield f"<tr><td><code>{field}</code>{' (required)' * (field in needed)}<td>{_compact(kind)}"
        yield "</table>"


def _compact(schema: Schema) -> str:
    """Return a schema as HTML: its JSON, or a link if it refers to a schema by name."""
    if name := schema.get("$ref", "").rpartition("/")[2]:
        return f'<a href="#{name}">{name}</a>'
    if kinds := [each for each in schema.get("anyOf", ()) if each != NULL]:
        return " or ".join(map(_compact, kinds))
    return f"<code>{escape(dump({key: value for key, value in schema.items() if key != 'title'}))}</code>"

"""Request bodies of the REST API: strict JSON, then a model that states each field's type and limits once.

The OpenAPI document is generated from these models. Names, defaults and limits are OpenAI's and vLLM's. An unknown
field is rejected by name, `null` means "not given", and fields that do not affect the tokens (`IGNORED`) are dropped.
"""

import json
import math
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from router.text.chat_template import Message
from shared.errors import RequestError
from shared.limits import INT32_MAX, MAX_LOGIT_BIASES, MAX_LOGPROBS

MAX_PROMPTS = 64
MAX_SAMPLES = 8
MAX_MESSAGES = 2048
MAX_PARTS = 1024
MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_TOKENS = 4, 64, 128
MAX_NAME = 64
OURS = "baton"  # type of the validation errors whose text follows the name of the parameter

# OpenAI's fields that do not affect the tokens.
IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# Known fields that are not supported, and the values with which they have no effect.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "response_format": ({"type": "text"},),
    "suffix": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "web_search_options": (),
}


def _no_constant(name: str) -> NoReturn:
    raise RequestError(f"The body is not JSON: {name} is not a JSON number.", code="invalid_json")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RequestError("The body holds a number too large.", code="invalid_json")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise RequestError("The body has a field twice.", code="invalid_json")
    return fields


def parse_json(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises RequestError if `raw` is anything else. A BOM, NaN, trailing bytes, duplicate names
    and lone surrogates are errors. The caller limits the size of `raw`, and the interpreter limits the nesting."""
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_unique)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise RequestError("The body is nested too deeply.", code="invalid_json") from None
    except UnicodeError:
        raise RequestError("The body is not valid Unicode text.", code="invalid_json") from None
    except ValueError:
        raise RequestError("The body is not JSON.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_json")
    return value


def described(text: str) -> WrapValidator:
    """Replace all errors of a field and its parts by one error that says what the field must be."""

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError(OURS, text) from None

    return WrapValidator(check)


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _as_prompts(value: object) -> object:
    """Return a list of prompts; a list of integers is one prompt."""
    is_one = isinstance(value, str) or (isinstance(value, list) and len(value) > 0 and type(value[0]) is int)
    return [value] if is_one else value


def _biases(value: object) -> dict[int, float]:
    """Convert the names to token ids, which strict JSON types cannot do."""
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIASES:
        raise RequestError(f"`logit_bias` must be an object of at most {MAX_LOGIT_BIASES} token ids.", "logit_bias")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError("The names in `logit_bias` must be token ids.", "logit_bias")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise RequestError("The values in `logit_bias` must be numbers from -100 to 100.", "logit_bias")
        biases[int(key)] = float(bias)
    return biases


Strict = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
TokenCount = Annotated[int, Field(ge=1, le=INT32_MAX)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stops = Annotated[tuple[Stop, ...], Field(max_length=MAX_STOPS)]
Prompt = Annotated[str, Field(min_length=1)] | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompts = Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Biases = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIASES, json_schema_extra={"additionalProperties": False}),
]


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = Strict
    type: Literal["text"]
    text: str


def _only_text(value: object) -> object:
    if isinstance(value, list) and any(isinstance(part, dict) and part.get("type") != "text" for part in value):
        raise PydanticCustomError(OURS, "may have text parts only; nothing is fetched or decoded")
    return value


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = Strict
    role: Annotated[
        Literal["system", "developer", "user", "assistant"],
        described("must be system, developer, user or assistant"),
    ]
    content: Annotated[
        str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)],
        described(f"must be a string or a list of 1 to {MAX_PARTS} text parts, each with `type` and `text`"),
        BeforeValidator(_only_text),
    ]
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        fields = {key: field for key, field in value.items() if field is not None}
        if fields.pop("tool_calls", None) or fields.get("function_call") or fields.get("role") in ("tool", "function"):
            raise PydanticCustomError(OURS, "uses tools, which are not supported")
        unknown = next((key for key in fields if key not in cls.model_fields), None)
        if unknown is not None:
            raise PydanticCustomError(OURS, "has an unknown field: `{name}`", {"name": unknown[:MAX_NAME]})
        return fields

    def plain(self) -> Message:
        """Return what the template gets, with text parts joined by newlines as vLLM does."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name is not None else {})


ChatMessages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
MESSAGES = TypeAdapter(ChatMessages)


def _messages(value: object) -> list[Message]:
    try:
        return [message.plain() for message in MESSAGES.validate_python(value)]
    except ValidationError as error:
        raise _rejection(error, "messages") from None


class StreamOptions(BaseModel):
    """Whether a stream reports the usage in a last event, and also in each event."""

    model_config = Strict
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(BaseModel):
    """The base of all bodies: strict types, and the model's name."""

    model_config = Strict
    model: str | None = None


class GenerateBody(Body):
    """The parameters of both completions and chat completions."""

    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    frequency_penalty: Penalty = 0.0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logit_bias: Annotated[dict[int, float], PlainValidator(_biases, json_schema_input_type=Biases)] = {}
    max_tokens: TokenCount | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    presence_penalty: Penalty = 0.0
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] = 0
    prompt_logprobs: LogprobCount | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    return_token_ids: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    skip_special_tokens: bool = True
    stop: Annotated[
        Stops,
        BeforeValidator(_as_tuple, json_schema_input_type=Stop | Stops),
        described(f"must be a string or a list of at most {MAX_STOPS}, each of 1 to {MAX_STOP_CHARACTERS} characters"),
    ] = ()
    stop_token_ids: Annotated[
        TokenIds,
        Field(max_length=MAX_STOP_TOKENS),
        described(f"must be a list of at most {MAX_STOP_TOKENS} token ids"),
    ] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _agrees(self) -> "GenerateBody":
        if self.stream_options is not None and not self.stream:
            raise RequestError("`stream_options` is only allowed with `stream`.", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("`prompt_logprobs` cannot be streamed.", "prompt_logprobs")
        if self.token_limit is not None and self.min_tokens > self.token_limit:
            raise RequestError(
                f"`min_tokens` ({self.min_tokens}) is above `max_tokens` ({self.token_limit}).", "min_tokens"
            )
        return self

    @property
    def token_limit(self) -> int | None:
        """The maximum number of tokens of the answer, if the client set one."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    prompt: Annotated[
        Prompts,
        BeforeValidator(_as_prompts, json_schema_input_type=Prompt | Prompts),
        described(f"must be a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of these; none empty"),
    ]
    add_special_tokens: bool = True
    best_of: int | None = None
    echo: bool = False
    logprobs: LogprobCount | None = None

    @model_validator(mode="after")
    def _no_search(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of != self.n:
            raise RequestError("`best_of` must equal `n`: all samples are returned.", "best_of")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives in each token's logprobs, or None without logprobs."""
        return self.logprobs


class ChatBody(GenerateBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], PlainValidator(_messages, json_schema_input_type=ChatMessages)]
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    continue_final_message: bool = False
    logprobs: bool = False
    max_completion_tokens: TokenCount | None = None
    top_logprobs: LogprobCount | None = None

    @model_validator(mode="after")
    def _chat_agrees(self) -> "ChatBody":
        _check_continuation(self.continue_final_message, self.add_generation_prompt)
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("`top_logprobs` is only allowed with `logprobs`.", "top_logprobs")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(Body):
    """POST /tokenize: either a text or a conversation."""

    prompt: str | None = None
    messages: Annotated[list[Message], PlainValidator(_messages, json_schema_input_type=ChatMessages)] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    continue_final_message: bool = False
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("Exactly one of `prompt` and `messages` is required.", "prompt")
        _check_continuation(self.continue_final_message, self.messages is not None and self.add_generation_prompt)
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Annotated[TokenIds, described("must be a list of token ids")]


def _check_continuation(continues: bool, prompts: bool) -> None:
    if continues and prompts:
        raise RequestError(
            "`continue_final_message` requires `add_generation_prompt` to be false.", "continue_final_message"
        )


BodyType = TypeVar("BodyType", bound=Body)


def read_body(kind: type[BodyType], raw: bytes, model_name: str) -> BodyType:
    """Parse and validate a body. Raises RequestError, which names the parameter and quotes little of its value."""
    fields = {key: value for key, value in parse_json(raw).items() if value is not None}
    name = fields.get("model", model_name)
    if name != model_name:
        shown = name[:MAX_NAME] if isinstance(name, str) else ""
        raise RequestError(f"The model `{shown}` does not exist.", "model", "model_not_found", 404)
    known: dict[str, Any] = {}
    for key, value in fields.items():
        if key in kind.model_fields:
            known[key] = value
        elif key in UNSUPPORTED and value not in UNSUPPORTED[key]:
            raise RequestError(f"`{key}` is not supported.", key, "unsupported_parameter")
        elif key not in IGNORED and key not in UNSUPPORTED:
            shown = key[:MAX_NAME]
            raise RequestError(f"Unknown parameter: `{shown}`.", shown, "unknown_parameter")
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        raise _rejection(error) from None


def _rejection(error: ValidationError, param: str = "") -> RequestError:
    """Return the first error. `param` is the parameter that was validated, or "" for the whole body."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        else:
            param += "." * bool(param) + part[:MAX_NAME]
    colon = "" if first["type"] == OURS else ":"
    return RequestError(f"`{param}`{colon} {first['msg']}.", param, "invalid_value")

"""Bodies of the REST API: JSON read strictly, then checked field by field. What passes here can be computed.

Names, defaults and limits are OpenAI's and vLLM's; an unknown field is refused by name, `null` means "not given",
and the few fields of OpenAI's that change no token (`IGNORED`) are accepted and dropped.
"""

import json
import math
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from router.text.chat_template import Message
from shared.errors import RequestError

MAX_PROMPTS = 64
MAX_SAMPLES = 8
MAX_MESSAGES = 2048
MAX_PARTS = 1024
MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_TOKENS = 4, 64, 128
MAX_BIASES = 300
MAX_LOGPROBS = 20
MAX_NAME = 64
INT32 = 2**31 - 1
ROLES = ("system", "developer", "user", "assistant")

# Fields of OpenAI's that say nothing about the tokens: who asks, what is kept, how it is billed.
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
# Known fields that this server cannot honour, and the values of them that ask for nothing.
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
        raise RequestError("The body names a field twice.", code="invalid_json")
    return fields


def parse_json(raw: bytes) -> dict[str, Any]:
    """A JSON object and nothing else: no BOM, no NaN, no trailing bytes, no duplicate names, no lone surrogates.

    Raises Rejected. `raw` is bounded by the caller; nesting by the interpreter's own limit.
    """
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


def is_ids(value: object) -> bool:
    """A list of integers; JSON's booleans are none."""
    return isinstance(value, list) and all(type(item) is int for item in value)


def _prompts(value: object) -> list[str | list[int]]:
    """One prompt or several, as text or as token ids; always a list of prompts."""
    if isinstance(value, str) or (value and is_ids(value)):
        prompts: list[Any] = [value]
    elif isinstance(value, list):
        prompts = value
    else:
        prompts = []
    if not prompts or not all(prompt and (isinstance(prompt, str) or is_ids(prompt)) for prompt in prompts):
        raise RequestError(
            "`prompt` must be a text, a list of texts, a list of token ids or a list of such lists; none empty.",
            "prompt",
        )
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"At most {MAX_PROMPTS} prompts are allowed; you sent {len(prompts)}.", "prompt")
    return prompts


def _one_prompt(value: object) -> str:
    if not isinstance(value, str):
        raise RequestError("`prompt` must be a text.", "prompt")
    return value


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError("`stop` must be a text or a list of texts.", "stop")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"`stop` may hold at most {MAX_STOPS} texts.", "stop")
    if not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise RequestError(f"Every `stop` must have 1 to {MAX_STOP_CHARACTERS} characters.", "stop")
    return tuple(stops)


def _stop_tokens(value: object) -> list[int]:
    if not isinstance(value, list) or not is_ids(value) or len(value) > MAX_STOP_TOKENS:
        raise RequestError(f"`stop_token_ids` must be a list of at most {MAX_STOP_TOKENS} token ids.", "stop_token_ids")
    return value


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not is_ids(value):
        raise RequestError("`tokens` must be a list of token ids.", "tokens")
    return value


def _biases(value: object) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise RequestError(f"`logit_bias` must be an object of at most {MAX_BIASES} token ids.", "logit_bias")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError("The names in `logit_bias` must be token ids.", "logit_bias")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise RequestError("The values in `logit_bias` must be numbers from -100 to 100.", "logit_bias")
        biases[int(key)] = float(bias)
    return biases


def _messages(value: object) -> list[Message]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise RequestError(f"`messages` must be a list of 1 to {MAX_MESSAGES} messages.", "messages")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(value)]


def _message(value: object, param: str) -> Message:
    if not isinstance(value, dict):
        raise RequestError("A message must be an object.", param)
    fields = {key: field for key, field in value.items() if field is not None}
    if fields.get("tool_calls") or fields.get("function_call") or fields.get("role") in ("tool", "function"):
        raise RequestError("Tools are not supported.", param)
    unknown = next((key for key in fields if key not in ("role", "content", "name", "tool_calls")), None)
    if unknown is not None:
        raise RequestError(f"Unknown field in a message: `{unknown[:MAX_NAME]}`.", param)
    role, name = fields.get("role"), fields.get("name")
    if role not in ROLES:
        raise RequestError(f"`role` must be one of {', '.join(ROLES)}.", f"{param}.role")
    message: Message = {"role": role, "content": _content(fields.get("content"), f"{param}.content")}
    if name is not None:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise RequestError(f"`name` must be a text of 1 to {MAX_NAME} characters.", f"{param}.name")
        message["name"] = name
    return message


def _content(value: object, param: str) -> str:
    """A text, or a list of text parts, which are joined by newlines as vLLM does."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PARTS:
        raise RequestError(f"`content` must be a text or a list of 1 to {MAX_PARTS} text parts.", param)
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise RequestError("Only text parts are supported in `content`; nothing is fetched or decoded.", param)
        text = part.get("text")
        if not isinstance(text, str) or set(part) != {"type", "text"}:
            raise RequestError("A text part must have `type` and `text` and nothing else.", param)
        texts.append(text)
    return "\n".join(texts)


def _salt(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 256:
        raise RequestError("`cache_salt` must be a text of 1 to 256 characters.", "cache_salt")
    return value


Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
TokenCount = Annotated[int, Field(ge=1, le=INT32)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(BaseModel):
    """What usage a stream tells: in a last event, and also in every event."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(BaseModel):
    """What all bodies share: strict types, and the model's name."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)
    model: str | None = None


class GenerateBody(Body):
    """The parameters that completions and chat completions share."""

    cache_salt: Annotated[str | None, PlainValidator(_salt)] = None
    frequency_penalty: Penalty = 0.0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logit_bias: Annotated[dict[int, float], PlainValidator(_biases)] = {}
    max_tokens: TokenCount | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    min_tokens: Annotated[int, Field(ge=0, le=INT32)] = 0
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    presence_penalty: Penalty = 0.0
    priority: Annotated[int, Field(ge=-INT32, le=INT32)] = 0
    prompt_logprobs: Logprobs | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    return_token_ids: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    skip_special_tokens: bool = True
    stop: Annotated[tuple[str, ...], PlainValidator(_stops)] = ()
    stop_token_ids: Annotated[list[int], PlainValidator(_stop_tokens)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32)] = 0
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
        """How many tokens the client allows for the answer."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    add_special_tokens: bool = True
    best_of: int | None = None
    echo: bool = False
    logprobs: Logprobs | None = None

    @model_validator(mode="after")
    def _no_search(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of != self.n:
            raise RequestError("`best_of` must equal `n`: nothing is generated that is not returned.", "best_of")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives a token's logprobs list; None when no logprobs are wanted."""
        return self.logprobs


class ChatBody(GenerateBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], PlainValidator(_messages)]
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    continue_final_message: bool = False
    logprobs: bool = False
    max_completion_tokens: TokenCount | None = None
    top_logprobs: Logprobs | None = None

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
    """POST /tokenize: a text, or a conversation."""

    prompt: Annotated[str | None, PlainValidator(_one_prompt)] = None
    messages: Annotated[list[Message] | None, PlainValidator(_messages)] = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    continue_final_message: bool = False
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("Exactly one of `prompt` and `messages` is needed.", "prompt")
        _check_continuation(self.continue_final_message, self.messages is not None and self.add_generation_prompt)
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Annotated[list[int], PlainValidator(_token_ids)]


def _check_continuation(continues: bool, prompts: bool) -> None:
    if continues and prompts:
        raise RequestError(
            "`continue_final_message` needs `add_generation_prompt` to be false.", "continue_final_message"
        )


BodyType = TypeVar("BodyType", bound=Body)


def read_body(kind: type[BodyType], raw: bytes, model_name: str) -> BodyType:
    """A checked body. Raises Rejected naming the parameter; its text never repeats what the client sent at length."""
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
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part)[:MAX_NAME] for part in first["loc"])
        raise RequestError(f"`{param}`: {first['msg']}.", param, "invalid_value") from None

"""Request bodies of the REST API. Each body is parsed as strict JSON, and a Pydantic model validates the types and
limits of its fields.

The OpenAPI document is generated from these models. Fields have the same names, defaults and limits as in OpenAI's API
and vLLM. An unknown field is rejected with an error that names the field. A field with the value `null` counts as not
given. Fields that do not affect the tokens (`IGNORED`) are dropped.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from router.http.messages import (
    MAX_NAME,
    MAX_PARTS,
    MAX_TOOLS,
    ChatMessages,
    StrictModel,
    ToolChoice,
    Tools,
    check_tool_choice,
    check_tool_names,
    check_tool_results,
)
from router.http.structured import Constraint, ResponseFormat, StructuredOutputs
from router.text.chat_template import Argument
from shared.errors import RequestError
from shared.limits import INT32_MAX, MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS, MAX_LOGIT_BIASES, MAX_LOGPROBS

MAX_PROMPTS, MAX_SAMPLES = 512, 128  # MAX_PROMPTS also limits the number of samples of all prompts together
MAX_LISTED = 8  # maximum number of models that an error lists
MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_TOKENS = 32, 256, 128
MAX_TEMPLATE_ARGUMENTS = 32
MAX_STREAM_INTERVAL = 1024
# Fields of the OpenAI and Anthropic APIs that do not affect the tokens, or that are hints for features which Baton does
# not have.
IGNORED = frozenset(("cache_control", "metadata", "prediction", "prompt_cache_key", "prompt_cache_options"))
IGNORED |= {"prompt_cache_retention", "safety_identifier", "service_tier", "session_id", "store", "user"}
IGNORED |= {"client_metadata", "diagnostics", "user_profile_id", "verbosity"}
# Known fields that are not supported, each with the values that are accepted nevertheless because they have no effect.
UNSUPPORTED: dict[str, tuple[object, ...]] = dict.fromkeys(
    ("audio", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "moderation"), ()
)
UNSUPPORTED |= {"suffix": ("",), "web_search_options": (), "logits_processors": ([],), "length_penalty": (1.0,)}
UNSUPPORTED |= dict.fromkeys(("conversation", "context_management"), ())
UNSUPPORTED |= {"embed_dtype": ("float32",), "endianness": ("native", "little"), "max_tokens_per_doc": ()}
UNSUPPORTED |= {"functions": ([],), "function_call": ("none",)}
UNSUPPORTED |= {"modalities": (["text"],), "use_beam_search": (False,)}
# Fields of vLLM
UNSUPPORTED |= dict.fromkeys(("chat_template", "ec_transfer_params", "kv_transfer_params", "logprob_token_ids"), ())
UNSUPPORTED |= dict.fromkeys(("prompt_embeds", "repetition_detection", "request_id"), ())
UNSUPPORTED |= dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs", "vllm_xargs"), ({},))
UNSUPPORTED |= {"documents": ([],), "truncation_side": ("left",)}
UNSUPPORTED |= dict.fromkeys(("return_mm_kwargs", "spaces_between_special_tokens"), (True,))
UNSUPPORTED |= dict.fromkeys(("echo", "return_prompt_text", "return_token_offsets", "watermarking"), (False,))
UNSUPPORTED |= {"routed_experts_prompt_start": (0,)}
# Fields of the Responses API and of the Messages API
UNSUPPORTED |= dict.fromkeys(("compaction", "container", "inference_geo", "thread"), ())
UNSUPPORTED |= {"fallbacks": ([],), "previous_input_messages": (), "previous_response": ()}
UNSUPPORTED |= {"enable_response_messages": (False,), "mcp_servers": ([],), "prompt": (), "speed": ("standard",)}
# Unsupported fields, each with the field to use instead. Earlier versions of vLLM had the `guided_` fields.
REPLACED = {f"guided_{name}": f"structured_outputs.{name}" for name in ("choice", "grammar", "json", "regex")}
REPLACED["prompt"] = "messages"
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Error messages for fields that accept several forms of a value. Pydantic's own message would explain only one form.
EXPECTED = {
    "prompt": f"must be a prompt (a string or a list of token ids, not empty) or a list of 1 to {MAX_PROMPTS} prompts",
    "stop": f"must be a string or a list of at most {MAX_STOPS} strings, of 1 to {MAX_STOP_CHARACTERS} characters each",
    "truncate_prompt_tokens": "must be a number of tokens, or -1 for as many as fit",
    "bad_words": f"must be a list of at most {MAX_BAD_WORDS} words of 1 to {MAX_BAD_WORD_CHARACTERS} characters each",
    "stop_token_ids": f"must be a list of at most {MAX_STOP_TOKENS} token ids",
    "logit_bias": f"must be an object of at most {MAX_LOGIT_BIASES} token ids, with values from -100 to 100",
    "content": f"must be a string or a list of at most {MAX_PARTS} parts: texts, with `type` and `text`, or images, "
    "with `type` and `image_url`; its `url` must begin with data:image/ (nothing is fetched); files are not supported",
    "chat_template_kwargs": f"must be an object of at most {MAX_TEMPLATE_ARGUMENTS} strings, numbers and booleans",
    "tools": f"must be a list of at most {MAX_TOOLS} functions",
    "tool_choice": 'must be "none", "auto", "required" or an object with the type "function" and a function\'s name',
}
# How many parts of a parameter's name an error shows, keyed by the first part. The default is 1.
# `tools[0].function.name` has 4 parts: `tools`, 0, `function` and `name`.
NESTED = {
    "messages": 3,
    "response_format": 3,
    "stream_options": 2,
    "structured_outputs": 2,
    "tools": 4,
    "input": 6,
    "thinking": 2,
    "output_config": 3,
    "text": 3,
    "reasoning": 2,
}


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("this number is not finite")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0][:MAX_NAME]
        text = twice.encode(errors="replace").decode()  # the name may contain lone surrogates
        raise RequestError(f"The body has the field `{text}` twice.", code="invalid_json")
    return fields


def parse_json(raw: bytes) -> dict[str, Any]:
    """Parse `raw` as a JSON object. Raises RequestError if `raw` is anything else, or if it has a BOM, NaN, trailing
    bytes, duplicate names or lone surrogates. The caller limits the size, and the interpreter limits the nesting."""
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_unique)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise RequestError("The body is nested too deeply.", code="invalid_json") from None
    except UnicodeError:
        raise RequestError("The body is not valid Unicode text.", code="invalid_json") from None
    except ValueError:
        raise RequestError("The body is not valid JSON.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_json")
    return value


TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
TokenCount = Annotated[int, Field(ge=1, le=INT32_MAX)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Temperature = Annotated[float, Field(ge=0, le=2)]
Prompt = Annotated[str, Field(min_length=1)] | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompts = Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=256)]
Priority = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)]
Truncation = TokenCount | Literal[-1]  # the number of prompt tokens to keep; -1 keeps as many as fit
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def listed(prompts: Any) -> list[Any]:
    """Return the prompts in a value of the type `Prompt | list[Prompt]`. A list of integers is one prompt."""
    is_one = isinstance(prompts, str) or isinstance(prompts[0], int)
    return [prompts] if is_one else list(prompts)


def _check_names(arguments: dict[str, Any]) -> dict[str, Any]:
    if taken := arguments.keys() & {"add_generation_prompt", "documents", "messages", "tools"}:
        raise PydanticCustomError("taken", "cannot set `{name}`", {"name": min(taken)})
    return arguments


TemplateArguments = Annotated[
    dict[Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]{0,63}$")], Argument],
    Field(max_length=MAX_TEMPLATE_ARGUMENTS, json_schema_extra={"additionalProperties": False}),
    AfterValidator(_check_names),
]


class StreamOptions(StrictModel):
    """`include_usage` reports the usage in the last event of a stream. With `continuous_usage_stats`, every event
    reports the usage so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class Body(StrictModel):
    """The base class of all bodies. Its validation is strict. The default limit on the size of a body suffices for a
    prompt that fills the model's context, and `more_bytes` is added to this limit."""

    more_bytes: ClassVar[int] = 0
    expected: ClassVar[Mapping[str, str]] = EXPECTED
    model: str | None = None


class GenerateBody(Body):
    """The parameters of both completions and chat completions."""

    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] = []
    cache_salt: CacheSalt | None = None
    frequency_penalty: Penalty = 0.0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], Bias],
        Field(max_length=MAX_LOGIT_BIASES, json_schema_extra={"additionalProperties": False}),
    ] = {}
    max_tokens: TokenCount | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    presence_penalty: Penalty = 0.0
    priority: Priority = 0
    prompt_logprobs: LogprobCount | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    response_format: ResponseFormat | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None  # -1: a random seed, as in vLLM
    skip_special_tokens: bool = True
    speculative: bool = True
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKENS)] = []
    stream: bool = False
    # The minimum number of tokens in each event of a stream, except the first and the last event.
    stream_interval: Annotated[int, Field(ge=1, le=MAX_STREAM_INTERVAL)] = 1
    stream_options: StreamOptions = StreamOptions()
    structured_outputs: StructuredOutputs | None = None
    temperature: Temperature = 1.0
    thinking_token_budget: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None  # -1: no limit
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    truncate_prompt_tokens: Truncation | None = None

    @model_validator(mode="after")
    def _agrees(self) -> "GenerateBody":
        if "stream_options" in self.model_fields_set and not self.stream:
            raise RequestError("`stream_options` is only allowed with `stream`.", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("`prompt_logprobs` cannot be streamed.", "prompt_logprobs")
        if self.token_limit is not None and self.min_tokens > self.token_limit:
            raise RequestError(
                f"`min_tokens` ({self.min_tokens}) is above `max_tokens` ({self.token_limit}).", "min_tokens"
            )
        return self

    def constraint(self) -> Constraint | None:
        """Return the constraint that the answer must match, if there is one. Raises RequestError if the parameters
        contradict each other."""
        by_format = self.response_format.constraint() if self.response_format is not None else None
        if self.structured_outputs is None:
            return by_format
        if by_format is not None:
            raise RequestError("Give `response_format` or `structured_outputs`, not both.", "structured_outputs")
        return self.structured_outputs.constraint()

    @property
    def token_limit(self) -> int | None:
        """The maximum number of tokens of the answer, if the client set one."""
        return self.max_tokens

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options.include_usage and self.stream_options.continuous_usage_stats


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    prompt: Prompt | Prompts
    add_special_tokens: bool = True
    best_of: int | None = None
    echo: bool = False
    logprobs: LogprobCount | None = None
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None

    @model_validator(mode="after")
    def _is_supported(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("`max_tokens` can only be 0 with `echo`.", "max_tokens")
        if len(self.prompts) * self.n > MAX_PROMPTS:
            raise RequestError(f"There can be at most {MAX_PROMPTS} samples of all prompts together.", "n")
        if self.best_of is not None and self.best_of != self.n:
            raise RequestError("`best_of` must equal `n`: all samples are returned.", "best_of")
        return self

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each a text or a list of token ids."""
        return listed(self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives in each token's logprobs, or None without logprobs."""
        return self.logprobs


class ChatBody(GenerateBody):
    """POST /v1/chat/completions."""

    messages: ChatMessages
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: TemplateArguments = {}
    continue_final_message: bool = False
    include_reasoning: bool = True
    logprobs: bool = False
    max_completion_tokens: TokenCount | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: ReasoningEffort | None = None
    tool_choice: ToolChoice = "auto"
    tools: Tools = []
    top_logprobs: LogprobCount | None = None

    @model_validator(mode="after")
    def _chat_agrees(self) -> "ChatBody":
        _check_continuation(self.continue_final_message, self.add_generation_prompt)
        if self.reasoning_effort is not None:  # each template has its own name for this setting
            thinks = self.reasoning_effort != "none"
            own = {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": self.reasoning_effort}
            self.chat_template_kwargs = own | self.chat_template_kwargs
        check_tool_names(self.tools)
        check_tool_choice(self.tool_choice, self.tools)
        check_tool_results(self.messages)
        if self.top_logprobs and not self.logprobs:
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
    messages: ChatMessages | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    chat_template_kwargs: TemplateArguments = {}
    continue_final_message: bool = False
    return_token_strs: bool = False
    tools: Tools = []

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("Exactly one of `prompt` and `messages` is required.", "prompt")
        _check_continuation(self.continue_final_message, self.messages is not None and self.add_generation_prompt)
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: TokenIds


def _check_continuation(continues: bool, prompts: bool) -> None:
    if continues and prompts:
        text = "`continue_final_message` requires `add_generation_prompt` to be false."
        raise RequestError(text, "continue_final_message")


def unknown_model(name: str, models: Sequence[str]) -> RequestError:
    served = ", ".join(f"`{each}`" for each in models[:MAX_LISTED])
    text = f"The model `{name[:MAX_NAME]}` does not exist; served: {served}."
    return RequestError(text, "model", "model_not_found", 404)


BodyType = TypeVar("BodyType", bound=Body)


def parse_body(kind: type[BodyType], raw: bytes, models: Sequence[str]) -> BodyType:
    """Parse and validate a body. `models` lists the values that the field `model` may have, with the default first.

    Raises RequestError if the body is invalid. The error names the parameter.
    """
    fields = {key: value for key, value in parse_json(raw).items() if value is not None}
    if fields.get("model") == "":  # the default model, as in vLLM
        del fields["model"]
    name = fields.get("model", models[0])
    if name not in models:
        raise unknown_model(name if isinstance(name, str) else "", models)
    for key in [key for key in fields if key not in kind.model_fields]:
        if fields[key] not in UNSUPPORTED.get(key, (fields[key],)):
            only = " or ".join(json.dumps(value) for value in UNSUPPORTED[key] if value)
            advice = f"; use `{REPLACED[key]}`." if REPLACED.get(key, "").split(".")[0] in kind.model_fields else "."
            message = f"`{key}` is not supported" + (f"; it can only be {only}." if only else advice)
            raise RequestError(message, key, "unsupported_parameter")
        if key not in IGNORED and key not in UNSUPPORTED:
            name = key[:MAX_NAME]
            raise RequestError(f"Unknown parameter: `{name}`{_near(kind, [name])}", name, "unknown_parameter")
        del fields[key]
    return validated(kind, fields)


def _near(kind: type[BaseModel], location: Sequence[str | int]) -> str:
    """Return the end of an error message about an unknown parameter. If a known parameter has a similar name, the
    message suggests it."""
    known: Any = kind
    for part in location[:-1]:
        known = known.model_fields[part].annotation if part in getattr(known, "model_fields", {}) else None
    near = get_close_matches(str(location[-1])[:MAX_NAME], getattr(known, "model_fields", ()), 1)
    return f"; did you mean `{near[0]}`?" if near else "."


def validated(kind: type[BodyType], fields: dict[str, Any]) -> BodyType:
    """Return a body with these fields. Raises RequestError, which names the parameter, if a field is invalid."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # A part that begins with "~" is the tag of a union, and not a field.
    full = [part for part in first["loc"] if not str(part).startswith("~")]
    location = full[: NESTED.get(str(full[0]), 1)]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:MAX_NAME]}" for part in location)[1:]
    if first["type"] == "extra_forbidden" and len(location) == len(full):
        raise RequestError(f"Unknown parameter: `{param}`{_near(kind, full)}", param, "unknown_parameter")
    is_ours = len(location) < len(full) or first["type"] == "literal_error"
    text = kind.expected.get(str(location[-1])) if is_ours else None
    raise RequestError(f"`{param}` {text}." if text else f"`{param}`: {first['msg']}.", param, "invalid_value")

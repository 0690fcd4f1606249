"""The body of POST /v1/responses, and its translation to a chat.

Names, limits and meanings are as in OpenAI's Responses API. vLLM's sampling parameters are accepted too. Each
item of `input` becomes a message or a part of a message: consecutive reasoning, text and calls of the assistant form
one message.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from router.http.bodies import (
    ChatBody,
    GenerateBody,
    LogprobCount,
    ReasoningEffort,
    TemplateArguments,
    TokenCount,
    validated,
)
from router.http.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    FunctionCall,
    FunctionChoice,
    FunctionDefinition,
    FunctionName,
    Id,
    NamedChoice,
    StrictModel,
    TextOr,
    check_depth,
    check_url,
    tag_of,
)
from router.http.structured import JsonSchema, ResponseFormat, SchemaName
from shared.errors import RequestError

INCLUDES = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


class InputText(StrictModel):
    """A text in a message. `annotations` and `logprobs` of an earlier answer have no effect."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], BeforeValidator(check_depth)] | None = None
    logprobs: Annotated[list[Any], BeforeValidator(check_depth)] | None = None


class InputImage(StrictModel):
    """An image in a message, as a data URL. `detail` has no effect."""

    type: Literal["input_image"]
    image_url: Annotated[str, BeforeValidator(check_url)]
    detail: Literal["auto", "low", "high"] | None = None


class RefusalPart(StrictModel):
    """A refusal in a message of the assistant."""

    type: Literal["refusal"]
    refusal: str


def _kind_of_part(value: Any) -> str:
    kind = tag_of(value)
    return "~input_text" if kind == "~output_text" else kind


Part = Annotated[
    Annotated[InputText, Tag("~input_text")] | Annotated[RefusalPart, Tag("~refusal")],
    Discriminator(_kind_of_part, "part", "must be an input_text or an output_text"),
]
MessagePart = Annotated[
    Annotated[InputText, Tag("~input_text")]
    | Annotated[RefusalPart, Tag("~refusal")]
    | Annotated[InputImage, Tag("~input_image")],
    Discriminator(_kind_of_part, "part", "must be an input_text, an output_text or an input_image; give files as text"),
]
Parts = Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]
MessageParts = Annotated[list[MessagePart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]


def text_of(content: str | Sequence[InputText | RefusalPart | InputImage]) -> str:
    """Return the texts and refusals in a message's content, joined by newlines. Images are left out."""
    if isinstance(content, str):
        return content
    texts = (part for part in content if not isinstance(part, InputImage))
    return "\n".join(part.text if isinstance(part, InputText) else part.refusal for part in texts)


def content_of(content: str | Sequence[InputText | RefusalPart | InputImage]) -> str | list[dict[str, Any]]:
    """Return the content in the form of a chat message: one text, or a list of parts if there are images."""
    if isinstance(content, str) or not any(isinstance(part, InputImage) for part in content):
        return text_of(content)
    return [
        {"type": "image_url", "image_url": {"url": part.image_url}}
        if isinstance(part, InputImage)
        else {"type": "text", "text": text_of([part])}
        for part in content
    ]


class ResponseItem(StrictModel):
    """The base class of the items in `input`. Clients may send back an item of an earlier answer; its `id` and `status`
    have no effect."""

    id: Id | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(ResponseItem):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOr[MessageParts]
    phase: str | None = None

    @model_validator(mode="after")
    def _check_images(self) -> "MessageItem":
        if self.role == "assistant" and not isinstance(content_of(self.content), str):
            raise PydanticCustomError("image", "is a message of the assistant, which cannot contain images")
        return self


class CallItem(ResponseItem):
    """A call that the model requested."""

    type: Literal["function_call"]
    call_id: Id
    name: FunctionName
    namespace: FunctionName | None = None
    arguments: str

    @model_validator(mode="after")
    def _check_arguments(self) -> "CallItem":
        FunctionCall(name=flat_name(self.namespace, self.name), arguments=self.arguments).parsed()
        return self


class CallOutputItem(ResponseItem):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Id
    output: TextOr[Parts]


class SummaryText(StrictModel):
    """A part of a reasoning item."""

    type: Literal["summary_text", "reasoning_text"]
    text: str


class ReasoningItem(ResponseItem):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: list[SummaryText] = []
    content: list[SummaryText] | None = None
    encrypted_content: str | None = None


Item = Annotated[
    Annotated[MessageItem, Tag("~message")]
    | Annotated[CallItem, Tag("~function_call")]
    | Annotated[CallOutputItem, Tag("~function_call_output")]
    | Annotated[ReasoningItem, Tag("~reasoning")],
    Discriminator(
        lambda value: tag_of(value, "message"),
        "item",
        "must be a message, function_call, function_call_output or reasoning",
    ),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class FunctionTool(FunctionDefinition):
    """A function in `tools` or in a namespace."""

    type: Literal["function"]


class NamespaceTool(StrictModel):
    """A group of functions. As in vLLM, the model gets each function with the name `namespace__name`."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class WebSearchTool(StrictModel):
    """A search of the server. As in vLLM, it has no effect: the model does not get it, because the server runs no tools
    of its own. OpenAI's Codex CLI sends it by default."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["web_search", "web_search_preview"]


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("~function")]
    | Annotated[NamespaceTool, Tag("~namespace")]
    | Annotated[WebSearchTool, Tag("~web_search")],
    Discriminator(
        lambda value: tag_of(value).removesuffix("_preview"),
        "tool",
        "must have the type function or namespace: the server runs no tools of its own",
    ),
]


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name of a function for the model."""
    return name if namespace is None else f"{namespace}__{name}"


class ReasoningOptions(StrictModel):
    """How much the model reasons. There are no summaries; a reasoning item contains the whole reasoning."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(StrictModel):
    """The format of the answer's text. It has the same fields as `response_format`, but without nesting."""

    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def response_format(self) -> ResponseFormat:
        """Return the same format for a chat. Raises RequestError."""
        if self.type != "json_schema":
            return ResponseFormat(type=self.type)
        if self.schema_ is None:
            raise RequestError("`text.format` needs a `schema`.", "text.format.schema", "invalid_value")
        schema = JsonSchema.model_validate({"name": self.name or "answer", "schema": self.schema_})
        return ResponseFormat(type="json_schema", json_schema=schema)


class ResponseChoice(FunctionChoice):
    """A `tool_choice` that requires a call of one function."""

    type: Literal["function"]


class TextOptions(StrictModel):
    """Options for the text of the answer."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(GenerateBody):
    """POST /v1/responses."""

    input: TextOr[Items]
    background: bool = False
    chat_template_kwargs: TemplateArguments = Field(default_factory=dict)
    include: Annotated[list[INCLUDES], Field(max_length=16)] = Field(default_factory=list)
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None  # no effect: the server runs no tools
    metadata: Annotated[Metadata, Field(max_length=16)] = Field(default_factory=dict)
    n: Literal[1] = 1
    parallel_tool_calls: bool = True
    previous_response_id: Id | None = None
    prompt_logprobs: None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    return_token_ids: Literal[False] = False
    store: bool | None = None
    stream_interval: Literal[1] = 1
    text: TextOptions = TextOptions()
    tool_choice: Literal["none", "auto", "required"] | ResponseChoice = "auto"
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    top_logprobs: LogprobCount | None = None
    truncation: Literal["auto", "disabled"] = "disabled"

    @field_validator("input")
    @classmethod
    def _as_items(cls, value: str | list[Item]) -> list[Item]:
        return [MessageItem(role="user", content=value)] if isinstance(value, str) else value

    @property
    def items(self) -> Sequence[Item]:
        assert not isinstance(self.input, str)
        return self.input

    @property
    def functions(self) -> list[tuple[str | None, FunctionTool]]:
        """The functions in `tools`, each with its namespace."""
        found: list[tuple[str | None, FunctionTool]] = []
        for tool in self.tools:
            if isinstance(tool, NamespaceTool):
                found += [(tool.name, each) for each in tool.tools]
            elif isinstance(tool, FunctionTool):
                found.append((None, tool))
        return found

    @property
    def has_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include

    def to_chat(self, context: Sequence[Item], begin: int = 0) -> ChatBody:
        """Return the chat that generates this response. `context` has the items of the conversation so far. The first
        `begin` items are left out, unless they are instructions. If the truncation is "auto", further turns may be left
        out, so that the chat has at most MAX_MESSAGES messages. Raises RequestError if a tool result has no call, or if
        a field is invalid."""
        if (count := len(self.functions)) > MAX_TOOLS:
            text = f"`tools` has {count} functions, with those in namespaces; at most {MAX_TOOLS} are allowed."
            raise RequestError(text, "tools", "invalid_value")
        fields = {name: getattr(self, name) for name in self.model_fields_set & GenerateBody.model_fields.keys()}
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        tools = [
            tool.model_dump(exclude_unset=True, exclude={"type"}) | {"name": flat_name(namespace, tool.name)}
            for namespace, tool in self.functions
        ]
        if self.text.format is not None:
            if self.response_format is not None:
                raise RequestError("Give `text.format` or `response_format`, not both.", "text.format")
            fields["response_format"] = self.text.format.response_format()
        choice: Any = self.tool_choice
        if isinstance(choice, ResponseChoice):
            choice = NamedChoice(type="function", function=FunctionChoice(name=choice.name))
        _check_outputs(self.items, {item.call_id for item in context if isinstance(item, CallItem)})
        items = [*context, *self.items]
        if self.truncation == "auto" and len(items) >= MAX_MESSAGES:
            begin = max(begin, _begin_of_last(MAX_MESSAGES - len(system), items))
        items = [*filter(_is_instruction, items[:begin]), *items[begin:]]
        return validated(
            ChatBody,
            fields
            | {
                "messages": system + messages_of(items),
                "max_completion_tokens": self.max_output_tokens,
                "chat_template_kwargs": self.chat_template_kwargs,
                "reasoning_effort": self.reasoning.effort,
                "parallel_tool_calls": self.parallel_tool_calls,
                "tools": [{"type": "function", "function": tool} for tool in tools],
                "tool_choice": choice,
                "logprobs": self.has_logprobs,
                "top_logprobs": self.top_logprobs if self.has_logprobs else None,
            },
        )


ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item], config=ConfigDict(hide_input_in_errors=True))


def items_of(data: bytes) -> list[Item]:
    """Return the items in a JSON list."""
    return ITEMS.validate_json(data)


def items_to_json(items: Sequence[Item]) -> bytes:
    return ITEMS.dump_json(list(items), exclude_none=True)


def turns_of(items: Sequence[Item]) -> list[int]:
    """Return the index of the first item of each turn of a conversation. A turn begins with a message of the user."""
    return [index for index, item in enumerate(items) if isinstance(item, MessageItem) and item.role == "user"]


def _begin_of_last(count: int, items: Sequence[Item]) -> int:
    """Return the index of the first of the last turns that have at most `count` messages together with all instructions
    of the conversation. At least the last turn is included."""
    turns = [0, *turns_of(items)[1:]]
    sizes = [len(messages_of(items[begin:end])) for begin, end in pairwise([*turns, len(items)])]
    fitting = bisect_right(list(accumulate(reversed(sizes))), count - sum(map(_is_instruction, items)))
    return turns[-max(1, fitting)]


def _is_instruction(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role in {"system", "developer"}


def _check_outputs(items: Sequence[Item], called: set[str]) -> None:
    for number, item in enumerate(items):
        if isinstance(item, CallItem):
            called.add(item.call_id)
        elif isinstance(item, CallOutputItem) and item.call_id not in called:
            text = f"`input[{number}].call_id` is not the id of an earlier function call."
            raise RequestError(text, f"input[{number}].call_id", "invalid_value")


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the messages of a chat. Consecutive items of the assistant become one message, whose texts are joined by
    newlines."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case MessageItem() if item.role != "assistant":
                messages.append({"role": item.role, "content": content_of(item.content)})
                continue
            case CallOutputItem():
                message = {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
                messages.append(message)
                continue
        if not messages or messages[-1]["role"] != "assistant" or isinstance(item, ReasoningItem):
            messages.append({"role": "assistant", "content": ""})
        last = messages[-1]
        match item:
            case MessageItem():
                last["content"] = "\n".join(filter(None, (last["content"], text_of(item.content))))
            case CallItem():
                function = {"name": flat_name(item.namespace, item.name), "arguments": item.arguments}
                last.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
            case ReasoningItem():
                last["reasoning_content"] = "".join(part.text for part in item.content or item.summary)
    return messages

"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens. Requests are translated to chat
completions, and the output is translated back.

Names and limits are as in Anthropic's API. Thinking blocks have an empty signature, because Baton does not verify the
blocks that a client sends back. `cache_control` has no effect, because every prefix is cached.

As in Anthropic's API, successive messages of the user are one turn. A message of the role `system` that follows another
message becomes a part of the user's turn, because many chat templates refuse system messages at later positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from secrets import token_hex
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from router.http.asgi import ResponseWriter
from router.http.bodies import (
    EXPECTED,
    MAX_STOPS,
    Body,
    ChatBody,
    ReasoningEffort,
    Stop,
    Temperature,
    TemplateArguments,
    TokenCount,
    validated,
)
from router.http.generation import GenerationService
from router.http.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    FunctionName,
    Id,
    StrictModel,
    TextOr,
    check_depth,
    object_in,
    renamed_parameters,
    tag_of,
)
from router.http.output import TextDelta
from router.http.parsing import encode_chat
from router.http.responses import dump, typed_events
from router.http.tools import check_tools
from router.text.tool_parser import AnswerPart, call_id
from shared.errors import RequestError

# A client of Anthropic begins the system prompt with a block that starts with this text, and that differs between
# requests with otherwise equal prompts. As in vLLM, the block is dropped, so that these requests share cached blocks.
BILLING = "x-anthropic-billing-header"
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
Event = dict[str, Any]
# Parameters of chat completions, and their names in this API.
PARAMS = {"stop": "stop_sequences", "response_format.json_schema.schema": "output_config.format.schema"}
named_parameters = partial(renamed_parameters, PARAMS, images="messages", schema="input_schema")


class ContentBlock(StrictModel):
    """The base class of the blocks in a message."""

    cache_control: dict[str, Any] | None = None


class TextBlock(ContentBlock):
    """A text."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class ThinkingBlock(ContentBlock):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedBlock(ContentBlock):
    """The reasoning of an earlier answer, encrypted by Anthropic. It has no effect."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(ContentBlock):
    """A call that the model requested."""

    type: Literal["tool_use"]
    id: Id
    name: FunctionName
    input: Annotated[dict[str, Any], BeforeValidator(check_depth)]


class ImageSource(StrictModel):
    """The data of an image, in base64."""

    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/webp"]
    data: str


class ImageBlock(ContentBlock):
    """An image in a message of the user or in the result of a call."""

    type: Literal["image"]
    source: ImageSource

    def part(self) -> dict[str, Any]:
        """Return the block as a part of a chat message."""
        url = f"data:{self.source.media_type};base64,{self.source.data}"
        return {"type": "image_url", "image_url": {"url": url}}


class ToolResultBlock(ContentBlock):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Id
    content: str | Annotated[list[TextBlock | ImageBlock], Field(max_length=MAX_PARTS)] = ""
    is_error: bool = False


Block = Annotated[
    Annotated[TextBlock, Tag("~text")]
    | Annotated[ImageBlock, Tag("~image")]
    | Annotated[ThinkingBlock, Tag("~thinking")]
    | Annotated[RedactedBlock, Tag("~redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("~tool_use")]
    | Annotated[ToolResultBlock, Tag("~tool_result")],
    Discriminator(tag_of, "block", "must be text, image, thinking, tool_use or tool_result"),
]
Blocks = Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)]


class AnthropicMessage(StrictModel):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: TextOr[Blocks]

    def blocks(self) -> Sequence[Block]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class AnthropicTool(StrictModel):
    """An entry of `tools`: a function that the client runs."""

    name: FunctionName
    type: Literal["custom"] = "custom"
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class AnthropicChoice(StrictModel):
    """The value of `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool = False


class Thinking(StrictModel):
    """Switches the reasoning on or off. `budget_tokens` is accepted, but does not limit the reasoning. `display` is
    accepted, but the answer always has the whole reasoning."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: TokenCount | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class ThinkingEdit(StrictModel):
    """An edit of the conversation that leaves it unchanged."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(StrictModel):
    """The field `context_management`. Edits that would change the conversation are refused."""

    edits: Annotated[list[ThinkingEdit], Field(max_length=1)] = Field(default_factory=list)


class OutputFormat(StrictModel):
    """A JSON schema that the text of the answer must match."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictModel):
    """`output_config`: the format of the answer's text, and how much the model reasons."""

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens."""

    expected: ClassVar[Mapping[str, str]] = EXPECTED | {
        "content": f"must be a string or a list of at most {MAX_PARTS} blocks: text, image (with a base64 `source`), "
        "thinking, tool_use or tool_result",
        "tool_choice": 'must be an object with the type "auto", "any", "tool" or "none"',
    }
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    chat_template_kwargs: TemplateArguments = Field(default_factory=dict)
    context_management: ContextManagement | None = None
    output_config: OutputConfig = OutputConfig()
    system: str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS)] = ""
    thinking: Thinking | None = None
    tool_choice: AnthropicChoice = AnthropicChoice(type="auto")
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of a `ChatBody` with the same prompt. Raises RequestError."""
        choice: Any = {"auto": "auto", "any": "required", "none": "none", "tool": None}[self.tool_choice.type]
        if (choice is None) != (self.tool_choice.name is not None):
            raise RequestError("`tool_choice` must have a name if and only if its type is `tool`.", "tool_choice")
        if choice is None:
            choice = {"type": "function", "function": {"name": self.tool_choice.name}}
        shown = self.system
        system = _text(shown if isinstance(shown, str) else [b for b in shown if not b.text.startswith(BILLING)])
        messages = [{"role": "system", "content": system}] if system else []
        used: set[str] = set()
        for number, message in enumerate(self.messages):
            messages += _chat_messages(message, number, used)
        messages = _turns(messages)
        # A final message of the assistant is the beginning of the answer.
        continues = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        switches = {} if self.thinking is None else dict.fromkeys(SWITCHES, self.thinking.type != "disabled")
        schema = self.output_config.format and {"name": "answer", "schema": self.output_config.format.schema_}
        return {
            "messages": messages,
            "model": self.model,
            "add_generation_prompt": not continues,
            "continue_final_message": continues,
            "chat_template_kwargs": switches | self.chat_template_kwargs,
            "reasoning_effort": self.output_config.effort,
            "response_format": {"type": "json_schema", "json_schema": schema} if schema else None,
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "tool_choice": choice,
            "tools": [{"type": "function", "function": _function(tool)} for tool in self.tools],
        }


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: TokenCount
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    stream: bool = False
    temperature: Temperature = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates that switch the reasoning on and off


def _function(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {key: value for key, value in (function | {"strict": tool.strict}).items() if value is not None}


def _text(content: str | Sequence[Block]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if isinstance(block, TextBlock))


def _chat_messages(message: AnthropicMessage, number: int, used: set[str]) -> list[dict[str, Any]]:
    """Convert message `number` to chat messages: one message for the text of each tool result, and then one message for
    the images of the results and for the other blocks. Add the ids of the message's calls to `used`. Raises
    RequestError if a block is not allowed in a message of this role, or if the id of a result is not in `used`."""
    blocks = message.blocks()
    for place, block in enumerate(blocks):
        of_user = isinstance(block, ToolResultBlock | ImageBlock)
        is_misplaced = message.role == "system" or of_user != (message.role == "user")
        if not isinstance(block, TextBlock) and is_misplaced:
            param = f"messages[{number}].content[{place}]"
            raise RequestError(f"`{param}`: a message of the {message.role} cannot contain {block.type}.", param)
        if isinstance(block, ToolUseBlock):
            used.add(block.id)
        elif isinstance(block, ToolResultBlock) and block.tool_use_id not in used:
            param = f"messages[{number}].content[{place}].tool_use_id"
            raise RequestError(f"`{param}` is not the id of an earlier tool_use block.", param, "invalid_value")
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    found: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)} for block in results
    ]
    lists = [block.content for block in results if not isinstance(block.content, str)]
    images = [each for content in lists for each in content if isinstance(each, ImageBlock)]
    shown = [*images, *(block for block in blocks if isinstance(block, TextBlock | ImageBlock))]
    text: Any = _text(shown)
    if any(isinstance(block, ImageBlock) for block in shown):
        text = [
            block.part() if isinstance(block, ImageBlock) else {"type": "text", "text": block.text} for block in shown
        ]
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": dump(block.input)}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if text or calls or not found:
        thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        fields: dict[str, Any] = {"tool_calls": calls, "reasoning_content": thoughts or None}
        found.append({"role": message.role, "content": text} | (fields if message.role == "assistant" else {}))
    return found


def _turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with successive messages of the user joined, and also those of the system. A system message
    that follows a message of another role counts as a message of the user."""
    first = next((place for place, message in enumerate(messages) if message["role"] != "system"), len(messages))
    later = [message | {"role": "user"} if message["role"] == "system" else message for message in messages[first:]]
    found: list[dict[str, Any]] = []
    for role, group in groupby(messages[:first] + later, key=itemgetter("role")):
        if role in ("system", "user"):
            found.append({"role": role, "content": _joined([message["content"] for message in group])})
        else:
            found += group
    return found


def _joined(contents: Sequence[str | list[dict[str, Any]]]) -> str | list[dict[str, Any]]:
    """Return the contents of several chat messages as one content."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "\n".join(texts)
    parts = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents)
    return list(chain.from_iterable(parts))


class MessageEvents:
    """Builds the events of an answer, and keeps the message so far in `message`. Call `start` first, and then `add` for
    each delta. Both methods return the new events."""

    def __init__(self, message_id: str, model: str, num_prompt: int, id_form: str) -> None:
        self.message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._num_prompt = num_prompt
        self._num_generated = 0
        self._id_form = id_form
        self._inputs: list[str] = []  # pieces of the current call's input

    def start(self, cached_tokens: int) -> list[Event]:
        usage = {"input_tokens": self._num_prompt - cached_tokens, "output_tokens": 0}
        self.message["usage"] = usage | {"cache_read_input_tokens": cached_tokens, "cache_creation_input_tokens": 0}
        return [{"type": "message_start", "message": self.message | {"content": []}}]

    def add(self, delta: TextDelta, *, has_calls: bool) -> list[Event]:
        """Return the events for a delta. `has_calls` is true if the answer so far has tool calls."""
        events: list[Event] = []
        self._num_generated += len(delta.tokens)
        for part in delta.all_parts():
            events += self._part(part)
        if delta.finish is not None:
            events += self._close()
            reason = STOP_REASONS[delta.finish]
            if isinstance(delta.stop_reason, str):
                reason, self.message["stop_sequence"] = "stop_sequence", delta.stop_reason
            self.message["stop_reason"] = "tool_use" if has_calls and reason == "end_turn" else reason
            self.message["usage"] = self.message["usage"] | {"output_tokens": self._num_generated}
            ending = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
            events.append({"type": "message_delta", "delta": ending, "usage": self.message["usage"]})
            events.append({"type": "message_stop"})
        return events

    def _part(self, part: AnswerPart) -> list[Event]:
        content = self.message["content"]
        kind = {"content": "text", "reasoning": "thinking"}.get(part.kind, "tool_use")
        events: list[Event] = []
        if part.kind == "call" or not content or content[-1]["type"] != kind:
            events = [*self._close(), self._open(kind, part)]
        block, place = content[-1], len(content) - 1
        match part.kind:
            case "content":
                block["text"] += part.text
                change = {"type": "text_delta", "text": part.text}
            case "reasoning":
                block["thinking"] += part.text
                change = {"type": "thinking_delta", "thinking": part.text}
            case "arguments":
                self._inputs.append(part.text)
                change = {"type": "input_json_delta", "partial_json": part.text}
            case _:
                return events
        return [*events, {"type": "content_block_delta", "index": place, "delta": change}]

    def _open(self, kind: str, part: AnswerPart) -> Event:
        content = self.message["content"]
        if kind == "tool_use":
            name, self._inputs = part.text, []
            block = {"id": call_id(self._id_form, self.message["id"], 0, part.number, name), "name": name, "input": {}}
        else:
            block = {"text": ""} if kind == "text" else {"thinking": "", "signature": ""}
        content.append({"type": kind, **block})
        return {"type": "content_block_start", "index": len(content) - 1, "content_block": dict(content[-1])}

    def _close(self) -> list[Event]:
        """End the current block, if there is one."""
        content = self.message["content"]
        if not content:
            return []
        if content[-1]["type"] == "tool_use":
            content[-1]["input"] = object_in("".join(self._inputs)) or {}  # empty if the answer ended inside the call
        return [{"type": "content_block_stop", "index": len(content) - 1}]


@dataclass(frozen=True)
class AnthropicApi:
    """The handlers of Anthropic's API. They run on the router's event loop."""

    generation: GenerationService

    async def create(self, body: MessagesBody, reply: ResponseWriter) -> None:
        """Handle POST /v1/messages."""
        message_id = f"msg_{token_hex(16)}"
        same = {"max_tokens", "stream", "temperature", "top_k", "top_p"} & body.model_fields_set
        fields = {name: getattr(body, name) for name in same}
        with named_parameters():
            chat = validated(ChatBody, body.chat_fields() | fields | {"stop": body.stop_sequences})
            (request,) = await self.generation.requests(chat, message_id, reply)
        model, id_form = self.generation.name_for(body), self.generation.tokenizer.syntax.id_form
        events = MessageEvents(message_id, model, len(request.prompt), id_form)
        output = self.generation.output(chat, message_id, [request], reply.arrived)
        async with self.generation.deltas(output, reply) as deltas:
            async for choice, delta in deltas:
                new = events.start(choice.prompt.cached_tokens) if delta.is_first else []
                new += events.add(delta, has_calls=choice.has_calls)
                if body.stream:
                    await reply.events(typed_events(new))
        if body.stream:
            await reply.end()
        else:
            await reply.json(events.message)

    async def count_tokens(self, body: CountTokensBody, reply: ResponseWriter) -> None:
        """Handle POST /v1/messages/count_tokens."""
        with named_parameters():
            chat = validated(ChatBody, body.chat_fields())
            check_tools(chat, self.generation.tokenizer.syntax)
            tenant = reply.identity.tenant
            ids, _ = await encode_chat(self.generation.tokenizer, chat, self.generation.images, tenant)
        await reply.json({"input_tokens": len(ids)})

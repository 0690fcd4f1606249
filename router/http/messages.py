"""The messages of a conversation and the tools that a client offers, as Pydantic models.

A tool is a function that the client runs. The model requests a call, and the client sends the result as a message with
the role `tool`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from router.text.chat_template import Message
from router.text.images import DATA_URL
from router.text.tool_parser import template_id
from shared.errors import RequestError

MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, MAX_CALLS = 2048, 1024, 256, 256
MAX_NAME, MAX_DEPTH = 64, 32
# The name of a function. Some models write it before a ":", so it cannot contain this character.
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
Ignored = Annotated[Any, Field(description="Accepted and ignored.", exclude=True)]
Id = Annotated[str, Field(min_length=1, max_length=256)]  # the id of a call, of an answer, or of a part of an answer


class StrictModel(BaseModel):
    """The base class of all parts of a body. It converts no values, and rejects unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


def object_in(text: str) -> dict[str, Any] | None:
    """Return the JSON object in the text, or None if the text is not a JSON object. Lone surrogates, which cannot be
    encoded, are replaced."""
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def depth_of(value: Any) -> int:
    """Return the depth of nested lists and objects. A number has the depth 0, and an object of numbers the depth 1."""
    depth, level = 0, [value]
    while level := [item for each in level for item in _items(each)]:
        depth += 1
    return depth


def check_depth(value: Any) -> Any:
    """Raise an error if lists and objects are nested more than MAX_DEPTH levels deep."""
    if depth_of(value) > MAX_DEPTH:
        raise PydanticCustomError("depth", "is nested more than {depth} levels deep", {"depth": MAX_DEPTH})
    return value


def _items(value: object) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _check_object_schema(value: Any) -> Any:
    if isinstance(value, dict) and (value.get("type", "object") != "object" or not _has_properties(value)):
        raise PydanticCustomError("schema", 'must be a JSON schema of the type "object"')
    return check_depth(value)


def _has_properties(schema: dict[str, Any]) -> bool:
    properties = schema.get("properties", {})
    return isinstance(properties, dict) and all(isinstance(each, dict | bool) for each in properties.values())


class FunctionDefinition(StrictModel):
    """A function that the model may ask to call. `parameters` is the JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any], BeforeValidator(_check_object_schema)] | None = None
    strict: bool | None = None


class ToolDefinition(StrictModel):
    """An entry of `tools`."""

    type: Literal["function"] = "function"
    function: FunctionDefinition
    cache_control: Ignored = None

    def plain(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates expect."""
        return {"type": "function", "function": self.function.model_dump(exclude_unset=True, exclude={"strict"})}


class FunctionChoice(StrictModel):
    """The name of a function."""

    name: FunctionName


class NamedChoice(StrictModel):
    """A `tool_choice` that requires a call of one function."""

    type: Literal["function"]
    function: FunctionChoice


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class FunctionCall(StrictModel):
    """A call that the model requested. `arguments` is a JSON object as a string. As in vLLM, any other string means
    `{}`, so that a conversation can continue after a malformed call. OpenAI's client adds `parsed_arguments`."""

    name: FunctionName
    arguments: str
    parsed_arguments: Ignored = None

    def parsed(self) -> dict[str, Any]:
        """Return the arguments. Raises PydanticCustomError if they are nested too deeply."""
        value = object_in(self.arguments) or {}
        check_depth(value)
        return value


class ToolCall(StrictModel):
    """An entry of `tool_calls` in a message of the assistant."""

    id: Id
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Annotated[int, Field(ge=0)] | None = None  # occurs in the deltas of a stream; some clients send it back

    def plain(self) -> dict[str, Any]:
        """Return the call in the form that chat templates expect."""
        function = {"name": self.function.name, "arguments": self.function.parsed()}
        return {"id": self.id, "type": "function", "function": function}


class TextPart(StrictModel):
    """A text in a message's content. As in vLLM, a part of the type `refusal` or `thinking` is a text too."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        if isinstance(value, dict) and (kind := value.get("type")) in ("refusal", "thinking"):
            return {"type": "text", "text": value.get(kind)}
        return value


def check_url(url: object) -> object:
    """Raise an error if the URL of an image is not a data URL."""
    if isinstance(url, str) and not url.startswith(DATA_URL):
        text = "must begin with {data}: the image itself in base64. The server fetches nothing from the network"
        raise PydanticCustomError("url", text, {"data": DATA_URL})
    return url


class ImageUrl(StrictModel):
    """An image as a data URL. `detail` has no effect, because the model's files decide the size of the image."""

    url: Annotated[str, BeforeValidator(check_url)]
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(StrictModel):
    """An image in a message's content."""

    type: Literal["image_url"]
    image_url: ImageUrl
    cache_control: Ignored = None


def tag_of(value: Any, default: str = "") -> str:
    """Return the tag by which pydantic finds the type of a value in a union. The tag is a "~" followed by the value's
    `type`. In the location of an error, the "~" distinguishes tags from fields."""
    return "~" + str(value.get("type", default) if isinstance(value, dict) else getattr(value, "type", ""))


def _tag_of_part(value: Any) -> str:
    tag = tag_of(value)
    return "~text" if tag in ("~refusal", "~thinking") else tag


Listed = TypeVar("Listed")
# A text or a list. An error explains only the form that the client gave.
TextOr = Annotated[
    Annotated[str, Tag("~text")] | Annotated[Listed, Tag("~list")],
    Discriminator(lambda value: "~text" if isinstance(value, str) else "~list"),
]
ContentPart = Annotated[
    Annotated[TextPart, Tag("~text")] | Annotated[ImagePart, Tag("~image_url")],
    Discriminator(_tag_of_part, "part", "must be a text or an image_url"),
]
Content = str | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)]


def _check_not_null(content: object) -> object:
    if content is None:
        raise PydanticCustomError("null", "must not be null, except with `tool_calls` or `reasoning_content`")
    return content


class ChatMessage(StrictModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Content, BeforeValidator(_check_not_null)]
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] = []
    tool_call_id: Id | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        fields = {key: field for key, field in value.items() if field is not None or key == "content"}
        fields.pop("cache_control", None)  # every prefix is cached
        if fields.get("function_call") or fields.get("role") == "function":
            raise PydanticCustomError("functions", "uses functions, which are not supported; use `tools`")
        if fields.get("role") == "assistant":  # fields of an answer that the client sends back
            refusal = fields.pop("refusal", None)
            fields["content"] = refusal if fields.get("content") is None else fields["content"]
            fields = {key: field for key, field in fields.items() if key not in ("annotations", "parsed")}
        if "reasoning" in fields:  # newer versions of vLLM have this name for `reasoning_content`
            fields.setdefault("reasoning_content", fields.pop("reasoning"))
        if (fields.get("tool_calls") or fields.get("reasoning_content")) and fields.get("content") is None:
            fields["content"] = ""
        unknown = next((key for key in fields if key not in cls.model_fields), None)
        if unknown is not None:
            raise PydanticCustomError("unknown", "has an unknown field: `{name}`", {"name": unknown[:MAX_NAME]})
        return fields

    @model_validator(mode="after")
    def _agrees(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("role", "has `tool_calls`, which only the role `assistant` may have")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise PydanticCustomError("role", "must have `tool_call_id` if and only if its role is `tool`")
        for call in self.tool_calls:
            call.function.parsed()
        return self

    def plain(self) -> Message:
        """Return the message in the form that chat templates expect.

        Text parts are joined by newlines, as in vLLM. If there are images, the parts stay separate, so that the
        template can place the images between the texts.
        """
        text: Any = self.content
        if not isinstance(text, str):
            parts = [{"type": "image"} if isinstance(part, ImagePart) else part.model_dump() for part in text]
            has_images = any(part["type"] == "image" for part in parts)
            text = parts if has_images else "\n".join(part["text"] for part in parts)
        message: Message = {"role": self.role, "content": text}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
            # gpt-oss's template calls the reasoning `thinking`, and refuses a message that also has text and calls.
            if not (text and self.tool_calls):
                message["thinking"] = self.reasoning_content
        return message


ChatMessages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Tools = Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)]


def plain_messages(messages: Sequence[ChatMessage], id_form: str) -> list[Message]:
    """Return the messages in the form that chat templates expect. `id_form` is the form of call ids (`template_id`)."""
    found, ids = [message.plain() for message in messages], dict[str, str]()
    calls = [call for message in found for call in message.get("tool_calls", ())]
    for number, call in enumerate(calls):
        call["id"] = ids.setdefault(call["id"], template_id(id_form, call["id"], number, call["function"]["name"]))
    for message in found:
        if (given := message.get("tool_call_id")) is not None:
            message["tool_call_id"] = ids.get(given, given)
    return found


def image_urls(messages: Sequence[ChatMessage]) -> list[tuple[str, str]]:
    """Return the parameter name and the URL of each image in the messages, in order."""
    return [
        (f"messages[{number}].content[{place}].image_url.url", part.image_url.url)
        for number, message in enumerate(messages)
        if not isinstance(message.content, str)
        for place, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]


@contextmanager
def renamed_parameters(names: Mapping[str, str], *, images: str, schema: str) -> Iterator[None]:
    """If a chat was converted from a request of another API, an error must name the parameter of that API: rename it.

    `names` maps parameters of chat completions to parameters of the other API. In that API, the parameter `images`
    contains the images, and the field `schema` of a tool is the schema of its arguments.
    """
    try:
        yield
    except RequestError as error:
        if (given := error.param) is None:
            raise
        if given.endswith(".image_url.url"):
            error.param, shown = images, f"An image of `{images}`"
        else:
            name = given.replace("].function.parameters", f"].{schema}").replace("].function.", "].")
            error.param = names.get(given, name)
            shown = f"`{error.param}`"
        error.message = error.message.replace(f"`{given}`", shown)
        raise


def check_tool_results(messages: Sequence[ChatMessage]) -> None:
    """Raise RequestError if a tool result has no matching call in an earlier message."""
    called: set[str] = set()
    for number, message in enumerate(messages):
        called |= {call.id for call in message.tool_calls}
        if message.tool_call_id is not None and message.tool_call_id not in called:
            text = f"`messages[{number}].tool_call_id` is not the id of a call in an earlier message of the assistant."
            raise RequestError(text, f"messages[{number}].tool_call_id", "invalid_value")


def check_tool_names(tools: Sequence[ToolDefinition]) -> None:
    """Raise RequestError if two tools have the same name."""
    names: set[str] = set()
    for number, tool in enumerate(tools):
        if tool.function.name in names:
            text = f"`tools[{number}].function.name` is the name of an earlier tool: `{tool.function.name}`."
            raise RequestError(text, f"tools[{number}].function.name", "invalid_value")
        names.add(tool.function.name)


def check_tool_choice(choice: ToolChoice, tools: Sequence[ToolDefinition]) -> None:
    """Raise RequestError if the choice requires a call of a function that is not in `tools`."""
    names = [tool.function.name for tool in tools]
    if choice == "required" and not names:
        raise RequestError("`tool_choice` is `required`, but there are no `tools`.", "tool_choice", "invalid_value")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        text = f"`tool_choice` names the function `{choice.function.name}`, which is not in `tools`."
        raise RequestError(text, "tool_choice", "invalid_value")


def schemas_of(tools: Sequence[ToolDefinition]) -> Mapping[str, Mapping[str, Any]]:
    """Return the schema of each function's arguments, keyed by the function's name."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools}

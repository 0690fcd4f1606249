"""Test Anthropic's Messages API with raw requests. The tests in tests/clients use Anthropic's own client."""

import json
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import httpx
import pytest

from router.http.anthropic import MessagesBody
from router.http.auth import ApiKeys
from router.text.tokenizer import Tokenizer
from shared.errors import UnavailableError
from tests.router.answering import ANSWER, BOTH, FUNCTION, SAID, THOUGHT, client, hermes
from tests.router.scripted import ScriptedDispatcher

__all__ = ["client", "hermes"]  # fixtures
TOOL = {"name": "get_weather", "input_schema": FUNCTION["parameters"], "cache_control": {"type": "ephemeral"}}
HELLO: dict[str, Any] = {"max_tokens": 500, "messages": [{"role": "user", "content": "Weather?"}]}


class Api:
    """A client that sends raw requests."""

    def __init__(self, url: str, dispatcher: ScriptedDispatcher, tokenizer: Tokenizer) -> None:
        self.dispatcher = dispatcher
        self._tokenizer = tokenizer
        self.http = httpx.AsyncClient(base_url=url, timeout=60)

    async def post(self, path: str = "messages", **fields: Any) -> httpx.Response:
        return await self.http.post(path, json=HELLO | fields)

    async def events(self, **fields: Any) -> list[dict[str, Any]]:
        """Return the events of a stream. The name of each event must equal the type in its data."""
        text = (await self.post(**fields, stream=True)).text
        events = []
        for each in text.removesuffix("\n\n").split("\n\n"):
            name, data = each.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events

    @property
    def prompt(self) -> str:
        """The prompt of the latest request, as text."""
        return self._tokenizer.decode(self.dispatcher.answers[-1].request.prompt, skip_special_tokens=False)


@pytest.fixture
async def api(client, hermes) -> AsyncIterator[Any]:
    """Provide `start(answer)`: it starts a router whose model gives this answer, and returns a client of the router."""
    opened: list[Api] = []

    async def start(answer: str, tokens_per_piece: int = 1, **options: Any) -> Api:
        own, dispatcher = await client(hermes, answer, tokens_per_piece, **options)
        opened.append(Api(str(own.base_url), dispatcher, hermes))
        return opened[-1]

    yield start
    for each in opened:
        await each.http.aclose()


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Build the content of a message from the events of a stream, as Anthropic's client does."""
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            match delta["type"]:
                case "text_delta":
                    block["text"] += delta["text"]
                case "thinking_delta":
                    block["thinking"] += delta["thinking"]
                case "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text)
    return blocks


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in block.items() if key != "id"} for block in blocks]


@pytest.mark.parametrize("tokens_per_piece", [1, 7, 1000])
async def test_a_message_has_thinking_text_and_calls_whole_and_streamed(api, tokens_per_piece):
    client = await api(ANSWER, tokens_per_piece)
    client.dispatcher.cached_tokens = 3
    message = (await client.post(tools=[TOOL], system=[{"type": "text", "text": "Be brief."}])).json()
    calls = [{"type": "tool_use", "name": name, "input": given} for name, given in BOTH]
    thinking = {"type": "thinking", "thinking": THOUGHT, "signature": ""}
    assert without_ids(message["content"]) == [thinking, {"type": "text", "text": SAID}, *calls]
    assert (message["stop_reason"], message["stop_sequence"], message["model"]) == ("tool_use", None, "tiny")
    num_prompt = len(client.dispatcher.answers[-1].request.prompt)
    num_tokens = len(client.dispatcher.script(None, 0))
    usage = {"input_tokens": num_prompt - 3, "output_tokens": num_tokens, "cache_read_input_tokens": 3}
    assert message["usage"] == usage | {"cache_creation_input_tokens": 0}
    assert client.prompt.count("<|im_start|>system\nBe brief.") == 1
    events = await client.events(tools=[TOOL], system="Be brief.")
    assert without_ids(blocks_of(events)) == without_ids(message["content"])
    assert events[0]["message"]["content"] == []
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == message["usage"]
    starts, stops = ([e["index"] for e in events if e["type"] == f"content_block_{kind}"] for kind in ("start", "stop"))
    assert starts == stops == [0, 1, 2, 3]
    counted = (await client.post("messages/count_tokens", max_tokens=None, tools=[TOOL], system="Be brief.")).json()
    assert counted == {"input_tokens": num_prompt}


async def test_results_of_tools_come_back_as_messages(api):
    client = await api(ANSWER)
    answer = (await client.post(tools=[TOOL])).json()
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    results: list[Any] = [{"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"} for call in calls]
    results[1]["content"] = [{"type": "text", "text": "rainy"}]
    history = [
        *HELLO["messages"],
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]},
    ]
    assert (await client.post(tools=[TOOL], messages=history)).status_code == 200
    assert client.prompt.count("<|im_start|>assistant") == 2
    place = client.prompt.index(
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>tool\nrainy<|im_end|>\n<|im_start|>user\nAnd"
    )
    assert client.prompt.index('"arguments": {"city": "Rome"}') < place


@pytest.mark.parametrize(
    ("fields", "stop_reason", "stop_sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["ef"]}, "stop_sequence", "ef"),
    ],
)
async def test_the_reason_of_the_end_is_given(api, fields, stop_reason, stop_sequence):
    client = await api("abc def ghi")
    message = (await client.post(**fields)).json()
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, stop_sequence)
    assert next(event for event in await client.events(**fields) if event["type"] == "message_delta")["delta"] == {
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
    }


async def test_a_last_message_of_the_assistant_is_continued_and_thinking_is_switched(api):
    client = await api("x")
    await client.post(messages=[*HELLO["messages"], {"role": "assistant", "content": "It is"}])
    assert client.prompt.endswith("<|im_start|>assistant\nIt is")
    await client.post(thinking={"type": "enabled", "budget_tokens": 2000})
    assert client.prompt.endswith("<think>\n")
    await client.post(thinking={"type": "disabled"})
    assert client.prompt.endswith("<|im_start|>assistant\n")


USER = {"role": "user", "content": "x"}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}
BAD = [
    ({"thread": {"type": "create"}}, "thread"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [USER | {"role": "tool"}]}, "messages[0].role"),
    ({"messages": [{"role": "system", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, "messages[0].content[0]"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"messages": [USER | {"content": 5}]}, "messages[0].content"),
    ({"messages": [USER | {"content": [{"type": "image", "source": {}}]}]}, "messages[0].content"),
    ({"messages": [USER | {"content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [USER | {"content": [{"type": "tool_result", "tool_use_id": "a"}]}], "system": "x"}, "messages[0].content[0].tool_use_id"),
    ({"system": 5}, "system"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": [TOOL | {"type": "bash_20250124"}]}, "tools[0].type"),
    ({"tools": [TOOL | {"input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    *[({"tool_choice": {"type": kind}}, "tool_choice") for kind in ("any", "function")],
    ({"thinking": {"type": "on"}}, "thinking.type"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"temperature": 3}, "temperature"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:50])
async def test_a_bad_parameter_is_rejected_in_anthropics_format(api, fields, param):
    client = await api("x")
    answer = await client.post(**fields)
    value = answer.json()
    assert (answer.status_code, value["type"], value["error"]["type"]) == (400, "error", "invalid_request_error")
    assert value["error"]["param"] == param
    assert not any(word in value["error"]["message"] for word in ("image_url", 'type "function"'))  # as in chats
    assert len(value["error"]["message"]) < 300


async def test_the_output_config_sets_the_format_and_the_reasoning(api):
    client = await api("{}")
    config = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "max"}
    assert (await client.post(output_config=config)).status_code == 200
    assert '"additionalProperties": false' in client.dispatcher.answers[-1].request.grammar
    assert client.prompt.endswith("<think>\n")


async def test_a_client_that_asks_for_a_thread_is_told_to_continue_without(api):
    client = await api("x")
    error = (await client.post(thread={"type": "create"})).json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}


async def test_reasoning_that_only_anthropic_can_read_is_skipped(api):
    client = await api("x")
    blocks = [{"type": "redacted_thinking", "data": "abc"}, {"type": "text", "text": "Hello."}]
    answer = await client.post(messages=[USER, {"role": "assistant", "content": blocks}, USER])
    assert answer.status_code == 200
    assert "abc" not in client.prompt


async def test_a_recorded_request_of_a_coding_agent_is_accepted(api):
    client = await api("x")
    system = ["x-anthropic-billing-header: cc_version=2.1.197.b35; cc_entrypoint=cli;", "Be brief."]
    answer = await client.post(
        system=[{"type": "text", "text": text} for text in system],
        messages=[USER, {"role": "system", "content": "Agents: none."}],
        thinking={"type": "adaptive", "display": "summarized"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        diagnostics={"client": "cli"},
    )
    assert answer.status_code == 200
    assert client.prompt.startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nx\nAgents: none.<|im_end|>\n"
    )


def test_system_messages_become_parts_of_the_users_turn():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    said = [("system", "a"), ("system", "b"), ("user", [image]), ("system", "c"), ("assistant", "d"), ("system", "e")]
    messages = [{"role": role, "content": content} for role, content in [*said, ("user", "f")]]
    body = MessagesBody.model_validate({"max_tokens": 1, "messages": messages})
    found = [(each["role"], each["content"]) for each in body.chat_fields()["messages"]]
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    user = [part, {"type": "text", "text": "c"}]
    assert found == [("system", "a\nb"), ("user", user), ("assistant", "d"), ("user", "e\nf")]


async def test_failures_have_anthropics_types(api):
    client = await api("abc " * 20)
    client.dispatcher.refuses = UnavailableError("full", status=429)
    answer = await client.post()
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
    client.dispatcher.refuses = UnavailableError("gone")
    assert (await client.post()).json()["error"]["type"] == "overloaded_error"
    client.dispatcher.refuses, client.dispatcher.fails_after = None, 3
    events = await client.events()
    assert (events[-1]["type"], events[-1]["error"]["message"]) == ("error", "the node is gone")


async def test_the_key_may_come_in_anthropics_header(api):
    keys = ApiKeys("", f"acme:{sha256(b'secret').hexdigest()}")
    client = await api("x", keys=keys)
    assert (await client.post()).json()["error"]["type"] == "authentication_error"
    client.http.headers["x-api-key"] = "secret"
    assert (await client.post()).status_code == 200
    client.http.headers["x-api-key"] = "wrong"
    assert (await client.post()).status_code == 401
    client.http.headers["authorization"] = "Bearer secret"
    assert (await client.post()).status_code == 200

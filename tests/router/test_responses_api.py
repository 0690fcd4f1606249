import json
import threading
from typing import Any

import openai
import pytest

from router.http.bodies import parse_body
from router.http.response_bodies import MessageItem, ResponsesBody
from router.http.responses import dump_in_parts
from shared.errors import RequestError, UnavailableError
from tests.router.answering import ANSWER, BOTH, FUNCTION, SAID, THOUGHT, client, hermes

__all__ = ["client", "hermes"]  # fixtures
TOOL = {"type": "function", **FUNCTION}


def summary(response: Any) -> tuple:
    reasoning = [item.content[0].text for item in response.output if item.type == "reasoning"]
    calls = [(item.name, json.loads(item.arguments)) for item in response.output if item.type == "function_call"]
    return response.output_text, reasoning, calls


@pytest.mark.parametrize("tokens_per_piece", [1, 7, 1000])
async def test_a_response_has_reasoning_text_and_calls_whole_and_streamed(client, hermes, tokens_per_piece):
    openai_client, dispatcher = await client(hermes, ANSWER, tokens_per_piece)
    dispatcher.cached_tokens = 3
    fields: dict[str, Any] = {"model": "tiny", "input": "Weather?", "instructions": "Be brief.", "tools": [TOOL]}
    response = await openai_client.responses.create(**fields)
    assert summary(response) == (SAID, [THOUGHT], BOTH)
    assert (response.status, response.usage.input_tokens_details.cached_tokens) == ("completed", 3)
    assert response.usage.output_tokens == len(dispatcher.script(None, 0))
    assert response.usage.output_tokens_details.reasoning_tokens == len(hermes.encode(f"\n{THOUGHT}\n"))
    async with openai_client.responses.stream(**fields) as stream:
        events = [event async for event in stream]
        streamed = await stream.get_final_response()
    assert summary(streamed) == summary(response)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == "completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == SAID
    added, done = (
        [e.item.id for e in events if e.type == f"response.output_item.{kind}"] for kind in ("added", "done")
    )
    assert added == done == [item.id for item in streamed.output]
    prompt = hermes.decode(dispatcher.answers[0].request.prompt, skip_special_tokens=False)
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWeather?" in prompt


async def test_a_conversation_continues_with_the_items_of_the_answer(client, hermes):
    openai_client, dispatcher = await client(hermes, ANSWER)
    first = await openai_client.responses.create(model="tiny", input="Weather?", tools=[TOOL])
    calls = [item for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    history = [{"role": "user", "content": "Weather?"}, *first.output, *results]
    await openai_client.responses.create(model="tiny", input=history, tools=[TOOL])
    prompt = hermes.decode(dispatcher.answers[-1].request.prompt, skip_special_tokens=False)
    assert prompt.count("<|im_start|>assistant") == 2, "the items of the answer are one message"
    assert prompt.count("<|im_start|>tool\nsunny") == 2
    assert f"{SAID}<tool_call>" in prompt


async def test_consecutive_messages_of_the_assistant_are_separate_lines(client, hermes):
    openai_client, dispatcher = await client(hermes, ANSWER)
    said = [{"role": "assistant", "content": text} for text in ("Sunny.", "And warm.")]
    await openai_client.responses.create(model="tiny", input=[{"role": "user", "content": "Weather?"}, *said])
    prompt = hermes.decode(dispatcher.answers[-1].request.prompt, skip_special_tokens=False)
    assert "<|im_start|>assistant\nSunny.\nAnd warm.<|im_end|>" in prompt


async def test_the_oldest_turns_of_a_long_conversation_are_left_out(client, hermes):
    openai_client, dispatcher = await client(hermes, "yes")
    rules = {"role": "developer", "content": "Be brief."}
    turns = [
        [{"role": "user", "content": f"turn {number} {'abc ' * 80}"}, CALL | {"call_id": f"c{number}"},
         RESULT | {"call_id": f"c{number}"}, {"role": "assistant", "content": f"answer {number}"}]
        for number in range(12)
    ]  # fmt: skip
    items = [rules, *(item for turn in turns for item in turn), USER]
    fields: dict[str, Any] = {"model": "tiny", "input": items, "instructions": "Be kind.", "max_output_tokens": 50}
    with pytest.raises(openai.BadRequestError) as error:
        await openai_client.responses.create(**fields)
    assert error.value.code == "context_length_exceeded"
    response = await openai_client.responses.create(**fields, truncation="auto")
    assert response.truncation == "auto"
    request = dispatcher.answers[-1].request
    prompt = hermes.decode(request.prompt, skip_special_tokens=False)
    first = next(number for number in range(12) if f"turn {number} " in prompt)
    assert 0 < first < 11
    assert [f"turn {number} " in prompt for number in range(12)] == [number >= first for number in range(12)]
    assert prompt.count("<|im_start|>tool") == 12 - first, "a result is left out with its call"
    assert "Be kind." in prompt
    assert "Be brief." in prompt
    turn = request.prompt[len(request.prompt) - len(hermes.encode(prompt[prompt.index(f"turn {first} ") :])) :]
    assert len(request.prompt) + len(turn) // (12 - first) > 2000 - 50, "one more turn would not fit"


def test_a_conversation_with_too_many_messages_loses_its_oldest_turns():
    turns = [MessageItem(role=role, content=str(number)) for number in range(1500) for role in ("user", "assistant")]
    body = ResponsesBody(model="tiny", input="And?", instructions="Be kind.", truncation="auto")
    messages = body.to_chat([MessageItem(role="developer", content="Be brief."), *turns]).messages
    assert [message.content for message in messages[:3]] == ["Be kind.", "Be brief.", "478"]
    assert (len(messages), messages[-1].content) == (2047, "And?"), "with one more turn, there would be 2049 messages"


async def test_logprobs_come_with_the_text(client, hermes):
    """Text is held back until its characters are complete. Spaces are also held back until more text follows them."""
    openai_client, _ = await client(hermes, "abc\n\n😀 abc  c")
    include = ["message.output_text.logprobs"]
    response = await openai_client.responses.create(model="tiny", input="x", include=include, top_logprobs=2)
    logprobs = response.output[0].content[0].logprobs
    assert len(logprobs) == response.usage.output_tokens
    assert bytes(byte for entry in logprobs for byte in entry.bytes).decode().startswith("abc\n\n😀 abc  c")
    assert [len(entry.top_logprobs) for entry in logprobs] == [2] * len(logprobs)
    options = {"include": include, "extra_body": {"return_tokens_as_token_ids": True}}
    named = (await openai_client.responses.create(model="tiny", input="x", **options)).output[0].content[0].logprobs
    ids = [int(entry.token.removeprefix("token_id:")) for entry in named]
    assert [hermes.token_text(token) for token in ids] == [entry.token for entry in logprobs]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_whole_texts_are_encoded_on_a_thread(client, hermes, monkeypatch, stream):
    threads = []

    def recorded(*args, **kwargs):
        threads.append(threading.current_thread())
        return dump_in_parts(*args, **kwargs)

    monkeypatch.setattr("router.http.responses_api.dump_in_parts", recorded)
    openai_client, _ = await client(hermes, "abc " * 20)
    include = ["message.output_text.logprobs"]
    answer = await openai_client.responses.create(model="tiny", input="x", include=include, stream=stream)
    kinds = {event.type async for event in answer} if stream else set()
    assert not stream or {"response.output_text.done", "response.completed"} <= kinds
    assert threads
    assert threading.main_thread() not in threads


async def test_a_cut_answer_is_incomplete(client, hermes):
    openai_client, _ = await client(hermes, "abc " * 20)
    response = await openai_client.responses.create(model="tiny", input="x", max_output_tokens=5)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens == 5


async def test_a_failure_within_a_stream_is_its_last_event(client, hermes):
    openai_client, dispatcher = await client(hermes, "abc " * 20)
    dispatcher.fails_after = 3
    events = [event async for event in await openai_client.responses.create(model="tiny", input="x", stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "the node is gone"
    dispatcher.refuses = UnavailableError("full", status=429)
    with pytest.raises(openai.RateLimitError, match="full"):
        await openai_client.responses.create(model="tiny", input="x", stream=True)


USER = {"role": "user", "content": "x"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "x"}
BAD = [
    *[({"input": value}, "input") for value in (5, [], {"role": "user"}, [USER] * 2049)],
    ({"input": [USER, 5]}, "input[1]"),
    ({"input": [USER | {"type": "item_reference"}]}, "input[0]"),
    ({"input": [USER | {"role": "tool"}]}, "input[0].role"),
    ({"input": [USER | {"content": None}]}, "input[0].content"),
    (
        {"input": [USER | {"content": [{"type": "input_image", "image_url": "http://x"}]}]},
        "input[0].content[0].image_url",
    ),
    ({"input": [USER | {"content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [USER | {"extra": 1}]}, "input[0].extra"),
    ({"input": [USER, RESULT]}, "input[1].call_id"),
    ({"input": [USER, CALL | {"call_id": "c2"}, RESULT]}, "input[2].call_id"),
    ({"input": [USER, CALL | {"arguments": '{"a":' * 33 + "1" + "}" * 33}]}, "input[1]"),
    ({"input": [USER, CALL | {"name": "a b"}]}, "input[1].name"),
    ({"input": [USER, CALL | {"namespace": "x" * 64, "name": "y" * 64}]}, "input[1].name"),
    *[({"tools": [tool]}, "tools[0]") for tool in (5, {"type": "mcp", "name": "f"})],
    ({"tools": [{"type": "namespace", "name": "a", "tools": [TOOL, {"type": "namespace"}]}]}, "tools[0].tools[1]"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [TOOL | {"name": "x" * 127}]}]}, "tools[0].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [TOOL | {"strict": True, "parameters": {"not": {}}}]}, "tools[0].parameters"),
    *[({"tool_choice": choice}, "tool_choice") for choice in ("required", {"type": "function", "name": "f"})],
    ({"include": ["file_search_call.results"]}, "include"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format.name"),
    ({"truncation": "middle"}, "truncation"),
    ({"input": "abc" * 2000, "truncation": "auto"}, "input"),
    ({"input": [USER, {"role": "user", "content": "abc" * 2000}], "truncation": "auto"}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 5000}, "max_output_tokens"),
    ({"input": "x" * 9000}, "input"),
    ({"n": 2}, "n"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"return_token_ids": True}, "return_token_ids"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:50])
async def test_a_bad_parameter_is_rejected_by_name(client, hermes, fields, param):
    openai_client, _ = await client(hermes, "x")
    with pytest.raises(openai.BadRequestError) as raised:
        await openai_client.responses.create(**{"model": "tiny", "input": "x", "extra_body": fields})
    assert raised.value.param == param
    assert not any(name in raised.value.message for name in ("`response_format", "].function."))  # names in chats
    assert len(raised.value.message) < 300


async def test_the_tools_of_a_coding_agent_are_accepted(client, hermes):
    """The model gets `namespace__name` for a function in a namespace. The client gets and sends both fields."""
    answer = '<tool_call>{"name": "agents__spawn", "arguments": {}}</tool_call>'
    openai_client, dispatcher = await client(hermes, answer)
    spawn = {"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False}
    agents = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [spawn]}
    search = {"type": "web_search", "external_web_access": False}
    fields: dict[str, Any] = {"model": "tiny", "tools": [TOOL, agents, search]}
    response = await openai_client.responses.create(input="x", **fields)
    (call,) = response.output
    assert (call.namespace, call.name) == ("agents", "spawn")
    assert [tool.type for tool in response.tools] == ["function", "namespace", "web_search"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    await openai_client.responses.create(input=[USER, call, result], **fields)
    prompt = hermes.decode(dispatcher.answers[-1].request.prompt, skip_special_tokens=False)
    assert prompt.count('"name": "agents__spawn"') == 2, "in the list of tools and in the earlier call"
    assert "web_search" not in prompt


def test_functions_in_namespaces_count_as_tools():
    functions = [TOOL | {"name": f"f{number}"} for number in range(129)]
    tools = [{"type": "namespace", "name": name, "tools": functions} for name in ("a", "b")]
    with pytest.raises(RequestError, match="`tools` has 258 functions, with those in namespaces; at most 256"):
        ResponsesBody(model="tiny", input="x", tools=tools).to_chat([])


async def test_formats_and_choices_reach_the_grammar(client, hermes):
    openai_client, dispatcher = await client(hermes, "{}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    response = await openai_client.responses.create(model="tiny", input="x", text=text)
    assert response.text.format.schema_ == schema
    assert '"integer"' in dispatcher.answers[-1].request.grammar
    strict = TOOL | {"strict": True}
    for choice in ("required", {"type": "function", "name": "get_weather"}, "auto"):
        response = await openai_client.responses.create(model="tiny", input="x", tools=[strict], tool_choice=choice)
        assert "get_weather" in dispatcher.answers[-1].request.grammar
        assert (response.tool_choice if choice != "auto" else "auto") is not None


def test_content_without_a_type_of_item_is_a_message():
    body = parse_body(ResponsesBody, json.dumps({"input": [USER]}).encode(), ["m"])
    assert body.items[0].content == "x"
    with pytest.raises(RequestError, match="must be an input_text, an output_text or an input_image"):
        parse_body(ResponsesBody, json.dumps({"input": [USER | {"content": [{"type": "x"}]}]}).encode(), ["m"])

"""Use anthropic-sdk-python: messages, streams, tools, errors."""

import asyncio
from typing import Literal

import anthropic
from anthropic import beta_tool
from checks import MODEL, TOOLS_URL, URL, end, refused, works
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
tools = anthropic.Anthropic(base_url=TOOLS_URL, api_key="none", max_retries=0)
HI = [{"role": "user", "content": "Tell me a story"}]
WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather in a given location",
    "input_schema": {
        "type": "object",
        "properties": {"location": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
        "required": ["location"],
    },
}


def create(**fields):
    return client.messages.create(**({"model": MODEL, "messages": HI, "max_tokens": 8} | fields))


def streamed():
    with client.messages.stream(model=MODEL, messages=HI, max_tokens=8) as stream:
        text = "".join(stream.text_stream)
        return text == stream.get_final_message().content[0].text != ""


def events():
    names = [event.type for event in create(stream=True)]
    return names[0] == "message_start" and names[-1] == "message_stop"


async def many():
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0) as own:
        ask = own.messages.create
        answers = await asyncio.gather(*(ask(model=MODEL, messages=HI, max_tokens=8) for _ in range(16)))
        return all(answer.stop_reason == "max_tokens" for answer in answers)


def loop(stream):
    """Run the example of tool use: the model calls a tool, gets the result, and answers."""
    messages = [{"role": "user", "content": "What's the weather like in Paris?"}]
    fields = {"model": "tools", "max_tokens": 500, "tools": [WEATHER]}
    if stream:
        with tools.messages.stream(messages=messages, **fields) as running:
            first = running.get_final_message()
    else:
        first = tools.messages.create(messages=messages, **fields)
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use"
    assert call.input == {"location": "Paris", "unit": "celsius"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "15 degrees"}]}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    return "15 degrees" in tools.messages.create(messages=messages, **fields).content[0].text


@beta_tool
def multiply(a: int, b: int) -> str:
    """Multiply two numbers.

    Args:
        a: a number
        b: a number
    """
    return str(a * b)


def runner():
    fields = {"max_tokens": 500, "model": "tools", "messages": [{"role": "user", "content": "What is 3 times 3?"}]}
    return "9" in tools.beta.messages.tool_runner(tools=[multiply], **fields).until_done().content[0].text


def forced():
    schema = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"]}
    schema["additionalProperties"] = False
    tool = {"name": "set_unit", "input_schema": schema, "strict": True}
    answer = create(tools=[tool], tool_choice={"type": "tool", "name": "set_unit"}, max_tokens=200)
    return answer.content[0].input["unit"] in ("c", "f")


class Answer(BaseModel):
    """An answer."""

    unit: Literal["celsius", "fahrenheit"]


def parsed():
    answer = client.messages.parse(model=MODEL, messages=HI, max_tokens=500, output_format=Answer)
    return isinstance(answer.parsed_output, Answer)


def raises(kind, **fields):
    try:
        create(**fields)
    except kind as error:
        return error
    return None


works("messages", lambda: create(system="Be brief.").content[0].text)
works("stream", events)
works("stream helper", streamed)
works("async", lambda: asyncio.run(many()))
works("stop_sequences", lambda: create(stop_sequences=["e"], max_tokens=100).stop_sequence == "e")
works("count_tokens", lambda: client.messages.count_tokens(model=MODEL, messages=HI).input_tokens > 0)
works("models", lambda: [model.id for model in client.models.list()] == [MODEL])
works("tools", lambda: loop(stream=False))
works("tools streamed", lambda: loop(stream=True))
works("tool_runner", runner)
works("tool_choice and strict", forced)
works("parse", parsed)
works("BadRequestError", lambda: "temperature" in str(raises(anthropic.BadRequestError, extra_body={"temperature": 9})))
works("NotFoundError", lambda: raises(anthropic.NotFoundError, model="x"))
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
refused("images", lambda: create(messages=[{"role": "user", "content": [IMAGE]}]), "this model takes no images")
end()

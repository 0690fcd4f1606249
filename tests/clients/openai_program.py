"""Use openai-python: models, chat, streams, completions, errors, cancellation."""

import asyncio
import json

import openai
from checks import MODEL, TOOLS_URL, URL, end, works
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
tools = openai.OpenAI(base_url=f"{TOOLS_URL}/v1", api_key="none", max_retries=0)
HI = [{"role": "user", "content": "Tell me a story"}]


def chat(**fields):
    return client.chat.completions.create(model=MODEL, messages=HI, **({"max_tokens": 8} | fields))


def complete(**fields):
    return client.completions.create(model=MODEL, **({"prompt": "Once upon a time", "max_tokens": 8} | fields))


def streamed():
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) and chunks[-1].usage.completion_tokens


async def many():
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as own:
        ask = own.chat.completions.create
        answers = await asyncio.gather(*(ask(model=MODEL, messages=HI, max_tokens=8) for _ in range(32)))
        stream = await ask(model=MODEL, messages=HI, max_tokens=500, stream=True)
        async for _ in stream:
            break
        await stream.close()
        return len(answers) == 32


def is_seeded():
    return len({complete(seed=7, temperature=1).choices[0].text for _ in range(3)}) == 1


def raises(kind, **fields):
    try:
        chat(**fields)
    except kind as error:
        return error
    return None


def helper():
    with client.chat.completions.stream(model=MODEL, messages=HI, max_completion_tokens=7000) as stream:
        return stream.get_final_completion().choices[0].message.content


class Answer(BaseModel):
    """An answer."""

    number: int = Field(ge=0, le=99)


def parsed():
    chosen = client.chat.completions.parse(model=MODEL, messages=HI, max_tokens=500, response_format=Answer)
    return isinstance(chosen.choices[0].message.parsed, Answer)


WEATHER = {
    "name": "get_weather",
    "description": "Get current temperature for a given location.",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "City and country e.g. Bogotá, Colombia"}},
        "required": ["location"],
        "additionalProperties": False,
    },
}


def chat_loop(stream):
    """Run the example of tool calls: the model calls a tool, gets the result, and answers."""
    messages = [{"role": "user", "content": "What is the weather like in Paris today?"}]
    fields = {"model": "tools", "tools": [{"type": "function", "function": WEATHER}]}
    if stream:
        with tools.chat.completions.stream(messages=messages, **fields) as running:
            choice = running.get_final_completion().choices[0]
    else:
        choice = tools.chat.completions.create(messages=messages, **fields).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"location": "Paris"}
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "14 degrees"}]
    return "14 degrees" in tools.chat.completions.create(messages=messages, **fields).choices[0].message.content


def required():
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=HI,
        max_tokens=500,
        tools=[openai.pydantic_function_tool(Answer)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    return all(isinstance(call.function.parsed_arguments, Answer) for call in answer.choices[0].message.tool_calls)


def named():
    tool = openai.pydantic_function_tool(Answer)
    choice = {"type": "function", "function": {"name": "Answer"}}
    return [
        call.function.name
        for call in chat(tools=[tool], tool_choice=choice, max_tokens=500).choices[0].message.tool_calls
    ] == ["Answer"]


def parsed_response():
    answer = client.responses.parse(model=MODEL, input="x", max_output_tokens=500, text_format=Answer)
    return isinstance(answer.output_parsed, Answer)


def streamed_response():
    with client.responses.stream(model=MODEL, input="x", max_output_tokens=500, text_format=Answer) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        return deltas == stream.get_final_response().output_text != ""


def responses_loop():
    """Run the example of function calling: the model calls a function, gets the result, and answers."""
    items = [{"role": "user", "content": "What is the weather like in Paris today?"}]
    fields = {"model": "tools", "tools": [{"type": "function", **WEATHER}]}
    first = tools.responses.create(input=items, **fields)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"location": "Paris"}
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "14 degrees"}]
    return "14 degrees" in tools.responses.create(input=items, **fields).output_text


def stored():
    first = client.responses.create(model=MODEL, input="x", max_output_tokens=8, store=True)
    then = client.responses.create(model=MODEL, input="y", max_output_tokens=8, previous_response_id=first.id)
    found = client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    return found and then.previous_response_id == first.id


def background():
    began = client.responses.create(model=MODEL, input="x", max_output_tokens=200, background=True, stream=True)
    name = next(event.response.id for event in began if event.type == "response.created")
    began.close()
    numbers = [event.sequence_number for event in client.responses.retrieve(name, stream=True, starting_after=4)]
    return numbers == list(range(5, 5 + len(numbers)))


works("models", lambda: [model.id for model in client.models.list()] == [MODEL])
works("chat", lambda: chat().choices[0].message.content)
works("stream with usage", streamed)
works("stream helper", helper)
works("n=2", lambda: len(chat(n=2).choices) == 2)
works("logprobs", lambda: chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content)
works("stop", lambda: chat(stop=["a"], max_tokens=50).choices[0].finish_reason == "stop")
works("seed", is_seeded)
works("token ids", lambda: complete(prompt=[5, 6, 7]).choices[0].finish_reason)
works("echo", lambda: complete(echo=True, max_tokens=1).choices[0].text.startswith("Once"))
works("batch", lambda: len(complete(prompt=["a", "b"], n=2).choices) == 4)
works(
    "extra_body",
    lambda: chat(extra_body={"min_tokens": 8, "top_k": 3, "ignore_eos": True}).usage.completion_tokens == 8,
)
works("parse", parsed)
works(
    "structured_outputs",
    lambda: complete(extra_body={"structured_outputs": {"choice": ["a", "b"]}}).choices[0].text in ("a", "b"),
)
works("hints", lambda: chat(verbosity="low", reasoning_effort="none", prompt_cache_key="k", safety_identifier="s"))
works("async and cancel", lambda: asyncio.run(many()))
works(
    "raw headers",
    lambda: client.chat.completions.with_raw_response.create(model=MODEL, messages=HI, max_tokens=1).headers[
        "x-request-id"
    ],
)
works("BadRequestError", lambda: raises(openai.BadRequestError, temperature=9).param == "temperature")
works("NotFoundError", lambda: raises(openai.NotFoundError, extra_body={"model": "x"}).code == "model_not_found")
works("APITimeoutError", lambda: raises(openai.APITimeoutError, max_tokens=5000, timeout=0.05))
works("tools", lambda: chat_loop(stream=False))
works("tools streamed", lambda: chat_loop(stream=True))
works("tool_choice required, strict, parse", required)
works("tool_choice by name", named)
works("responses", lambda: client.responses.create(model=MODEL, input="x", max_output_tokens=8).output_text)
works("responses parse", parsed_response)
works("responses streamed", streamed_response)
works("responses tools", responses_loop)
works("responses stored", stored)
works("responses in the background", background)
works("embeddings", lambda: len(client.embeddings.create(model=MODEL, input=["x", "y"]).data) == 2)
end()

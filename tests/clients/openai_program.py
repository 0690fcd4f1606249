"""Use openai-python: models, chat, streams, completions, errors, cancellation."""

import asyncio

import openai
from checks import MODEL, URL, end, refused, works
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
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
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
refused("tools", lambda: chat(tools=[TOOL]), "has no place for `tools`")
works("responses", lambda: client.responses.create(model=MODEL, input="x", max_output_tokens=8).output_text)
refused("embeddings", lambda: client.embeddings.create(model=MODEL, input="x"), "POST /v1/embeddings does not exist")
end()

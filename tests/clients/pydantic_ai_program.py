"""Use pydantic-ai with its client for OpenAI's chat completions."""

import asyncio

from checks import MODEL, URL, end, refused, works
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
settings = {"max_tokens": 8}


class Answer(BaseModel):
    """An answer."""

    number: int


def with_tool():
    agent = Agent(model)
    agent.tool_plain(lambda: 5, name="five")
    return agent.run_sync("x", model_settings=settings)


async def streamed():
    async with Agent(model).run_stream("Tell me a story", model_settings=settings) as result:
        return [text async for text in result.stream_text(delta=True)]


works("run_sync", lambda: Agent(model).run_sync("Tell me a story", model_settings=settings).output)
works("stream", lambda: asyncio.run(streamed()))
refused("tools", with_tool, "has no place for `tools`")
refused("output_type", lambda: Agent(model, output_type=Answer).run_sync("x"), "is not supported")
end()

"""Use pydantic-ai with its client for OpenAI's chat completions."""

import asyncio

from checks import MODEL, URL, end, refused, works
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
settings = {"max_tokens": 8}


class Answer(BaseModel):
    """An answer."""

    number: int = Field(ge=0, le=99)


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
refused("output_type by a tool", lambda: Agent(model, output_type=Answer).run_sync("x"), "`tool")
works("NativeOutput", lambda: isinstance(Agent(model, output_type=NativeOutput(Answer)).run_sync("x").output, Answer))
end()

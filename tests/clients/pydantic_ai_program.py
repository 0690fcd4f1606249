"""Use pydantic-ai with its client for OpenAI's chat completions."""

import asyncio

from checks import MODEL, TOOLS_URL, URL, end, works
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, RunContext
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
provider = OpenAIProvider(base_url=f"{TOOLS_URL}/v1", api_key="none")
with_tools = {
    "chat": OpenAIChatModel("tools", provider=provider),
    "responses": OpenAIResponsesModel("tools", provider=provider),
    "anthropic": AnthropicModel("tools", provider=AnthropicProvider(base_url=TOOLS_URL, api_key="none")),
}
settings = {"max_tokens": 8}


class Answer(BaseModel, extra="forbid"):
    """An answer."""

    number: int = Field(ge=0, le=99)


def dice(kind):
    """Run the dice game of the documentation. One of its tools takes the context, and the other does not."""
    agent = Agent(with_tools[kind], deps_type=str, system_prompt="You're a dice game.")

    @agent.tool_plain
    def roll_dice() -> str:
        """Roll a six-sided die and return the result."""
        return "4"

    @agent.tool
    def get_player_name(ctx: RunContext[str]) -> str:
        """Get the player's name."""
        return ctx.deps

    return agent.run_sync("My guess is 4", deps="Anne").output == "The answer is Anne."


async def dice_streamed():
    agent = Agent(with_tools["chat"])
    agent.tool_plain(lambda: 5, name="five")
    async with agent.run_stream("x") as result:
        return await result.get_output() == "The answer is 5."


async def streamed():
    async with Agent(model).run_stream("Tell me a story", model_settings=settings) as result:
        return [text async for text in result.stream_text(delta=True)]


works("run_sync", lambda: Agent(model).run_sync("Tell me a story", model_settings=settings).output)
works("stream", lambda: asyncio.run(streamed()))
for kind in with_tools:
    works(f"tools ({kind})", lambda kind=kind: dice(kind))
works("tools streamed", lambda: asyncio.run(dice_streamed()))
works("output_type by a tool", lambda: isinstance(Agent(model, output_type=Answer).run_sync("x").output, Answer))
works("NativeOutput", lambda: isinstance(Agent(model, output_type=NativeOutput(Answer)).run_sync("x").output, Answer))
end()

"""Use llama-index with its client for OpenAI-compatible servers."""

import asyncio

from checks import MODEL, TOOLS_URL, URL, end, works
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=True, max_tokens=8, max_retries=0)
plain = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=False, max_tokens=8, max_retries=0)
HI = [ChatMessage(role="user", content="Tell me a story")]


async def agent():
    """Run the example of an agent with a function."""
    model = OpenAILike(
        model="tools", api_base=f"{TOOLS_URL}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True
    )

    def multiply(a: float, b: float) -> float:
        """Multiply two numbers and return the product."""
        return a * b

    return "12.25" in str(await FunctionAgent(tools=[multiply], llm=model).run("What is 3.5 * 3.5?"))


works("chat", lambda: llm.chat(HI).message.content)
works("stream_chat", lambda: "".join(part.delta for part in llm.stream_chat(HI)))
works("complete", lambda: plain.complete("Once upon a time").text)
works("agent with a function", lambda: asyncio.run(agent()))
end()

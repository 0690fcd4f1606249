"""Use langchain-openai."""

from checks import MODEL, TOOLS_URL, URL, end, works
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

settings = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "max_tokens": 8, "max_retries": 0}
chat = ChatOpenAI(**settings)
tools = {"base_url": f"{TOOLS_URL}/v1", "api_key": "none", "model": "tools", "max_retries": 0}


class Answer(BaseModel, extra="forbid"):
    """An answer."""

    number: int = Field(ge=0, le=99)


@tool
def multiply(a: int, b: int) -> int:
    """Multiply a and b.

    Args:
        a: first int
        b: second int
    """
    return a * b


def loop(stream=False, **options):
    """Run the example of tool calling: bind the tool; the model calls it, gets the result, and answers."""
    model = ChatOpenAI(**tools, **options).bind_tools([multiply])
    messages = [HumanMessage("What is 3 * 3?")]
    if stream:
        first = None
        for chunk in model.stream(messages):
            first = chunk if first is None else first + chunk
    else:
        first = model.invoke(messages)
    (call,) = first.tool_calls
    assert call["args"] == {"a": 3, "b": 3}
    messages += [first, multiply.invoke(call)]
    return "9" in model.invoke(messages).text


def structured(method):
    model = ChatOpenAI(**settings | {"max_tokens": 500}).with_structured_output(Answer, method=method)
    return isinstance(model.invoke("x"), Answer)


works("invoke", lambda: chat.invoke("Tell me a story").content)
works("stream", lambda: "".join(chunk.content for chunk in chat.stream("Tell me a story")))
works("batch", lambda: len(chat.batch(["a", "b", "c"])) == 3)
works("completions", lambda: OpenAI(**settings).invoke("Once upon a time"))
works("bind_tools", loop)
works("bind_tools streamed", lambda: loop(stream=True))
works("bind_tools with responses", lambda: loop(use_responses_api=True))
works("structured output", lambda: structured("json_schema"))
works("structured output by a tool", lambda: structured("function_calling"))
works("responses", lambda: ChatOpenAI(**settings, use_responses_api=True).invoke("x").content)
embeddings = OpenAIEmbeddings(
    base_url=f"{URL}/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False, max_retries=0
)
works("embeddings", lambda: embeddings.embed_query("x"))
end()

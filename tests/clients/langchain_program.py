"""Use langchain-openai."""

from checks import MODEL, URL, end, refused, works
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

settings = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "max_tokens": 8, "max_retries": 0}
chat = ChatOpenAI(**settings)


class Answer(BaseModel):
    """An answer."""

    number: int = Field(ge=0, le=99)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


works("invoke", lambda: chat.invoke("Tell me a story").content)
works("stream", lambda: "".join(chunk.content for chunk in chat.stream("Tell me a story")))
works("batch", lambda: len(chat.batch(["a", "b", "c"])) == 3)
works("completions", lambda: OpenAI(**settings).invoke("Once upon a time"))
refused("bind_tools", lambda: chat.bind_tools([add]).invoke("x"), "has no place for `tools`")
structured = ChatOpenAI(**settings | {"max_tokens": 500}).with_structured_output(Answer)
works("structured output", lambda: isinstance(structured.invoke("x"), Answer))
works("responses", lambda: ChatOpenAI(**settings, use_responses_api=True).invoke("x").content)
embeddings = OpenAIEmbeddings(
    base_url=f"{URL}/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False, max_retries=0
)
refused("embeddings", lambda: embeddings.embed_query("x"), "POST /v1/embeddings does not exist")
end()

"""Use llama-index with its client for servers that are like OpenAI's."""

from checks import MODEL, URL, end, works
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=True, max_tokens=8, max_retries=0)
plain = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=False, max_tokens=8, max_retries=0)
HI = [ChatMessage(role="user", content="Tell me a story")]

works("chat", lambda: llm.chat(HI).message.content)
works("stream_chat", lambda: "".join(part.delta for part in llm.stream_chat(HI)))
works("complete", lambda: plain.complete("Once upon a time").text)
end()

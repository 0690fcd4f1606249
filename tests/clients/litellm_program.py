"""Use litellm with its three providers for servers of this kind."""

import litellm
from checks import MODEL, URL, end, refused, works

HI = [{"role": "user", "content": "Tell me a story"}]


def chat(provider, **fields):
    base = {"api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 8, "num_retries": 0}
    return litellm.completion(model=f"{provider}/{MODEL}", messages=HI, **(base | fields))


def text():
    return litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="Once", api_base=f"{URL}/v1", api_key="none", max_tokens=8
    )


works("openai/", lambda: chat("openai").choices[0].message.content)
works("hosted_vllm/", lambda: chat("hosted_vllm").choices[0].message.content)
works("text completion", lambda: text().choices[0].text)
works("stream", lambda: "".join(c.choices[0].delta.content or "" for c in chat("openai", stream=True)))
works("n=2", lambda: len(chat("openai", n=2).choices) == 2)
works(
    "reasoning_effort none",
    lambda: chat("hosted_vllm", reasoning_effort="none", allowed_openai_params=["reasoning_effort"]),
)
works("reasoning_effort high", lambda: chat("hosted_vllm", reasoning_effort="high").choices[0].message.content)
refused(
    "unknown model",
    lambda: litellm.completion(model="openai/other", messages=HI, api_base=f"{URL}/v1", api_key="none"),
    "does not exist",
)
end()

"""Use litellm with its three providers for servers that have OpenAI's API."""

import json

import litellm
from checks import MODEL, TOOLS_URL, URL, end, refused, works

HI = [{"role": "user", "content": "Tell me a story"}]


def chat(provider, **fields):
    base = {"api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 8, "num_retries": 0}
    return litellm.completion(model=f"{provider}/{MODEL}", messages=HI, **(base | fields))


def text():
    return litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="Once", api_base=f"{URL}/v1", api_key="none", max_tokens=8
    )


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather in a given location",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location"],
        },
    },
}


def tools(provider, base):
    """Run the example of function calling: the model calls a function, gets the result, and answers."""
    messages = [{"role": "user", "content": "What's the weather like in Paris?"}]
    fields = {"model": f"{provider}/tools", "api_base": base, "api_key": "none", "tools": [WEATHER], "max_tokens": 500}
    message = litellm.completion(messages=messages, **fields).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["location"] == "Paris"
    messages += [
        message,
        {"tool_call_id": call.id, "role": "tool", "name": call.function.name, "content": "22 degrees"},
    ]
    return "22 degrees" in litellm.completion(messages=messages, **fields).choices[0].message.content


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
works("tools", lambda: tools("hosted_vllm", f"{TOOLS_URL}/v1"))
works("anthropic/ with tools", lambda: tools("anthropic", TOOLS_URL))
works(
    "responses",
    lambda: (
        litellm.responses(
            model=f"openai/{MODEL}", input="x", api_base=f"{URL}/v1", api_key="none", max_output_tokens=8
        ).output
    ),
)
refused(
    "unknown model",
    lambda: litellm.completion(model="openai/other", messages=HI, api_base=f"{URL}/v1", api_key="none"),
    "does not exist",
)
end()

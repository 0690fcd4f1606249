"""Routers whose model gives a fixed answer, to test tool calls and the APIs that support tool calls."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai
import pytest
import tokenizers

from router.dispatch.requests import ModelCard
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from router.text.tool_syntax import find_syntax
from tests.router.conftest import CHATML, byte_level_tokenizer
from tests.router.scripted import EOS, ScriptedDispatcher, app_of, serving

HERMES = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML.replace(
    "{{ message['content'] | trim }}",
    "{{ message['content'] }}{% for call in message.tool_calls %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}",
).replace("assistant\n{% endif %}", "assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}")
FUNCTION = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOL = {"type": "function", "function": FUNCTION}
HI = [{"role": "user", "content": "What is the weather?"}]
THOUGHT, SAID = "I need a tool.", "Let me look."
CALLS = "".join(
    f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>\n'
    for city in ("Paris", "Rome")
)
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n{CALLS}"


def tokenizer_of(template: str, special: list[str], tool_parser: str = "auto", reasoning: str = "auto") -> Tokenizer:
    """Return a tokenizer for a model with this chat template. Each text in `special` is a special token."""
    library = byte_level_tokenizer()
    library.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in special])
    every = [token.content for token in library.get_added_tokens_decoder().values()]
    return Tokenizer(library, {}, ChatTemplate(template, {}, every), find_syntax(template, tool_parser, reasoning))


BOTH = [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]


def hermes_tokenizer() -> Tokenizer:
    return tokenizer_of(HERMES, ["<tool_call>", "</tool_call>", "<think>", "</think>"])


Connect = Callable[..., Awaitable[tuple[openai.AsyncOpenAI, ScriptedDispatcher]]]


@asynccontextmanager
async def connecting(**options: Any) -> AsyncIterator[Connect]:
    """Provide a function that starts a router whose model gives a fixed answer. The function returns a client and the
    dispatcher of the router. `options` are arguments of `build_app`."""
    async with AsyncExitStack() as stack:

        async def connect(
            tokenizer: Tokenizer, answer: str, tokens_per_piece: int = 1, **more: Any
        ) -> tuple[openai.AsyncOpenAI, ScriptedDispatcher]:
            dispatcher = ScriptedDispatcher(lambda *_: [*tokenizer.encode(answer), EOS])
            dispatcher.tokens_per_piece = tokens_per_piece
            model = ModelCard("tiny", max_model_len=2000, vocab_size=400, eos_ids=frozenset({EOS}))
            app = app_of(dispatcher, tokenizer, model, **options | more)
            _, port = await stack.enter_async_context(serving(app))
            if (runs := app.state.responses) is not None:
                runs.open()
                stack.push_async_callback(runs.close)
            own = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            return await stack.enter_async_context(own), dispatcher

        yield connect


@pytest.fixture(scope="module")
def hermes() -> Tokenizer:
    return hermes_tokenizer()


@pytest.fixture
async def client() -> AsyncIterator[Connect]:
    async with connecting() as connect:
        yield connect

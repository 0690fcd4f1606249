"""Serve a router whose model calls each offered tool once, and then repeats the last result.

The client programs run their tool examples against this router, because the demo model has not learnt to call tools.
`python -m tests.clients.tools_server` prints the router's URL, and ends at the end of its standard input.
"""

import asyncio
import json
import sys
from typing import Any

from router.dispatch.requests import GenerationRequest, ModelCard
from router.text.tokenizer import Tokenizer
from router.text.tool_parser import resolved
from tests.router.answering import hermes_tokenizer
from tests.router.scripted import EOS, ScriptedDispatcher, app_of, serving

START, END = "<|im_start|>", "<|im_end|>"
VALUES: dict[str, Any] = {"integer": 3, "number": 3.5, "string": "Paris", "boolean": True, "array": [], "null": None}


def example(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """Return a value that matches a simple schema."""
    schema = resolved(schema, root)
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return example(schema["anyOf"][0], root)
    if schema.get("type", "object") == "object":
        return {name: example(each, root) for name, each in schema.get("properties", {}).items()}
    return VALUES[schema["type"]]


def answer(prompt: str) -> str:
    first, *messages = prompt.removeprefix(START).split(START)
    tools = json.loads(first.removeprefix("system\n").partition(END)[0]) if first.startswith("system\n[") else []
    results = [each.removeprefix("tool\n").partition(END)[0] for each in messages if each.startswith("tool\n")]
    if len(results) < len(tools):
        function = tools[len(results)]["function"]
        schema = function.get("parameters") or {}
        call = {"name": function["name"], "arguments": example(schema, schema)}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return f"The answer is {results[-1]}." if results else "Hello."


async def main() -> None:
    tokenizer: Tokenizer = hermes_tokenizer()

    def script(request: GenerationRequest, _sample: int) -> list[int]:
        return [*tokenizer.encode(answer(tokenizer.decode(request.prompt, skip_special_tokens=False))), EOS]

    dispatcher = ScriptedDispatcher(script)
    dispatcher.tokens_per_piece = 3
    model = ModelCard("tools", max_model_len=20_000, vocab_size=400, eos_ids=frozenset({EOS}))
    async with serving(app_of(dispatcher, tokenizer, model)) as (_, port):
        print(f"http://127.0.0.1:{port}", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())

"""Builds the grammar of a reasoning model's whole answer: the reasoning is free text, and the rest of the answer must
match the client's grammar."""

import json
import re

from router.text.tokenizer import Tokenizer

PROMPT_END = 16  # number of tokens at the end of a prompt that are searched for the markers of the reasoning
LEXEMES = "TEXT: /(.|\\n)*/\nSPACE: /[ \\n]{0,4}/\n"


def prompt_end(tokenizer: Tokenizer, prompt: list[int]) -> str:
    """Return the text at the end of a prompt. It shows whether the reasoning has begun or ended."""
    return tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False).rstrip()


def after_reasoning(grammar: str, tokenizer: Tokenizer, prompt: list[int], *, has_channels: bool = False) -> str:
    """Return a grammar of the model's whole answer to `prompt`: reasoning, if the answer may begin with it, and then a
    text that matches `grammar`. Both grammars are in llguidance's format. For gpt-oss, set `has_channels` if the texts
    that match `grammar` begin with a channel's header."""
    start = _start(tokenizer, prompt_end(tokenizer, prompt), has_channels)
    if not start:
        return grammar
    first, *others = json.loads(grammar)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": start + LEXEMES}, first | {"name": "answer"}, *others]})


def _start(tokenizer: Tokenizer, before: str, has_channels: bool) -> str:
    """Return Lark rules for an answer that may begin with reasoning, or "" if it cannot begin with reasoning."""
    reasoning = tokenizer.syntax.reasoning
    if reasoning is None or before.endswith(reasoning.end):
        return ""
    if tokenizer.syntax.is_harmony:
        opens, final = (lark_of(f"<|channel|>{name}<|message|>", tokenizer) for name in ("analysis", "final"))
        thinks = _until(lark_of("<|end|>", tokenizer))
        again = lark_of("<|start|>assistant", tokenizer)
        return f"start: ({opens} thought {again})* {'' if has_channels else final} @answer\n{thinks}"
    opens, thinks = lark_of(reasoning.start, tokenizer), _until(lark_of(reasoning.end, tokenizer))
    if before.endswith(reasoning.start):
        return f"start: thought SPACE @answer\n{thinks}"
    if reasoning.is_implicit:
        return f"start: ({opens})? thought SPACE @answer\n{thinks}"
    return f"start: ({opens} thought SPACE)? @answer\n{thinks}"


def _until(end: str) -> str:
    """Return a Lark rule for a text without special tokens, followed by `end`. The text stops at the first `end`."""
    return f"thought{'' if end.startswith('<[') else '[lazy]'}: TEXT {end}\n"


def lark_of(text: str, tokenizer: Tokenizer) -> str:
    """Return a text as a sequence of Lark terms. The name of a special token in the text becomes that token."""
    names = tokenizer.special_ids
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return " ".join(f"<[{names[part]}]>" if part in names else json.dumps(part) for part in parts if part)

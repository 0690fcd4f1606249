"""The grammar of a reasoning model's whole answer: free text up to the end of the reasoning, then the client's
grammar."""

import json
import re

from router.text.tokenizer import Tokenizer
from router.text.tool_syntax import AnswerSyntax

PROMPT_END = 16  # this many tokens at the end of a prompt show whether the reasoning has begun or ended
LEXEMES = "TEXT: /(.|\\n)*/\nSPACE: /[ \\n]{0,4}/\n"


def prompt_end(tokenizer: Tokenizer, prompt: list[int]) -> str:
    """Return the last text of a prompt. It shows whether the reasoning has begun or ended."""
    return tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False).rstrip()


def after_reasoning(grammar: str, tokenizer: Tokenizer, prompt: list[int], *, has_channels: bool = False) -> str:
    """Return a grammar of the model's whole answer to this prompt. If the answer may begin with reasoning, the grammar
    allows the reasoning first. The rest of the answer must match `grammar`. Both grammars are in llguidance's format.
    For gpt-oss, set `has_channels` if the texts of `grammar` begin with the header of a channel."""
    start = _start(tokenizer, tokenizer.syntax, prompt_end(tokenizer, prompt), has_channels)
    if not start:
        return grammar
    first, *others = json.loads(grammar)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": start + LEXEMES}, first | {"name": "answer"}, *others]})


def _start(tokenizer: Tokenizer, syntax: AnswerSyntax, before: str, has_channels: bool) -> str:
    """Return the rules of the reasoning, in Lark. Returns "" if the answer does not begin with reasoning."""
    reasoning = syntax.reasoning
    if reasoning is None or before.endswith(reasoning.end):
        return ""
    if syntax.is_harmony:
        opens, final = (lark_of(f"<|channel|>{name}<|message|>", tokenizer) for name in ("analysis", "final"))
        thinks = _until(lark_of("<|end|>", tokenizer))
        again = lark_of("<|start|>assistant", tokenizer)
        return f"start: ({opens} thought {again})* {'' if has_channels else final} @answer\n{thinks}"
    opens, thinks = lark_of(reasoning.start, tokenizer), _until(lark_of(reasoning.end, tokenizer))
    if before.endswith(reasoning.start):
        return f"start: thought SPACE @answer\n{thinks}"
    if reasoning.is_implicit:
        return f"start: ({opens})? thought SPACE @answer\n{thinks}"
    return f"start: ({opens} thought)? SPACE @answer\n{thinks}"


def _until(end: str) -> str:
    """Return the rule of a text that ends with the first `end`. The text contains no special token."""
    return f"thought{'' if end.startswith('<[') else '[lazy]'}: TEXT {end}\n"


def lark_of(text: str, tokenizer: Tokenizer) -> str:
    """Return a text as a sequence of Lark terms. The name of a special token in the text becomes that token."""
    names = tokenizer.special_ids
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return " ".join(f"<[{names[part]}]>" if part in names else json.dumps(part) for part in parts if part)

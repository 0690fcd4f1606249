"""Test that a grammar applies only to the text after the reasoning, for each syntax of reasoning."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken

from router.text.answer_grammar import after_reasoning, lark_of
from router.text.tokenizer import Tokenizer
from shared.grammar import GrammarTokenizer, choice_grammar, json_grammar
from tests.router.conftest import CHATML, byte_level_tokenizer

YES = choice_grammar(["yes", "no"])
HARMONY = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|return|>"]
THINK, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
ROWS: list[tuple[str, list[str], str, list[str], list[str]]] = [
    ("qwen3", [], "", ["yes", "<think>\nhm\n</think>\n\nno"], ["<think>", "hm</think>yes", "<think>a</think>maybe"]),
    ("qwen3", ["<think>", "</think>"], "", ["yes", "<think>hm</think>no"], ["<think>yes", "a<think>b</think>yes"]),
    ("qwen3", [], "<think>\n", ["hm</think>yes", "</think>\nno", "yes</think>yes"], ["yes", "hm</think> maybe"]),
    ("qwen3", [], "<think>\n\n</think>\n\n", ["yes"], ["hm</think>yes", "<think>hm</think>yes"]),
    ("deepseek_r1", [], "", ["hm</think>yes", "<think>hm</think>yes"], ["yes"]),
    ("mistral", ["[THINK]", "[/THINK]"], "", ["[THINK]hm[/THINK]yes", "no"], ["[THINK]hm yes", " yes"]),
    ("granite", [], "", ["yes", "Here is my thought process: x Here is my response: no"], ["Here is my response: yes"]),
    ("gemma4", ["<|channel>", "<channel|>"], "", ["yes", "<|channel>thought\nhm<channel|>no"], ["<|channel>yes"]),
    (
        *("openai_gptoss", HARMONY, "<|start|>assistant"),
        [f"{FINAL}yes", f"{THINK}hm<|end|><|start|>assistant{FINAL}no"],
        ["yes", f"{THINK}yes", f"{THINK}hm<|end|>yes", f"{FINAL}maybe"],
    ),
    ("none", ["<think>"], "", ["yes"], ["<think>hm</think>yes"]),
]


def tokenizer_with(
    directory: Path, added: list[str], reasoning: str, *, is_special: bool = True
) -> tuple[Tokenizer, GrammarTokenizer]:
    library = byte_level_tokenizer()
    library.add_tokens([AddedToken(name, special=is_special) for name in added])
    library.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHATML)
    return Tokenizer.load(directory, reasoning_parser=reasoning), GrammarTokenizer(directory, 400)


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize(("reasoning", "added", "before", "good", "bad"), ROWS)
def test_the_grammar_applies_after_the_reasoning(
    tmp_path: Path, reasoning: str, added: list[str], before: str, good: list[str], bad: list[str], is_special: bool
) -> None:
    tokenizer, matching = tokenizer_with(tmp_path, added, reasoning, is_special=is_special)
    grammar = after_reasoning(YES, tokenizer, tokenizer.encode("x" + before))
    assert (grammar == YES) == (reasoning == "none" or before.endswith("</think>\n\n"))
    for text in (*good, *bad):
        matcher = matching.matcher(grammar)
        tokens = tokenizer.encode(text)
        matches = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert matches == (text in good), text


def test_a_schema_after_the_reasoning_keeps_its_options(tmp_path: Path) -> None:
    tokenizer, matching = tokenizer_with(tmp_path, [], "qwen3")
    grammar = after_reasoning(json_grammar({"type": "object"}), tokenizer, [1])
    matcher = matching.matcher(grammar)
    assert matcher.consume_tokens(tokenizer.encode("<think>{</think>{"))
    tokens = tokenizer.encode(" " * 9)
    assert sum(len(tokenizer.decode([token])) for token in tokens[: matcher.try_consume_tokens(tokens)]) == 8
    assert json.loads(grammar)["grammars"][1]["name"] == "answer"


def test_special_tokens_of_a_text_are_tokens(tmp_path: Path) -> None:
    tokenizer, _ = tokenizer_with(tmp_path, ["<|a|>"], "none")
    number = tokenizer.special_ids["<|a|>"]
    assert lark_of('<|a|>"x"<|a|>', tokenizer) == f'<[{number}]> "\\"x\\"" <[{number}]>'

"""A tokenizer with a token for each printable ASCII character and a few longer tokens, and matchers for its texts."""

import tempfile
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.token_masks import TokenMatcher
from shared.grammar import GrammarTokenizer, choice_grammar, json_grammar, lark_grammar
from tests.engine.build import VOCABULARY

CHARACTERS = "\u0120" + "".join(map(chr, range(33, 122)))  # a space is written as U+0120 in a byte-level vocabulary
MERGES = [("{", '"'), ('"', ":"), ("1", "2"), ("}", "}")]
END = "<|end|>"


def tokenizer_of() -> Tokenizer:
    """Return a tokenizer of `VOCABULARY` tokens, of which the last is `END`."""
    tokens = [*CHARACTERS, "{", "}", *(left + right for left, right in MERGES)]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


@cache
def grammar_tokenizer() -> GrammarTokenizer:
    with tempfile.TemporaryDirectory() as directory:
        tokenizer_of().save(str(Path(directory) / "tokenizer.json"))
        tokenizer = GrammarTokenizer(Path(directory), VOCABULARY)
        assert tokenizer.end_token == END_ID + 1
    return tokenizer


def matcher_of(grammar: str) -> TokenMatcher:
    return TokenMatcher(grammar_tokenizer(), grammar)


END_ID = tokenizer_of().token_to_id(END)
ENDLESS = lark_grammar("start: /[a-y]+/ start")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a"],
    "additionalProperties": False,
}
GRAMMARS = [ENDLESS, json_grammar(SCHEMA), lark_grammar("start: /(a|bc)*/"), choice_grammar(["yes", "no", ""])]

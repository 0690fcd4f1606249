"""Grammars that an answer must match, as text in the format of llguidance.

A router builds the text from a client's schema, regular expression or grammar. Nodes compile the text to matchers with
the library llguidance, an Earley parser whose lexer uses derivatives of regular expressions.
"""

import json
import re
import threading
from collections.abc import Iterable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

MAX_GRAMMAR_BYTES = 1 << 20  # maximum size of the text that a node accepts; a router's limit for clients is lower
# JSON may have at most 8 characters of white space between two JSON tokens. Without a bound, a model may write white
# space forever. If llguidance cannot enforce a keyword of a schema, it must not ignore the keyword, but raise an error.
JSON_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": True, "whitespace_pattern": r"[ \n\r\t]{1,8}", "lenient": False, "coerce_one_of": False,
}  # fmt: skip
# Errors do not quote the grammar, since they are logged. The other limits on time and memory are llguidance's defaults.
LIMITS = LLParserLimits(verbose_errors=False)
MAX_ERROR = 300  # characters
# The number of compiled grammars to keep for further requests and samples. Each grammar can take 200 MB.
COMPILED = 2
EXCERPT = re.compile(r"\n *\d+ \| |<state>")
_END = "<|end of grammar|>"


def json_grammar(schema: dict[str, Any], **options: Any) -> str:
    """Return the grammar of the JSON texts that match a schema. `options` override `JSON_OPTIONS`."""
    return json.dumps({"grammars": [{"json_schema": with_json_options(schema, **options)}]})


def with_json_options(schema: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the schema with `JSON_OPTIONS` added, for use after `%json` in a Lark grammar."""
    return schema | {"x-guidance": JSON_OPTIONS | options}


def lark_grammar(text: str) -> str:
    """Return the grammar that `text` defines in llguidance's dialect of Lark."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def regex_grammar(regex: str) -> str:
    """Return the grammar of the texts that `regex` matches as a whole. The syntax is that of Rust's crate `regex`.

    The classes \\d, \\w and \\s and their complements are limited to ASCII, as in vLLM's default backend.
    """
    return lark_grammar(f"start: /{regex_to_lark(regex, use_ascii='dws')}/")


def choice_grammar(choices: Iterable[str]) -> str:
    """Return the grammar that allows exactly these texts."""
    return lark_grammar("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def one_line(error: str) -> str:
    """Return an error of llguidance as one line, without the excerpt of the grammar or the parser state at its end."""
    return " ".join(EXCERPT.split(error)[0].split())[:MAX_ERROR]


class GrammarTokenizer:
    """A model's tokenizer in the form that matchers need. Thread-safe.

    The tokenizer is read from the model's directory when the first matcher is made, which takes seconds for a large
    vocabulary. llguidance uses `end_token`, an id beyond the vocabulary, as the end of a text. A matcher's mask has
    `num_words` words of 32 bits.
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self._file = directory / "tokenizer.json"
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._compiled = lru_cache(COMPILED)(self._compile)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        tokenizer = tokenizers.Tokenizer.from_file(str(self._file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        end = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        tokenizer.add_special_tokens([_END])
        return LLTokenizer(tokenizer.to_str(), n_vocab=max(end + 1, self._vocab_size), eos_token=end)

    @property
    def end_token(self) -> int:
        return self._tokenizer.eos_token

    @property
    def num_words(self) -> int:
        return -(-self._tokenizer.vocab_size // 32)

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a new matcher, which expects the first token of a text. Takes a millisecond for usual grammars.

        Raises ValueError if the grammar does not compile, or if the model's tokenizer cannot be read.
        """
        matcher = self._compiled(grammar).deep_copy()
        matcher.compute_bitmask()
        if matcher.is_error():  # the copies share a lexer, and the others have reached its limit of states
            self._compiled.cache_clear()
            matcher = self._compiled(grammar).deep_copy()
        return matcher

    def _compile(self, grammar: str) -> LLMatcher:
        with self._lock:
            try:
                tokenizer = self._tokenizer
            except Exception as error:  # the library raises plain Exception
                raise ValueError(f"{self._file}: {str(error)[:MAX_ERROR]}") from error
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # builds the lexer's first states: may take seconds, and must not delay a step
        if matcher.is_error():
            raise ValueError(f"the grammar does not compile: {one_line(matcher.get_error())}")
        return matcher

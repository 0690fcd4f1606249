"""The regular expressions of a tokenizer.json, looked at before any text meets them.

The tokenizer's engine backtracks, in native code that nothing can stop: `(a+)+` needs longer for 40 letters than
anybody waits. Such a pattern is known by its form: a group repeated without bound that repeats or chooses inside.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

# An escape, with its braces; a quantifier without bound; one with a bound; or any one character. Each in one way only:
# this must not take for ever itself.
PIECE = re.compile(
    r"\\[pPxuo]\{[^}]{0,64}\}|\\.|(?P<endless>[*+]|\{\d+,\})[?+]?|\{(?:\d+,)?\d+\}[?+]?|\{,\d+\}[?+]?|.", re.DOTALL
)


def check_patterns(tokenizer: tokenizers.Tokenizer) -> None:
    """Raises ValueError naming a pattern that may take for ever."""
    for part in (tokenizer.normalizer, tokenizer.pre_tokenizer):
        if part is None:
            continue
        for pattern in _patterns(json.loads(part.__getstate__())):
            if may_take_for_ever(pattern):
                raise ValueError(
                    f"the pattern {pattern[:80]!r} repeats a group that repeats or chooses inside, which may take for "
                    "ever to match; write it with a character class instead"
                )


def _patterns(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("Regex"), str):
            yield value["Regex"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _patterns(item)


def may_take_for_ever(pattern: str) -> bool:
    """Whether a group that is repeated without bound holds another such repeat, or alternatives."""
    open_groups = [False]  # whether each holds such a thing so far
    closed: bool | None = None  # the same, of the group that ended just now
    class_depth = 0
    for piece in PIECE.finditer(pattern):
        text, ended, closed = piece[0], closed, None
        if class_depth:
            class_depth += (text == "[") - (text == "]")
        elif text == "[":
            class_depth = 1
        elif text == "(":
            open_groups.append(False)
        elif text == ")" and len(open_groups) > 1:
            closed = open_groups.pop()
            open_groups[-1] |= closed
        elif piece["endless"]:
            if ended:
                return True
            open_groups[-1] = True
        elif text == "|":
            open_groups[-1] = True
    return False

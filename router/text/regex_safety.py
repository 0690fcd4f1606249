"""Rejects regular expressions in a tokenizer.json that can take exponential time.

The tokenizer's regex engine backtracks in uninterruptible native code. For example, `(a+)+b` can take 3 s for 500
characters, and hours for a megabyte. A pattern is rejected if a group that repeats without bound contains alternatives
or another unbounded repeat. It is also rejected if it has syntax that this check does not parse.
"""

import json
import re
from typing import Any

import tokenizers

# Matches one piece of a pattern: an escape (including its braces), an unbounded quantifier, a bounded quantifier, or
# any other character. The alternatives do not overlap, so PIECE itself does not backtrack.
PIECE = re.compile(
    r"\\[pPxuo]\{[^}]{0,64}\}|\\.|(?P<endless>[*+]|\{\d+,\})[?+]?|\{(?:\d+,)?\d+\}[?+]?|\{,\d+\}[?+]?|.", re.DOTALL
)

# Comments, extended mode, and calls of groups, which no known tokenizer uses. They could hide a repeat from the check.
UNPARSED = re.compile(r"\(\?(?:#|[a-z-]*x)|\\g[<']")


def check_patterns(tokenizer: tokenizers.Tokenizer) -> None:
    """Raise ValueError, naming the pattern, if a pattern of the tokenizer may take exponential time."""

    def check(value: dict[str, Any]) -> None:
        pattern = value.get("Regex")
        if isinstance(pattern, str) and UNPARSED.search(pattern):
            raise ValueError(f"the pattern {pattern[:80]!r} has a comment, the option x or a group call: remove it")
        if isinstance(pattern, str) and may_backtrack_exponentially(pattern):
            raise ValueError(
                f"the pattern {pattern[:80]!r} repeats a group that contains a repeat or alternatives, which may "
                "take exponential time to match; use a character class instead"
            )

    for part in (tokenizer.normalizer, tokenizer.pre_tokenizer):
        if part is not None:
            json.loads(part.__getstate__(), object_hook=check)


def may_backtrack_exponentially(pattern: str) -> bool:
    """Return whether a group repeats without bound and contains alternatives or another unbounded repeat."""
    open_groups = [False]  # for each open group: whether it contains alternatives or an unbounded repeat so far
    closed: bool | None = None  # if a group ended at the previous piece, its last value in `open_groups`
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

"""Checks a client's grammar in a child process, before it is sent to a node.

llguidance is native code. It limits its own work, but not well enough for untrusted input: a chain of 5,000 rules
overflows the stack, which crashes the process. Therefore this module also runs as a child process (`python -m
router.text.grammar_check`), whose CPU time, memory and stack are limited. A grammar that passes in the child also
passes on the nodes, where the limits are higher. The child has no tokenizer, so nodes check the names of special
tokens.
"""

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.text.child_process import ChildProcess, limit_process, questions, reply
from shared.fair_threads import FairThreads
from shared.grammar import LIMITS, lark_grammar, one_line

CHECK_S = 4.0  # CPU time limit for one grammar, after which the child is killed
MEMORY_BYTES = 1 << 30  # limit of the child's address space
STACK_BYTES = 2 << 20  # a quarter of the stack size of a node's threads
# Limit on the symbols of a client's own grammar. Finding the allowed tokens can take time cubic in their number.
MAX_SYMBOLS = 256
REMEMBERED = 256  # number of results that are cached, because clients often send the same grammar again
NO_TOKENIZER = "no tokenizer"  # part of llguidance's warnings about special tokens
# llguidance's syntax for a rule's temperature, which nodes do not support.
TEMPERATURE = re.compile(r'^\s*\w+\s*\[[^\]"]*\btemperature\s*=', re.MULTILINE)


class GrammarError(ValueError):
    """The grammar cannot be used. The message is the reason."""


class GrammarChecker(Collector):
    """Checks grammars, and converts them to llguidance's format. It is also a Prometheus collector of the number and
    duration of the checks.

    The router's handlers share one checker, which owns the child process. `check` blocks for up to CHECK_S of the
    child's CPU time, so callers run it on `threads`, which has one thread. If they ran it on the threads that
    tokenize chats, slow checks could occupy all of these threads.
    """

    def __init__(self) -> None:
        self.threads = FairThreads(1, "grammars")
        self._lock = threading.Lock()
        self._child = ChildProcess("router.text.grammar_check")
        self._checked = lru_cache(REMEMBERED)(self._ask)
        self._counts = {"accepted": 0, "refused": 0}
        self._waited_s = 0.0

    def check(self, text: str, is_source: bool = False) -> str:
        """Return the grammar in llguidance's format. Raises GrammarError if the grammar is invalid, if llguidance
        cannot enforce all of it, or if no text matches it.

        If `is_source` is set, `text` is a grammar in Lark or GBNF. Otherwise, it is already in llguidance's format.
        """
        began_s = time.monotonic()
        answer = self._checked(text, is_source)
        with self._lock:
            self._counts["refused" if "error" in answer else "accepted"] += 1
            self._waited_s += time.monotonic() - began_s
        if "error" in answer:
            raise GrammarError(answer["error"])
        return answer["grammar"]

    def collect(self) -> Iterator[Metric]:
        counts = CounterMetricFamily("baton_grammars", "Grammar checks, by result.", labels=["result"])
        for result, count in self._counts.items():
            counts.add_metric([result], count)
        yield counts
        yield CounterMetricFamily("baton_grammar_check_seconds", "Time of grammar checks.", self._waited_s)

    def _ask(self, text: str, is_source: bool) -> dict[str, str]:
        with self._lock:
            answer = self._child.ask([text, is_source])
        return {"error": "it takes too much time or memory to compile"} if answer is None else answer


# The rest of this module runs in the child process.


def checked(text: str, is_source: bool) -> dict[str, str]:
    """Return {"grammar": ...} or {"error": the reason}."""
    limits = LIMITS
    if is_source:
        limits = LLParserLimits(verbose_errors=False, max_grammar_size=MAX_SYMBOLS)
        try:
            text = gbnf_to_lark(text) if "::=" in text and not is_lark_syntax(text) else text
        except Exception as error:  # noqa: BLE001 - the library raises plain Exception
            return {"error": one_line(str(error))}
        if TEMPERATURE.search(text):
            return {"error": "`temperature` of a rule is not supported; set it for the request"}
        text = lark_grammar(text)
    _, messages = LLMatcher.validate_grammar_with_warnings(text, None, limits=limits)
    for message in messages:  # a warning means that a part of the grammar is not enforced
        if not message.startswith(NO_TOKENIZER):
            return {"error": one_line(message)}
    matcher = LLMatcher(LLTokenizer("byte"), text, log_level=0, limits=limits)
    # A grammar that names special tokens is an error here, because this tokenizer has none. A node checks the names.
    if not matcher.is_error():
        matcher.compute_bitmask()
        if matcher.is_error():
            return {"error": "no text matches it"}
    return {"grammar": text}


def main() -> None:
    """Check grammars from standard input until it ends."""
    limit_process(MEMORY_BYTES)
    threading.stack_size(STACK_BYTES)
    for text, is_source in questions(CHECK_S):
        with ThreadPoolExecutor(1) as small_stack:
            reply(small_stack.submit(checked, text, is_source).result())


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()

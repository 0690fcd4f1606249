"""Run the JSON Schema Test Suite: each schema is refused, or its grammar matches no invalid text."""

import json
from collections import Counter
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from router.http.structured import StructuredOutputs
from router.text.grammar_check import GrammarChecker
from router.text.tokenizer import Tokenizer
from shared.errors import RequestError
from tests.cluster.harness import DATA

BYTES = LLTokenizer("byte")
# Counts of schemas, of enforced schemas, and of valid values that an enforced schema's grammar rejects: values with
# properties in another order than the schema, an integer written as 1.0, or a string that violates the `format`.
COUNTS = {"draft2020-12": (366, 162, 22), "draft7": (252, 155, 13)}


def matches(grammar: str, text: str) -> bool:
    matcher, tokens = LLMatcher(BYTES, grammar, log_level=0), list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("draft", COUNTS)
def test_no_invalid_value_matches_the_grammar_of_a_schema(draft: str, byte_level: Tokenizer) -> None:
    suite: dict[str, list[dict[str, Any]]] = json.loads((DATA / "json_schema_suite" / f"{draft}.json").read_text())
    checker, found, wrong = GrammarChecker(), Counter[str](), []
    for case in (case for cases in suite.values() for case in cases if isinstance(case["schema"], dict)):
        found["schemas"] += 1
        try:
            grammar = StructuredOutputs(json=case["schema"]).constraint().grammar(checker, byte_level)
        except RequestError:
            continue
        found["enforced"] += 1
        for test in case["tests"]:
            accepted = matches(grammar, json.dumps(test["data"], ensure_ascii=False))
            found["valid values without an answer"] += test["valid"] and not accepted
            if accepted and not test["valid"]:
                wrong.append((case["description"], test["description"]))
    assert not wrong
    assert tuple(found.values()) == COUNTS[draft]

"""Test that docs/api.md is up to date, and that it names every parameter in OpenAI's API document."""

from pathlib import Path

import pytest

from router.http.bodies import IGNORED, UNSUPPORTED
from router.http.openapi import POSTS
from tests.bad_input.conformance import openai_document
from tests.router.api_page import ELSEWHERE, answer_to, markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == markdown(), "run `python -m tests.router.api_page > docs/api.md`"


@pytest.mark.parametrize("path", ELSEWHERE)
def test_a_parameter_that_an_endpoint_lacks_is_dropped_or_refused_by_name(path: str) -> None:
    body = POSTS[path][0]
    for name in ELSEWHERE[path].split():
        assert name not in body.model_fields
        error = answer_to(body, name)
        assert (error is None) == (name in IGNORED), name
        assert error is None or error.startswith(f"`{name}` is not supported"), error


@pytest.mark.parametrize(("path", "request_name"), [("/v1/completions", "CreateCompletionRequest"), ("/v1/chat/completions", "CreateChatCompletionRequest")])  # fmt: skip
def test_the_page_names_every_parameter_of_openais_document(path: str, request_name: str) -> None:
    schemas = openai_document()["components"]["schemas"]
    named = set(POSTS[path][0].model_fields) | set(ELSEWHERE[path].split())
    todo, found = [schemas[request_name]], set[str]()
    while todo:
        schema = todo.pop()
        found |= schema.get("properties", {}).keys()
        todo += [
            *schema.get("allOf", ()),
            *(schemas[schema["$ref"].rpartition("/")[2]] for _ in range("$ref" in schema)),
        ]
    assert found - named == set()


def test_every_parameter_that_is_refused_is_on_the_page() -> None:
    assert set(UNSUPPORTED) - set(" ".join(ELSEWHERE.values()).split()) == set(), "add them to tests/router/api_page.py"

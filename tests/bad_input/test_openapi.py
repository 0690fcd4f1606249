"""Test that the API conforms to its own OpenAPI document and to OpenAI's. `make schemathesis` tests more cases."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from dashboard.routes import Dashboard
from router.http.openapi import openapi
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from tests.bad_input.conformance import asking_for, check, openai_document
from tests.router.conftest import CHATML, byte_level_tokenizer
from tests.router.scripted import EOS, MODEL, ScriptedDispatcher, app_of

CASES = 2  # number of valid requests for each operation, and of invalid ones


@pytest.fixture(scope="module")
def app() -> Any:
    library = byte_level_tokenizer()
    special = [token.content for token in library.get_added_tokens_decoder().values()]
    tokenizer = Tokenizer(library, {}, ChatTemplate(CHATML, {}, special))
    text = tokenizer.encode("Once upon a time")
    return app_of(ScriptedDispatcher(lambda _, sample: [*text[sample:], EOS]), tokenizer, MODEL, observer=Dashboard())


def test_the_api_conforms_to_its_document(app: Any) -> None:
    statuses = check(app, asking_for(MODEL.name, openapi(Dashboard.queries)), CASES)
    assert statuses[200] > CASES, "both kinds of answers occur"
    assert statuses[400] > CASES


def test_the_api_conforms_to_openais_document(app: Any) -> None:
    statuses = check(app, asking_for(MODEL.name, openai_document()), CASES, "http://router/v1")
    assert statuses[200]
    assert statuses[400] > CASES


def test_the_document_is_served_and_describes_every_field(app: Any) -> None:
    document = TestClient(app).get("/openapi.json").json()
    assert document == openapi(Dashboard.queries)
    for name, schema in document["components"]["schemas"].items():
        for field, described in schema.get("properties", {}).items():
            assert set(described) - {"title", "default"}, f"{name}.{field} has no description"
    routes = {route.path.replace(":path", "") for route in app.routes}
    assert set(document["paths"]) <= routes

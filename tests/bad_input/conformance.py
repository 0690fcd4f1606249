"""Test the API against our OpenAPI document and OpenAI's. `make schemathesis CASES=50000` tests a live cluster.

Every answer must have a status below 500 and the content type and schema that the document states. Some requests are
valid and some are deliberately invalid. Both kinds of requests may contain NUL characters.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as tried
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from dashboard.routes import Dashboard
from router.http.openapi import openapi
from tests.cluster.harness import DATA, cluster

CHECKS = [not_a_server_error, response_schema_conformance, content_type_conformance]
OPENAI = DATA / "openai" / "openai_reduced_openapi.json"
Document = dict[str, Any]


def openai_document() -> Document:
    """Return OpenAI's document, reduced to the API that we serve. Logprobs may be null in it, because the first token
    of an echoed prompt has no logprob."""
    document: Document = json.loads(OPENAI.read_text())
    choices = document["components"]["schemas"]["CreateCompletionResponse"]["properties"]["choices"]
    logprobs = choices["items"]["properties"]["logprobs"]["anyOf"][0]["properties"]
    for name in ("token_logprobs", "top_logprobs"):
        logprobs[name]["items"] = {"anyOf": [logprobs[name]["items"], {"type": "null"}]}
    return document


def asking_for(model: str, document: Document) -> Document:
    """Set the model in the requests of the document, because otherwise most requests would name an unknown model."""
    for name, schema in document["components"]["schemas"].items():
        for part in (schema, *schema.get("allOf", ())):
            if name.endswith(("Body", "Request")) and "model" in part.get("properties", {}):
                part["properties"]["model"] = {"const": model}
    return document


def modes_of(operation: Any) -> list[schemathesis.GenerationMode]:
    """Return the kinds of requests that an operation has. Without a body, a query and headers, it has no invalid ones,
    and schemathesis would give up only after hundreds of attempts."""
    has_invalid = any((operation.body, operation.query, operation.headers))
    return [mode for mode in schemathesis.GenerationMode if has_invalid or mode.is_positive]


def check(app: Any, document: Document, cases: int, base: str = "http://router") -> Counter[int]:
    """Send `cases` valid and `cases` invalid requests of each operation to an ASGI app. Count the answers by status."""
    schema = schemathesis.openapi.from_dict(document)
    schema.app = app
    statuses: Counter[int] = Counter()
    for result in schema.get_all_operations():
        for mode in modes_of(result.ok()):

            @seed(1)
            @tried(
                max_examples=cases,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=result.ok().as_strategy(generation_mode=mode))
            def one(case: Any) -> None:
                statuses[case.call_and_validate(checks=CHECKS, base_url=base).status_code] += 1

            one()
    return statuses


def main() -> int:
    """Run the command line of schemathesis for each document. Return the highest exit status."""
    options = argparse.ArgumentParser(description=str(__doc__).split("\n\n", maxsplit=1)[0])
    options.add_argument("--cases", type=int, default=1000, help="requests per document, over all operations")
    options.add_argument("--seed", type=int, default=1, help="seed of the generated requests")
    chosen = options.parse_args()
    documents = {"ours": openapi(Dashboard.queries)} | ({"OpenAI's": openai_document()} if OPENAI.is_file() else {})
    worst = 0
    # The hash model gives no logprobs. The context is short, because some cases request as many tokens as possible.
    settings: dict[str, object] = {"runner": "torch", "max_model_len": 64}
    with cluster(prefill=1, decode=1, **settings) as running, tempfile.TemporaryDirectory() as directory:
        for name, document in documents.items():
            file = Path(directory) / "openapi.json"
            file.write_text(json.dumps(asking_for(running.model, document)))
            base = running.url + ("" if name == "ours" else "/v1")
            print(f"---- {name}", flush=True)
            each = -(-chosen.cases // len(document["paths"]))
            ended = subprocess.run(_command(file, base, each, chosen.seed), check=False)
            worst = max(worst, ended.returncode)
            running.idle()
    return worst


def _command(file: Path, base: str, cases: int, number: int) -> list[str]:
    names = ",".join(check.__name__ for check in CHECKS)
    flags = ["--url", base, "--checks", names, "--mode", "all", "--phases", "examples,coverage,fuzzing"]
    flags += ["--max-examples", str(cases), "--generation-allow-x00", "true", "--no-shrink"]
    flags += ["--suppress-health-check", "all", "--continue-on-failure", "--seed", str(number)]
    flags += ["--request-timeout", "60", "--output-sanitize", "false"]
    return [sys.executable, "-m", "schemathesis.cli", "run", str(file), *flags]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that `cluster` ends its processes on SIGTERM too
    sys.exit(main())

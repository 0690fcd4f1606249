"""The API held against documents: our own, and OpenAI's. By hand: `make schemathesis CASES=50000`, with a live cluster.

Checked of every answer: no 5xx, the content type that the document names, and its schema. Cases fit the document or are
bent away from it, NUL included (schemathesis).
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as tried
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from dashboard.routes import Dashboard
from router.http.openapi import openapi
from tests.cluster.harness import DATA, cluster

CHECKS = [not_a_server_error, response_schema_conformance, content_type_conformance]
OPENAI = DATA / "openai" / "openai_reduced_openapi.json"
Document = dict[str, Any]


def openai_document() -> Document:
    """OpenAI's own, reduced to what we serve, with what it gets wrong put right: the first token of an echoed prompt
    has no logprob, there as here."""
    document: Document = json.loads(OPENAI.read_text())
    choices = document["components"]["schemas"]["CreateCompletionResponse"]["properties"]["choices"]
    logprobs = choices["items"]["properties"]["logprobs"]["anyOf"][0]["properties"]
    for name in ("token_logprobs", "top_logprobs"):
        logprobs[name]["items"] = {"anyOf": [logprobs[name]["items"], {"type": "null"}]}
    return document


def asking_for(model: str, document: Document) -> Document:
    """`document` with this model in its requests: nearly all would else be for another, and all have one answer."""
    for name, schema in document["components"]["schemas"].items():
        for part in (schema, *schema.get("allOf", ())):
            if name.endswith(("Body", "Request")) and "model" in part.get("properties", {}):
                part["properties"]["model"] = {"const": model}
    return document


def hold(app: Any, document: Document, cases: int, base: str = "http://router") -> Counter[int]:
    """`cases` of each operation and mode, against an ASGI app. Returns the answers' statuses; raises what is amiss."""
    schema = schemathesis.openapi.from_dict(document)
    schema.app = app
    statuses: Counter[int] = Counter()
    for result in schema.get_all_operations():
        for mode in schemathesis.GenerationMode:

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

            with suppress(Unsatisfiable):  # where nothing is sent, nothing can be wrong with it
                one()
    return statuses


def main() -> int:
    """The command line's own run, for all its phases. Returns its status: 0 when nothing was amiss."""
    options = argparse.ArgumentParser(description=str(__doc__).split("\n\n", maxsplit=1)[0])
    options.add_argument("--cases", type=int, default=1000, help="of all operations of a document together")
    options.add_argument("--seed", type=int, default=1, help="another one makes other cases")
    chosen = options.parse_args()
    documents = {"ours": openapi(Dashboard.queries)} | ({"OpenAI's": openai_document()} if OPENAI.is_file() else {})
    worst = 0
    # Hash nodes know no logprobs. Answers are short: some cases ask for as many tokens as there is room for.
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the cluster's processes end with us
    sys.exit(main())

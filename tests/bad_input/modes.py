"""Compare the answers of a disaggregated and a co-located cluster to the same generated requests.

`python -m tests.bad_input.modes --cases 100`. Both clusters get each request, with a fixed seed. Statuses, errors,
texts, token ids and logprobs must be equal. Ids, times and counts of cached tokens may differ. The clusters may divide
a stream into different events, so the texts of all events are joined before the comparison.
"""

import argparse
import json
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as tried

from dashboard.routes import Dashboard
from router.http.openapi import POSTS, openapi
from tests.bad_input.conformance import Document, asking_for, modes_of, openai_document
from tests.cluster.harness import cluster

# Fields that may differ between two answers to the same request. They are not compared.
OWN = {"id", "item_id", "call_id", "request_id", "created", "created_at", "completed_at", "sequence_number"}
OWN |= {"cached_tokens", "cache_read_input_tokens", "input_tokens"}
TEXTS = {"text", "content", "delta", "partial_json", "thinking", "token", "arguments", "reasoning", "reasoning_content"}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the scalars of a JSON value with their paths. The items of a list have the same path."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name not in OWN:
                yield from leaves(each, f"{path}.{name}")
    elif isinstance(value, list):
        for each in value:
            yield from leaves(each, path + "[]")
    else:
        yield path, value


def joined(events: list[Any]) -> dict[str, Any]:
    """Return the content of a stream by path: the joined texts, or the distinct values in order of appearance."""
    found: dict[str, Any] = {}
    for event in events:
        for path, value in leaves(event):
            if path.rpartition(".")[2].rstrip("[]") in TEXTS and isinstance(value, str):
                found[path] = found.get(path, "") + value
            else:
                found.setdefault(path, {})[repr(value)] = None
    return {path: value if isinstance(value, str) else list(value) for path, value in found.items() if value}


def summary(response: Any) -> Any:
    """Return the parts of a response that must be equal in both modes."""
    kind = ";".join(response.headers.get("content-type", ()))
    if "event-stream" in kind:
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        return response.status_code, joined([json.loads(line) for line in lines if line != "[DONE]"])
    return response.status_code, list(leaves(response.json())) if "json" in kind else response.text


def make_repeatable(case: Any) -> None:
    """Give the request a fixed seed. Anthropic's API has no seed, so its requests get the temperature 0 instead."""
    if isinstance(case.body, dict) and case.path != "/v1/messages/count_tokens":
        if case.path == "/v1/messages":
            case.body["temperature"] = 0
        elif "tokenize" not in case.path and case.body.get("seed") is None:
            case.body["seed"] = 1


def compare_operation(strategy: Any, bases: list[str], statuses: Counter[int], cases: int) -> None:
    @seed(1)
    @tried(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def one(case: Any) -> None:
        make_repeatable(case)
        answers = [case.call(base_url=base, timeout=120) for base in bases]
        first, second = (summary(answer) for answer in answers)
        assert first == second, f"{case.as_curl_command()}\n{first}\n{second}"
        statuses[answers[0].status_code] += 1

    one()


def compare(document: Document, bases: list[str], cases: int) -> Counter[int]:
    """Send `cases` valid and `cases` invalid requests of each operation to both clusters. Count the pairs by status."""
    statuses: Counter[int] = Counter()
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = result.ok()
        if not any(path.endswith(operation.path) for path in (*POSTS, "/v1/models", "/v1/models/{name}", "/version")):
            continue  # the answer at this path depends on the cluster's state
        for mode in modes_of(operation):
            strategy = operation.as_strategy(generation_mode=mode)
            compare_operation(strategy, bases, statuses, cases)
    return statuses


def compare_modes(cases: int) -> dict[str, Counter[int]]:
    """Compare both modes with requests drawn from our document and OpenAI's. Raises AssertionError on a difference."""
    with ExitStack() as stack:
        # The hash model gives no logprobs. The context is short, because some cases request as many tokens as possible.
        options: dict[str, Any] = {"runner": "torch", "max_model_len": 64}
        both = [stack.enter_context(cluster(prefill, 2 - prefill, **options)) for prefill in (1, 0)]
        urls, model = [each.url for each in both], both[0].model
        return {
            "ours": compare(asking_for(model, openapi(Dashboard.queries)), urls, cases),
            "OpenAI's": compare(asking_for(model, openai_document()), [f"{url}/v1" for url in urls], cases),
        }


def main() -> None:
    options = argparse.ArgumentParser(description=str(__doc__).split("\n\n", maxsplit=1)[0])
    options.add_argument("--cases", type=int, default=100, help="requests for each operation, valid and invalid")
    for name, statuses in compare_modes(options.parse_args().cases).items():
        print(f"{name}: {statuses.total()} requests, no difference; by status: {dict(sorted(statuses.items()))}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that `cluster` ends its processes on SIGTERM too
    main()

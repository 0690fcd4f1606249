"""Merges the answers of a router's workers and the statuses of its models.

The functions are pure. `documents` and `texts` have one item for each worker that answered. The first item is from the
worker that received the client's request.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

# Each worker sees every node, so metrics of nodes are equal in all workers. The exceptions are the lengths of the
# handoff queues, which each worker counts for its own requests.
OWN_QUEUES = ("baton_num_prefill_", "baton_num_decode_")
COUNTS = ("requests", "placements", "inexact_retries", "queue")  # objects in `/v1/status` whose numbers are added up
HANDOFFS = ("handoffs", "blocks_moved", "bytes_moved")
SHARES = ("baton_slo_attainment_ratio",)  # for these metrics, the smallest value of any worker is shown


def is_of_nodes(name: str, labels: Mapping[str, str]) -> bool:
    """Return whether a metric describes nodes rather than the requests of one worker."""
    return ("engine" in labels or name.startswith("baton_pool_")) and not name.startswith(OWN_QUEUES)


class MergedMetrics(Collector):
    """Adds up the request metrics of the workers, and takes the largest value of each node metric.

    A restarted worker counts from 0, so its values of node metrics may be too small. The largest value is correct."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._families: dict[str, Metric] = {}
        values: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[float]] = defaultdict(list)
        for text in texts:
            for family in text_string_to_metric_families(text):
                self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    values[family.name, sample.name, tuple(sample.labels.items())].append(sample.value)
        for (name, of_sample, labels), each in values.items():
            merge: Callable[[list[float]], float] = max if is_of_nodes(name, dict(labels)) else sum
            self._families[name].add_sample(of_sample, dict(labels), (min if name in SHARES else merge)(each))

    def collect(self) -> list[Metric]:
        return list(self._families.values())


def merged_status(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return `/v1/status` of the whole router. The numbers of requests are summed over all workers. Each latency is the
    largest value of any worker."""
    first = documents[0]
    status = first | _counts(documents)
    if "models" in first:
        models = {name: [document["models"][name] for document in documents] for name in first["models"]}
        status["models"] = {name: _counts(each) for name, each in models.items()}
    queued = first["totals"]["queued"] - first["queue"]["requests"] + status["queue"]["requests"]
    of_nodes = {"running": first["totals"]["running"], "queued": queued}
    status["totals"] = _sum([document["totals"] for document in documents]) | of_nodes
    status["latency"] = _largest([document["latency"] for document in documents])
    return status | {"workers": [document["router"]["id"] for document in documents]}


def status_of_models(statuses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the combined status of a router's models: their nodes and events, and the sums of their counts.

    `model` is the name of the first model. With several models, `models` maps the name of each model to its counts.
    """
    first = statuses[0]
    if len(statuses) == 1:
        return first
    events = [event for status in statuses for event in status["events"]]
    return (
        first
        | _counts(statuses)
        | {name: sum(status[name] for status in statuses) for name in HANDOFFS}
        | {
            "nodes": [node | {"model": status["model"]} for status in statuses for node in status["nodes"]],
            "events": sorted(events, key=lambda event: float(event["time_ms"])),
            "models": {status["model"]: {name: status[name] for name in COUNTS} for status in statuses},
        }
    )


def _counts(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: _sum([document[name] for document in documents]) for name in COUNTS}


def merged_requests(documents: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return the latest requests of all workers, newest first."""
    rows = [row for document in documents for row in document["requests"]]
    return documents[0] | {"requests": sorted(rows, key=lambda row: -row["accepted_ms"])[:limit]}


def _sum(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sum of each number over all documents. Values that are not numbers come from the first document."""
    total: dict[str, Any] = {}
    for document in documents:
        for name, value in document.items():
            is_number = isinstance(value, int | float) and isinstance(total.get(name, 0), int | float)
            total[name] = total.get(name, 0) + value if is_number else total.get(name, value)
    return total


def _largest(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the numbers of all documents, at any depth. Add up each `n`, and take the smallest value of each
    `attainment` and the largest value of every other number."""
    found: dict[str, Any] = {}
    for name, value in documents[0].items():
        values = [document[name] for document in documents if document.get(name) is not None]
        if isinstance(value, Mapping):
            found[name] = _largest(values)
        elif all(isinstance(each, int | float) for each in values):
            merges: dict[str, Callable[[list[Any]], Any]] = {"n": sum, "attainment": min}
            found[name] = merges.get(name, max)(values) if values else None
        else:
            found[name] = value
    return found

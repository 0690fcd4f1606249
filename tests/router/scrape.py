"""Read the metrics of a registry as `/metrics` exports them."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.metrics.request_metrics import Snapshot


def samples_of(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """Return the value of each metric in a scrape, by its name and sorted labels."""
    families = text_string_to_metric_families(generate_latest(Snapshot(registry)).decode())
    return {
        (sample.name, *sorted(f"{key}={value}" for key, value in sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }

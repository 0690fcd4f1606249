"""What each tenant used, for `/metrics`. Its labels are the names in the file of API keys, and no others."""

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.http.keys import WrongKeys


@dataclass(slots=True)
class TenantUsage:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0


class TenantMetrics(Collector):
    """A prometheus collector; without keys it shows nothing but zero refusals."""

    def __init__(self, model_name: str, wrong_keys: WrongKeys) -> None:
        self._model_name = model_name
        self._wrong_keys = wrong_keys
        self._used: dict[str, TenantUsage] = {}

    def count(self, tenant: str, used: TenantUsage) -> None:
        if not tenant:
            return
        total = self._used.setdefault(tenant, TenantUsage())
        for name in TenantUsage.__slots__:
            setattr(total, name, getattr(total, name) + getattr(used, name))

    def collect(self) -> Iterable[Metric]:
        for name in TenantUsage.__slots__:
            text = f"{name.replace('_', ' ').capitalize()} of a tenant."
            family = CounterMetricFamily(f"baton_tenant_{name}", text, labels=["model_name", "tenant"])
            for tenant, used in self._used.items():
                family.add_metric([self._model_name, tenant], getattr(used, name))
            yield family
        yield CounterMetricFamily(
            "baton_requests_without_key", "Refused for want of a right API key.", self._wrong_keys.num_refused
        )

"""Hypothesis without deadlines: speed is measured in `benchmarks/`."""

from hypothesis import HealthCheck, settings

UNCHECKED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]  # no example changes a fixture
settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=UNCHECKED)
settings.load_profile("untimed")

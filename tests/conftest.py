"""No test fails for being slow: speed is measured in `benchmarks/`."""

from hypothesis import HealthCheck, settings

WELL = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]  # what a fixture gives here, no example changes
settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=WELL)
settings.load_profile("untimed")

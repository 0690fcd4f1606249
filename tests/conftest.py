"""No test fails for being slow: speed is measured in `benchmarks/`."""

from hypothesis import settings

settings.register_profile("untimed", settings(), deadline=None)
settings.load_profile("untimed")

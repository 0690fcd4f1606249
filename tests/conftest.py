"""Hypothesis profiles: few examples by default, many with `--hypothesis-profile=nightly`. Speed is measured in `benchmarks/`.

The number of examples of a test is its own `max_examples` at most; the profile only lowers or raises that of other tests.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers and nodes share the cores

UNCHECKED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]  # no example changes a fixture
settings.register_profile("short", settings(), max_examples=40, deadline=None, suppress_health_check=UNCHECKED)
settings.register_profile("nightly", settings.get_profile("short"), max_examples=1000)
settings.load_profile("short")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory with a short path, because the paths of sockets may have 107 bytes only."""
    with tempfile.TemporaryDirectory(prefix="baton-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)

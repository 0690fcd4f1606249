"""Hypothesis profiles: few examples by default, many with `--hypothesis-profile=nightly`.

A profile sets the number of examples only for tests without their own `max_examples`.
"""

import atexit
import gc
import importlib.util
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # test workers and nodes share the cores
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads would keep the cores busy

gc.disable()  # until the tests are imported, because garbage collection takes a third of the import time

# Environments created before Pillow became a dependency have no Pillow until `make` installs it.
collect_ignore_glob = [] if importlib.util.find_spec("PIL") else ["*/test_images.py"]
UNCHECKED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]  # no example changes a fixture
settings.register_profile("short", settings(), max_examples=40, deadline=None, suppress_health_check=UNCHECKED)
settings.register_profile("nightly", settings.get_profile("short"), max_examples=1000)
settings.load_profile("short")


# The files that take longest, in the order in which they start, so that no worker ends long after the others.
LONGEST = (
    "tests/cluster/test_simulator_page.py", "tests/cluster/test_compare.py", "tests/deploy/test_ray.py",
    "tests/gpu_less/test_interpreter.py", "tests/proxy_node/test_compare.py", "tests/proxy_node/test_cluster.py",
    "tests/deploy/test_compose.py", "tests/deploy/test_podman.py", "tests/engine/test_batch_invariance.py",
    "tests/cluster/test_page.py", "tests/engine/test_jit.py", "tests/chaos/test_chaos.py",
    "tests/gpu_less/test_compile.py", "tests/cluster/test_families.py", "tests/proxy_node/test_sglang_pair.py",
    "tests/cluster/test_workers.py", "tests/cluster/test_golden.py", "tests/cluster/test_speculation.py",
    "tests/deploy/test_slurm.py", "tests/engine/test_draft_model.py", "tests/compare/test_client.py",
    "tests/cluster/test_operations.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONGEST)))


def pytest_collection_finish() -> None:
    """Exclude the objects that exist after the imports from garbage collection."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # otherwise nanobind reports its objects as leaked


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory with a short path, because the path of a socket may have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="baton-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    """Undo the process-wide settings that a router or node makes when it starts: log handlers, which write to the
    stderr of one test, and the switch interval of threads."""
    root, interval_s = logging.getLogger(), sys.getswitchinterval()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    sys.setswitchinterval(interval_s)

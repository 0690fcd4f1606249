"""Test a few seeds of the simulation, an exact replay, and each mutation with a seed that detects it."""

import gc
import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.cluster.harness import ROOT
from tests.simulation.checks import WANTED, table
from tests.simulation.loop import EPOCH_S
from tests.simulation.mutations import MUTATIONS
from tests.simulation.world import simulate

SEEDS = range(40)
# Further seeds to run, and the defect that each has found.
FOUND = {
    143: "a Reserve call whose connection was lost swallowed its cancellation",
    9047: "the simulation signalled a node that had just started, and its previous process received the signal",
}


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Exclude the objects that exist so far from the garbage collections of each simulation."""
    gc.collect()
    gc.freeze()


def test_no_seed_violates_an_invariant() -> None:
    reached, violations = Counter[str](), []
    for result in map(simulate, [*SEEDS, *FOUND]):
        reached.update(result.reached)
        violations += [f"seed {result.seed}: {text}" for text in result.violations]
        assert 1.0 < result.virtual_s < EPOCH_S
    assert not violations, "\n".join(violations[:20])
    _, missing = table(reached)
    assert len(missing) <= 0.15 * len(WANTED), f"never reached: {missing}"


def test_a_seed_replays_bit_for_bit() -> None:
    """The replay is also exact in another process with another seed for string hashes."""
    here = simulate(4, keeps_log=True)
    assert len(here.lines) > 40
    assert simulate(5).fingerprint != here.fingerprint
    assert simulate(4).fingerprint == here.fingerprint
    there = subprocess.run([sys.executable, "-m", "tests.simulation", "--seed", "4"], cwd=ROOT, text=True, check=False,
                           env=os.environ | {"PYTHONHASHSEED": "1"}, capture_output=True, timeout=300)  # fmt: skip
    assert there.stdout.strip().endswith(here.fingerprint), there.stdout[-500:] + there.stderr[-500:]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_detected(name: str) -> None:
    violations = simulate(MUTATIONS[name][0], name).violations
    assert violations
    assert not [text for text in violations if "positional arguments" in text], "the mutation itself fails"

"""The simulation as `make test` runs it: 200 seeds without a violation, exact replay, and some mutations."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.loop import EPOCH_S
from tests.simulation.mutations import MUTATIONS
from tests.simulation.seeds import results, run_one
from tests.simulation.sometimes import WANTED, table

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 200
# Seeds that found a defect.
FOUND: dict[int, str] = {
    5: "a reservation that arrived after its cancellation was granted, and its blocks stayed in quarantine for good",
    4: "sending on a stream that its peer had just reset was logged as a failed task",
    16: "a Reserve call whose caller had gone or timed out swallowed its cancellation",
    143: "the same when its connection was lost",
    9047: "the simulation signalled a node that had just started, and its previous process received the signal",
}
# The mutations that the first seeds detect; `make mutations` applies all of them.
QUICK = (
    "a release is forgotten",
    "received blocks are swapped",
    "prefixes without salt",
    "quarantine is skipped",
    "waiting for a node counts as an attempt",
    "avoided prefill nodes stay avoided",
    "avoided decode nodes stay avoided",
)


@pytest.mark.timeout(600)
def test_no_seed_of_two_hundred_violates_an_invariant() -> None:
    reached, violations = Counter[str](), []
    for result in results(range(SEEDS)):
        reached.update(result.reached)
        violations += [f"seed {result.seed}: {text}" for text in result.violations]
    assert not violations, "\n".join(violations[:20])
    _, missing = table(reached)
    assert len(missing) <= 0.05 * len(WANTED), f"never reached: {missing}"


@pytest.mark.parametrize("seed", FOUND)
def test_seeds_that_found_a_defect_pass(seed: int) -> None:
    assert run_one(seed).violations == []


def test_a_seed_replays_bit_for_bit() -> None:
    """Also in another process with another string hash seed."""
    here = run_one(4, keeps_log=True)
    assert len(here.lines) > 40
    assert run_one(5).fingerprint != here.fingerprint
    assert run_one(4).fingerprint == here.fingerprint
    command = [sys.executable, "-m", "tests.simulation", "--seed", "4"]
    there = subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert there.stdout.strip().endswith(here.fingerprint), there.stdout[-500:] + there.stderr[-500:]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_applies(name: str) -> None:
    with MUTATIONS[name]():
        pass


@pytest.mark.parametrize("name", QUICK)
def test_a_mutation_is_detected(name: str) -> None:
    assert name in MUTATIONS
    assert any(run_one(seed, name).violations for seed in range(60)), "no seed detected it"


def test_time_is_virtual() -> None:
    result = run_one(3)
    assert 1.0 < result.virtual_s < EPOCH_S

"""Test that skipping stretches of decodes does not change the results of a simulated node."""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given

from engine.emulation import Residuals
from scheduler.cost import CostModel
from scheduler.prefix import block_hashes
from scheduler.scheduler import StepLimits
from simulator.node import StepTimes, Stretch
from tests.simulator.drive import UNIT, Run, Work, work


@given(work=work())
def test_skipping_decodes_changes_no_step_no_time_and_no_report(work: Work) -> None:
    stepped, skipped = Run(work, skips=False).run(), Run(work, skips=True).run()
    assert skipped.members == stepped.members
    assert skipped.ended == stepped.ended
    assert skipped.firsts == stepped.firsts
    assert [astuple(report) for report in skipped.reports] == [astuple(report) for report in stepped.reports]
    ends = [run.node.times.ends(run.node.log) for run in (stepped, skipped)]
    assert ends[0] == ends[1]
    assert skipped.scheduler.ledger() == stepped.scheduler.ledger()
    assert cached_rows(skipped) == cached_rows(stepped)
    assert astuple(skipped.scheduler.counters) == astuple(stepped.scheduler.counters)


def cached_rows(run: Run) -> tuple[list[object], list[int]]:
    """Return the rows of all cached blocks of all requests, and all rows in the order in which they are reused."""
    pool = run.scheduler.pool
    names = [name for each in run.requests for name in block_hashes(each.tokens, run.work.block_tokens, each.salt)]
    return [pool.find(name) for name in names], pool.take(pool.available)


@given(work=work())
def test_random_variations_of_durations_do_not_depend_on_skipping(work: Work) -> None:
    quantiles = (0.9, 1.0, 1.5)
    stepped, skipped = (Run(work, skips, quantiles).run() for skips in (False, True))
    assert skipped.members == stepped.members
    ends = [run.node.times.ends(run.node.log) for run in (stepped, skipped)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)
    assert [name for _, name in skipped.ended] == [name for _, name in stepped.ended]


def test_steps_with_prompts_have_their_own_variation() -> None:
    residuals = Residuals(1.5, (2.0, 2.2, 4.0)), Residuals(3.0, (1.1, 1.2))
    times = StepTimes(CostModel(overhead=1.0), quantiles=(0.5, 1.0), prompt_residuals=residuals)
    for first_s, has_prompts, quantiles in (
        (1.0, False, (0.5, 0.75, 1.0)),
        (1.0, True, (2.0, 2.2, 4.0)),
        (2.0, True, (1.1, 1.15, 1.2)),
        (9.0, True, (1.1, 1.15, 1.2)),
    ):
        steps = [Stretch(0.0, number, 1, first_s, 0.0, has_prompts=has_prompts) for number in range(500)]
        ratios = [times.end(step, 1) / first_s for step in steps]
        assert np.quantile(ratios, (0.0, 0.5, 1.0)) == pytest.approx(quantiles, abs=0.1)
    of_all = StepTimes(CostModel(overhead=1.0), quantiles=(3.0, 3.0))
    assert of_all.end(Stretch(0.0, 7, 1, 1.0, 0.25, has_prompts=True), 1) == 3.25


def test_most_decodes_are_skipped() -> None:
    fields = [{"id": f"r{n}", "tokens": [n] * 20, "num_prompt": 20, "max_tokens": 500} for n in range(3)]
    arrivals = [(n * 300 * UNIT, each) for n, each in enumerate(fields)]
    run = Run(Work("stall_free", StepLimits(64, 8), 1000, 4, False, arrivals, [], 0.0, 5000 * UNIT), skips=True).run()
    assert len(run.members) - run.num_skipped < 10
    assert run.num_gathered > 0
    assert np.all(np.diff(run.node.times.ends(run.node.log)) > 0)

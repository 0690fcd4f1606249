"""Test the cost model against measured steps of the demo model (see `benchmarks/step_times.py`)."""

import numpy as np

from benchmarks.step_times import held_out


def test_the_cost_model_predicts_steps_that_it_was_not_fitted_to() -> None:
    """The model is fitted to every other step. The limits of the error are those in docs/planning.md."""
    _, errors = held_out()
    assert len(errors) == 150
    assert 100 * np.abs(errors).mean() <= 5
    assert 100 * np.percentile(np.abs(errors), 95) <= 12

"""Test that the fitted model of step times is accurate, soon follows a change of the device, and ignores stalls."""

import math
import random

import pytest

from engine.step_time_fit import KINDS, PER_KIND, RECENT, CostFit
from scheduler.cost import CostModel, StepWork, pairs_of

TRUE = CostModel(overhead=4e-3, per_token=3e-5, knee_tokens=64, per_pair=2e-8, per_context=1e-7, per_decode=5e-5)


def some_work(rng: random.Random) -> StepWork:
    work = StepWork()
    for _ in range(rng.randrange(20)):
        work.add_decode(rng.randrange(10, 2000))
    if rng.random() < 0.5 or not work.num_decodes:
        work.add_chunk(rng.randrange(4000), rng.randrange(1, 512))
    return work


def watch(fit: CostFit, rng: random.Random, steps: int, speed: float = 1.0, stalls: float = 0.0) -> CostModel:
    for _ in range(steps):
        work = some_work(rng)
        stall = 50 if rng.random() < stalls else 1
        fit.observe(work, TRUE.seconds(work) * speed * stall * rng.lognormvariate(0, 0.05))
        model = fit.model()
    assert model is not None
    return model


def error(model: CostModel, rng: random.Random, speed: float = 1.0) -> float:
    """Return the 95th percentile of the model's relative errors on new steps."""
    works = [some_work(rng) for _ in range(200)]
    return sorted(abs(model.seconds(work) / (speed * TRUE.seconds(work)) - 1) for work in works)[190]


@pytest.mark.parametrize("stalls", [0.0, 0.02])
def test_the_model_becomes_accurate_with_and_without_stalls(stalls: float) -> None:
    rng = random.Random(5)
    fit = CostFit()
    assert error(watch(fit, rng, 50, stalls=stalls), rng) < 0.15
    model = watch(fit, rng, 400, stalls=stalls)
    assert error(model, rng) < 0.07
    assert model.knee_tokens == 64


def test_the_margin_covers_about_99_of_100_steps() -> None:
    late = total = 0
    for seed in range(10):
        rng = random.Random(seed)
        model = watch(CostFit(), rng, 400)
        works = [work for work in (some_work(rng) for _ in range(1000)) if work.prefill_tokens]
        limits = [(1 + model.margin) * model.seconds(work) for work in works]
        late += sum(TRUE.seconds(w) * rng.lognormvariate(0, 0.05) > x for w, x in zip(works, limits, strict=True))
        total += len(works)
    assert 0.001 * total < late < 0.03 * total


@pytest.mark.parametrize("speed", [2.0, 0.5, 5.0])
def test_the_model_follows_a_change_of_speed_within_a_hundred_steps(speed: float) -> None:
    rng = random.Random(6)
    fit = CostFit()
    before = watch(fit, rng, 500)
    assert error(before, rng, speed) > 0.4
    assert error(watch(fit, rng, 100, speed), rng, speed) < 0.12


def test_rescaled_measurements_stay_bounded_on_a_busy_machine() -> None:
    """The speed of a busy machine changes all the time, and each change rescales old measurements. Without a bound, the
    product of the scale factors would diverge."""
    rng = random.Random(12)
    fit, slowness = CostFit(), 0.0
    watch(fit, rng, 400)
    for _ in range(3_000):
        slowness = 0.9 * slowness + rng.gauss(0, 0.5)
        work = StepWork()
        for _ in range(rng.randrange(1, 20)):
            work.add_decode(rng.randrange(10, 2000))
        fit.observe(work, TRUE.seconds(work) * math.exp(slowness))
        model = fit.model()
    assert model is not None
    chunk = StepWork(1, 512, pairs_of(4000, 512))
    assert TRUE.seconds(chunk) / 1000 < model.seconds(chunk) < 1000 * TRUE.seconds(chunk)


def test_a_kind_of_step_that_became_rare_is_remembered() -> None:
    rng = random.Random(7)
    fit = CostFit()
    watch(fit, rng, 300)
    for _ in range(600):
        work = StepWork()
        for _ in range(rng.randrange(1, 12)):
            work.add_decode(rng.randrange(10, 3000))
        fit.observe(work, TRUE.seconds(work) * rng.lognormvariate(0, 0.2))
        model = fit.model()
    chunk = StepWork()
    chunk.add_chunk(2000, 400)
    assert model is not None
    assert model.seconds(chunk) == pytest.approx(TRUE.seconds(chunk), rel=0.3)


@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_the_noise_of_short_prompts_does_not_multiply_the_prediction_for_a_long_one(noise: float) -> None:
    chunk = StepWork(1, 512, pairs_of(3584, 512))
    ratios = []
    for seed in range(40):
        rng, fit = random.Random(seed), CostFit()
        for _ in range(60):
            work = StepWork()
            if rng.random() < 0.3:
                work.add_chunk(0, rng.randint(5, 60))
            for _ in range(rng.randint(not work.num_prefills, 4)):
                work.add_decode(rng.randint(10, 250))
            fit.observe(work, TRUE.seconds(work) * rng.lognormvariate(0, noise))
            model = fit.model()
        assert model is not None
        ratios.append(model.seconds(chunk) / TRUE.seconds(chunk))
    assert sorted(ratios)[35] < 10 * noise + 1


def test_a_new_kind_of_step_is_not_mistaken_for_a_change_of_speed() -> None:
    rng = random.Random(8)
    fit = CostFit()

    works = [StepWork(1, tokens, pairs_of(0, tokens)) for tokens in (1024, 2048)] * 25
    works += [StepWork(num_decodes=8, decode_context=6400)] * 64
    for work in works:
        fit.observe(work, TRUE.seconds(work) * rng.lognormvariate(0, 0.04))
        model = fit.model()
    assert model is not None
    chunk_alone = StepWork(1, 2048, pairs_of(0, 2048))
    assert model.seconds(chunk_alone) == pytest.approx(TRUE.seconds(chunk_alone), rel=0.1)


def test_the_model_is_missing_before_the_first_fit_and_unchanged_between_fits() -> None:
    rng = random.Random(1)
    fit = CostFit()
    assert fit.model() is None
    fit.observe(StepWork(), 1.0)
    fit.observe(some_work(rng), 0.0)
    assert fit.model() is None
    model = watch(fit, rng, 8)
    assert fit.model() is model


def test_the_number_of_samples_is_limited() -> None:
    rng = random.Random(2)
    fit = CostFit()
    watch(fit, rng, 1000)
    assert RECENT < fit.num_observations <= RECENT + KINDS * PER_KIND


@pytest.mark.parametrize(
    "wrong", [[], [1.0] * 6, [1.0] * 6 + [-1.0], [1.0, float("nan"), *[1.0] * 5], [float("inf")] * 7]
)
def test_numbers_that_are_not_a_model_are_refused(wrong: list[float]) -> None:
    assert CostModel.unpacked(wrong) is None
    assert CostModel.unpacked(TRUE.packed()) == TRUE

"""Test estimates of capacity, the highest rate at which a share alpha of the requests meets the SLO. The search needs
few runs, the interval covers the capacity, and a capacity beyond the measured rates is reported as a bound."""

import numpy as np
import pytest

from compare.stats.capacity import (
    CapacityEstimate,
    CapacityPoint,
    CapacitySearch,
    attainment_bands,
    capacity_of,
    crossing,
    fit_attainment,
)

ALPHA = 0.9


def attainment(rate: float, capacity: float, noise: float = 0.0) -> float:
    """Return the attainment at `rate`. It falls linearly with the rate, and is 0.9 at `capacity`."""
    return float(np.clip(0.9 - 0.8 * (rate / capacity - 1) + noise, 0.0, 1.0))


def measuring(capacity: float, noise: float, random: np.random.Generator):
    """Return a function that measures attainment with two random errors: one per seed and a smaller one per run."""
    shift: dict[int, float] = {}

    async def measure(rate: float, seed: int) -> float:
        if seed not in shift:
            shift[seed] = random.normal(0.0, noise)
        return attainment(rate, capacity, shift[seed] + random.normal(0.0, noise / 3))

    return measure


def test_the_fit_never_rises_and_pools_runs_and_rates() -> None:
    points = [CapacityPoint(rate, 0, share) for rate, share in ((1.0, 0.9), (2.0, 0.8), (3.0, 1.0), (4.0, 0.5))]
    assert fit_attainment(points) == ([1.0, 2.0, 3.0, 4.0], pytest.approx([0.9, 0.9, 0.9, 0.5]))
    points = [CapacityPoint(1.0, 0, 0.6), CapacityPoint(1.0, 1, 0.66), CapacityPoint(2.0, 0, 0.9)]
    assert fit_attainment(points)[1] == pytest.approx([0.72, 0.72])
    low_and_high = {"low": [0.6, 0.9], "high": [0.66, 0.9]}
    assert attainment_bands(points) == {"rate": [1.0, 2.0], "share": pytest.approx([0.72, 0.72])} | low_and_high


@pytest.mark.parametrize(
    ("rates", "shares", "found"),
    [
        ([1.0, 2.0, 3.0], [1.0, 0.95, 0.75], CapacityEstimate(2.25, None, None)),
        ([1.0, 2.0], [1.0, 0.95], CapacityEstimate(2.0, None, None, "above")),
        ([1.0, 2.0], [0.8, 0.5], CapacityEstimate(1.0, None, None, "below")),
        ([1.0, 2.0, 2.1], [1.0, 0.99, 0.2], CapacityEstimate(2.0, None, None, cliff=True)),
        ([1.0, 2.0, 4.0], [1.0, 1.0, 0.2], CapacityEstimate(2.25, None, None)),  # no cliff: 2 and 4 are far apart
    ],
)
def test_the_crossing_of_a_curve(rates: list[float], shares: list[float], found: CapacityEstimate) -> None:
    got = crossing(rates, shares, ALPHA)
    assert got.rate == pytest.approx(found.rate)
    assert (got.bounded, got.cliff) == (found.bounded, found.cliff)


def test_the_interval_over_seeds_covers_the_capacity() -> None:
    random = np.random.default_rng(4)
    covered, draws = 0, 150
    for _ in range(draws):
        points = []
        for seed in range(6):
            shift = random.normal(0.0, 0.02)
            for rate in (9.0, 9.6, 10.4, 11.0):
                points.append(CapacityPoint(rate, seed, attainment(rate, 10.0, shift + random.normal(0.0, 0.005))))
        found = capacity_of(points, ALPHA)
        covered += found.low <= 10.0 <= found.high
    assert 0.90 <= covered / draws <= 0.99


def test_an_interval_has_no_bounds_if_seeds_cross_beyond_the_measured_rates() -> None:
    """The capacities of the seeds differ by up to 36 %, but the measured rates are within 8 % of 10 req/s."""
    points = [
        CapacityPoint(rate, seed, attainment(rate, capacity))
        for seed, capacity in enumerate((8.2, 9.1, 10.0, 10.9, 11.8))
        for rate in (9.3, 10.0, 10.8)
    ]
    found = capacity_of(points, ALPHA)
    assert found.rate == pytest.approx(10.0, rel=0.05)
    assert (found.low, found.high) == (None, None)


@pytest.mark.parametrize(("capacity", "first"), [(10.0, 1.0), (10.0, 64.0), (0.3, 1.0), (10.0, 10.0)])
async def test_a_search_finds_the_capacity_from_above_and_below(capacity: float, first: float) -> None:
    measure = measuring(capacity, 0.01, np.random.default_rng(1))
    search = CapacitySearch(measure, ALPHA, max_runs=60, min_seeds=4)
    found = await search.run(first)
    assert found.bounded == "yes"
    assert found.rate == pytest.approx(capacity, rel=0.05)
    assert found.low <= found.rate <= found.high
    assert len(search.points) <= 60
    assert len({point.seed for point in search.points}) >= 4


@pytest.mark.parametrize("noise", [0.002, 0.08])
async def test_a_search_continues_until_the_interval_is_narrow(noise: float) -> None:
    search = CapacitySearch(measuring(10.0, noise, np.random.default_rng(1)), ALPHA, max_runs=200, min_seeds=4)
    found = await search.run(4.0)
    assert ((found.high - found.low) / 2 <= 0.03 * found.rate) == (noise < 0.01)
    assert (len(search.points) < 40) == (noise < 0.01)


async def test_a_search_ends_with_its_budget_and_returns_an_estimate() -> None:
    search = CapacitySearch(measuring(10.0, 0.01, np.random.default_rng(1)), ALPHA, max_runs=5)
    found = await search.run(4.0)
    assert len(search.points) == 5
    assert 4.0 <= found.rate <= 16.0
    assert found.low is None


@pytest.mark.parametrize(
    ("last_good", "bounded", "is_cliff"), [(np.inf, "above", False), (0.0, "below", False), (7.3, "yes", True)]
)
async def test_a_search_without_a_crossing_finds_a_bound_or_a_cliff(
    last_good: float, bounded: str, is_cliff: bool
) -> None:
    """At a cliff, attainment drops from nearly 1 to 0 between two close rates, for example when KV memory is full."""

    async def measure(rate: float, _seed: int) -> float:
        return 0.99 if rate <= last_good else 0.0

    search = CapacitySearch(measure, ALPHA, max_runs=60, min_seeds=3, lowest=0.3)
    found = await search.run(2.0)
    assert min(point.rate for point in search.points) >= 0.3
    assert (found.bounded, found.cliff) == (bounded, is_cliff)
    assert 6.5 <= found.rate <= 7.3 if is_cliff else len(search.points) < 20

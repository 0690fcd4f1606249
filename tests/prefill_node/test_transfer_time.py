"""Test that the model of transfer times estimates latency and bandwidth from pushes, despite noise and outliers."""

import random

import pytest

from prefill_node.sender import TransferTimeModel


def fitted(pushes: list[tuple[int, float]]) -> list[float]:
    model = TransferTimeModel()
    return [model.observe(*push) for push in pushes][-1]


def test_latency_and_bandwidth_are_estimated_despite_noise_and_slow_pushes() -> None:
    rng = random.Random(1)
    sizes = [rng.randrange(1, 100) * 10_000 for _ in range(25)]
    pushes = [(size, 0.002 + size * 1e-9 * rng.uniform(0.98, 1.02)) for size in sizes]
    for index in (3, 9, 20):
        pushes[index] = (pushes[index][0], 0.5)
    assert fitted(pushes) == [pytest.approx(0.002, rel=0.05), pytest.approx(1e-9, rel=0.1)]


def test_the_time_of_pushes_of_one_size_is_attributed_to_their_bytes() -> None:
    assert fitted([(1000, 0.002)] * 5) == pytest.approx([0.0, 2e-6])


def test_larger_pushes_that_took_less_time_give_no_negative_estimate() -> None:
    of_any, of_a_byte = fitted([(1000, 0.004), (2000, 0.003)] * 8)
    assert of_a_byte == 0.0
    assert 0.003 <= of_any <= 0.004

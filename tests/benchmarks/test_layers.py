"""Tests of the benchmarks of parts of models, at toy size."""

import torch

from benchmarks import layers
from benchmarks.models import SHAPES


def test_the_time_of_recurrences_is_a_part_of_the_step() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96, "vocab_size": 600}
    runs = layers.recurrence_runs(layers.config_of(layers.QWEN35 | sizes), 2)
    assert [len(values) for values in runs.values()] == [2, 2, 2]
    assert all(0 < part < whole for part, whole in zip(runs["layers"], runs["step"], strict=True))


def test_as_many_bytes_are_read_as_the_chosen_experts_have() -> None:
    with torch.inference_mode():
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 16, "vocab_size": 97}
        arms, num_bytes = layers.expert_arms(layers.config_of(SHAPES["1b-moe"] | sizes | {"head_dim": 16}))
        assert all(arm() > 0 for arm in arms.values())
    one = 4 * 3 * 16 * 64
    assert num_bytes % one == 0
    assert 2 * 8 * one <= num_bytes <= 2 * 64 * one, "in each of 2 layers, 8 tokens choose 8 to 64 experts"

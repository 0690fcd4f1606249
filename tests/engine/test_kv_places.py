"""Test the memory for KV with sliding windows and for recurrent states, with the layer shapes of published models."""

import pytest

from engine.models.kv_places import kv_places
from engine.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, ModelConfig
from scheduler.geometry import Geometry

MLP = MlpSpec(8)
BLOCK, TOKENS = 64, 8192
DELTA = DeltaSpec(16, 32, 128, 128, 4)  # of Qwen3.5 9B


def model(windows: list[int], kv_heads: int, head_dim: int, deltas: int = 0) -> ModelConfig:
    layers = [LayerSpec(AttentionSpec(kv_heads, kv_heads, head_dim, window=size), MLP) for size in windows]
    return ModelConfig("Test", 8, 9, (*layers, *[LayerSpec(DELTA, MLP)] * deltas), 1e-6, False, 1 << 20)


@pytest.mark.parametrize(
    ("windows", "kv_heads", "head_dim", "share"),
    [
        ([128, 0] * 12, 8, 64, 0.53),  # gpt-oss-20b
        (([1024] * 5 + [0]) * 10 + [1024] * 2, 16, 128, 0.29),  # Gemma 3 27B
        (([512] * 5 + [0]) * 4 + [512] * 2, 1, 256, 0.25),  # Gemma 3 1B
        ([4096] * 32, 8, 128, 0.51),  # Mistral 7B v0.1
    ],
)
def test_windows_reduce_the_kv_of_a_decoding_request(
    windows: list[int], kv_heads: int, head_dim: int, share: float
) -> None:
    places = kv_places(model(windows, kv_heads, head_dim))
    geometry = Geometry(BLOCK, places.groups)
    full = TOKENS // BLOCK
    assert geometry.rows_of(full, 1) * places.row_layers <= share * full * len(windows)
    padding = sum(group.rows for group in places.groups) * places.row_layers - len(windows)
    assert padding <= 0.1 * len(windows)


def test_each_layer_has_a_place_of_its_own() -> None:
    windows = ([1024] * 5 + [0]) * 4 + [512] * 3
    places = kv_places(model(windows, 2, 64))
    assert len(set(zip(places.tables, places.places, strict=True))) == len(windows)
    sizes = [group.size for group in places.groups for _ in range(group.rows)]
    assert [sizes[table] for table in places.tables] == windows


def test_a_state_fills_its_rows() -> None:
    row_bytes = 8 * BLOCK * 4 * 2 * 256 * 2  # 8 layers with 4 heads of 256 dimensions, in bfloat16
    places = kv_places(model([0] * 8, 4, 256, deltas=24), row_bytes)
    assert places.groups[-1].kind == "state"
    numbers = 24 * (32 * 128 * 128 + 3 * (2 * 16 + 32) * 128)
    assert places.groups[-1].rows * row_bytes <= 1.1 * 4 * numbers


def test_a_unit_larger_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has 384 numbers, .* holds 256: increase --block-size"):
        kv_places(model([0], 1, 8, deltas=1), 1024)

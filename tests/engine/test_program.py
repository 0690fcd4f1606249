"""Test that a fused decode pass gives the same logits and KV, bit for bit, as a decoder that calls each kernel."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from benchmarks.random_model import random_decoder
from engine.batch import Batch
from engine.cpu import why_not_compiled
from engine.cpu.selection import linear_on_cpu
from engine.models.decoder import Decoder
from engine.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, MoeSpec
from tests.engine.build import CPU, threads
from tests.gpu_less.contract import batch_of, fill, pool_of

if why_not_compiled():
    pytest.skip(f"no compiled kernels: {why_not_compiled()}", allow_module_level=True)

from engine.cpu.attention import NumbaAttention
from engine.cpu.fused_decode import MAX_ROWS, FusedDecode, fused_decode_of
from engine.cpu.layer import NumbaKernels
from engine.cpu.matmul_kernels import HAS_INT8, PANEL

__all__ = ["threads"]  # a fixture


def config_of(
    *windows: int, kv_heads: int = 2, mlp: MlpSpec | MoeSpec = MlpSpec(3 * PANEL), tied: bool = False, **more: Any
) -> ModelConfig:
    layers = tuple(
        LayerSpec(AttentionSpec(4, kv_heads, PANEL, window=window, **more), mlp) for window in windows or (0, 0, 0)
    )
    return ModelConfig("LlamaForCausalLM", 2 * PANEL, 100, layers, 1e-5, tied, 4096)


SHAPES = {
    "llama": config_of(),
    "qwen 2": config_of(kv_heads=4, qkv_bias=True, tied=True),
    "qwen 3": config_of(kv_heads=1, qk_norm=True),
    "windows": config_of(40, 0, 300, output_bias=True, mlp=MlpSpec(3 * PANEL, bias=True)),
    "gelu": config_of(mlp=MlpSpec(3 * PANEL, "gelu_tanh")),
    "experts": config_of(mlp=MoeSpec(11, 3, MlpSpec(2 * PANEL), renormalizes=False)),
    "gated experts": config_of(mlp=MoeSpec(6, 2, MlpSpec(PANEL, bias=True), "sigmoid", scale=1.5, corrects=True)),
}
FLOATS, SHORTS, BYTES = ("float32", "none"), ("bfloat16", "none"), ("auto", "int8")
CASES = [*((name, FLOATS) for name in SHAPES), ("llama", SHORTS), ("qwen 2", BYTES), ("experts", SHORTS)]
CASES += [("experts", BYTES)]


def decoder(config: ModelConfig, settings: tuple[str, str]) -> Decoder:
    return random_decoder(config, torch.float32, CPU, linear_on_cpu(*settings), deviation=0.2)


def contexts(count: int) -> list[tuple[int, int]]:
    """Return the spans of decodes. One of the contexts is long enough to be divided among threads."""
    rng = Random(count)
    ends = [900, *(rng.randrange(1, 120) for _ in range(count - 1))]
    return [(end - 1, end) for end in rng.sample(ends, count)]


def drawing(spans: list[tuple[int, int]]) -> Batch:
    """Return a batch whose slices all draw a token."""
    batch = batch_of(spans, 16, 700, CPU)
    return replace(batch, sampled=list(range(len(spans))), logit_rows=batch.cu_q[1:].long() - 1)


@pytest.mark.parametrize(("shape", "settings"), CASES, ids=lambda value: "".join(value))
def test_the_fused_pass_gives_the_same_bits(shape: str, settings: tuple[str, str]) -> None:
    config = SHAPES[shape]
    model = decoder(config, settings)
    pool = pool_of(config.num_kv_heads, config.head_dim, 16, torch.float32, 700, CPU, config.num_layers)
    kernels, attention = NumbaKernels(config, pool), NumbaAttention(pool)
    program = fused_decode_of(model, kernels, attention)
    if settings == BYTES and not HAS_INT8:
        pytest.skip("this CPU has no instruction for products of 8 bits")
    assert program is not None
    for count in (5, 1, 17):  # the buffers keep values of earlier steps
        batch = drawing(contexts(count))
        for layer in range(config.num_layers):
            fill(pool, batch, layer)
        batch.tokens[:] = torch.arange(count)
        before = pool.tensor.clone()
        wanted = model.logits(model.forward(batch, kernels.begin(batch), attention.plan(batch)))
        stored = pool.tensor.clone()
        pool.tensor.copy_(before)
        assert program.takes(batch)
        found = program.logits(batch)
        assert torch.equal(found, wanted)
        assert found.isfinite().all()
        assert torch.equal(pool.tensor.nan_to_num(), stored.nan_to_num())
        assert not torch.equal(before.nan_to_num(), stored.nan_to_num())


def test_only_decodes_that_draw_are_taken() -> None:
    model = decoder(SHAPES["llama"], FLOATS)
    pool = pool_of(2, PANEL, 16, torch.float32, 700, CPU, 3)
    program = fused_decode_of(model, NumbaKernels(SHAPES["llama"], pool), NumbaAttention(pool))
    assert isinstance(program, FusedDecode)
    decodes = drawing(contexts(3))
    assert program.takes(decodes)
    assert program.takes(drawing([(4, 5)] * MAX_ROWS))
    assert not program.takes(drawing([(4, 5)] * (MAX_ROWS + 1)))
    assert not program.takes(drawing([*contexts(3), (0, 7)]))
    assert not program.takes(replace(decodes, sampled=[0, 2], logit_rows=decodes.logit_rows[[0, 2]]))
    assert not program.takes(replace(decodes, sampled=[0, 2]))  # slice 1 has logits but does not draw


@pytest.mark.parametrize(("hidden", "inner"), [(2 * PANEL + 4, 3 * PANEL), (2 * PANEL, PANEL + 2)])
def test_widths_with_padded_panels_are_not_fused(hidden: int, inner: int) -> None:
    layers = tuple(replace(layer, mlp=MlpSpec(inner)) for layer in SHAPES["llama"].layers)
    config = replace(SHAPES["llama"], hidden_size=hidden, layers=layers)
    pool = pool_of(2, PANEL, 16, torch.float32, 8, CPU, 3)
    model = decoder(config, FLOATS)
    assert fused_decode_of(model, NumbaKernels(config, pool), NumbaAttention(pool)) is None

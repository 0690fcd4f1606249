"""Test recurrent layers: the names of tensors, saved states, and results that do not depend on chunks."""

import json
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from engine.cpu.selection import kernels_on_cpu
from engine.kernels import TorchKernels
from engine.models.load import load_model
from engine.models.spec import DeltaSpec, LayerSpec, MlpSpec, ModelConfig, SsmSpec, state_units, unit_places
from tests.engine.build import CPU
from tests.engine.recurrent_scene import LENGTHS, SPECS, Scene

torch.set_num_threads(1)
BACKENDS = {"torch": TorchKernels, "numba": kernels_on_cpu}
QWEN = {
    "hidden_size": 48, "intermediate_size": 52, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 97,
    "max_position_embeddings": 256, "num_key_value_heads": 2, "head_dim": 16, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "full_attention_interval": 3,
}  # fmt: skip


def equal(one: Tensor, other: Tensor) -> None:
    assert torch.equal(one, other)


def close(one: Tensor, other: Tensor) -> None:
    """Assert equality up to rounding: torch's element-wise functions round differently for different tensor sizes."""
    torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SPECS)
def test_results_and_states_have_the_same_bits_for_all_cuts(name: str, backend: str) -> None:
    whole, check = Scene(SPECS[name], BACKENDS[backend]), close if backend == "torch" else equal
    found, last = whole.run(Random(0), [{index: length} for index, length in enumerate(LENGTHS)], {})
    states = [whole.state(index, last[index]) for index in range(3)]
    assert all(bool(one.isfinite().all()) for one in (*found, *states))
    for seed in (1, 2, 3):
        random, cut, steps, left = Random(seed), Scene(SPECS[name], BACKENDS[backend]), [], dict(enumerate(LENGTHS))
        while left:
            chosen = random.sample(sorted(left), random.randint(1, len(left)))
            steps.append({index: min(left[index], random.choice([1, 1, 2, 3, 7, 16])) for index in chosen})
            left = {index: rest - steps[-1].get(index, 0) for index, rest in left.items()}
            left = {index: rest for index, rest in left.items() if rest}
        again, last = cut.run(random, steps, {0: 8, 2: 1})
        for index in range(3):
            check(again[index], found[index])
            check(cut.state(index, last[index]), states[index])
        at_cut = Scene(SPECS[name], BACKENDS[backend])
        _, last = at_cut.run(random, [{0: 8, 1: 1, 2: 1}], {})
        for index in (0, 2):
            check(cut.state(index, 2), at_cut.state(index, last[index]))


@pytest.mark.parametrize("name", SPECS)
def test_compiled_results_equal_the_reference(name: str) -> None:
    steps = [{0: 5, 1: 1, 2: 9}, {0: 18}]
    expected, _ = Scene(SPECS[name], TorchKernels).run(Random(0), steps, {})
    found, _ = Scene(SPECS[name], kernels_on_cpu).run(Random(0), steps, {})
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, atol=2e-5, rtol=2e-5)


def test_units_are_in_order_and_do_not_cross_rows() -> None:
    config = ModelConfig(
        "Test", 8, 9,
        (LayerSpec(DeltaSpec(1, 2, 4, 6, 3), MlpSpec(8)), LayerSpec(SsmSpec(1, 1, 5, 7, 2), MlpSpec(8))), 1e-6, False, 64,
    )  # fmt: skip
    units = state_units(config)
    assert units == (8, 8, 12, 12, 24, 24, 7, 5, 5, 35)
    assert unit_places(units, 40)[:6] == [(0, 0), (0, 8), (0, 16), (0, 28), (1, 0), (2, 0)]
    with pytest.raises(ValueError, match="has 35 numbers, but must fit into a row of the KV pool, which holds 34"):
        unit_places(units, 34)


def test_a_checkpoint_with_other_models_is_read_as_its_text_model(tmp_path: Path) -> None:
    text, whole = tmp_path / "text", tmp_path / "whole"
    AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**QWEN)).save_pretrained(text)
    whole.mkdir()
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(text / "model.safetensors").items()
    }
    others = {"mtp.fc.weight": torch.ones(2), "model.visual.merger.weight": torch.ones(2)}
    save_file(tensors | others, whole / "model.safetensors")
    config = json.loads((text / "config.json").read_text())
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": config.pop("tie_word_embeddings"),
        "text_config": config,
    }  # fmt: skip
    (whole / "config.json").write_text(json.dumps(outer))
    one, other = (load_model(path, torch.float32, CPU) for path in (text, whole))
    assert one.config.layers == other.config.layers
    rows = torch.randn(3, one.config.hidden_size)
    assert torch.equal(one.layers[0].output(torch.ones(2, 80)), other.layers[0].output(torch.ones(2, 80)))
    assert torch.equal(one.logits(rows), other.logits(rows))

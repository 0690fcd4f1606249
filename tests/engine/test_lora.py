"""Test that requests with different LoRA adapters in one batch get the logits of peft, and that an adapter is refused
if it cannot be applied exactly."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.random_model import random_decoder
from engine.attention import plan_tables
from engine.batch import BlockRows, build
from engine.linear import Plain, PlainLinear
from engine.lora.files import CONFIG, WEIGHTS, AdapterFiles, LowRank, lora_digest, read_lora
from engine.lora.linear import AdaptedLinear, AdaptedRows, ModelAdapters
from engine.models.decoder import Decoder
from engine.models.load import load_model
from engine.models.mlp import MLP_ROWS
from engine.models.spec import AttentionSpec, LayerSpec, MlpSpec, state_units
from engine.options import BuildOptions, lora_adapters
from scheduler.scheduler import StepLimits
from tests.engine.build import (  # fmt: skip
    CPU,
    GREEDY,
    Blocks,
    States,
    device_code,
    every_backend,
    in_one_piece,
    layout_of,
    model_fixture,
    once,
    piece,
    pool_of,
    state_size,
)
from tests.engine.families import CONFIGS, save
from tests.engine.lora_files import EVERY, save_adapter
from tests.engine.nodes import Node, requests_of, run_together

ATTENTION = EVERY[:4]
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # peft reads this attribute
__all__ = ["every_backend", "model_fixture"]  # the first applies to every test here


def adapted_rows(model: Decoder, adapters: dict[str, Path], max_rank: int = 8) -> AdaptedRows:
    added = ModelAdapters(model, Plain(torch.float32))
    for digest, directory in adapters.items():
        added.add(AdapterFiles(digest, directory, read_lora(directory, max_rank)))
    return added.rows


@torch.inference_mode()
def logits_of(model: Decoder, adapted: AdaptedRows, rows: list[tuple[str, list[int]]]) -> list[torch.Tensor]:
    """Return the logits of all rows, each with its adapter. Each of the two steps computes a part of every row."""
    one, size = layout_of(model, 4096, 4), 0
    if state_units(model.config):
        size = state_size(model.config, one.block_bytes)
        one = layout_of(model, 4096 + 2 * len(rows) * size, 4)
    pool = pool_of(model, one, in_one_piece(model.config))
    (backend, kernels), blocks = device_code(model, pool), Blocks(4096, 4, pool.places.groups)
    states, rows_of, parts = States(4096, size), BlockRows(pool.places), [[] for _ in rows]  # type: ignore[var-annotated]
    requests = [blocks.request([*row, 0], max_tokens=1, needs_prompt_logprobs=True, adapter=name) for name, row in rows]
    for part in (3, None):
        slices = [piece(each, part or len(each.tokens) - 1 - each.num_computed) for each in requests]
        states.use(slices)
        batch = build(slices, 4, CPU, rows=rows_of)
        adapted.select(batch, CPU)
        found = model.logits(model.forward(batch, kernels.begin(batch), plan_tables(backend, pool, batch)))
        for request, slice_, logits, kept in zip(requests, slices, found.split(batch.counts), parts, strict=True):
            kept.append(logits)
            request.num_computed = slice_.end
    return [torch.cat(kept) for kept in parts]


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("llama", EVERY),
        ("llama", ("q_proj", "v_proj")),
        ("gemma2", EVERY),
        ("phi3, window", FUSED),
        ("qwen3 moe", ATTENTION),
        ("qwen3.5", EVERY),
    ],
)
def test_a_batch_of_several_adapters_gives_the_logits_of_peft(
    name: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    base = save(CONFIGS[name], tmp_path)
    references: dict[str, Any] = {"": deepcopy(base)}
    changes: list[dict[str, Any]] = [{}, {"r": 7, "use_rslora": True}]
    if name == "llama":  # of several patterns that match, the first counts
        changes[0] = {"alpha_pattern": {"layers.0.self_attn.q_proj": 64, "q_proj": 6}}
    for seed, change in enumerate(changes):
        directory = tmp_path / f"adapter {seed}"
        model = save_adapter(deepcopy(base), directory, seed, modules, **change)
        references[lora_digest(directory)] = model
    model = load_model(tmp_path, torch.float32, CPU)
    directories = {digest: tmp_path / f"adapter {seed}" for seed, digest in enumerate(list(references)[1:])}
    adapted = adapted_rows(model, directories)
    random = Random(name)
    # The three long rows make the second step longer than MLP_ROWS, the number of rows that an MLP multiplies at once.
    lengths = [9, 17, 4, 30, 11, *([MLP_ROWS // 3] * 3 if name == "llama" else [])]
    rows = [
        (list(references)[index % 3], [random.randrange(97) for _ in range(min(length, 250))])
        for index, length in enumerate(lengths)
    ]
    for (digest, row), found in zip(rows, logits_of(model, adapted, rows), strict=True):
        with torch.inference_mode():
            expected = references[digest](torch.tensor([row])).logits[0]
        limit = 4e-4 if state_units(model.config) else 1e-4
        assert float((found - expected).abs().max()) <= limit * max(1.0, float(expected.abs().max()))


def test_base_rows_are_unchanged_by_company_and_by_loaded_adapters(tmp_path: Path) -> None:
    base = save(CONFIGS["llama"], tmp_path)
    save_adapter(deepcopy(base), tmp_path / "adapter", 1)
    plain, adaptable = (load_model(tmp_path, torch.float32, CPU) for _ in range(2))
    row = [5, 9, 2, 44, 17, 60]
    alone = logits_of(plain, AdaptedRows(), [("", row)])[0]
    adapted = adapted_rows(adaptable, {"d": tmp_path / "adapter"})
    for rows in ([("", row)], [("", row), ("d", row)], [("d", [1, 2, 3, 4]), ("", row)]):
        found = logits_of(adaptable, adapted, rows)[[name for name, _ in rows].index("")]
        assert float((found - alone).abs().max()) <= 1e-5
    changed = logits_of(adaptable, adapted, [("d", row)])[0]
    assert float((changed - alone).abs().max()) > 0.01


def test_prompt_logprobs_change_no_answer_of_an_adapter_of_a_gate(model: Decoder) -> None:
    """A step with prompt logprobs computes the attention of the last layer for all rows, and other steps do not."""
    layer = LayerSpec(AttentionSpec(4, 2, 16, gated=True), MlpSpec(20))
    model = random_decoder(replace(model.config, layers=(layer, layer)), torch.float32, CPU, deviation=0.1)
    adapters, size = ModelAdapters(model, Plain(torch.float32)), model.config.hidden_size
    torch.manual_seed(0)
    update = LowRank(torch.randn(4, size), torch.randn(128, 4))
    adapters.add(AdapterFiles("d", Path(), {"model.layers.1.self_attn.q_proj": update}))
    found = []
    for sampling in (GREEDY, replace(GREEDY, prompt_logprobs=1)):
        node, rows = Node(model, StepLimits(), 6, 4), requests_of(3, False, [sampling, GREEDY] * 2)
        node.runner.adapters = adapters
        for row in rows[::2]:
            row.adapter = "d"
        found.append(run_together(rows, node))
    assert found[0] == found[1]


def test_a_failed_step_leaves_no_trace_in_later_steps(tmp_path: Path) -> None:
    base = save(CONFIGS["llama"], tmp_path)
    save_adapter(base, tmp_path / "adapter", 1)
    model = load_model(tmp_path, torch.float32, CPU)
    adapted, row = adapted_rows(model, {"d": tmp_path / "adapter"}), [5, 9, 2, 44, 17, 60]
    expected = logits_of(model, adapted, [("d", row)])[0]
    first, calls = model.layers[0].mlp, iter([None])
    down = first.down

    def failing(rows: torch.Tensor) -> torch.Tensor:
        next(calls)  # raises StopIteration in the second call, which computes the rows from MLP_ROWS on
        return down(rows)

    halving: Any = SimpleNamespace(gated=lambda rows, _: rows.chunk(2, -1)[0])
    first.down = failing  # type: ignore[assignment]
    with pytest.raises(StopIteration):
        first(torch.zeros(2 * MLP_ROWS, model.config.hidden_size), halving)
    first.down = down
    assert torch.equal(logits_of(model, adapted, [("d", row)])[0], expected)


@once
def test_an_update_does_not_wait_for_a_gpu() -> None:
    """The size of a result must not depend on values on the device."""
    indexed_by = set()

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.index.Tensor:
                indexed_by.update(index.dtype for index in args[1])
            return func(*args, **(kwargs or {}))

    base, down, up = (PlainLinear(torch.ones(size)) for size in ((4, 8), (2, 8), (4, 2)))
    adapted = AdaptedLinear(base, {"d": (down, up)}, AdaptedRows({"d": torch.tensor([1, 3])}))
    with Notes():  # type: ignore[no-untyped-call]
        found = adapted(torch.ones(5, 8))
    assert found[:, 0].tolist() == [8.0, 24.0, 8.0, 24.0, 8.0]
    assert indexed_by == {torch.int64}


LAYER = "base_model.model.model.layers.0"
Q = f"{LAYER}.self_attn.q_proj"


@once
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda config, _: config.update(peft_type="IA3"), "peft_type is 'IA3'"),
        (lambda config, _: config.update(bias="all"), "bias is 'all'"),
        (lambda config, _: config.update(use_dora=True), "use_dora is True"),
        (lambda config, _: config.update(modules_to_save=["lm_head"]), "modules_to_save is"),
        (lambda config, _: config.update(alora_invocation_tokens=[1]), "alora_invocation_tokens is"),
        (lambda config, _: config.update(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
        (lambda config, _: config.update(lora_alpha="16"), "lora_alpha is '16'"),
        (lambda config, _: config.update(alpha_pattern={"(a+)+": 1}), "alpha_pattern has"),
        (lambda config, _: config.update(lora_alpha=10**400), "lora_alpha is 1000.*: it must be a finite number"),
        (lambda config, _: config.update(alpha_pattern=["q_proj"]), r"alpha_pattern has \['q_proj'\]"),
        (lambda _, tensors: tensors.pop(f"{Q}.lora_A.weight"), "self_attn.q_proj has tensors"),
        (lambda _, tensors: tensors[f"{Q}.lora_A.weight"].fill_(float("nan")), "not finite"),
        (lambda _, tensors: tensors.update({f"{Q}.lora_A.weight": torch.ones(4, 47)}), "the adapter belongs to another model"),
        (lambda _, tensors: tensors.update({"base_model.model.lm_head.weight": torch.ones(3)}), "lm_head.weight is not"),
        (
            lambda _, tensors: tensors.update(
                {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 48), "base_model.model.lm_head.lora_B.weight": torch.ones(97, 4)}
            ),
            "lm_head of the adapter is not a matrix",
        ),
        (
            lambda _, tensors: tensors.update({f"{Q}.lora_A.weight": torch.ones(9, 48), f"{Q}.lora_B.weight": torch.ones(48, 9)}),
            "rank 9: at most --max-lora-rank 8",
        ),
    ],
)  # fmt: skip
def test_an_adapter_that_cannot_be_applied_exactly_is_refused(change: Any, says: str, tmp_path: Path) -> None:
    directory = tmp_path / "adapter"
    save_adapter(save(CONFIGS["llama"], tmp_path), directory, 1)
    config, tensors = json.loads((directory / CONFIG).read_text()), load_file(directory / WEIGHTS)
    change(config, tensors)
    (directory / CONFIG).write_text(json.dumps(config))
    save_file(tensors, directory / WEIGHTS)
    model = load_model(tmp_path, torch.float32, CPU)
    with pytest.raises(ValueError, match=says):
        adapted_rows(model, {"d": directory}, max_rank=8)


@once
def test_pickled_and_missing_files_are_refused(tmp_path: Path) -> None:
    save_adapter(save(CONFIGS["llama"], tmp_path), tmp_path / "adapter", 1)
    assert read_lora(tmp_path / "adapter", 4)
    (tmp_path / "adapter" / WEIGHTS).rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(ValueError, match="only pickled weights"):
        lora_digest(tmp_path / "adapter")
    with pytest.raises(ValueError, match=f"no {CONFIG}"):
        lora_digest(tmp_path)
    with pytest.raises(ValueError, match=f"~no-such-user/adapter: has no {CONFIG}"):
        lora_adapters(BuildOptions("", lora_modules=("d=~no-such-user/adapter",)))

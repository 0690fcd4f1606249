"""Test that draft heads guess as published and change no answer, and that their guesses are the same in both modes and
after cached prefixes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config

from benchmarks.random_model import random_decoder
from engine.draft_head import DraftHead, head_places
from engine.kv_pool import KVPool
from engine.linear import Plain
from engine.lora.files import AdapterFiles, LowRank
from engine.lora.linear import ModelAdapters
from engine.models.decoder import Decoder
from engine.models.draft_head import HeadDecoder
from engine.models.draft_layers import MtpNames, with_head
from engine.models.load import assemble_mtp, load_eagle, load_model, load_mtp
from engine.models.spec import AttentionSpec, DeltaSpec, LatentSpec, LayerSpec, MlpSpec
from engine.options import BuildOptions, check_options
from scheduler.drafters import Speculation
from scheduler.request import Request
from scheduler.scheduler import StepLimits
from shared.rpc.messages import SamplingParams
from tests.engine.build import CONFIG, CPU, GREEDY, VOCABULARY, device_code, every_backend, once, thinned
from tests.engine.draft_files import write_eagle, write_mtp
from tests.engine.families import CONFIGS, SIZES, reference
from tests.engine.nodes import Node, requests_of, run_together

torch.set_num_threads(1)
__all__ = ["every_backend"]  # a fixture
LAYERS = {
    "grouped": LayerSpec(AttentionSpec(4, 2, 16, qk_norm=True), MlpSpec(20)),
    "latent": LayerSpec(LatentSpec(4, 12, 24, 10, 8, 14), MlpSpec(20)),
    "recurrent": LayerSpec(DeltaSpec(1, 2, 4, 8, 3), MlpSpec(20)),
}
NAMES = MtpNames("mtp.layers.0.", "mtp.e", "mtp.h", "mtp.fc", "mtp.norm")
SAMPLINGS = [
    GREEDY,
    SamplingParams(seed=1, temperature=0.9),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(seed=3, top_k=8, presence_penalty=0.5, logprobs=1),
    replace(GREEDY, prompt_logprobs=1),
]


def model_of(kind: str) -> tuple[Decoder, HeadDecoder]:
    """Return a random model whose next token depends mostly on the last token, and an MTP layer that
    guesses this next token."""
    first = LAYERS["grouped"] if kind == "recurrent" else LAYERS[kind]
    config = with_head(replace(CONFIG, layers=(first, LAYERS[kind])), CONFIG.hidden_size)
    model = random_decoder(config, torch.float32, CPU, deviation=0.1)
    generator = torch.Generator().manual_seed(1)

    def take(name: str, *shape: int) -> Tensor:
        if name == "mtp.fc.weight":
            return torch.eye(*shape) + torch.empty(shape).normal_(0, 0.02, generator=generator)
        is_norm = name.endswith(("norm.weight", "mtp.e.weight", "mtp.h.weight"))
        return torch.ones(shape) if is_norm else torch.empty(shape).normal_(0, 0.1, generator=generator)

    return model, assemble_mtp(take, model, Plain(torch.float32), NAMES)


def drafting(node: Node, head: HeadDecoder, num_tokens: int = 3) -> DraftHead:
    """Let the node guess with a draft head. Prefill nodes do not guess, but they also need the head, which observes
    their steps."""
    own = KVPool(node.pool.layout, node.pool.memory, head_places(node.pool.places))
    attention, kernels = device_code(head, own)
    drafter = DraftHead(head, own, kernels, attention, num_tokens)
    drafter.warm_up()
    node.runner.use_head(drafter)
    node.scheduler.speculation = Speculation(drafter, num_tokens)
    return drafter


def recorded(drafter: DraftHead) -> dict[tuple[str, int], Tensor]:
    """Return the logits of the head's guesses, by request and position. If several steps guess at a position, keep the
    logits of the latest step."""
    found: dict[tuple[str, int], Tensor] = {}
    inner = drafter.model.guess

    def guess(batch: Any, *given: Any) -> tuple[Tensor, Tensor]:
        following, logits = inner(batch, *given)
        for name, position, row in zip(names, batch.positions.tolist(), logits, strict=False):
            found[name, position] = row
        return following, logits

    names: list[str] = []
    asked = drafter.guess

    def ask(requests: Sequence[Request], counts: Sequence[int]) -> list[Sequence[int]]:
        names[:] = [request.id for request, count in zip(requests, counts, strict=True) if count]
        return asked(requests, counts)

    drafter.model.guess, drafter.guess = guess, ask
    return found


def first_guesses(node: Node, head: HeadDecoder) -> tuple[dict[tuple[str, int], Tensor], list[int]]:
    """Return the logits of the first guesses after a prompt of 17 tokens, and the prompt with the first token."""
    found = recorded(drafting(node, head))
    row = Request("r", [at * 7 % VOCABULARY for at in range(17)], 17, 10, sampling=GREEDY)
    node.scheduler.add(row)
    while not found:
        node.step()
    return found, row.tokens[:18]


# ---- the published definition ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["deepseek v3", "glm4 moe", "qwen3 next", "qwen3.5", "qwen3.5 moe"])
@torch.inference_mode()
def test_an_mtp_layer_guesses_as_published(kind: str, tmp_path: Path) -> None:
    files = write_mtp(CONFIGS[kind], tmp_path)
    _, config = check_options(BuildOptions(str(tmp_path), draft_method="mtp", kv_cache_memory=2**24))
    model = load_model(tmp_path, torch.float32, CPU)
    model.config = replace(model.config, draft_layers=config.draft_layers, units=config.units)
    node = Node(model, StepLimits(max_num_batched_tokens=7), 4, 4)
    found, text = first_guesses(node, load_mtp(tmp_path, model))
    states = files.base.model(torch.tensor([text[:-1]])).last_hidden_state[0]
    for depth in range(3):
        last, expected = files.logits(text, states)
        torch.testing.assert_close(found["r", 17 + depth], expected, atol=2e-4, rtol=2e-4)
        text, states = [*text, int(expected.argmax())], torch.cat((states, last))


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
@torch.inference_mode()
def test_an_eagle_head_guesses_as_published(prefix: str, tmp_path: Path) -> None:
    sizes = SIZES | {"num_hidden_layers": 5, "head_dim": 16, "num_key_value_heads": 2}
    files = write_eagle(Qwen3Config(**sizes), tmp_path, prefix)
    options = BuildOptions(str(tmp_path), draft_method="eagle3", draft_model=str(tmp_path / "eagle"))
    _, config = check_options(replace(options, kv_cache_memory=2**24))
    model = load_model(tmp_path, torch.float32, CPU)
    model.config = replace(model.config, draft_layers=config.draft_layers)
    node = Node(model, StepLimits(max_num_batched_tokens=7), 4, 4)
    found, text = first_guesses(node, load_eagle(tmp_path / "eagle", model))
    states = files.states(text[:-1])
    for depth in range(3):
        last, expected = files.logits(text, states)
        kept = files.targets
        torch.testing.assert_close(found["r", 17 + depth][kept], expected[kept], atol=2e-4, rtol=2e-4)
        assert int(found["r", 17 + depth].argmax()) in kept.tolist()
        text, states = [*text, int(expected.argmax())], torch.cat((states, last))


# ---- the same answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", thinned(reversed(LAYERS), 3))
@settings(max_examples=6)
@given(
    seed=st.integers(0, 9),
    budget=st.integers(5, 64),
    block_tokens=st.sampled_from([1, 4, 16]),
    tight=st.booleans(),
    shared=st.booleans(),
    handed_over=st.booleans(),
)
def test_a_draft_head_changes_no_answer(
    kind: str, seed: int, budget: int, block_tokens: int, tight: bool, shared: bool, handed_over: bool
) -> None:
    (model, head), limits = model_of(kind), StepLimits(max_num_batched_tokens=budget)
    here, there = (Node(model, limits, 1.5 if tight else 6, block_tokens) for _ in range(2))
    for node in (here, there):
        drafting(node, head)
    expected = run_together(requests_of(seed, shared, SAMPLINGS), Node(model, StepLimits(), 6, 4))
    assert run_together(requests_of(seed, shared, SAMPLINGS), here, there if handed_over else None) == expected
    assert not here.scheduler.audit()


@pytest.mark.parametrize("handed_over", thinned([True, False], 2))
def test_an_eagle_head_changes_no_answer(handed_over: bool, tmp_path: Path) -> None:
    sizes = SIZES | {"num_hidden_layers": 5, "head_dim": 16, "num_key_value_heads": 2}
    write_eagle(Qwen3Config(**sizes), tmp_path, agrees=True)
    model = load_model(tmp_path, torch.float32, CPU)
    model.config = replace(model.config, draft_layers=1)
    accepted = 0
    for seed in range(3):
        expected = run_together(requests_of(seed, True, SAMPLINGS), Node(model, StepLimits(), 6, 4))
        here, there = (Node(model, StepLimits(max_num_batched_tokens=20), 6, 4) for _ in range(2))
        for node in (here, there):
            drafting(node, load_eagle(tmp_path / "eagle", model))
        assert run_together(requests_of(seed, True, SAMPLINGS), here, there if handed_over else None) == expected
        accepted += here.scheduler.counters.accepted_tokens
    assert accepted > 10


@pytest.mark.parametrize(("module", "width"), [("self_attn.o_proj", 64), ("mlp.down_proj", 20)])
def test_a_draft_head_changes_no_answer_of_an_adapter(module: str, width: int) -> None:
    model, head = model_of("grouped")
    adapters, size = ModelAdapters(model, Plain(torch.float32)), CONFIG.hidden_size
    update = LowRank(torch.eye(4, width), torch.linspace(-1, 1, 4 * size).view(size, 4))
    adapters.add(AdapterFiles("d", Path(), {f"model.layers.1.{module}": update}))
    found = []
    for drafts in (False, True):
        node = Node(model, StepLimits(max_num_batched_tokens=20), 6, 4)
        node.runner.adapters = adapters
        if drafts:
            drafting(node, head)
        rows = requests_of(3, False, SAMPLINGS)
        for row in rows[::2]:
            row.adapter = "d"
        found.append(run_together(rows, node))
    assert found[0] == found[1]


MANY = [
    ("eagle", 500, True),
    *((kind, 25_000, way) for way in (True, False) for kind in ["grouped", "latent", "eagle"]),
]


@pytest.mark.parametrize(("kind", "least", "handed_over"), thinned(MANY, len(MANY)))
def test_many_guesses_of_a_head_give_no_different_answer(
    kind: str, least: int, handed_over: bool, tmp_path: Path
) -> None:
    """Together, the cases of `make nightly` verify 150,000 guesses with each backend."""
    if kind == "eagle":
        write_eagle(
            Qwen3Config(**SIZES | {"num_hidden_layers": 5, "head_dim": 16, "num_key_value_heads": 2}),
            tmp_path,
            agrees=True,
        )
        model = load_model(tmp_path, torch.float32, CPU)
        model.config = replace(model.config, draft_layers=1)
        head = load_eagle(tmp_path / "eagle", model)
    else:
        model, head = model_of(kind)
    drafted = accepted = seed = 0
    while drafted < least:
        expected = run_together(requests_of(seed, False, SAMPLINGS), Node(model, StepLimits(), 6, 4))
        here, there = (Node(model, StepLimits(max_num_batched_tokens=64), 6, 4) for _ in "ht")
        for node in (here, there):
            drafting(node, head, 1 + seed % 8)
        assert run_together(requests_of(seed, False, SAMPLINGS), here, there if handed_over else None) == expected
        drafted += here.scheduler.counters.draft_tokens
        accepted += here.scheduler.counters.accepted_tokens
        seed += 1
    assert 0.02 * drafted < accepted < 0.98 * drafted


@pytest.mark.parametrize("kind", LAYERS)
def test_guesses_are_the_same_in_both_modes_after_hits_and_after_preemption(kind: str) -> None:
    """A guess depends only on the text. Its logits must not depend on where or in which steps the text was computed."""
    found, counted = [], []
    every: list[dict[str, Any]] = [{}, {"handed_over": True}, {"again": True}, {"room": 1.5}]
    for ways in every[:3] if kind == "recurrent" else every:  # a small pool has no room for a third state
        (model, head), limits = model_of(kind), StepLimits(max_num_batched_tokens=20)
        tight = "room" in ways
        here, there = (Node(model, limits, ways.get("room", 6), 1 if tight else 4) for _ in range(2))
        logits = recorded(drafting(here, head, 1))
        drafting(there, head, 1)
        if ways.get("again"):
            run_together(requests_of(0, True, SAMPLINGS), here)
            logits.clear()
        before = here.scheduler.counters.cache_hits
        run_together(requests_of(0, True, SAMPLINGS), here, there if ways.get("handed_over") else None)
        assert (here.scheduler.counters.cache_hits > before) or not ways.get("again")
        assert (here.scheduler.counters.preemptions > 0) == tight
        found.append(logits)
        counted.append((here.scheduler.counters.accepted_tokens, here.scheduler.counters.draft_tokens))
    assert counted[0][0] > 3
    for other in found[1:]:
        common = found[0].keys() & other.keys()
        assert len(common) > 10
        for key in common:
            torch.testing.assert_close(other[key], found[0][key], atol=1e-3, rtol=1e-3)


def test_a_failing_head_ends_only_the_guesses() -> None:
    model, head = model_of("grouped")
    node = Node(model, StepLimits(), 6, 4)
    drafter = drafting(node, head)
    store, steps = head.store, iter(range(4))

    def failing(*given: Any) -> None:
        next(steps)  # raises StopIteration after four steps
        store(*given)

    head.store = failing
    assert run_together(requests_of(3, False, SAMPLINGS), node) == run_together(
        requests_of(3, False, SAMPLINGS), Node(model, StepLimits(), 6, 4)
    )
    assert drafter.has_failed
    assert node.scheduler.counters.draft_tokens > 0


# ---- bad input ------------------------------------------------------------------------------------------------------


def options_of(where: Path, **more: Any) -> BuildOptions:
    return BuildOptions(str(where), draft_method="mtp", kv_cache_memory=2**24, **more)


@once
def test_a_checkpoint_without_an_mtp_layer_is_refused(tmp_path: Path) -> None:
    reference(CONFIGS["llama"]).save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match=r"--speculative-config: method mtp: .*no MTP layer.*: use the method ngram"):
        check_options(options_of(tmp_path / "llama"))
    write_mtp(CONFIGS["glm4 moe"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if "layers.3." not in name}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor model\.layers\.3\.eh_proj\.weight: download the checkpoint"):
        check_options(options_of(tmp_path))


@once
def test_an_incomplete_mtp_layer_is_refused_by_the_name_of_its_tensor(tmp_path: Path) -> None:
    write_mtp(CONFIGS["glm4 moe"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.3.shared_head.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'model\.layers\.3\.shared_head\.norm\.weight' is missing"):
        load_mtp(tmp_path, load_model(tmp_path, torch.float32, CPU))


@once
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"hidden_size": 64},
            r"config\.json: hidden_size is 64: the model has 48; take the EAGLE-3 checkpoint that was",
        ),
        ({"target_hidden_size": 64}, r"config\.json: target_hidden_size is 64: the model has 48"),
        ({"vocab_size": 98}, r"config\.json: vocab_size is 98: the model has 97; take the EAGLE-3 checkpoint"),
        ({"num_key_value_heads": 1}, r"num_key_value_heads is 1: it must be 2 as in the model.*use the method ngram"),
        ({"num_hidden_layers": 2}, r"num_hidden_layers is 2: only 1 is supported"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, r"the model has layers 0 to 4"),
    ],
)
def test_an_eagle_head_of_another_model_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_eagle(Qwen3Config(**SIZES | {"num_hidden_layers": 5}, head_dim=16, num_key_value_heads=2), tmp_path)
    file = tmp_path / "eagle" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    options = BuildOptions(str(tmp_path), draft_method="eagle3", draft_model=str(tmp_path / "eagle"))
    with pytest.raises(ValueError, match="--speculative-config: .*" + words):
        check_options(replace(options, kv_cache_memory=2**24))

"""Test that the decoder gives the logits of transformers for random chunks. Unused memory of the pool is NaN."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Phi3Config

from engine.attention import plan_tables
from engine.batch import BlockRows, build
from engine.models.decoder import Decoder
from engine.models.load import load_model
from engine.models.spec import Rope, state_units
from engine.runner import TorchRunner
from scheduler.request import Request
from shared.rpc.messages import SamplingParams
from tests.engine.build import (
    CPU,
    GREEDY,
    Blocks,
    States,
    device_code,
    every_backend,
    generate,
    in_one_piece,
    layout_of,
    piece,
    pool_of,
    run_step,
    state_size,
    thinned,
    torch_runner,
)
from tests.engine.families import CONFIGS, LONGROPE, MULTIMODAL, SIZES, kind_of, save
from tests.engine.quantized_files import change_config, quantize

STORIES = Path(__file__).parents[1] / "data" / "stories260K"
torch.set_num_threads(1)
__all__ = ["every_backend"]  # applies to every test here


@torch.inference_mode()
def all_logits(model: Decoder, rows: list[list[int]], random: Random, block_tokens: int) -> list[torch.Tensor]:
    """Return the logits of every position. Each step computes random chunks of randomly chosen rows."""
    one = layout_of(model, 96, block_tokens)
    size = state_size(model.config, one.block_bytes)
    layout = replace(one, num_blocks=one.num_blocks + 2 * len(rows) * size)
    pool = pool_of(model, layout, in_one_piece(model.config))
    (backend, kernels), blocks = device_code(model, pool), Blocks(one.num_blocks, block_tokens, pool.places.groups)
    states, rows_of = States(one.num_blocks, size), BlockRows(pool.places)
    # With the extra token, every position of the row is followed by a known prompt token.
    requests = [blocks.request([*row, 0], max_tokens=1, needs_prompt_logprobs=True) for row in rows]
    logits: list[list[torch.Tensor]] = [[] for _ in rows]
    while unfinished := [one for one in requests if one.num_computed < len(one.tokens) - 1]:
        chosen = random.sample(unfinished, random.randint(1, len(unfinished)))
        slices = [
            piece(one, min(random.choice([1, 1, 2, 5, 9, 16]), len(one.tokens) - 1 - one.num_computed))
            for one in chosen
        ]
        states.use(slices)
        batch = build(slices, block_tokens, CPU, rows=rows_of)
        found = model.logits(model.forward(batch, kernels.begin(batch), plan_tables(backend, pool, batch)))
        for one, part in zip(slices, found.split([one.count for one in slices]), strict=True):
            logits[requests.index(one.request)].append(part)
            one.request.num_computed = one.end
    return [torch.cat(parts) for parts in logits]


def largest_difference(
    reference_model: Any, model: Decoder, seed: int = 0, block_tokens: int = 4, lengths: Sequence[int] = (41, 1, 17, 8)
) -> float:
    random = Random(seed)
    vocab = model.config.vocab_size
    rows = [[random.randrange(vocab) for _ in range(length)] for length in lengths]
    ours = all_logits(model, rows, random, block_tokens)
    with torch.inference_mode():
        theirs = [reference_model(torch.tensor([row])).logits[0] for row in rows]
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", thinned(CONFIGS, 2))
def test_logits_equal_transformers_in_any_chunking(name: str, tmp_path: Path) -> None:
    reference_model = save(CONFIGS[name], tmp_path)
    model = load_model(tmp_path, torch.float32, CPU)
    for seed, block_tokens in ((1, 4), (2, 1)):
        # Transformers computes recurrences in chunks, so its rounding differs.
        limit = 4e-4 if state_units(model.config) else 1e-4
        assert largest_difference(reference_model, model, seed, block_tokens) <= limit


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_text_decoder_of_a_model_of_text_and_images(name: str, tmp_path: Path) -> None:
    reference_model = save(MULTIMODAL[name], tmp_path)
    assert largest_difference(reference_model, load_model(tmp_path, torch.float32, CPU)) <= 1e-4


def test_a_mistral_model_in_which_only_some_layers_have_a_window(tmp_path: Path) -> None:
    """Such files describe Ministral 8B. Transformers gives them another class if they are loaded by AutoModel."""
    save(CONFIGS["mistral, window 7"], tmp_path)
    change_config(tmp_path, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    reference_model = kind_of(CONFIGS["mistral"]).from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert type(reference_model).__name__ == "MinistralForCausalLM"
    assert largest_difference(reference_model, load_model(tmp_path, torch.float32, CPU)) <= 1e-4


def test_a_head_of_its_own_in_a_model_that_claims_to_have_none(tmp_path: Path) -> None:
    """Published configs of Mistral 3 omit `tie_word_embeddings`. When transformers saves such a config, it writes the
    default value."""
    reference_model = save(MULTIMODAL["mistral3"], tmp_path)
    change_config(tmp_path, tie_word_embeddings=True)
    assert largest_difference(reference_model, load_model(tmp_path, torch.float32, CPU)) <= 1e-4


def test_a_head_of_its_own_in_a_text_model_that_claims_to_have_none(tmp_path: Path) -> None:
    """As in transformers 5, the tensors decide: the head is tied to the embedding only if the two are equal."""
    reference_model = save(CONFIGS["llama"], tmp_path)
    change_config(tmp_path, tie_word_embeddings=True)
    assert largest_difference(reference_model, load_model(tmp_path, torch.float32, CPU)) <= 1e-4


def test_experts_that_the_checkpoint_stores_in_one_tensor(tmp_path: Path) -> None:
    """transformers stores the experts of Qwen3.5 separately. Published checkpoints have one tensor for each layer."""
    reference_model = save(CONFIGS["qwen3.5 moe"], tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for layer in {name.split(".experts.")[0] for name in stored if ".experts." in name}:
        parts = {each: [] for each in ("gate_proj", "up_proj", "down_proj")}  # type: ignore[var-annotated]
        for number in range(sum(name.startswith(f"{layer}.experts.") for name in stored) // 3):
            for each, tensors in parts.items():
                tensors.append(stored.pop(f"{layer}.experts.{number}.{each}.weight"))
        gate, up, down = (torch.stack(tensors) for tensors in parts.values())
        stored |= {f"{layer}.experts.gate_up_proj": torch.cat((gate, up), 1), f"{layer}.experts.down_proj": down}
    save_file(stored, file, {"format": "pt"})
    assert largest_difference(reference_model, load_model(tmp_path, torch.float32, CPU)) <= 4e-4


def test_a_config_that_transformers_4_wrote_for_qwen2_5_vl(tmp_path: Path) -> None:
    """In such a config, the text decoder has no section of its own, and the rotary embedding has a special type."""
    reference_model = save(MULTIMODAL["qwen2.5 vl"], tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    del text["rope_parameters"]
    rope = {"rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}}
    file.write_text(json.dumps(text | config | rope))
    assert largest_difference(reference_model, load_model(tmp_path, torch.float32, CPU)) <= 1e-4


def test_latent_attention_of_fp8_blocks(tmp_path: Path) -> None:
    source, target = tmp_path / "dense", tmp_path / "fp8"
    save(CONFIGS["deepseek v3"], source)
    quantize(source, target, "fp8 blocks")  # also gives the matrices in `source` the values of the blocks
    values = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    assert largest_difference(values.eval(), load_model(target, torch.float32, CPU)) <= 1e-4


@pytest.mark.parametrize("block", [[16, 16], None], ids=["blocks", "one scale"])
def test_experts_of_fp8_in_one_tensor(block: list[int] | None, tmp_path: Path) -> None:
    save(CONFIGS["mistral4"], tmp_path)
    file = tmp_path / "model.safetensors"
    values = load_file(file)
    stored = dict(values)
    for name, tensor in [(name, tensor) for name, tensor in values.items() if tensor.ndim == 3]:
        count, out, width = tensor.shape
        gates = 2 if "gate_up" in name else 1
        high, wide = block or (out // gates, width)
        scales = torch.rand(count, -(-out // high), -(-width // wide)) * 0.002 + 0.001
        each = scales.repeat_interleave(high, 1)[:, :out].repeat_interleave(wide, 2)[..., :width]
        codes = (tensor / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        values[name] = (codes.float() * each).bfloat16().float()
        stored |= {name: codes, f"{name}_scale_inv": scales, f"{name}_activation_scale": torch.ones(count)}
    save_file(values, file, {"format": "pt"})
    expected = transformers.Mistral4ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    save_file(stored, file, {"format": "pt"})
    change_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": block})
    assert largest_difference(expected, load_model(tmp_path, torch.float32, CPU)) <= 1e-4
    save_file(
        stored | {name: torch.full_like(scales, torch.nan) for name, scales in stored.items() if "_inv" in name}, file
    )
    with pytest.raises(ValueError, match=r"experts\.(gate_up|down)_proj_scale_inv' has a scale that is NaN"):
        load_model(tmp_path, torch.float32, CPU)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama, biases", "mistral, window 7", "qwen2, windows"])
def test_the_last_layer_attends_only_for_rows_that_draw(name: str, tmp_path: Path) -> None:
    save(CONFIGS[name], tmp_path)
    model = load_model(tmp_path, torch.float32, CPU)
    pools = []
    for spares in (False, True):
        layout = layout_of(model, 96, 4)
        pool = pool_of(model, layout)
        pool.tensor.zero_()
        (backend, kernels), blocks = device_code(model, pool), Blocks(layout.num_blocks, 4, pool.places.groups)
        whole, half, short = (blocks.request(list(range(count)), max_tokens=4) for count in (41, 30, 9))
        found = []
        for sizes in (
            {half: 13},  # no request draws a token
            {whole: 41, half: 6, short: 9},  # `half` does not draw a token
            {half: 11},
        ):
            slices = [piece(request, size) for request, size in sizes.items()]
            batch = build(slices, 4, CPU, rows=BlockRows(pool.places))
            drawing = batch.drawing()
            assert drawing is not None
            assert drawing.counts == [1] * len(batch.sampled)
            plan = plan_tables(backend, pool, drawing) if spares else None
            hidden = model.forward(batch, kernels.begin(batch), plan_tables(backend, pool, batch), plan)
            found.append(model.logits(hidden))
            for one in slices:
                one.request.num_computed = one.end
        assert [len(rows) for rows in found] == [0, 2, 1]
        pools.append((torch.cat(found), pool.tensor.clone()))
    (logits, stored), (spared, same) = pools
    torch.testing.assert_close(spared, logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(stored, same)


def test_a_batch_of_decodes_or_with_prompt_logprobs_has_no_drawing_batch() -> None:
    blocks = Blocks(96, 4)
    decode, scored = blocks.request([1]), blocks.request([1, 2, 3], needs_prompt_logprobs=True)
    assert build([piece(decode, 1)], 4, CPU).drawing() is None
    assert build([piece(scored, 3)], 4, CPU).drawing() is None


def test_longrope_uses_the_factors_for_long_contexts(tmp_path: Path) -> None:
    """Transformers chooses the factors for each prompt by its length. All prompts of this test are long."""
    sizes = SIZES | {"original_max_position_embeddings": 8}
    reference_model = save(
        Phi3Config(**sizes, num_key_value_heads=2, rope_parameters=LONGROPE, pad_token_id=0), tmp_path
    )
    model = load_model(tmp_path, torch.float32, CPU)
    assert model.config.ropes[0] == Rope(
        10000.0, "longrope", original_max_position_embeddings=8, magnitude=pytest.approx((1 + 5 / 3) ** 0.5),
        factors=(1.0, 1.5, 2.0, 4.0), dims=8,
    )  # fmt: skip
    assert largest_difference(reference_model, model, lengths=(41, 17, 9)) <= 1e-4


def test_a_long_step_is_split_in_the_mlp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.mlp.MLP_ROWS", 3)
    reference_model = save(CONFIGS["llama, biases"], tmp_path)
    assert largest_difference(reference_model, load_model(tmp_path, torch.float32, CPU)) <= 1e-4


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama, grouped, tied", {"dtype": torch.bfloat16}),
        ("llama, grouped, tied", {"dtype": torch.float16}),
        ("qwen3", {"max_shard_size": "40KB"}),
        ("llama 3 rope", {}),
    ],
)
def test_files_of_half_precision_in_shards_and_of_transformers_4_are_read_exactly(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    reference_model = save(CONFIGS[name], tmp_path, **options)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == ("max_shard_size" in options)
    if not options:  # write the config as transformers 4 did
        config = json.loads((tmp_path / "config.json").read_text())
        scaling = config.pop("rope_parameters")
        config["rope_theta"], config["rope_scaling"] = scaling.pop("rope_theta"), scaling
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert largest_difference(reference_model, load_model(tmp_path, torch.float32, CPU)) <= 1e-4


@pytest.mark.parametrize("name", ["qwen3", "deepseek, no query rank, biases", "gemma4"])
def test_a_16_bit_pool_stays_near_the_exact_logits(name: str, tmp_path: Path) -> None:
    reference_model = save(CONFIGS[name], tmp_path)
    model = load_model(tmp_path, torch.float32, CPU)
    layout = replace(layout_of(model, 16, 4), dtype="bfloat16")
    pool = pool_of(model, layout)
    runner = TorchRunner(model, pool, *device_code(model, pool), CPU)
    request = Blocks(layout.num_blocks, 4, pool.places.groups).request(
        range(3, 30), SamplingParams(temperature=0.0, logprobs=5), max_tokens=1
    )
    (output,) = run_step(runner, [piece(request)])
    with torch.inference_mode():
        theirs = reference_model(torch.tensor([request.tokens[:27]])).logits[0, -1].log_softmax(0)
    (entry,) = output.logprobs
    for token, logprob in zip(entry.top_tokens, entry.top_logprobs, strict=True):
        assert abs(float(theirs[token]) - logprob) < 0.1


def golden() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((STORIES / "golden_greedy.json").read_text())["cases"]
    return cases


@pytest.mark.parametrize("budget", [7, 4096])
def test_a_trained_model_generates_the_golden_stories(budget: int) -> None:
    model = load_model(STORIES, torch.float32, CPU)
    runner, _, blocks = torch_runner(model, num_blocks=400, block_tokens=16)
    cases = golden()
    requests: list[Request] = [
        blocks.request(case["prompt_token_ids"], GREEDY, 160, stop_tokens=frozenset(model.config.eos_token_ids))
        for case in cases
    ]
    answers = generate(runner, requests, budget)
    for case, answer in zip(cases, answers, strict=True):
        assert answer == case["completion_token_ids"]

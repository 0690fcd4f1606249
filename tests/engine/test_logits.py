"""Test that the decoder gives the logits of transformers, in random chunks over a pool whose unused memory is NaN."""

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
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Ministral3Config,
    Mistral3Config,
    Mistral4Config,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    SmolLM3Config,
)

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
    layout_of,
    piece,
    pool_of,
    run_step,
    thinned,
    torch_runner,
)
from tests.engine.quantized_files import change_config, quantize

STORIES = Path(__file__).parents[1] / "data" / "stories260K"
torch.set_num_threads(1)
__all__ = ["every_backend"]  # applies to every test here

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}
MINISTRAL = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 8,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0, 1.5, 2.0, 4.0],
    "short_factor": [1.0, 1.0, 1.2, 1.5],
    "original_max_position_embeddings": 8,
    "partial_rotary_factor": 2 / 3,
}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
GLM_MOE = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
    "v_head_dim": 14, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "moe_intermediate_size": 20,
}  # fmt: skip
DEEPSEEK_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 6, "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
LINEAR_ATTENTION = {
    "num_key_value_heads": 2, "head_dim": 16, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "full_attention_interval": 3,
}  # fmt: skip
SHARED_MOE = QWEN_MOE | {"shared_expert_intermediate_size": 28}
GRANITE4 = {
    "num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 10, "mamba_n_groups": 2, "mamba_d_conv": 3,
    "mamba_chunk_size": 16, "shared_intermediate_size": 20, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
    "attention_multiplier": 0.2, "logits_scaling": 2.5,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=4),
    "llama, grouped, tied": LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "llama, one kv head, head_dim 20": LlamaConfig(**SIZES, num_key_value_heads=1, head_dim=20),
    "llama, biases": LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    "llama 3 rope": LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=20, rope_parameters=LLAMA3),
    "llama, linear rope": LlamaConfig(**SIZES, num_key_value_heads=2, rope_parameters=LINEAR),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=None),
    "mistral, window 7": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=7),
    "mistral, window 1": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=1),
    "ministral3": Ministral3Config(**SIZES, num_key_value_heads=2, head_dim=16, rope_parameters=MINISTRAL),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2),
    "qwen2, windows": Qwen2Config(
        **SIZES, num_key_value_heads=1, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=20),
    "qwen3, tied, bias": Qwen3Config(
        **SIZES, num_key_value_heads=4, head_dim=8, attention_bias=True, tie_word_embeddings=True
    ),
    "llama, yarn": LlamaConfig(**SIZES, num_key_value_heads=2, rope_parameters=YARN),
    "smollm3": SmolLM3Config(**SIZES | {"num_hidden_layers": 4}, num_key_value_heads=2, pad_token_id=0),
    "phi3, window": Phi3Config(**SIZES, num_key_value_heads=2, sliding_window=9, pad_token_id=0),
    "granite": GraniteConfig(
        **SIZES,
        num_key_value_heads=2,
        embedding_multiplier=3.0,
        logits_scaling=2.5,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
    ),
    "mixtral": MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, sliding_window=None),
    "qwen2 moe": Qwen2MoeConfig(
        **SIZES, **QWEN_MOE, num_key_value_heads=2, shared_expert_intermediate_size=28, mlp_only_layers=[1]
    ),
    "qwen3 moe": Qwen3MoeConfig(**SIZES, **QWEN_MOE, num_key_value_heads=2, head_dim=16, norm_topk_prob=True),
    "glm4 moe": Glm4MoeConfig(**SIZES, **GLM_MOE, num_key_value_heads=2, head_dim=16, use_qk_norm=True),
    "deepseek v2": DeepseekV2Config(
        **SIZES,
        **LATENT,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.5,
        rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek v2 lite": DeepseekV2Config(**SIZES, **LATENT | {"q_lora_rank": None}, first_k_dense_replace=1),
    "deepseek v3": DeepseekV3Config(
        **SIZES, **LATENT, first_k_dense_replace=1, n_group=4, topk_group=2, rope_parameters=DEEPSEEK_YARN
    ),
    "deepseek, no query rank, biases": DeepseekV3Config(
        **SIZES,
        **LATENT | {"q_lora_rank": None, "kv_lora_rank": 34},
        first_k_dense_replace=3,
        n_group=1,
        topk_group=1,
        rope_interleave=False,
        attention_bias=True,
    ),
    "glm4 moe lite": Glm4MoeLiteConfig(**SIZES, **LATENT | {"kv_lora_rank": 18}),
    "mistral4": Mistral4Config(
        **SIZES, **LATENT, rope_parameters=MINISTRAL | {"partial_rotary_factor": 8 / 18, "type": "yarn"}
    ),
    "gpt oss": GptOssConfig(
        **SIZES | {"num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
    ),
    "gemma2": Gemma2Config(
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=6,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma4": Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        **GEMMA4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=5.0,
    ),
    "gemma4 moe": Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        **GEMMA4 | {"head_dim": 12, "global_head_dim": 24},
        num_key_value_heads=4,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=20,
    ),
    "qwen3 next": Qwen3NextConfig(**SIZES, **LINEAR_ATTENTION, **SHARED_MOE, decoder_sparse_step=2),
    "qwen3.5": Qwen3_5TextConfig(**SIZES, **LINEAR_ATTENTION, tie_word_embeddings=True),
    "qwen3.5 moe": Qwen3_5MoeTextConfig(
        **{key: value for key, value in SIZES.items() if key != "intermediate_size"}, **LINEAR_ATTENTION, **SHARED_MOE
    ),
    "granite 4": GraniteMoeHybridConfig(**SIZES, **GRANITE4, num_local_experts=4, num_experts_per_tok=2),
    "granite 4, dense, rope": GraniteMoeHybridConfig(
        **SIZES, **GRANITE4 | {"mamba_proj_bias": True}, num_local_experts=0, position_embedding_type="rope"
    ),
    "gemma3": Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 6},
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=12,
        sliding_window=6,
    ),
}

TEXT = SIZES | {"num_key_value_heads": 2, "head_dim": 16}
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
GEMMA4_VISION = VISION | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4}
QWEN_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4, "out_hidden_size": 48,
    "num_position_embeddings": 64, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0], "window_size": 16,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0}
MULTIMODAL: dict[str, PretrainedConfig] = {
    "gemma3": Gemma3Config(
        text_config=TEXT | {"sliding_window": 6, "query_pre_attn_scalar": 12},
        vision_config=VISION,
        mm_tokens_per_image=4,
    ),
    "gemma4": Gemma4Config(
        text_config=TEXT | GEMMA4 | {"num_hidden_layers": 4, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        vision_config=GEMMA4_VISION,
        audio_config=None,
    ),
    "mistral3": Mistral3Config(
        text_config=TEXT | {"model_type": "mistral"},
        vision_config=VISION | {"model_type": "pixtral", "head_dim": 16},
        tie_word_embeddings=False,
    ),
    "mistral3, ministral": Mistral3Config(
        text_config=TEXT | {"model_type": "ministral3", "rope_parameters": MINISTRAL},
        vision_config=VISION | {"model_type": "pixtral", "head_dim": 16},
    ),
    "qwen2.5 vl": Qwen2_5_VLConfig(
        text_config=SIZES
        | {"num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_parameters": MROPE | {"mrope_section": [1, 2, 3]}},
        vision_config={name: value for name, value in QWEN_VISION.items() if name != "num_position_embeddings"},
    ),
    "qwen3 vl": Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": MROPE | {"mrope_section": [2, 3, 3], "mrope_interleaved": True}},
        vision_config=QWEN_VISION,
    ),
}


def kind_of(config: PretrainedConfig) -> Any:
    """Return the class of transformers that builds or loads the model of a config."""
    if isinstance(config, Mistral4Config):  # AutoModelForCausalLM does not have it
        return transformers.Mistral4ForCausalLM
    return (
        transformers.AutoModelForImageTextToText
        if hasattr(config, "vision_config")
        else transformers.AutoModelForCausalLM
    )


def reference(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random model. Its norms and biases are random too, since the usual ones and zeros would hide errors."""
    torch.manual_seed(7)
    kind = kind_of(config)
    made = kind.from_config(config, attn_implementation="eager") if hasattr(kind, "from_config") else kind(config)
    model = made.eval()
    for name, parameter in model.named_parameters():
        scale = 0.8 if "conv1d" in name else 0.15 if parameter.ndim > 1 else 0.3
        parameter.data = torch.randn_like(parameter) * scale + (1.0 if "norm" in name else 0.0)
    for name, buffer in model.named_buffers():
        if name.endswith(("layer_scalar", "e_score_correction_bias")):
            buffer.copy_(torch.rand_like(buffer) * 0.3 + 0.8)
    return model.to(dtype)


def save(config: PretrainedConfig, where: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    reference(config, dtype).save_pretrained(where, **options)
    return kind_of(config).from_pretrained(where, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def all_logits(model: Decoder, rows: list[list[int]], random: Random, block_tokens: int) -> list[torch.Tensor]:
    """Return the logits of every position. Each step computes random chunks of randomly chosen rows."""
    one = layout_of(model, 96, block_tokens)
    in_states = 8 * len(rows) * sum(state_units(model.config))  # two states of each request, in bytes
    layout = replace(one, num_blocks=one.num_blocks + -(-in_states // one.block_bytes))
    pool = pool_of(model, layout)
    (backend, kernels), blocks = device_code(model, pool), Blocks(one.num_blocks, block_tokens, pool.places.groups)
    states, rows_of = States(model, pool, one.num_blocks), BlockRows(pool.places)
    # With the extra token, every position of the row is followed by a known prompt token.
    requests = [blocks.request([*row, 0], max_tokens=1, needs_prompt_logprobs=True) for row in rows]
    logits: list[list[torch.Tensor]] = [[] for _ in rows]
    while unfinished := [one for one in requests if one.num_computed < len(one.tokens) - 1]:
        chosen = random.sample(unfinished, random.randint(1, len(unfinished)))
        slices = [
            piece(one, min(random.choice([1, 1, 2, 5, 9, 16]), len(one.tokens) - 1 - one.num_computed))
            for one in chosen
        ]
        batch = build(slices, block_tokens, CPU, rows=rows_of)
        if in_states:
            batch.states = states.batch(slices)
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
        # Transformers computes recurrences in chunks, whose rounding differs.
        limit = 4e-4 if state_units(model.config) else 1e-4
        assert largest_difference(reference_model, model, seed, block_tokens) <= limit


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_text_decoder_of_a_model_of_text_and_images(name: str, tmp_path: Path) -> None:
    reference_model = save(MULTIMODAL[name], tmp_path)
    assert largest_difference(reference_model, load_model(tmp_path, torch.float32, CPU)) <= 1e-4


def test_a_head_of_its_own_in_a_model_that_claims_to_have_none(tmp_path: Path) -> None:
    """Files of Mistral 3 leave `tie_word_embeddings` out, and transformers writes its default when it saves them."""
    reference_model = save(MULTIMODAL["mistral3"], tmp_path)
    change_config(tmp_path, tie_word_embeddings=True)
    assert largest_difference(reference_model, load_model(tmp_path, torch.float32, CPU)) <= 1e-4


def test_a_config_that_transformers_4_wrote_for_qwen2_5_vl(tmp_path: Path) -> None:
    """Its keys of the text decoder are not nested, and its rotary embedding has a type of its own."""
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
    quantize(source, target, "fp8 blocks")  # replaces the matrices of `source` by the values of the blocks
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
    """Transformers chooses the factors by the length of each prompt; these prompts are all long."""
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
    assert output.logprobs is not None
    for token, logprob in zip(output.logprobs.top_tokens, output.logprobs.top_logprobs, strict=True):
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

"""Test models that run through transformers' modules: their logits, the check at load, and the refused models."""

import json
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    BartConfig,
    BertConfig,
    BloomConfig,
    Cohere2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    FalconConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
    Starcoder2Config,
)

from engine.components import build
from engine.cpu import why_not_compiled
from engine.cpu.selection import attention_on_cpu, linear_on_cpu
from engine.foreign.check import check
from engine.foreign.config import choose_config, read_foreign_config
from engine.foreign.decoder import ForeignDecoder
from engine.foreign.load import checked, load_foreign, read_module
from engine.kv_pool import KVPool
from engine.options import BuildOptions, check_options
from engine.startup import EngineComponents
from scheduler.request import Slice, StateUse
from tests.engine.build import Blocks, generate, run_step, states_in

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2, "intermediate_size": 52}
LATENT = SIZES | {
    "intermediate_size": 52, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 12, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8, "v_head_dim": 14, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "moe_intermediate_size": 20, "n_group": 1, "topk_group": 1,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "gpt neox": GPTNeoXConfig(**SIZES, intermediate_size=52),
    "opt": OPTConfig(**SIZES, ffn_dim=52, word_embed_proj_dim=48),
    "gpt2": GPT2Config(**SIZES),
    "phi": PhiConfig(**SIZES, intermediate_size=52),
    "starcoder2, windows": Starcoder2Config(**GROUPED, sliding_window=9),
    "cohere2, windows": Cohere2Config(**GROUPED | {"num_hidden_layers": 4}, sliding_window=6),
    "llama": LlamaConfig(**GROUPED),
    "gpt oss, sinks": GptOssConfig(
        **GROUPED, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=6
    ),
    "gemma2, soft cap": Gemma2Config(
        **GROUPED, head_dim=16, sliding_window=6, query_pre_attn_scalar=24, attn_logit_softcapping=2.0
    ),
    "gemma4, two sizes of heads": Gemma4TextConfig(
        **GROUPED | {"num_hidden_layers": 4}, head_dim=16, global_head_dim=32, vocab_size_per_layer_input=97,
        hidden_size_per_layer_input=8, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=6,
        num_kv_shared_layers=2,
    ),
    "deepseek, keys larger than values": DeepseekV3Config(**LATENT),
    "lfm2, short convolutions": Lfm2Config(**GROUPED, layer_types=["conv", "full_attention", "conv"]),
    "falcon h1, states next to attention": FalconH1Config(
        **GROUPED, mamba_d_ssm=96, mamba_n_heads=6, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2
    ),
    "jamba, weights that are read": JambaConfig(
        **GROUPED, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8, mamba_dt_rank=4
    ),
}  # fmt: skip


def save(config: PretrainedConfig, where: Path, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        scale = 0.15 if parameter.ndim > 1 else 0.3
        parameter.data = torch.randn_like(parameter) * scale + (1.0 if "norm" in name else 0.0)
    model.to(dtype).save_pretrained(where)
    return model.float()


def backend(pool: KVPool) -> Any:
    return attention_on_cpu("auto", pool)


def load(where: Path) -> ForeignDecoder:
    return load_foreign(where, read_foreign_config(where), linear_on_cpu("auto", "none"), backend)


def built(where: Path, **options: Any) -> EngineComponents:
    return build(BuildOptions(str(where), threads=1, num_blocks=512, **options))


@pytest.mark.parametrize("name", CONFIGS)
def test_requests_in_company_get_the_tokens_of_generate(name: str, tmp_path: Path) -> None:
    reference = save(CONFIGS[name], tmp_path)
    reference.generation_config.eos_token_id = None
    prompts = [[Random(seed).randrange(3, 97) for _ in range(length)] for seed, length in enumerate((1, 41, 17))]
    expected = [
        reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0].tolist() for prompt in prompts
    ]
    components = built(tmp_path, model_impl="transformers", block_size=16)
    for budget in (7, 64):
        blocks, states = Blocks(256, 16, components.groups), states_in(components.groups, 256)
        requests = [blocks.request(prompt, max_tokens=12) for prompt in prompts]
        found = generate(components.runner, requests, budget, states)
        assert [prompt + tokens for prompt, tokens in zip(prompts, found, strict=True)] == expected


def test_a_state_is_saved_inside_a_chunk(tmp_path: Path) -> None:
    save(CONFIGS["falcon h1, states next to attention"], tmp_path)
    components = built(tmp_path, model_impl="transformers", block_size=16)
    size = components.groups[-1].rows
    own, saved, other = (tuple(range(first, first + size)) for first in (256, 256 + size, 256 + 2 * size))
    prompt = [Random(3).randrange(3, 97) for _ in range(21)]
    request = Blocks(256, 16, components.groups).request(prompt)
    run_step(components.runner, [Slice(request, 0, 21, True, 0, StateUse(None, own, 16, saved))])
    answer, request.tokens = request.tokens, list(prompt)
    run_step(components.runner, [Slice(request, 16, 5, True, 0, StateUse(saved, other))])
    assert request.tokens == answer
    assert len(answer) == 22
    rows = components.memory.rows.view("float32")
    assert rows[list(own)].any()
    assert abs(rows[list(own)] - rows[list(other)]).max() < 1e-5


def test_code_that_starts_chunks_without_a_state_gets_single_tokens(tmp_path: Path) -> None:
    save(CONFIGS["lfm2, short convolutions"], tmp_path)
    config = read_foreign_config(tmp_path)
    module = read_module(tmp_path, config)
    for layer in module.model.layers:
        if not layer.is_attention_layer:
            layer.conv.register_forward_pre_hook(without_state, with_kwargs=True)
    decoder = ForeignDecoder(module, config)
    with pytest.raises(ValueError, match="computed in chunks, with other prompts has logits that differ"):
        check(decoder, backend)
    checked(decoder, backend)
    assert decoder.stepwise


def without_state(
    module: Any, given: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the state by an empty one if there are several tokens."""
    cache, hidden = options["cache"], given[0] if given else options["hidden_states"]
    if cache is not None and hidden.shape[1] > 1:
        cache.layers[module.layer_idx].reset()
    return given, options


def test_sizes_of_keys_and_values_are_those_that_the_model_has(tmp_path: Path) -> None:
    save(CONFIGS["deepseek, keys larger than values"], tmp_path)
    assert read_foreign_config(tmp_path).head_dim == 8
    config = load(tmp_path).config
    assert (config.num_kv_heads, config.head_dim) == (4, 18)


@pytest.mark.parametrize("flags", [{"quantization": "int8"}, {"weight_dtype": "bfloat16"}])
def test_weights_may_be_rounded(flags: dict[str, str], tmp_path: Path) -> None:
    save(CONFIGS["gpt neox"], tmp_path)
    linear = linear_on_cpu(flags.get("weight_dtype", "auto"), flags.get("quantization", "none"))
    load_foreign(tmp_path, read_foreign_config(tmp_path), linear, backend)


@pytest.mark.skipif(bool(why_not_compiled()), reason="needs compiled kernels")
def test_sixteen_bit_weights_stay_in_sixteen_bits(tmp_path: Path) -> None:
    save(CONFIGS["gpt neox"], tmp_path, torch.bfloat16)
    linear = linear_on_cpu("auto", "none")
    load_foreign(tmp_path, read_foreign_config(tmp_path), linear, backend)
    assert linear.name.startswith("bfloat16")


def test_a_model_that_depends_on_its_chunks_fails_the_check(tmp_path: Path) -> None:
    save(CONFIGS["gpt neox"], tmp_path)
    decoder = load(tmp_path)
    embed = decoder.module.gpt_neox.embed_in
    embed.register_forward_hook(lambda _, __, out: out * (1 + 0.01 * (out.shape[1] in {3, 17, 40})))
    with pytest.raises(ValueError, match="computed in chunks, with other prompts has logits that differ"):
        check(decoder, backend)


REFUSED: dict[str, tuple[PretrainedConfig, dict[str, Any], str]] = {
    "code": (CONFIGS["opt"], {"auto_map": {"AutoModel": "x.Y"}}, "auto_map is .*never run"),
    "quantized": (CONFIGS["opt"], {"quantization_config": {"quant_method": "awq"}}, "only on Baton's own families"),
    "encoder": (CONFIGS["opt"], {"is_encoder_decoder": True}, "only decoders"),
    "unknown": (CONFIGS["opt"], {"architectures": ["NoSuchForCausalLM"]}, "has no decoder of this name"),
    "not a decoder": (CONFIGS["opt"], {"architectures": ["OPTModel"]}, "has no decoder of this name"),
    "rotation": (
        LlamaConfig(**GROUPED),
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rope_type is 'dynamic'.*would depend on other requests",
    ),
    "own attention": (FalconConfig(**SIZES, alibi=False), {}, "does not use the attention interface"),
    "no length": (
        BloomConfig(vocab_size=97, hidden_size=48, n_layer=3, n_head=4),
        {},
        "has no attribute 'max_position",
    ),
    "chosen tokens": (
        DeepseekV32Config(**LATENT, index_topk=8, index_n_heads=2, index_head_dim=16),
        {},
        "has indexed_attention: layers that attend to chosen tokens",
    ),
    "local chunks": (
        Llama4TextConfig(**GROUPED, head_dim=12, intermediate_size_mlp=52, num_local_experts=2, attention_chunk_size=9),
        {},
        r"a token attends to tokens other than the latest ones \(local size 9\)",
    ),
    "an encoder": (
        BertConfig(**SIZES, intermediate_size=52),
        {},
        "a token attends to later ones: this is not a decoder",
    ),
    "positions of its own": (
        BartConfig(**SIZES, decoder_layers=3, decoder_attention_heads=4, decoder_ffn_dim=52, d_model=48),
        {},
        "the check failed.*its code takes no position_ids",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_run_are_refused_by_name(name: str, tmp_path: Path) -> None:
    config, changes, reason = REFUSED[name]
    save(config, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=reason) as error:
        built(tmp_path, model_impl="transformers")
    assert str(tmp_path) in str(error.value)


def test_missing_and_unknown_tensors_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save(CONFIGS["gpt neox"], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    moved = {name: tensor for name, tensor in tensors.items() if not name.endswith("layers.1.mlp.dense_4h_to_h.bias")}
    save_file(moved, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"1 tensors are missing, such as .*dense_4h_to_h.bias"):
        load(tmp_path)
    save_file(tensors | {"extra": torch.ones(2)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="1 tensors are not part of the model, such as extra"):
        load(tmp_path)


def test_auto_prefers_a_family_of_baton_and_nodes_of_both_ways_do_not_exchange_kv(tmp_path: Path) -> None:
    save(CONFIGS["llama"], tmp_path)
    assert choose_config(tmp_path, "auto").transformers == ""
    native, foreign = built(tmp_path), built(tmp_path, model_impl="transformers")
    assert native.layout == foreign.layout
    assert native.fingerprint != foreign.fingerprint
    assert native.attributes["model_impl"] == "baton"
    assert foreign.attributes["model_impl"] == f"transformers {transformers.__version__}"


def test_only_a_model_without_a_family_runs_through_transformers_by_default(tmp_path: Path) -> None:
    save(CONFIGS["gpt neox"], tmp_path)
    assert check_options(BuildOptions(str(tmp_path)))[1].transformers == transformers.__version__
    with pytest.raises(ValueError, match=r"architectures is .*GPTNeoXForCausalLM.*must be one of"):
        check_options(BuildOptions(str(tmp_path), model_impl="baton"))


def test_code_that_reads_the_mask_is_refused_by_name(tmp_path: Path) -> None:
    config = transformers.DogeConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    save(config, tmp_path)
    with pytest.raises(
        ValueError, match=r"DogeForCausalLM through transformers .*: its code cannot run over a KV pool"
    ):
        load(tmp_path)


def test_layers_may_differ_in_the_size_of_their_heads(tmp_path: Path) -> None:
    save(CONFIGS["gemma4, two sizes of heads"], tmp_path)
    config = load(tmp_path).config
    assert (config.num_kv_heads, config.head_dim) == (2, 32)


def test_layers_with_windows_form_a_group(tmp_path: Path) -> None:
    save(CONFIGS["cohere2, windows"], tmp_path)
    groups = built(tmp_path, model_impl="transformers").groups
    assert [(group.kind, group.size) for group in groups] == [("full", 0), ("window", 6)]


def test_a_config_whose_windows_are_not_those_of_the_code_is_refused(tmp_path: Path) -> None:
    """Transformers' GPT-NeoX has no windows, whatever its config.json says."""
    config = deepcopy(CONFIGS["gpt neox"])
    config.layer_types, config.sliding_window = ["full_attention", "sliding_attention", "full_attention"], 9
    save(config, tmp_path)
    with pytest.raises(
        ValueError, match=r"windows of \[0, 9, 0\] tokens .* transformers' code attends to \[0, 0, 0\]; correct config"
    ):
        load(tmp_path)

"""Test that quantized checkpoints are served with exactly the weights that they represent, and refused if damaged."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, LlamaConfig, Phi3Config, PretrainedConfig, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.attention import plan_tables
from engine.batch import BlockRows, build
from engine.cpu import why_not_compiled
from engine.cpu.selection import linear_on_cpu
from engine.formats.forms import E2M1, INTEGERS, GroupedWeight
from engine.linear import LinearFormat, SeparateExperts
from engine.models.families import read_model_config
from engine.models.load import load_model
from engine.options import BuildOptions, check_options
from tests.engine.build import CPU, GREEDY, device_code, generate, piece, torch_runner
from tests.engine.quantized_files import AWQ, FORMATS, GPTQ, change_config, compressed, quantize

compiled = pytest.mark.skipif(bool(why_not_compiled()), reason=f"no compiled kernels: {why_not_compiled()}")
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = LlamaConfig(**SIZES)
MOE = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
FUSED = Phi3Config(**SIZES, pad_token_id=0)
GPT_OSS = GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=6)
UP = "model.layers.0.mlp.up_proj"


def write(config: PretrainedConfig, where: Path) -> Path:
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.15 + (parameter.ndim == 1)
    model.save_pretrained(where)
    return where


def logits(path: Path, linear: LinearFormat | None = None) -> Tensor:
    """Return the logits of every position of a prompt."""
    model = load_model(path, torch.float32, CPU, linear)
    _, pool, blocks = torch_runner(model)
    backend, kernels = device_code(model, pool)
    prompt = [1, *range(3, 40)]
    batch = build(
        [piece(blocks.request([*prompt, 0], needs_prompt_logprobs=True), len(prompt))],
        4,
        CPU,
        rows=BlockRows(pool.places),
    )
    with torch.inference_mode():
        return model.logits(model.forward(batch, kernels.begin(batch), plan_tables(backend, pool, batch)))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_quantized_model_equals_its_dense_values(kind: str, tmp_path: Path) -> None:
    dense = write(LLAMA, tmp_path / "dense")
    quantize(dense, tmp_path / "quantized", kind)
    wanted = logits(dense)
    assert float((logits(tmp_path / "quantized") - wanted).abs().max()) <= 1e-4
    if not why_not_compiled():
        found = logits(tmp_path / "quantized", linear_on_cpu("auto", "none"))
        largest = 1e-4 if kind != "int-quantized" else 0.1 * float(wanted.abs().max())  # 8-bit activations
        assert float((found - wanted).abs().max()) <= largest


@pytest.mark.parametrize("kind", ["fp8 blocks", "awq", "gptq act-order", "nvfp4"])
@pytest.mark.parametrize("config", [MOE, FUSED], ids=["experts", "fused"])
def test_experts_and_fused_matrices_of_other_families(config: PretrainedConfig, kind: str, tmp_path: Path) -> None:
    dense = write(config, tmp_path / "dense")
    quantize(dense, tmp_path / "quantized", kind)
    linear = None if why_not_compiled() else linear_on_cpu("auto", "none")
    assert float((logits(tmp_path / "quantized", linear) - logits(dense)).abs().max()) <= 1e-4


def test_mxfp4_experts_of_gpt_oss_equal_transformers(tmp_path: Path) -> None:
    """The expected values come from transformers' own conversion."""
    dense, target = write(GPT_OSS, tmp_path / "dense"), tmp_path / "mxfp4"
    target.mkdir()
    values = load_file(dense / "model.safetensors")
    stored = dict(values)
    for name in [one for one in values if one.endswith(("gate_up_proj", "down_proj"))]:
        count, width, out = values[name].shape
        blocks = torch.randint(0, 256, (count, out, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, (count, out, width // 32), dtype=torch.uint8)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(values, dense / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, target / "model.safetensors")
    (target / "config.json").write_bytes((dense / "config.json").read_bytes())
    change_config(target, quantization_config={"quant_method": "mxfp4"})
    linear = None if why_not_compiled() else linear_on_cpu("auto", "none")
    wanted = logits(dense)
    assert float((logits(target, linear) - wanted).abs().max()) <= 1e-5 * max(1.0, float(wanted.abs().max())) * 10


@compiled
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("out", "width", "group", "zeros", "table"), [
    (200, 256, 128, True, INTEGERS), (33, 96, 32, False, E2M1), (64, 64, 16, True, E2M1), (5, 48, 24, True, INTEGERS),
])  # fmt: skip
def test_a_grouped_product_equals_the_dense_one(
    out: int, width: int, group: int, zeros: bool, table: tuple[float, ...], threads: int
) -> None:
    from engine.cpu.panels import experts_in_panels, grouped_linear

    generator = torch.Generator().manual_seed(out)
    codes = torch.randint(0, 256, (out, width // 2), dtype=torch.uint8, generator=generator)
    scales, offsets = torch.rand(2, out, width // group, generator=generator)
    weight = GroupedWeight(codes, table, scales, offsets if zeros else None)
    bias, rows = torch.randn(out, generator=generator), torch.randn(40, width, generator=generator)
    wanted = rows.double() @ weight.dense().double().T + bias
    linear = grouped_linear(weight, bias)
    torch.set_num_threads(threads)
    alone = torch.cat([linear(row[None]) for row in rows])
    for count in (1, 5, 6, 7, 13, 40):
        found = linear(rows[:count])
        assert torch.equal(found, alone[:count])  # no bit of a row depends on the other rows
        assert float(((found - wanted[:count]).norm(dim=1) / wanted[:count].norm(dim=1)).max()) <= 1e-5
    unlike = grouped_linear(GroupedWeight(255 - codes, table, scales, offsets if zeros else None), bias)
    counts = torch.tensor([3, 0, 37])
    wanted = SeparateExperts([linear, linear, unlike])(rows, counts)
    assert torch.equal(experts_in_panels([linear, linear, unlike])(rows, counts), wanted)
    torch.set_num_threads(1)


@compiled
def test_decodes_of_a_quantized_model_generate_the_dense_models_tokens(tmp_path: Path) -> None:
    dense = write(LLAMA, tmp_path / "dense")
    quantize(dense, tmp_path / "quantized", "awq")
    found = []
    for path in (dense, tmp_path / "quantized"):
        runner, _, blocks = torch_runner(load_model(path, torch.float32, CPU, linear_on_cpu("auto", "none")))
        rows = [[1, 5, 9], [1, *range(20, 33)]]
        requests = [blocks.request(row, max_tokens=12, sampling=GREEDY) for row in rows]
        found.append(generate(runner, requests, 64))
    assert found[0] == found[1]


# ---- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method is 'bitsandbytes': supported are fp8"),
        ({"quant_method": "hqq"}, "quant_method is 'hqq': supported are .*awq, gptq"),
        ({"quant_method": "aqlm"}, "quant_method is 'aqlm'"),
        ({"bits": 4}, "quant_method is missing"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv'"),
        ({**AWQ, "group_size": 0}, "group_size is 0"),
        ({**GPTQ, "bits": 3}, "bits is 3: supported are 4 and 8"),
        ({**GPTQ, "dynamic": {"-:.*": {}}}, "dynamic is"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        (compressed("marlin-24", 4, "int"), "format is 'marlin-24'"),
        (compressed("pack-quantized", 3, "int"), "num_bits is 3"),
        (
            {**compressed("pack-quantized", 4, "int"), "transform_config": {"config_groups": {"R1": {}}}},
            "transform_config",
        ),
        ({**compressed("float-quantized", 8, "float"), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        ([], r"quantization_config is \[\]: it must be an object"),
    ],
)
def test_an_unsupported_quantization_is_refused_before_the_start(settings: Any, message: str, tmp_path: Path) -> None:
    write(LLAMA, tmp_path)
    change_config(tmp_path, quantization_config=settings)
    with pytest.raises(ValueError, match=message) as error:
        check_options(BuildOptions(str(tmp_path)))
    assert "config.json" in str(error.value)
    assert "\n" not in str(error.value)


def damage(kind: str, tensors: dict[str, Tensor], suffix: str) -> Tensor | None:
    if kind == "missing":
        return None
    found = tensors[f"{UP}.{suffix}"].clone()
    if kind == "shape":
        return found.flatten()[:-1].clone()
    found.view(-1)[-1:] = torch.nan
    return found


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [("fp8 blocks", "weight_scale_inv"), ("awq", "scales"), ("gptq", "scales"), ("nvfp4", "weight_scale"),
     ("fp8 channels", "weight_scale"), ("pack-quantized", "weight_scale"), ("int-quantized", "weight_scale")],
)  # fmt: skip
@pytest.mark.parametrize("how", ["missing", "shape", "not finite"])
def test_a_damaged_scale_is_refused_by_name(kind: str, suffix: str, how: str, tmp_path: Path) -> None:
    quantize(write(LLAMA, tmp_path / "dense"), tmp_path / "quantized", kind)
    file = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(file)
    changed = damage(how, tensors, suffix)
    kept = {name: one for name, one in tensors.items() if name != f"{UP}.{suffix}"}
    save_file(kept if changed is None else {**kept, f"{UP}.{suffix}": changed}, file)
    message = {"missing": "is missing", "shape": "the config needs", "not finite": "NaN or infinite"}[how]
    with pytest.raises(ValueError, match=f"tensor '{UP}.{suffix}' .*{message}"):
        load_model(tmp_path / "quantized", torch.float32, CPU)


@pytest.mark.parametrize(
    ("kind", "suffix"), [("awq", "qweight"), ("gptq", "qzeros"), ("fp8 blocks", "weight_scale_inv")]
)
def test_codes_of_another_dtype_are_refused_by_name(kind: str, suffix: str, tmp_path: Path) -> None:
    quantize(write(LLAMA, tmp_path / "dense"), tmp_path / "quantized", kind)
    file = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {f"{UP}.{suffix}": torch.zeros(tensors[f"{UP}.{suffix}"].shape, dtype=torch.int8)}, file)
    with pytest.raises(ValueError, match=f"tensor '{UP}.{suffix}' is torch.int8; its format needs"):
        load_model(tmp_path / "quantized", torch.float32, CPU)


def test_older_modelopt_checkpoints_have_a_file_of_their_own(tmp_path: Path) -> None:
    quantize(write(LLAMA, tmp_path / "dense"), tmp_path / "quantized", "fp8 tensor")
    change_config(tmp_path / "quantized", quantization_config=None)
    settings = tmp_path / "quantized" / "hf_quant_config.json"
    settings.write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert torch.equal(logits(tmp_path / "quantized"), logits(tmp_path / "dense"))
    settings.write_text('{"quantization": {"quant_algo": "INT4"}}')
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: quantization\.quant_algo is 'INT4'"):
        read_model_config(tmp_path / "quantized")

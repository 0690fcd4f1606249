"""Writers of tiny quantized checkpoints, from the published layouts of the formats.

Each writer converts a matrix [out, in] to the tensors of a module, and also returns the values that they represent.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
GROUP = 16
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_words(codes: Tensor, dim: int, bits: int = 4, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """Pack groups of codes along `dim` into words of int32. Nibble i of a word holds code order[i] of its group."""
    moved = codes.long().movedim(dim, -1).unflatten(-1, (-1, 32 // bits))
    words = sum(moved[..., order[place]] << bits * place for place in range(32 // bits))
    return torch.where(words >= 2**31, words - 2**32, words).int().movedim(-1, dim).contiguous()


def asymmetric(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes [out, in], scales and zeros [out, groups], and the values that they represent. The weights of the
    first row become positive, so its zeros are 0."""
    grouped = torch.cat((weight[:1].abs(), weight[1:])).unflatten(1, (-1, GROUP))
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    return codes.flatten(1), scales, zeros, ((codes - zeros[..., None]) * scales[..., None]).flatten(1)


def awq(weight: Tensor) -> Written:
    codes, scales, zeros, values = asymmetric(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    qweight, qzeros = in_words(codes.T, 1, order=order), in_words(zeros.T, 1, order=order)
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales.T.half().contiguous()}, values


def gptq(weight: Tensor, act_order: bool = False) -> Written:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
    order = order if act_order else torch.arange(weight.shape[1])
    codes, scales, zeros, values = asymmetric(weight[:, order])
    back = order.argsort()
    tensors = {
        "qweight": in_words(codes[:, back].T, 0), "qzeros": in_words((zeros.int() - 1 & 15).T, 1),
        "scales": scales.T.half().contiguous(), "g_idx": (back // GROUP).int(),
    }  # fmt: skip
    return tensors, values[:, back]


def act_ordered(weight: Tensor) -> Written:
    return gptq(weight, act_order=True)


def pack_quantized(weight: Tensor) -> Written:
    codes, scales, zeros, values = asymmetric(weight)
    tensors = {"weight_packed": in_words(codes, 1), "weight_zero_point": in_words(zeros, 0)}
    return {**tensors, "weight_scale": scales.half(), "weight_shape": torch.tensor(weight.shape)}, values


def fp8_blocks(weight: Tensor) -> Written:
    high, wide = -(-weight.shape[0] // 32), -(-weight.shape[1] // 32)
    scales = torch.rand(high, wide, generator=torch.Generator().manual_seed(1)) * 0.01 + 0.001
    wide_scales = scales.repeat_interleave(32, 0)[: len(weight)].repeat_interleave(32, 1)[:, : weight.shape[1]]
    stored = (weight / wide_scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scales}, (stored.float() * wide_scales).bfloat16().float()


def fp8_channels(weight: Tensor) -> Written:
    scales = weight.abs().amax(1, keepdim=True) / 448
    stored = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scales}, (stored.float() * scales).bfloat16().float()


def fp8_tensor(weight: Tensor) -> Written:
    scale = weight.abs().amax() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    extra = {"weight_scale": scale, "input_scale": torch.ones(())}
    return {"weight": stored, **extra}, (stored.float() * scale).bfloat16().float()


def int8(weight: Tensor) -> Written:
    scales = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scales).round().to(torch.int8)
    return {"weight": stored, "weight_scale": scales}, stored.float() * scales


def e2m1(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed codes, uint8 [out, in / 2], and the values that they represent with `scales`."""
    grouped = weight.unflatten(1, (scales.shape[1], -1)) / scales[..., None]
    codes = (grouped[..., None] - E2M1).abs().argmin(-1)
    flat = codes.flatten(1).to(torch.uint8)
    return flat[:, 0::2] | flat[:, 1::2] << 4, (E2M1[codes] * scales[..., None]).flatten(1)


def nvfp4(weight: Tensor, divides: bool = False) -> Written:
    whole = weight.abs().amax() / (6 * 448)
    grouped = weight.unflatten(1, (-1, 16)).abs().amax(2) / 6
    scales = (grouped / whole).to(torch.float8_e4m3fn)
    if divides:
        packed, values = e2m1(weight, scales.float() / (1 / whole))
        return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": (1 / whole).view(1)}, values
    packed, values = e2m1(weight, scales.float() * whole)
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": whole}, values


def nvfp4_divided(weight: Tensor) -> Written:
    return nvfp4(weight, divides=True)


def mxfp4(weight: Tensor) -> Written:
    exponents = (weight.unflatten(1, (-1, 32)).abs().amax(2) / 6).clamp(min=1e-30).log2().ceil()
    packed, values = e2m1(weight, torch.exp2(exponents))
    return {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, values


def compressed(form: str, bits: int, kind: str, **weights: Any) -> dict[str, Any]:
    group = {"weights": {"num_bits": bits, "type": kind, **weights}, "input_activations": {"num_bits": 8}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
FORMATS: dict[str, tuple[Callable[[Tensor], Written], dict[str, Any]]] = {
    "fp8 blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "fp8 channels": (fp8_channels, compressed("float-quantized", 8, "float", strategy="channel")),
    "fp8 tensor": (fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "awq": (awq, AWQ),
    "gptq": (gptq, GPTQ),
    "gptq act-order": (act_ordered, {**GPTQ, "desc_act": True}),
    "pack-quantized": (pack_quantized, compressed("pack-quantized", 4, "int", strategy="group", group_size=GROUP)),
    "int-quantized": (int8, compressed("int-quantized", 8, "int", strategy="channel")),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nvfp4-pack-quantized": (nvfp4_divided, compressed("nvfp4-pack-quantized", 4, "float", group_size=16)),
    "mxfp4-pack-quantized": (mxfp4, compressed("mxfp4-pack-quantized", 4, "float", group_size=32)),
}


def change_config(where: Path, **values: Any) -> None:
    file = where / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def quantize(source: Path, target: Path, kind: str) -> None:
    """Write the model in `source` to `target` in the format `kind`. Replace the matrices in `source` by the values that
    the quantized matrices represent."""
    write, settings = FORMATS[kind]
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    stored, values = {}, dict(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and ".layers." in name and "gate.weight" not in name:
            parts, values[name] = write(tensor.float())
            stored |= {f"{name.removesuffix('weight')}{part}": one.contiguous() for part, one in parts.items()}
        else:
            stored[name] = tensor
    save_file(values, source / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, target / "model.safetensors")
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    change_config(target, quantization_config=settings)

"""Reads the quantization of a checkpoint from config.json. This module does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.config_reader import ConfigReader
from shared.model_files import read_object

Layout = Literal["fp8", "int8", "awq", "gptq", "packed int4", "nvfp4", "mxfp4"]
SUPPORTED = (
    "supported are fp8, fbgemm_fp8, awq, gptq, mxfp4, modelopt (FP8, NVFP4) and compressed-tensors (float-quantized, "
    "pack-quantized, int-quantized, nvfp4-pack-quantized); use one of these, or the unquantized model"
)
MODELOPT = "hf_quant_config.json"  # older versions of modelopt store their quantization here instead of in config.json
COMPRESSED: dict[str, Layout] = {
    "float-quantized": "fp8", "pack-quantized": "packed int4", "int-quantized": "int8",
    "nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the quantized matrices of a checkpoint are stored. Other matrices of the same checkpoint may be dense.

    `group` is the number of inputs that share a scale, or 0 if all inputs share one. `block` is the shape of an FP8
    block, whose weights share a scale, or (0, 0). If `divides`, the global scale of NVFP4 is a divisor. If
    `zeros_less_one`, GPTQ stores each zero point minus 1. If `activations`, activations are rounded to 8 bits too.
    """

    method: str
    layout: Layout
    bits: int = 4
    group: int = 0
    block: tuple[int, int] = (0, 0)
    divides: bool = False
    zeros_less_one: bool = True
    activations: bool = True


def read_scheme(directory: Path) -> Scheme | None:
    """Return the quantization of a model directory, or None if the model is not quantized. Raises ValueError if the
    quantization is not supported or a value is invalid."""
    file = directory / "config.json"
    values = read_object(file)
    nested = values.get("text_config")
    for key in ("quantization_config", "compression_config"):
        if values.get(key) is not None:
            return _scheme(ConfigReader(values, file).nested(key))
        if isinstance(nested, dict) and nested.get(key) is not None:
            return _scheme(ConfigReader(nested, file, "text_config.").nested(key))
    file = directory / MODELOPT
    if not file.exists():
        return None
    given = ConfigReader(read_object(file), file).nested("quantization")
    return None if given.values.get("quant_algo") is None else _modelopt(given)


def _scheme(given: ConfigReader) -> Scheme:
    method = str(given.values.get("quant_method"))
    if method in {"fp8", "fbgemm_fp8"}:
        return Scheme(method, "fp8", 8, block=_block(given, "weight_block_size"))
    if method == "awq":
        given.require("version", "gemm", "gemm")
        given.require("bits", 4, None)
        return Scheme(method, "awq", group=_group(given))
    if method == "gptq":
        bits = given.size("bits")
        if bits not in {4, 8}:
            given.refuse("bits", "supported are 4 and 8")
        if given.values.get("dynamic"):
            given.refuse("dynamic", "settings per module are not supported")
        form = given.text("checkpoint_format", "gptq")
        if form not in {"gptq", "gptq_v2"}:
            given.refuse("checkpoint_format", "supported are gptq and gptq_v2")
        return Scheme(method, "gptq", bits, _group(given), zeros_less_one=form == "gptq")
    if method == "mxfp4":
        return Scheme(method, "mxfp4", group=32)
    if method == "modelopt":
        return _modelopt(given)
    if method != "compressed-tensors":
        given.refuse("quant_method", SUPPORTED)
    return _compressed(given)


def _modelopt(given: ConfigReader) -> Scheme:
    name = given.text("quant_algo")
    if name in {"FP8", "FP8_PER_CHANNEL_PER_TOKEN"}:
        return Scheme("modelopt", "fp8", 8)
    if name != "NVFP4":
        given.refuse("quant_algo", SUPPORTED)
    return Scheme("modelopt", "nvfp4", group=given.size("group_size", 16))


def _compressed(given: ConfigReader) -> Scheme:
    if given.nested("transform_config").values.get("config_groups"):
        given.refuse("transform_config", "transformed weights and activations are not supported")
    if given.nested("sparsity_config").text("format", "dense") != "dense":
        given.refuse("sparsity_config", "sparse weights are not supported; use a dense checkpoint")
    groups = given.nested("config_groups")
    if len(groups.values) != 1:
        given.refuse("config_groups", "only one group of modules, with one format, is supported")
    (name,) = groups.values
    group = groups.nested(name)
    form = (group if group.values.get("format") else given).text("format", "")
    if form not in COMPRESSED:
        given.refuse("format", SUPPORTED)
    layout, weights = COMPRESSED[form], group.nested("weights")
    bits, kind = weights.size("num_bits"), weights.text("type", "int")
    if (layout, kind, bits) not in {
        ("fp8", "float", 8), ("packed int4", "int", 4), ("packed int4", "int", 8), ("int8", "int", 8),
        ("nvfp4", "float", 4), ("mxfp4", "float", 4),
    }:  # fmt: skip
        weights.refuse("num_bits", f"the format {form} does not support this number of bits for the type {kind}")
    block = _block(weights, "block_structure") if weights.values.get("strategy") == "block" else (0, 0)
    size = {"nvfp4": 16, "mxfp4": 32}.get(layout, 0) if weights.values.get("group_size") is None else _group(weights)
    rounded = group.values.get("input_activations") is not None
    return Scheme("compressed-tensors", layout, bits, size, block, divides=True, activations=rounded)


def _group(given: ConfigReader) -> int:
    return 0 if given.values.get("group_size") == -1 else given.size("group_size")


def _block(given: ConfigReader, key: str) -> tuple[int, int]:
    value: Any = given.values.get(key)
    if value is None:
        return 0, 0
    if not isinstance(value, list) or len(value) != 2 or any(type(one) is not int or one < 1 for one in value):
        given.refuse(key, "it must be a list of two sizes, such as [128, 128]")
    return value[0], value[1]

"""Selects attention, kernels and weight formats for a node on a CPU: numba's, or torch's if numba cannot compile."""

import torch
from torch import Tensor

from engine.attention import AttentionBackend, TorchAttention
from engine.cpu import why_not_compiled
from engine.formats.forms import GroupedWeight, QuantizedWeight
from engine.kernels import Kernels, TorchKernels
from engine.kv_pool import KVPool
from engine.linear import ExpertLinear, Linear, LinearFormat, Plain
from engine.models.spec import ModelConfig

SIXTEEN_BITS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def attention_on_cpu(name: str, pool: KVPool) -> AttentionBackend:
    """Return the attention backend `name`: auto, numba or torch. Raises ValueError if it cannot run on this machine."""
    if name == "torch" or (name == "auto" and why_not_compiled()):
        return TorchAttention(pool)
    if why_not_compiled():
        raise ValueError(f"--attention-backend numba: cannot run here: {why_not_compiled()}; use auto or torch")
    from engine.cpu.attention import NumbaAttention

    return NumbaAttention(pool)


def kernels_on_cpu(config: ModelConfig, pool: KVPool) -> Kernels:
    """Return the numba kernels, or torch's if this machine cannot compile kernels."""
    if why_not_compiled():
        return TorchKernels(config, pool)
    from engine.cpu.layer import NumbaKernels

    return NumbaKernels(config, pool)


def linear_on_cpu(weight_dtype: str, quantization: str) -> LinearFormat:
    """Return the weight format that `--weight-dtype` and `--quantization` select.

    Raises ValueError if this machine does not support them.
    """
    why_not = why_not_compiled()
    if quantization == "int8":
        return _int8(why_not)
    if why_not:
        if weight_dtype in SIXTEEN_BITS:
            raise ValueError(f"--weight-dtype {weight_dtype}: needs compiled kernels, which cannot run here: {why_not}")
        return Plain(torch.float32)
    from engine.cpu.panels import Panels

    if weight_dtype in SIXTEEN_BITS:
        return Panels(SIXTEEN_BITS[weight_dtype])
    return AsStored() if weight_dtype == "auto" else Panels(torch.float32)


def _int8(why_not: str) -> LinearFormat:
    if not why_not:
        from engine.cpu.matmul_kernels import HAS_INT8

        if HAS_INT8:
            from engine.cpu.panels import Int8Panels

            return Int8Panels()
    from engine.cpu.int8 import Int8, has_fbgemm

    if not has_fbgemm():
        raise ValueError(
            "--quantization int8: needs an x86 CPU with AVX2 (torch has no FBGEMM on this machine); omit it"
        )
    return Int8()


class AsStored:
    """A format that keeps 16-bit weights in 16 bits, to halve memory and reading time. Other weights become float32.

    `name` describes only the matrix that was made last. This suffices, because a checkpoint rarely mixes dtypes.
    """

    def __init__(self) -> None:
        from engine.cpu.panels import Panels

        self._formats = {dtype: Panels(dtype) for dtype in (torch.float32, *SIXTEEN_BITS.values())}
        self._floats = self._formats[torch.float32]
        self._form = ""
        self.name = self._floats.name

    def make(self, weight: Tensor, bias: Tensor | None) -> Linear:
        chosen = self._formats.get(weight.dtype, self._floats)
        self.name = self._form + chosen.name
        return chosen.make(weight, bias)

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        """Keep 4-bit codes, and keep int8 weights if this CPU can multiply them. Other matrices become float32."""
        from engine.cpu.matmul_kernels import HAS_INT8
        from engine.cpu.panels import Int8Panels, grouped_linear

        if isinstance(weight, GroupedWeight):
            self._form = "4-bit, "
            return grouped_linear(weight, bias)
        self._form = "int8, "
        return (Int8Panels() if HAS_INT8 else self._floats).make_quantized(weight, bias)

    def make_exact(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return self._floats.make(weight, bias)

    def of_experts(self, each: list[Linear]) -> ExpertLinear:
        return self._floats.of_experts(each)

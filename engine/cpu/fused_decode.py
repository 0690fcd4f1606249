"""The forward pass of a few decodes as one call. Python code between kernels would take longer than some kernels.

Memory and the arguments of kernels are prepared once, as for a CUDA graph. Each step sets only the number of rows, the
addresses of its tables, and its items of attention. The kernels and their order are those of `Decoder.forward`, so the
results have the same bits.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from torch import Tensor

from engine.batch import Batch
from engine.cpu.attention import NumbaAttention, NumbaPlan
from engine.cpu.attention_kernels import attend, merge
from engine.cpu.jit import PARALLEL_WORK, Kernel, kernel, wait_for_all
from engine.cpu.layer import NumbaKernels
from engine.cpu.layer_kernels import add_norm, gated, norm, rotate_and_store
from engine.cpu.panels import PanelLinear
from engine.cpu.simd import address_at, emit_pointer, written
from engine.linear import Linear
from engine.models.decoder import AttentionDecoderLayer, Decoder, DecoderLayer
from engine.models.mlp import Mlp
from engine.models.spec import MlpSpec

MAX_ROWS = 64  # with more rows, Python's share of a step is negligible
VALUES = 22  # maximum number of arguments of a kernel
_LONG = ir.IntType(64)


def _call(builder: Any, function: Any, values: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_LONG.as_pointer()])
    builder.call(emit_pointer(builder, function, kind), [emit_pointer(builder, values, _LONG)])


_call_kernel = written(types.void, (types.int64, types.int64), _call)


@kernel
def run(values: Any) -> None:
    """Run kernels in order. `values` contains the number of kernels, the list of their addresses, the address of the
    first kernel's values, and the distance in bytes between the values of two kernels. A kernel starts when all threads
    have finished the previous one."""
    kernels, given, stride = values[1], values[2], values[3]
    for index in range(values[0]):
        _call_kernel(address_at(kernels + 8 * index), given + stride * index)
        wait_for_all()


class FusedDecode:
    """Runs the forward pass of up to MAX_ROWS decodes as one call.

    Owned by `TorchRunner` and called on the thread that computes. It keeps the addresses of the decoder's weights,
    which must not move. `logits` returns the same bits as `Decoder.forward` followed by `Decoder.logits`.
    """

    def __init__(self, model: Decoder, kernels: NumbaKernels, attention: NumbaAttention) -> None:
        self._model, self._kernels, self._attention = model, kernels, attention
        config = model.config
        self._tables = list(kernels.pool.places.tables)
        heads = config.num_heads
        (inner,) = {spec.mlp.inner for spec in config.layers if isinstance(spec.mlp, MlpSpec)}
        sizes = {
            "hidden": config.hidden_size,
            "normed": config.hidden_size,
            "update": config.hidden_size,
            "qkv": (heads + 2 * config.num_kv_heads) * config.head_dim,
            "q": heads * config.head_dim,
            "attended": heads * config.head_dim,
            "gate_up": 2 * inner,
            "product": inner,
        }
        # Do not zero the memory: this would start a second team of OpenMP threads, in addition to the engine's.
        self._memory = {name: torch.empty(MAX_ROWS, size) for name, size in sizes.items()}
        self._memory["scratch"] = torch.empty(
            MAX_ROWS, max(linear.row_scratch for linear in _panels(model)), dtype=torch.uint8
        )
        self._at = {name: tensor.data_ptr() for name, tensor in self._memory.items()}
        self._calls: list[tuple[Kernel, list[int]]] = []
        # Indices of the calls of `attend`, by table and window; `merge` follows each.
        self._attends_of: dict[tuple[int, int], list[int]] = {}
        self._write(model)
        numbers = {kernel: [n for n, call in enumerate(self._calls) if call[0] is kernel] for kernel, _ in self._calls}
        self._rotations = numbers[rotate_and_store]
        self._of_rows = [n for n, (kernel, _) in enumerate(self._calls) if kernel not in (attend, merge)]
        self._addresses = np.array([kernel.address for kernel, _ in self._calls], np.int64)
        self._values = np.zeros((len(self._calls), VALUES), np.int64)
        for row, (_, values) in zip(self._values, self._calls, strict=True):
            row[: len(values)] = values

    def takes(self, batch: Batch) -> bool:
        """Return whether the batch consists of at most MAX_ROWS decodes."""
        rows = len(batch.starts)
        return 0 < rows <= MAX_ROWS and len(batch.tokens) == rows == len(batch.sampled) == len(batch.logit_rows)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Store the batch's KV and return the tokens' logits, float32 [S, vocab_size]. Requires `takes(batch)`."""
        rows, values = len(batch.tokens), self._values
        self._memory["hidden"][:rows] = self._model.embed(batch.tokens)
        step = self._kernels.begin(batch)
        plans = [self._attention.plan(batch.with_table(number)) for number in range(len(batch.others) + 1)]
        values[self._of_rows, 0] = rows
        ((cosine, sine),) = step.angles
        values[self._rotations, 3:5] = (cosine.data_ptr(), sine.data_ptr())
        values[self._rotations, 5] = np.array([slots.data_ptr() for slots in step.slots])[self._tables]
        for (table, window), numbers in self._attends_of.items():
            self._attends(plans[table], window, numbers)
        head = _panels(self._model)[-1]
        logits = torch.empty(rows, head.padded)
        values[-1, 3] = logits.data_ptr()
        run(PARALLEL_WORK, len(values), self._addresses.ctypes.data, values.ctypes.data, values.strides[0])
        return logits if head.width == head.padded else logits[:, : head.width].contiguous()

    def _attends(self, plan: NumbaPlan, window: int, numbers: list[int]) -> None:
        prepared = plan.prepared(self._model.config.num_heads, window)
        memory = self._attention.memory(torch.get_num_threads(), prepared.group)
        values, merges = self._values, [number + 1 for number in numbers]
        values[numbers, :3] = (0, *prepared.units)
        values[numbers, 6:20] = (*prepared.rest, memory.address)
        values[merges, :2] = 0
        if prepared.merged:
            units, items, parts, *_ = prepared.merged
            values[merges, 1:3] = (units, items)
            values[merges, 4] = parts

    # ---- kernel arguments that are the same in every step ---------------------------------------------------------

    def _write(self, model: Decoder) -> None:
        epsilon, size, at = self._kernels.epsilon_at, model.config.hidden_size, self._at
        first = model.layers[0].attention_norm
        self._call(norm, 0, size, epsilon, at["hidden"], first.data_ptr(), at["normed"])
        following = [layer.attention_norm for layer in model.layers[1:]] + [model.norm]
        for index, (layer, norm_after) in enumerate(zip(model.layers, following, strict=True)):
            self._write_attention(index, layer)
            added = (at["hidden"], at["update"])
            self._call(add_norm, 0, size, epsilon, *added, layer.mlp_norm.data_ptr(), at["normed"])
            mlp = _mlp(layer)
            self._multiply(mlp.gate_up, "normed", "gate_up")
            self._call(gated, 0, self._memory["product"].shape[1], at["gate_up"], at["product"])
            self._multiply(mlp.down, "product", "update")
            self._call(add_norm, 0, size, epsilon, *added, norm_after.data_ptr(), at["normed"])
        self._multiply(model.head, "normed", "hidden")  # each step replaces the address of the result

    def _write_attention(self, index: int, layer: DecoderLayer) -> None:
        assert isinstance(layer, AttentionDecoderLayer)
        config, kernels, at = self._model.config, self._kernels, self._at
        self._multiply(layer.qkv, "normed", "qkv")
        shape = (config.num_heads, config.num_kv_heads, config.head_dim)
        norms = [0 if weight is None else weight.data_ptr() for weight in (layer.q_norm, layer.k_norm)]
        pool = self._attention.layer_address(index)
        self._call(rotate_and_store, 0, at["qkv"], at["q"], 0, 0, 0, *shape, *norms, pool, *kernels.pool_shape)
        key = self._tables[index], layer.attention.window
        self._attends_of.setdefault(key, []).append(len(self._calls))
        self._call(attend, 0, 0, 0, at["q"], at["attended"], pool)
        group = config.num_heads // config.num_kv_heads
        self._call(merge, 0, 0, 0, at["attended"], 0, config.num_kv_heads, group, config.head_dim)
        self._multiply(layer.output, "attended", "update")

    def _multiply(self, linear: object, source: str, target: str) -> None:
        assert isinstance(linear, PanelLinear)
        stride = 4 * self._memory[source].shape[1]
        at = self._at
        self._call(linear.kernel, 0, at[source], stride, at[target], 4 * linear.padded, at["scratch"], *linear.fixed)

    def _call(self, kernel: Kernel, *values: int) -> None:
        self._calls.append((kernel, list(values)))


def fused_decode_of(model: Decoder, kernels: object, attention: object) -> FusedDecode | None:
    """Return the fused pass, or None if a part is not a numba kernel, a product before the head pads its columns, or
    the model needs more than these kernels do (see `is_plain`)."""
    if not isinstance(kernels, NumbaKernels) or not isinstance(attention, NumbaAttention) or not is_plain(model):
        return None
    *inner, head = _linears(model)
    narrow = all(isinstance(linear, PanelLinear) and linear.width == linear.padded for linear in inner)
    return FusedDecode(model, kernels, attention) if narrow and isinstance(head, PanelLinear) else None


def is_plain(model: Decoder) -> bool:
    """Return whether all layers are of Llama's kind, with MLPs of one size and one rotary embedding."""
    config = model.config
    scales = {config.embedding_scale, config.residual_scale, config.logit_scale}
    plain = all(
        isinstance(layer, AttentionDecoderLayer)
        and layer.attention.is_plain
        and layer.gate is None
        and (layer.spec.query_scale, layer.spec.temperature) == (1, 0)
        and layer.post_attention_norm is None
        for layer in model.layers
    )
    (mlp, *others) = {spec.mlp for spec in config.layers}
    is_silu = isinstance(mlp, MlpSpec) and mlp.activation == "silu"
    return plain and is_silu and not others and len(config.ropes) == 1 and scales == {1.0} and not config.logit_softcap


def _mlp(layer: DecoderLayer) -> Mlp:
    assert isinstance(layer.mlp, Mlp)
    return layer.mlp


def _linears(model: Decoder) -> list[Linear]:
    """Return all matrices that a pass multiplies by, in order of use."""
    inner = [
        linear for layer in model.layers if isinstance(layer, AttentionDecoderLayer)
        for linear in (layer.qkv, layer.output, _mlp(layer).gate_up, _mlp(layer).down)
    ]  # fmt: skip
    return [*inner, model.head]


def _panels(model: Decoder) -> Sequence[PanelLinear]:
    return [linear for linear in _linears(model) if isinstance(linear, PanelLinear)]

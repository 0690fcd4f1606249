"""The forward pass of a few decodes as one call, since Python code between kernels would take longer than some kernels.

Memory and the arguments of kernels are prepared once, as for a CUDA graph. A step sets only its number of rows, its
items of attention, and the addresses of its rotary angles, slots and logits. The kernels and their order are the same
as in `Decoder.forward`, so the results have the same bits.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch
from engine.cpu.attention import NumbaAttention, NumbaPlan
from engine.cpu.attention_kernels import attend, merge
from engine.cpu.jit import PARALLEL_WORK, Kernel, kernel, wait_for_all
from engine.cpu.layer import NumbaKernels
from engine.cpu.layer_kernels import ACTIVATIONS, add_norm, gated, norm, rotate_and_store
from engine.cpu.matmul_kernels import PANEL
from engine.cpu.panels import ExpertPanels, PanelLinear
from engine.cpu.routing import choice
from engine.cpu.routing_kernels import combine, gather, route, sort_by_expert
from engine.cpu.simd import address_at, emit_pointer, written
from engine.linear import ExpertLinear, Linear
from engine.models.decoder import AttentionDecoderLayer, Decoder, DecoderLayer
from engine.models.experts import Experts
from engine.models.spec import Activation, MoeSpec

MAX_ROWS = 64  # with more rows, Python's share of a step is negligible
VALUES = 22  # maximum number of arguments of a kernel
_LONG = ir.IntType(64)
IntArray = NDArray[np.int64]


def _call(builder: Any, function: Any, values: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_LONG.as_pointer()])
    builder.call(emit_pointer(builder, function, kind), [emit_pointer(builder, values, _LONG)])


_call_kernel = written(types.void, (types.int64, types.int64), _call)


@kernel
def run(values: Any) -> None:
    """Run kernels in order. A kernel starts when all threads have finished the previous one. `values`, in order: number
    of kernels, address of the list of their addresses, address of the first kernel's values, and distance in bytes
    between the values of adjacent kernels."""
    kernels, given, stride = values[1], values[2], values[3]
    for index in range(values[0]):
        _call_kernel(address_at(kernels + 8 * index), given + stride * index)
        wait_for_all()


class FusedDecode:
    """Runs the forward pass of up to MAX_ROWS decodes as one call.

    `TorchRunner` owns this object, and calls it on the thread that computes. The addresses of the decoder's weights are
    kept, so they must not change. `logits` returns the same bits as `Decoder.forward` followed by `Decoder.logits`.
    """

    def __init__(self, model: Decoder, kernels: NumbaKernels, attention: NumbaAttention) -> None:
        self._model, self._kernels, self._attention = model, kernels, attention
        config = model.config
        self._tables = list(kernels.pool.places.tables)
        heads = config.num_heads
        mlp = config.layers[0].mlp  # the same in all layers
        spec, top_k = (mlp.expert, mlp.top_k) if isinstance(mlp, MoeSpec) else (mlp, 1)
        sizes = {
            "hidden": config.hidden_size,
            "normed": config.hidden_size,
            "update": config.hidden_size,
            "qkv": (heads + 2 * config.num_kv_heads) * config.head_dim,
            "q": heads * config.head_dim,
            "attended": heads * config.head_dim,
        }
        # Do not zero the memory: this would start a second team of OpenMP threads, in addition to the engine's.
        self._memory = {name: torch.empty(MAX_ROWS, size) for name, size in sizes.items()}
        sizes = {"gathered": config.hidden_size, "gate_up": 2 * spec.inner, "product": spec.inner}
        self._memory |= {name: torch.empty(top_k * MAX_ROWS, size) for name, size in sizes.items()}
        self._memory["outputs"] = torch.empty_like(self._memory["gathered"])
        if isinstance(mlp, MoeSpec):
            self._memory |= _routing_memory(mlp)
        scratch = max(panels.row_scratch for panels in _panels(model))
        self._memory["scratch"] = torch.empty(top_k * MAX_ROWS, scratch, dtype=torch.uint8)
        self._at = {name: tensor.data_ptr() for name, tensor in self._memory.items()}
        self._calls: list[tuple[Kernel, list[int]]] = []  # the first argument is the number of rows per decode
        # Indices of the calls of `attend`, keyed by (table, window). A call of `merge` follows each of them.
        self._attends_of: dict[tuple[int, int], list[int]] = {}
        self._rotations_of: dict[int, list[int]] = {}  # indices of the calls of `rotate_and_store`, keyed by table
        self._write(model)
        self._rows = 0  # number of rows in the last step
        self._rows_for_each = np.array([values[0] for _, values in self._calls])
        self._addresses = np.array([kernel.address for kernel, _ in self._calls], np.int64)
        self._values = np.zeros((len(self._calls), VALUES), np.int64)
        for row, (_, values) in zip(self._values, self._calls, strict=True):
            row[: len(values)] = values
        # These indices are arrays: an assignment with a list as index would take most of its time to convert the list.
        self._rotations = {table: np.array(numbers) for table, numbers in self._rotations_of.items()}
        self._attends = {key: (np.array(numbers), np.array(numbers) + 1) for key, numbers in self._attends_of.items()}

    def takes(self, batch: Batch) -> bool:
        """Return whether the batch consists of at most MAX_ROWS decodes."""
        rows = len(batch.starts)
        return 0 < rows <= MAX_ROWS and len(batch.tokens) == rows == len(batch.sampled) == len(batch.logit_rows)

    def logits(self, batch: Batch) -> Tensor:
        """Store the batch's KV and return the tokens' logits, float32 [S, vocab_size]. Requires `takes(batch)`."""
        rows, values = len(batch.tokens), self._values
        self._memory["hidden"][:rows] = self._model.embed(batch.tokens)
        step = self._kernels.begin(batch)
        plans = [self._attention.plan(batch.with_table(number)) for number in range(len(batch.others) + 1)]
        if rows != self._rows:
            self._rows, values[:, 0] = rows, rows * self._rows_for_each
        ((cosine, sine),) = step.angles
        for table, rotations in self._rotations.items():
            values[rotations, 3:6] = (cosine.data_ptr(), sine.data_ptr(), step.slots[table].data_ptr())
        for (table, window), (attends, merges) in self._attends.items():
            self._plan_attention(plans[table], window, attends, merges)
        head = self._model.head
        assert isinstance(head, PanelLinear)
        logits = torch.empty(rows, head.padded)
        values[-1, 3] = logits.data_ptr()
        run(PARALLEL_WORK, len(values), self._addresses.ctypes.data, values.ctypes.data, values.strides[0])
        return logits if head.width == head.padded else logits[:, : head.width].contiguous()

    def _plan_attention(self, plan: NumbaPlan, window: int, attends: IntArray, merges: IntArray) -> None:
        prepared = plan.prepared(self._model.config.num_heads, window)
        memory = self._attention.memory(torch.get_num_threads(), prepared.group)
        values = self._values
        values[attends, :3] = (0, *prepared.units)
        values[attends, 6:20] = (*prepared.rest, memory.address)
        units, items, parts = prepared.merged[:3] if prepared.merged else (0, 0, 0)
        values[merges, :5] = (0, units, items, self._at["attended"], parts)

    # ---- kernel arguments that are the same in every step ---------------------------------------------------------

    def _write(self, model: Decoder) -> None:
        epsilon, size, at = self._kernels.epsilon_at, model.config.hidden_size, self._at
        first = model.layers[0].attention_norm
        self._call(norm, 1, size, epsilon, at["hidden"], first.data_ptr(), at["normed"])
        following = [layer.attention_norm for layer in model.layers[1:]] + [model.norm]
        for index, (layer, norm_after) in enumerate(zip(model.layers, following, strict=True)):
            self._write_attention(index, layer)
            added = (at["hidden"], at["update"])
            self._call(add_norm, 1, size, epsilon, *added, layer.mlp_norm.data_ptr(), at["normed"])
            if isinstance(layer.mlp, Experts):
                self._write_experts(layer.mlp)
            else:
                self._multiply(layer.mlp.gate_up, "normed", "gate_up")
                self._write_gated(1, layer.mlp.activation)
                self._multiply(layer.mlp.down, "product", "update")
            self._call(add_norm, 1, size, epsilon, *added, norm_after.data_ptr(), at["normed"])
        self._multiply(model.head, "normed", "hidden")  # each step replaces "hidden" by the address of the logits

    def _write_experts(self, experts: Experts) -> None:
        at, spec, size = self._at, experts.spec, self._model.config.hidden_size
        routed = spec.num_experts, spec.top_k
        self._multiply(experts.router, "normed", "logits")
        chosen_by = at["logits"], 4 * self._memory["logits"].shape[1], at["scores"]
        choosing = choice(spec, experts.correction, experts.factors)
        self._call(route, 1, *routed, *chosen_by, *choosing, at["weights"], at["chosen"])
        self._call(sort_by_expert, 1, *routed, at["chosen"], at["sources"], at["places"], at["counts"])
        self._call(gather, spec.top_k, size, at["normed"], at["sources"], at["gathered"])
        self._multiply_experts(experts.gate_up, spec.top_k, "gathered", "gate_up")
        self._write_gated(spec.top_k, spec.expert.activation)
        self._multiply_experts(experts.down, spec.top_k, "product", "outputs")
        self._call(combine, 1, spec.top_k, size, at["outputs"], at["places"], at["weights"], at["update"])

    def _write_gated(self, rows_for_each: int, activation: Activation) -> None:
        at, inner = self._at, self._memory["product"].shape[1]
        self._call(gated, rows_for_each, inner, at["gate_up"], at["product"], ACTIVATIONS.index(activation))

    def _write_attention(self, index: int, layer: DecoderLayer) -> None:
        assert isinstance(layer, AttentionDecoderLayer)
        config, kernels, at = self._model.config, self._kernels, self._at
        self._multiply(layer.qkv, "normed", "qkv")
        shape = (config.num_heads, config.num_kv_heads, config.head_dim)
        norms = [0 if weight is None else weight.data_ptr() for weight in (layer.q_norm, layer.k_norm)]
        pool = self._attention.layer_address(index)
        self._rotations_of.setdefault(self._tables[index], []).append(len(self._calls))
        self._call(rotate_and_store, 1, at["qkv"], at["q"], 0, 0, 0, *shape, *norms, pool, *kernels.pool_shape)
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
        self._call(linear.kernel, 1, at[source], stride, at[target], 4 * linear.padded, at["scratch"], *linear.fixed)

    def _multiply_experts(self, experts: object, rows_for_each: int, source: str, target: str) -> None:
        assert isinstance(experts, ExpertPanels)
        like, at, stride = experts.like, self._at, 4 * self._memory[source].shape[1]
        fixed = experts.fixed(at["counts"])
        self._call(
            like.expert_kernel, rows_for_each, at[source], stride, at[target], 4 * like.padded, at["scratch"], *fixed
        )

    def _call(self, kernel: Kernel, *values: int) -> None:
        self._calls.append((kernel, list(values)))


def _routing_memory(spec: MoeSpec) -> dict[str, Tensor]:
    """Return memory for the choice of experts: see the kernels `route` and `sort_by_expert`."""
    padded = -(-spec.num_experts // PANEL) * PANEL
    floats = {"logits": padded, "scores": 2 * spec.num_experts, "weights": spec.top_k}
    return {name: torch.empty(MAX_ROWS, size) for name, size in floats.items()} | {
        "chosen": torch.empty(MAX_ROWS, spec.top_k, dtype=torch.int64),
        "places": torch.empty(MAX_ROWS, spec.top_k, dtype=torch.int64),
        "sources": torch.empty(MAX_ROWS * spec.top_k, dtype=torch.int64),
        "counts": torch.empty(spec.num_experts, dtype=torch.int64),
    }


def fused_decode_of(model: Decoder, kernels: object, attention: object) -> FusedDecode | None:
    """Return the fused pass, or None if the model cannot use it.

    The model must be plain (see `is_plain`), and numba must compute attention, all other kernels and all matrix
    products. No matrix except the head may have padded columns.
    """
    if not isinstance(kernels, NumbaKernels) or not isinstance(attention, NumbaAttention) or not is_plain(model):
        return None
    panels = _panels(model)
    ours = len(panels) == len(_products(model)) and isinstance(model.head, PanelLinear)
    narrow = all(panel.width == panel.padded for panel in panels if panel is not model.head)
    return FusedDecode(model, kernels, attention) if ours and narrow else None


def is_plain(model: Decoder) -> bool:
    """Return whether all layers have Llama's structure, one rotary embedding, and MLPs or experts of one shape."""
    config = model.config
    scales = {config.embedding_scale, config.residual_scale, config.logit_scale}
    plain = all(
        isinstance(layer, AttentionDecoderLayer)
        and layer.attention.is_plain
        and layer.gate is None
        and (layer.spec.query_scale, layer.spec.temperature) == (1, 0)
        and layer.post_attention_norm is None
        and layer.alongside is None
        for layer in model.layers
    )
    (mlp, *others) = {spec.mlp for spec in config.layers}
    if isinstance(mlp, MoeSpec):
        plain = plain and mlp.shared is None and mlp.groups == 1
    return plain and not others and len(config.ropes) == 1 and scales == {1.0} and not config.logit_softcap


def _products(model: Decoder) -> list[Linear | ExpertLinear]:
    """Return the weight matrices that a pass multiplies by, except the routers."""
    found: list[Linear | ExpertLinear] = [model.head]
    for layer in model.layers:
        assert isinstance(layer, AttentionDecoderLayer)
        found += [layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down]
    return found


def _panels(model: Decoder) -> Sequence[PanelLinear]:
    """Return the matrices that are stored in panels. Of a layer's experts, return only the first expert's matrices."""
    products = [one.like if isinstance(one, ExpertPanels) else one for one in _products(model)]
    return [one for one in products if isinstance(one, PanelLinear)]

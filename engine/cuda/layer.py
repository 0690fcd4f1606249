"""The element-wise work of a layer on a GPU. Each Triton kernel does the work of 3 to 10 torch kernels."""

import torch
import triton
from torch import Tensor

from engine.batch import Batch
from engine.cuda import layer_kernels as triton_rows
from engine.cuda import routing_kernels as triton_routing
from engine.cuda.recurrence import recur
from engine.kernels import CommonStep, Kernels
from engine.models.spec import Activation, MoeSpec
from engine.recurrence import RecurrentLayer
from engine.routing import by_expert

COLUMNS = 1024  # number of elements that each program of an element-wise kernel computes
FEW_CHOICES = 8192  # for up to this many (token, expert) pairs in a step, `sort_by_expert` is faster than torch's sort
CHOICES = 64  # number of (token, expert) pairs whose places each program of `sort_by_expert` computes
ELEMENTS_PER_WARP = 256  # with fewer elements, lanes of a warp would be idle; more would not fit into registers


class TritonKernels(Kernels):
    name = "triton"
    captures_states = True

    def begin(self, batch: Batch) -> "TritonStep":
        """Return the step's kernels. This method computes nothing from the batch, so a graph can replay the kernels."""
        return TritonStep(self, batch)


class TritonStep(CommonStep):
    """The element-wise kernels of one step on a GPU.

    `TritonKernels.begin` creates this object for one batch, and the decoder uses it on the engine's thread. The kernels
    write KV directly into the pool.
    """

    def _angles(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the angles for a layer. Each layer computes them again, so that a graph can replay the computation."""
        return self._kernels.rotations[self._kernels.rotation_of[layer]].angles(self._batch.positions)

    def norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        return self._norm(flat, flat, weight, adds=False).view(rows.shape)

    def add_norm(self, hidden: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, self._norm(hidden, update, weight, adds=True)

    def _norm(self, rows: Tensor, update: Tensor, weight: Tensor, adds: bool) -> Tensor:
        width = rows.shape[1]
        out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        block = triton.next_power_of_2(width)
        if len(rows):
            triton_rows.norm_rows[(len(rows),)](
                rows, update, weight, out, self._kernels.config.rms_norm_eps, rows.stride(0), update.stride(0),
                WIDTH=width, BLOCK=block, ADDS=adds, num_warps=_warps(block, 4),
            )  # fmt: skip
        return out

    def rotate_and_store(self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
        """Rotate the queries in place, store the keys and values, and return the queries as a view of `qkv`."""
        kernels, batch, config = self._kernels, self._batch, self._kernels.config
        if kernels.norms_values[layer]:
            return self._rotate_and_store_normed(layer, qkv, q_norm, k_norm)
        rotation = kernels.rotations[kernels.rotation_of[layer]]
        keys, values = kernels.pool.layer(layer)
        key_scale, value_scale = kernels.pool.scales[layer]
        group = config.num_heads // config.num_kv_heads
        block_g, block_h = triton.next_power_of_2(group), triton.next_power_of_2(config.head_dim // 2)
        normed = q_norm is not None and k_norm is not None
        if len(qkv):
            triton_rows.rotate_and_store[(len(qkv), config.num_kv_heads)](
                qkv, q_norm if normed else qkv, k_norm if normed else qkv, keys, values,
                batch.positions, self._slots(layer), rotation.frequencies, rotation.magnitudes, config.rms_norm_eps,
                1 / key_scale, 1 / value_scale, qkv.stride(0), keys.stride(0), keys.stride(1), keys.stride(2),
                GROUP=group, PAGE=kernels.pool.layout.block_tokens, HEAD_DIM=config.head_dim,
                BLOCK_G=block_g, BLOCK_H=block_h, NORMED=normed, FLOAT8=kernels.pool.is_float8,
                num_warps=_warps(block_g * block_h, 1),
            )  # fmt: skip
        return qkv[:, : config.num_heads * config.head_dim].view(len(qkv), config.num_heads, config.head_dim)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return self._gated(gate, up, activation)

    def sigmoid_gated(self, rows: Tensor, gate: Tensor) -> Tensor:
        return self._gated(gate, rows, "sigmoid")

    def _gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        count, width = gate.shape
        out = torch.empty(count, width, dtype=up.dtype, device=up.device)
        if count:
            triton_rows.gated[(count, triton.cdiv(width, COLUMNS))](
                gate, up, out, gate.stride(0), up.stride(0), width, BLOCK=COLUMNS, ACTIVATION=activation, num_warps=4
            )
        return out

    def route(self, spec: MoeSpec, logits: Tensor, correction: Tensor | None, factors: Tensor) -> tuple[Tensor, Tensor]:
        count, alone = len(logits), spec.scores_chosen
        weights = torch.empty(count, spec.top_k, dtype=torch.float32, device=logits.device)
        chosen = torch.empty(count, spec.top_k, dtype=torch.int64, device=logits.device)
        groups = 1 if alone else spec.groups
        triton_routing.route[(count,)](
            logits, logits if correction is None else correction, factors, weights, chosen,
            EXPERTS=spec.num_experts, TOP_K=spec.top_k,
            SCORE="chosen" if alone else spec.score, CORRECTS=correction is not None and not alone,
            RENORMALIZES=alone or spec.renormalizes, GROUPS=groups,
            TOP_GROUPS=spec.top_groups, GROUP_SCORES=min(spec.group_scores, spec.num_experts // groups),
            BLOCK_E=triton.next_power_of_2(spec.num_experts), BLOCK_K=triton.next_power_of_2(spec.top_k),
            BLOCK_G=triton.next_power_of_2(groups), num_warps=1,
        )  # fmt: skip
        return weights, chosen

    def by_expert(self, chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        count, chosen = chosen.numel(), chosen.contiguous()
        if count > FEW_CHOICES:
            return by_expert(chosen, num_experts)
        sources, places, counts = chosen.new_empty(count), torch.empty_like(chosen), chosen.new_empty(num_experts)
        triton_routing.sort_by_expert[(triton.cdiv(count + num_experts, CHOICES),)](
            chosen, sources, places, counts, count, TOP_K=chosen.shape[1], EXPERTS=num_experts, BLOCK=CHOICES,
            num_warps=4,
        )  # fmt: skip
        return sources, places, counts

    def combine(self, outputs: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        (count, top_k), width = places.shape, outputs.shape[1]
        out = torch.empty(count, width, dtype=outputs.dtype, device=outputs.device)
        triton_rows.combine[(count, triton.cdiv(width, COLUMNS))](
            outputs, places, weights, out, width, TOP_K=top_k, BLOCK=COLUMNS, num_warps=4
        )
        return out

    def recur(self, layer: RecurrentLayer, inputs: Tensor, gate: Tensor, steps: Tensor) -> Tensor:
        return recur(self.pool, self._batch, layer, inputs, gate, steps, self._kernels.config.rms_norm_eps)


def _warps(elements: int, least: int) -> int:
    return int(min(16, max(least, triton.next_power_of_2(elements // ELEMENTS_PER_WARP))))

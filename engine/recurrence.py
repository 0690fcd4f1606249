"""Recurrent layers: their weights, and the reference in plain torch.

The recurrence runs token by token in float32. The result of a token, and the state after the token, therefore do not
depend on how a prompt is divided into chunks.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from engine.batch import Batch, StateBatch
from engine.kv_pool import KVPool
from engine.models.spec import DeltaSpec, RecurrentSpec, SsmSpec

NORM_EPSILON = 1e-6  # epsilon of the norms of queries and keys


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentLayer:
    """The weights of a recurrent layer apart from its projections, all float32.

    `first_unit` is the layer's first unit in a state (see `state_units`). For each token, the state is multiplied by
    exp(rate * softplus(step size + step_bias)). The value of a head, multiplied by `skip` (0 for the delta rule), is
    added to the head's result. The results of all heads are normed in groups of `group` columns.
    """

    spec: RecurrentSpec
    first_unit: int
    conv: Tensor  # [conv, channels], the oldest input first
    conv_bias: Tensor | None  # [channels]
    rates: Tensor  # [value_heads]
    step_bias: Tensor  # [value_heads]
    skip: Tensor  # [value_heads]
    norm: Tensor  # [inner]
    group: int

    @property
    def num_inputs(self) -> int:
        """The number of units that hold inputs of the convolution."""
        return sum(heads for heads, _ in self.spec.parts)


def states_of(batch: Batch) -> StateBatch:
    if batch.states is None:
        raise ValueError("a model with recurrent layers needs a batch with states")
    return batch.states


def starts_of(batch: Batch) -> Tensor:
    """Return the index of each slice's first token, int32 [S + 1], for recurrent layers (see `StateBatch`)."""
    own = states_of(batch).cu_q
    return batch.cu_q if own is None else own


def places_of(pool: KVPool, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return two fields of `StateBatch`: `places` (the offsets in the pool of the states to read, to write and to
    save), and `save_at`."""
    states = states_of(batch)
    if states.places is None:
        states.places = pool.state_places(states.rows)
    return states.places, states.save_at


def recur(
    pool: KVPool, batch: Batch, layer: RecurrentLayer, inputs: Tensor, gate: Tensor, steps: Tensor, epsilon: float
) -> Tensor:
    """Compute `StepKernels.recur`. `epsilon` is used in the norm of the results."""
    (places, saves), spec, floats = places_of(pool, batch), layer.spec, pool.floats
    strengths, decays = _strengths_and_decays(layer, steps.float())
    out = torch.empty(len(inputs), spec.inner, dtype=torch.float32, device=inputs.device)
    starts = starts_of(batch).tolist()
    for index, (row, end) in enumerate(pairwise(starts)):
        rows, count = slice(row, end), end - row
        read, write, save = places[:, index].tolist()
        save_at = int(saves[index])
        mixed, kept = _convolve(layer, _past_inputs(floats, layer, read), inputs[rows].float())
        state = _past_state(floats, layer, read)
        for token in range(count):
            at = row + token
            state, out[at] = _advance(layer, state, mixed[token], strengths[at], decays[at])
            if token + 1 == save_at:
                _store(floats, layer, save, kept[token + 1 : token + spec.conv], state)
        _store(floats, layer, write, kept[count : count + spec.conv - 1], state)
    return _normed(layer, out, gate.float(), epsilon).to(inputs.dtype)


def _strengths_and_decays(layer: RecurrentLayer, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors [T, value_heads]: the factors that multiply updates, and the factors that multiply states."""
    sizes = softplus(steps[:, -layer.spec.value_heads :] + layer.step_bias)
    decays = (sizes * layer.rates).exp()
    if isinstance(layer.spec, SsmSpec):
        return sizes, decays
    return steps[:, : layer.spec.value_heads].sigmoid(), decays


def _past_inputs(pool: Tensor, layer: RecurrentLayer, places: list[int]) -> Tensor:
    """Return the inputs of the convolution before the slice, [conv - 1, channels]."""
    spec, unit, found = layer.spec, layer.first_unit, []
    for heads, size in spec.parts:
        for _ in range(heads):
            count = (spec.conv - 1) * size
            found.append(_unit(pool, places[unit], count).view(spec.conv - 1, size))
            unit += 1
    return torch.cat(found, dim=1)


def _past_state(pool: Tensor, layer: RecurrentLayer, places: list[int]) -> Tensor:
    """Return the recurrent matrices before the slice, [value_heads, key_dim, value_dim]."""
    spec, first = layer.spec, layer.first_unit + layer.num_inputs
    shape = spec.key_dim, spec.value_dim
    own = places[first : first + spec.value_heads]
    return torch.stack([_unit(pool, place, shape[0] * shape[1]).view(shape) for place in own])


def _unit(pool: Tensor, place: int, size: int) -> Tensor:
    return pool.new_zeros(size) if place < 0 else pool[place : place + size]


def _store(pool: Tensor, layer: RecurrentLayer, places: list[int], inputs: Tensor, state: Tensor) -> None:
    """Store the recurrent matrices and the last inputs of the convolution."""
    spec = layer.spec
    sizes = [size for heads, size in spec.parts for _ in range(heads)]
    units = [*torch.split(inputs, sizes, dim=1), *state]
    for place, values in zip(places[layer.first_unit : layer.first_unit + len(units)], units, strict=True):
        if place >= 0:
            pool[place : place + values.numel()] = values.flatten()


def _convolve(layer: RecurrentLayer, past: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of the convolution, [count, channels], and its inputs, preceded by the past inputs.

    For the delta rule, the queries and keys of each head are normed.
    """
    spec, every = layer.spec, torch.cat((past, inputs))
    total = torch.zeros_like(inputs) if layer.conv_bias is None else layer.conv_bias.expand_as(inputs)
    for place in range(spec.conv):
        total = total + layer.conv[place] * every[place : place + len(inputs)]
    mixed = silu(total)
    if isinstance(spec, DeltaSpec):
        keys = spec.key_heads * spec.key_dim
        heads = mixed[:, : 2 * keys].reshape(len(mixed), 2, spec.key_heads, spec.key_dim)
        heads = heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + NORM_EPSILON)
        scales = torch.tensor([spec.key_dim**-0.5, 1.0], device=heads.device)
        mixed = torch.cat(((heads * scales[:, None, None]).flatten(1), mixed[:, 2 * keys :]), dim=1)
    return mixed, every


def _advance(
    layer: RecurrentLayer, state: Tensor, mixed: Tensor, strength: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the state after one token, and the token's result, [inner]."""
    spec, (query_at, key_at, value_at) = layer.spec, layer.spec.columns
    shared = spec.value_heads // spec.key_heads

    def keys(start: int) -> Tensor:
        heads = mixed[start : start + spec.key_heads * spec.key_dim].view(spec.key_heads, spec.key_dim)
        return heads.repeat_interleave(shared, 0)[:, :, None]

    query, key = keys(query_at), keys(key_at)
    value = mixed[value_at : value_at + spec.inner].view(spec.value_heads, spec.value_dim)
    state = state * decay[:, None, None]
    known = (state * key).sum(1) if isinstance(spec, DeltaSpec) else 0.0
    state = state + key * ((value - known) * strength[:, None])[:, None]
    result = (state * query).sum(1)
    return state, (result + layer.skip[:, None] * value).flatten()


def _normed(layer: RecurrentLayer, rows: Tensor, gate: Tensor, epsilon: float) -> Tensor:
    """Return the normed and gated result. State spaces are gated before the norm, and delta rules after the norm."""
    gates_first = isinstance(layer.spec, SsmSpec)
    rows = rows * silu(gate) if gates_first else rows
    groups = rows.view(len(rows), -1, layer.group)
    groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + epsilon)
    normed = groups.flatten(1) * layer.norm
    return normed if gates_first else normed * silu(gate)

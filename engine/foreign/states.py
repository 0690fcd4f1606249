"""Recurrent states of transformers' modules, which are kept in Baton's KV pool between the steps of a request.

A pass computes the tokens of all requests as one sequence, except in modules with states. A module with states runs
once for all decodes together, and separately for each chunk. In each run, the module gets a `Cache` of transformers,
which contains the states of the requests in this run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from engine.batch import Batch
from engine.kv_pool import KVPool
from engine.recurrence import places_of

UNIT = 512  # the largest unit of a state, in float32 numbers: small enough for the rows of small models
# Names of the cache argument in different versions of transformers.
CACHE = ("cache", "past_key_values", "cache_params")


@dataclass(frozen=True, slots=True)
class StatePart:
    """A tensor that a module keeps: the last inputs of a convolution, or a recurrent state. `shape` is the shape of one
    state."""

    layer: int
    number: int  # index by which transformers identifies the state within its layer
    is_conv: bool
    shape: tuple[int, ...] = ()


@dataclass(slots=True)
class ModuleStates:
    """The state that a module keeps between tokens, and where its units are in the state of a whole request."""

    module: nn.Module
    parts: list[StatePart]
    first_unit: int
    sizes: Tensor = field(init=False)  # sizes of the units, int64
    within: Tensor = field(init=False)  # for each value of the state, the value's offset in its unit, int64

    def __post_init__(self) -> None:
        self.sizes = torch.tensor(self.units)
        self.within = torch.cat([torch.arange(size) for size in self.units])

    @property
    def units(self) -> tuple[int, ...]:
        counts = [prod(part.shape) for part in self.parts]
        return tuple(min(UNIT, count - start) for count in counts for start in range(0, count, UNIT))

    def numbers(self, places: Tensor) -> Tensor:
        """Return the offset in `KVPool.floats` of each value of the states. `places` has the offsets of the states'
        units."""
        own = places[..., self.first_unit : self.first_unit + len(self.sizes)]
        return own.repeat_interleave(self.sizes, dim=-1) + self.within

    def load(self, cache: DynamicCache, numbers: Tensor) -> None:
        """Copy states, float32 [S, values per state], into the cache."""
        tensors = torch.split(numbers, [prod(part.shape) for part in self.parts], dim=1)
        for part, tensor in zip(self.parts, tensors, strict=True):
            update = cache.update_conv_state if part.is_conv else cache.update_recurrent_state
            update(tensor.reshape(-1, *part.shape), part.layer, state_idx=part.number)

    def of(self, cache: DynamicCache) -> Tensor:
        """Return the states in a cache, float32 [S, values per state]."""
        return torch.cat([kept(cache, part).float().flatten(1) for part in self.parts], dim=1)


def kept(cache: DynamicCache, part: StatePart) -> Tensor:
    """Return the state `part` from a cache. Raises ValueError if the cache does not have this state."""
    get = cache.get_conv_state if part.is_conv else cache.get_recurrent_state
    found: Tensor | None = get(part.layer, state_idx=part.number)
    if found is None:
        raise ValueError(f"layer {part.layer} stored its state in another place than in the first pass")
    return found


class StateProbe(DynamicCache):  # type: ignore[misc]
    """The cache of a probe pass, which detects the modules that keep states."""

    def __init__(self, config: Any, module: nn.Module) -> None:
        super().__init__(config=config)
        # By module: its states, as keys (layer, number, is_conv)
        self._parts: dict[nn.Module, dict[tuple[int, int, bool], None]] = {}
        self._calls: list[nn.Module] = []  # the modules whose code runs, from the outermost to the innermost
        self._module = module

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the calls of modules in the `with` block."""
        hooks = [one.register_forward_pre_hook(self._enter) for one in self._module.modules()]
        hooks += [one.register_forward_hook(self._leave) for one in self._module.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._calls.append(module)

    def _leave(self, *_: Any) -> None:
        self._calls.pop()

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any) -> Tensor:
        self._parts.setdefault(self._calls[-1], {})[layer_idx, state_idx, True] = None
        return super().update_conv_state(conv_states, layer_idx, state_idx, **options)  # type: ignore[no-any-return]

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> Tensor:
        self._parts.setdefault(self._calls[-1], {})[layer_idx, state_idx, False] = None
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **options)  # type: ignore[no-any-return]

    def found(self) -> list[ModuleStates]:
        """Return the states of each module that has any."""
        found: list[ModuleStates] = []
        for module, owned in self._parts.items():
            given = [StatePart(*key) for key in sorted(owned, key=lambda one: not one[2])]  # convolutions first
            parts = [replace(part, shape=tuple(kept(self, part).shape[1:])) for part in given]
            found.append(ModuleStates(module, parts, sum(len(one.units) for one in found)))
        return found


class StatefulModule(nn.Module):
    """A wrapper of a module of transformers that has states. It passes each call to `run`, which keeps the states in
    the pool during a pass."""

    def __init__(self, states: ModuleStates, run: Callable[..., Any]) -> None:
        super().__init__()
        self.module = states.module
        self._states, self._run = states, run

    def forward(self, *given: Any, **options: Any) -> Any:
        return self._run(self._states, given, options)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module, because code outside the module may read it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def wrap(root: nn.Module, states: list[ModuleStates], run: Callable[..., Any]) -> None:
    """Replace each module with states by a `StatefulModule`."""
    wrapped = {id(one.module): StatefulModule(one, run) for one in states}
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in wrapped and not isinstance(parent, StatefulModule):
                setattr(parent, name, wrapped[id(child)])


class StatePass:
    """The states of one pass. All decodes share one cache, and each chunk has its own cache.

    If `stepwise`, modules get one token at a time, because their code ignores the state before a chunk.
    """

    def __init__(self, config: Any, batch: Batch, pool: KVPool, stepwise: bool) -> None:
        self._floats = pool.floats
        self._places, saves = places_of(pool, batch)
        # For each cache: the slices that use it, and the rows of the batch that each call of a module computes.
        self._groups: list[tuple[list[int], list[Tensor]]] = []
        self._save_at = saves.tolist()
        first = batch.cu_q.tolist()
        begins = (self._places[0, :, 0] < 0).tolist()
        decodes = [one for one, count in enumerate(batch.counts) if count == 1 and not begins[one]]
        if decodes:
            self._groups.append((decodes, [torch.tensor([first[one] for one in decodes])[:, None]]))
        for one, count in enumerate(batch.counts):
            if one not in decodes:
                rows = torch.arange(first[one], first[one + 1])[None]
                cuts = range(count) if stepwise else sorted({0, self._save_at[one] % count})
                self._groups.append(([one], list(torch.tensor_split(rows, list(cuts)[1:], dim=1))))
        self._begins = begins
        self._caches = [DynamicCache(config=config) for _ in self._groups]
        self._order = torch.cat([rows.flatten() for _, runs in self._groups for rows in runs]).argsort()
        self._num_tokens = first[-1]

    def run(self, states: ModuleStates, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run a module for all slices, and store their states."""
        outputs: list[Any] = []
        for (slices, runs), cache in zip(self._groups, self._caches, strict=True):
            numbers = states.numbers(self._places[:, slices])
            if not self._begins[slices[0]]:
                states.load(cache, self._floats[numbers[0]])
            done = 0
            for rows in runs:
                own = {name: cache if name in CACHE else self._part(value, rows) for name, value in options.items()}
                outputs.append(states.module(*(self._part(value, rows) for value in given), **own))
                done += rows.shape[1]
                if saved := [place for place, one in enumerate(slices) if self._save_at[one] == done]:
                    self._floats[numbers[2, saved]] = states.of(cache)[saved]
            self._floats[numbers[1]] = states.of(cache)
        return self._joined(outputs)

    def _part(self, value: Any, rows: Tensor) -> Any:
        """Return the part of an argument for the tokens `rows`, [requests, tokens]. Only tensors of shape [1, T, ...]
        have an entry for each token. Other values are returned whole."""
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, self._num_tokens):
            return value[0, rows]
        if isinstance(value, tuple | list):
            return type(value)(self._part(one, rows) for one in value)
        return value

    def _joined(self, outputs: list[Any]) -> Any:
        """Return the outputs of all tokens, in the order of the pass."""
        if isinstance(outputs[0], Tensor):
            return torch.cat([one.flatten(0, 1) for one in outputs])[self._order][None]
        if isinstance(outputs[0], tuple | list):
            return type(outputs[0])(self._joined(list(parts)) for parts in zip(*outputs, strict=True))
        return outputs[0]

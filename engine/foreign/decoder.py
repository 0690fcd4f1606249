"""A decoder made of modules of transformers. It stores its KV in Baton's pool, and attends with Baton's kernels.

A step is one pass over one sequence, which holds the tokens of all requests. Baton replaces attention, and runs
recurrent modules in `engine.foreign.states`. Other modules compute each token independently of the other tokens.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface

from engine.attention import AttentionLayer, AttentionPlan
from engine.batch import Batch
from engine.foreign.states import CACHE, ModuleStates, StatePass, StateProbe, wrap
from engine.kernels import StepKernels
from engine.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelConfig

ATTENTION = "baton"  # the name under which transformers finds Baton's attention
PROBE_TOKENS = 8
WINDOWED = {"full_attention": 0, "hybrid": 0, "sliding_attention": 1, "hybrid_sliding": 1}
RECURRENT = ("linear_attention", "conv", "hybrid", "hybrid_sliding")  # kinds of layers with a state
FAR = 4096  # a query at this position must see all earlier positions, unless the layer has a window


@dataclass(frozen=True, slots=True, eq=False)
class Reach:
    """The mask of a layer, which is passed to attention in place of a tensor. A query sees the last `window` tokens, or
    all tokens if `window` is 0.

    If the mask is not supported, `refusal` is the reason.
    """

    window: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One call of attention in a pass: the sizes of its inputs, and its parameters."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    softcap: float
    sinks: Tensor | None


class ProbePass:
    """Records the calls of attention in a probe pass. Attention returns zeros in this pass."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: object, options: dict[str, Any]) -> Tensor:
        if not isinstance(mask, Reach):
            raise ValueError("it computes its attention masks itself, or attends without a mask")
        if mask.refusal:
            raise ValueError(mask.refusal)
        if query.shape[2] != key.shape[2] or len(query) != 1:
            raise ValueError("it attends to tokens that are not in its input")
        sinks = options.get("s_aux")
        self.calls.append(
            AttentionCall(
                query.shape[1], key.shape[1], query.shape[3], value.shape[3], mask.window,
                float(options.get("softcap") or 0.0), None if sinks is None else sinks.detach().float().flatten(),
            )
        )  # fmt: skip
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def mask(self, mask_function: Any, local_size: int | None) -> Reach:
        """Find the reach of a mask by testing which keys a few sample queries see."""
        sizes = (local_size,) if local_size else ()
        for at in (5, *(2 * size + 1 for size in sizes), *(3 * size - 1 for size in sizes), *(() if sizes else (FAR,))):
            keys, zero = torch.arange(at + 3), torch.zeros(1, dtype=torch.long)
            try:
                seen = mask_function(zero, zero, torch.tensor([at]), keys)
            except IndexError:
                return Reach(refusal="the attention mask depends on the tokens of the prompt")
            wrong = seen.expand(len(keys)) != _visible(keys, at, local_size)
            if bool(wrong[at + 1 :].any()):
                return Reach(refusal="a token attends to later ones: this is not a decoder")
            if bool(wrong.any()):
                return Reach(refusal=f"a token attends to tokens other than the latest ones (local size {local_size})")
        return Reach(local_size or 0)


def _visible(keys: Tensor, at: int, window: int | None) -> Tensor:
    return (keys <= at) & (keys > at - window) if window else keys <= at


@dataclass(slots=True)
class PackedPass:
    """The attention of one pass. The model's layers call `attend` in the same order as in the probe pass."""

    decoder: "ForeignDecoder"
    kernels: StepKernels
    plan: AttentionPlan
    states: StatePass | None
    calls: int = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, _: object, options: dict[str, Any]) -> Tensor:
        decoder, index = self.decoder, self.calls
        layer = decoder.layers[index]
        self.calls += 1
        dim = decoder.config.head_dim
        scaling = options.get("scaling")
        scale = 1.0 if scaling is None and query.shape[3] == dim else (scaling or query.shape[3] ** -0.5) * dim**0.5
        query = query if math.isclose(scale, 1.0, rel_tol=1e-7) else query * scale
        repeats = decoder.config.num_kv_heads // key.shape[1]
        parts = [_rows(query, dim), _rows(key, dim, repeats), _rows(value, dim, repeats)]
        q = self.kernels.rotate_and_store(index, torch.cat(parts, dim=1), None, None)
        attended = self.plan.attend(layer, q)
        return attended[None, ..., : value.shape[3]]

    def mask(self, mask_function: Any, local_size: int | None) -> Reach:
        return Reach(local_size or 0)


def _rows(heads: Tensor, dim: int, repeats: int = 1) -> Tensor:
    """Reshape `heads`, [1, heads, T, size], to [T, heads * dim]. Each head is padded with zeros to size `dim`."""
    heads = heads[0].transpose(0, 1)
    heads = heads if repeats == 1 else heads.repeat_interleave(repeats, dim=1)
    heads = heads if heads.shape[2] == dim else pad(heads, (0, dim - heads.shape[2]))
    return heads.flatten(1)


class ForeignDecoder:
    """A model of transformers with the interface of `Decoder`.

    The runner owns the model and calls it on one thread at a time. During a pass, the model's modules call `_pass` for
    attention and for masks. `config` has the sizes of keys and values that a probe pass found. These sizes are the same
    for all layers: smaller heads are padded, and a layer with fewer KV heads stores copies of its KV heads. `states`
    has the recurrent states that the probe pass found. If `stepwise`, layers with states get one token at a time."""

    def __init__(self, module: Any, config: ModelConfig) -> None:
        self.module = module.eval()
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self._pass: ProbePass | PackedPass | None = None
        self._name = f"{ATTENTION}-{id(self)}"
        AttentionInterface.register(self._name, self._attend)
        AttentionMaskInterface.register(self._name, self._mask)
        self.attend_with_baton()
        self.stepwise = False
        self._sizes = module.config.get_text_config(decoder=True)
        self.calls, self.states = self._probe(config)
        units = tuple(size for one in self.states for size in one.units)
        self.config = replace(config, layers=layers_of(self.calls), units=units)
        check_windows(self._sizes, self.calls)
        wrap(module, self.states, self._run_with_states)
        self.layers = [
            AttentionLayer(index, call.window, call.softcap, call.sinks) for index, call in enumerate(self.calls)
        ]

    @property
    def takes_positions(self) -> bool:
        return "position_ids" in signature(self.module.forward).parameters

    def attend_with_baton(self) -> None:
        self.module.set_attn_implementation(self._name)

    @contextmanager
    def own_attention(self) -> Iterator[Any]:
        """Yield the module with transformers' own eager attention."""
        self.module.set_attn_implementation("eager")
        yield self.module
        self.attend_with_baton()

    @torch.inference_mode()
    def forward(
        self, batch: Batch, kernels: StepKernels, attention: AttentionPlan, last: AttentionPlan | None = None
    ) -> Tensor:
        """Store the KV of all T tokens, and return the logits of the batch's logit rows, [R, vocab_size]."""
        states = StatePass(self._sizes, batch, kernels.pool, self.stepwise) if self.states else None
        packed = PackedPass(self, kernels, attention, states)
        rows = batch.logit_rows
        found = self._run(packed, batch.tokens, batch.positions, rows if len(rows) else batch.logit_rows.new_zeros(1))
        if packed.calls != len(self.layers):
            raise RuntimeError(f"{packed.calls} calls of attention in a pass, but {len(self.layers)} in the probe")
        return found[: len(rows)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `hidden` in float32. It already contains logits, because `forward` of this class returns logits."""
        return hidden.float()

    def _run(
        self,
        receiver: ProbePass | PackedPass,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor,
        cache: StateProbe | None = None,
    ) -> Tensor:
        own = {}
        if cache is not None:
            accepted = signature(self.module.forward).parameters
            own[next(name for name in CACHE if name in accepted)] = cache
        self._pass = receiver
        try:
            output = self.module(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=cache is not None,
                logits_to_keep=rows,
                **own,
            )
        finally:
            self._pass = None
        logits: Tensor = output.logits[0]
        # A model whose head ignores `logits_to_keep` returns the logits of all rows.
        return logits if len(logits) == len(rows) else logits[rows]

    @torch.inference_mode()
    def _probe(self, config: ModelConfig) -> tuple[list[AttentionCall], list[ModuleStates]]:
        geometry, positions = ProbePass(), torch.arange(min(PROBE_TOKENS, config.max_position_embeddings))
        given = geometry, positions % config.vocab_size, positions, positions[-1:]
        if not set(getattr(self._sizes, "layer_types", None) or ()) & set(RECURRENT):
            self._run(*given)
            return geometry.calls, []
        probe = StateProbe(self._sizes, self.module)
        with probe.watching():
            self._run(*given, probe)
        return geometry.calls, probe.found()

    def _run_with_states(self, states: ModuleStates, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run a module with states. In a pass over the pool, its states are in the pool. In other passes, the module
        runs unchanged."""
        if isinstance(self._pass, PackedPass) and self._pass.states is not None:
            return self._pass.states.run(states, given, options)
        return states.module(*given, **options)

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        assert self._pass is not None, "attention outside of a pass"
        return self._pass.attend(query, key, value, attention_mask, options), None

    def _mask(self, *, mask_function: Any, local_size: int | None = None, **_: Any) -> Reach:
        assert self._pass is not None, "a mask outside of a pass"
        return self._pass.mask(mask_function, local_size)


def check_windows(config: Any, calls: list[AttentionCall]) -> None:
    """Raise ValueError if the windows of config.json are not those that transformers' code uses.

    If the windows differ, the output of transformers itself might be wrong, because its caches drop the KV outside the
    windows of config.json.
    """
    window, found = getattr(config, "sliding_window", None) or 0, [call.window for call in calls]
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * len(found)
    given = [window * WINDOWED[kind] for kind in kinds if kind in WINDOWED]
    if len(given) == len(found) and given != found:  # the lengths differ if a layer calls attention more than once
        raise ValueError(
            f"config.json gives the layers windows of {given} tokens (0: all), by layer_types and sliding_window, but "
            f"transformers' code attends to {found}; correct config.json"
        )


def layers_of(calls: list[AttentionCall]) -> tuple[LayerSpec, ...]:
    """Return the layers with the sizes that the probe found, or raise ValueError if the KV pool cannot hold them."""
    if not calls:
        raise ValueError("it does not use the attention interface of transformers")
    heads, kv_heads = {call.heads for call in calls}, max(call.kv_heads for call in calls)
    if len(heads) > 1 or max(heads) % kv_heads or any(kv_heads % call.kv_heads for call in calls):
        raise ValueError(f"its layers have {sorted(heads)} query heads and at most {kv_heads} key heads")
    dim = max(max(call.key_dim, call.value_dim) for call in calls)
    dim += dim % 2
    specs = (
        AttentionSpec(call.heads, kv_heads, dim, None, call.window, softcap=call.softcap, sinks=call.sinks is not None)
        for call in calls
    )
    return tuple(LayerSpec(spec, MlpSpec(1)) for spec in specs)

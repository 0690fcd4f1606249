"""Loads a decoder into transformers' modules, with Baton's matrix products, and checks the decoder."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.attention import AttentionBackend
from engine.foreign.check import TOLERANCE, check
from engine.foreign.decoder import ForeignDecoder
from engine.kv_pool import KVPool
from engine.linear import Linear, LinearFormat
from engine.models.spec import ModelConfig
from engine.startup import cause, is_out_of_memory
from engine.weights import stored_dtype

log = logging.getLogger("baton.engine")
# For each dtype of a checkpoint, the weight formats that round weights of this dtype.
LESS = {
    torch.float32: ("bfloat16", "float16"),
    torch.bfloat16: ("float16",),
    torch.float16: ("bfloat16",),
}
ROUNDED = 0.1  # largest accepted difference of logits, relative to their range, if weights are rounded


class LinearModule(nn.Module):
    """A linear layer that multiplies with one of Baton's weight formats.

    `weight` is an empty tensor. It exists because some modules read its dtype.
    """

    def __init__(self, linear: Linear, width: int) -> None:
        super().__init__()
        self._linear = linear
        self.out_features = width
        self.weight = torch.empty(0)

    def forward(self, rows: Tensor) -> Tensor:
        return self._linear(rows.reshape(-1, rows.shape[-1])).view(*rows.shape[:-1], self.out_features)


def load_foreign(
    path: Path, config: ModelConfig, linear: LinearFormat, backend: Callable[[KVPool], AttentionBackend]
) -> ForeignDecoder:
    """Load the model in `path` and check it.

    Raises ValueError, with the reason, if the model is not suitable or fails the check.
    """
    module = read_module(path, config)
    stored = getattr(torch, stored_dtype(path))
    try:
        decoder = ForeignDecoder(module, config)
        with called_modules(module) as called:
            expected = checked(decoder, backend)
        use_products(module, linear, stored, called)
        rounds = linear.name.startswith("int8") or linear.name.split()[0] in LESS.get(stored, ())
        check(decoder, backend, expected, ROUNDED if rounds else TOLERANCE)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        why = str(error) if isinstance(error, ValueError) else f"its code cannot run over a KV pool: {cause(error)}"
        raise ValueError(f"{path}: {config.architecture} through transformers {config.transformers}: {why}") from error
    return decoder


def checked(decoder: ForeignDecoder, backend: Callable[[KVPool], AttentionBackend]) -> list[Tensor]:
    """Check the decoder and return the result of `check`.

    If the check fails and the decoder has recurrent states, check again with one token at a time, because the code of
    some models cannot process several tokens from an existing state.
    """
    try:
        return check(decoder, backend)
    except ValueError:
        if not decoder.states:
            raise
    decoder.stepwise = True
    return check(decoder, backend)


def read_module(path: Path, config: ModelConfig) -> Any:
    """Return transformers' model in float32. Raises ValueError if a tensor is missing, unexpected or of wrong size."""
    transformers.utils.logging.disable_progress_bar()
    module, found = getattr(transformers, config.architecture).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", local_files_only=True, trust_remote_code=False,
        use_safetensors=True, output_loading_info=True,
    )  # fmt: skip
    for key, why in (
        ("missing_keys", "missing"), ("mismatched_keys", "of other sizes"), ("unexpected_keys", "not part of the model")
    ):  # fmt: skip
        if names := sorted(map(str, found.get(key) or ())):
            raise ValueError(f"{path}: {len(names)} tensors are {why}, such as {names[0][:100]}")
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()  # so that overwriting the file does not change a running model
    return module


@contextmanager
def called_modules(root: nn.Module) -> Iterator[set[nn.Module]]:
    """Yield a set to which each module of `root` is added when it is called in the `with` block."""
    called: set[nn.Module] = set()
    hooks = [one.register_forward_pre_hook(lambda module, _: called.add(module)) for one in root.modules()]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def use_products(module: nn.Module, linear: LinearFormat, stored: torch.dtype, called: set[nn.Module]) -> None:
    """Replace each linear layer by a module that multiplies with a weight format. The format gets the weights in the
    checkpoint's dtype `stored` if this dtype represents them exactly, and in float32 otherwise.

    Layers that are not in `called` stay as they are, because the model's code may read their weights directly (Jamba).
    """
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) not in {nn.Linear, Conv1D} or child not in called:
                continue
            weight: Tensor = child.weight.detach()  # type: ignore[operator]
            weight = weight.T.contiguous() if type(child) is Conv1D else weight
            short = weight.to(stored)
            weight = short if torch.equal(short.float(), weight) else weight
            bias = None if child.bias is None else child.bias.detach()  # type: ignore[operator]
            setattr(parent, name, LinearModule(linear.make(weight, bias), len(weight)))

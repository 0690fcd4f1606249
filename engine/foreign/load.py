"""Loads a decoder into transformers' modules, with Baton's products, and checks it before it serves."""

import logging
from collections.abc import Callable
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
# The weight formats that round the weights of a checkpoint.
LESS = {
    torch.float32: ("bfloat16", "float16"),
    torch.bfloat16: ("float16",),
    torch.float16: ("bfloat16",),
}
ROUNDED = 0.1  # the largest difference of logits, by their range, if weights are stored with fewer bits


class LinearModule(nn.Module):
    """A linear layer that multiplies with one of Baton's weight formats.

    Some code asks for the dtype of `weight`, which is empty here. The check at load refuses code that reads its values.
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
    """Load the model in `path` and check it. Raises ValueError, with the reason, if it does not fit or fails."""
    module = read_module(path, config)
    stored = getattr(torch, stored_dtype(path))
    try:
        decoder = ForeignDecoder(module, config)
        expected = check(decoder, backend)
        use_products(module, linear, stored)
        rounds = linear.name.startswith("int8") or linear.name.split()[0] in LESS.get(stored, ())
        check(decoder, backend, expected, ROUNDED if rounds else TOLERANCE)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        why = str(error) if isinstance(error, ValueError) else f"its code cannot run over a KV pool: {cause(error)}"
        raise ValueError(f"{path}: {config.architecture} through transformers {config.transformers}: {why}") from error
    return decoder


def read_module(path: Path, config: ModelConfig) -> Any:
    """Return transformers' model in float32. Raises ValueError if tensors are missing, too many or of other sizes."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
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


def use_products(module: nn.Module, linear: LinearFormat, stored: torch.dtype) -> None:
    """Replace the linear layers by products in a weight format. Weights that fit are passed in the dtype `stored`."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) not in {nn.Linear, Conv1D}:
                continue
            weight: Tensor = child.weight.detach()  # type: ignore[operator]
            weight = weight.T.contiguous() if type(child) is Conv1D else weight
            short = weight.to(stored)
            weight = short if torch.equal(short.float(), weight) else weight
            bias = None if child.bias is None else child.bias.detach()  # type: ignore[operator]
            setattr(parent, name, LinearModule(linear.make(weight, bias), len(weight)))

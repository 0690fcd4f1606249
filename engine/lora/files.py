"""Reads LoRA adapters in the format of Hugging Face peft. Rejects pickled weights."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from engine.weights import text_name
from shared.model_files import read_object

if TYPE_CHECKING:  # `lora_digest` runs before the computing processes start, and importing torch takes seconds
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
SUFFIXES = (".lora_A.weight", ".lora_B.weight")
# Fields of adapter_config.json that change how an update is computed, and their supported values.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "megatron_config": (None,),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    # Other initializations, such as "pissa", also change the weights of the base model.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The content of an adapter: its digest (see `lora_digest`), and the update of each module (see `read_lora`)."""

    digest: str
    directory: Path
    updates: "dict[str, LowRank]"


@dataclass(frozen=True, slots=True)
class LowRank:
    """The update of one module. The module's input is multiplied by `down` and then by `up`, which includes the scale.
    The result is added to the module's output."""

    down: "Tensor"  # [rank, in]
    up: "Tensor"  # [out, rank]


def lora_digest(directory: Path) -> str:
    """Return the identity of an adapter: a digest of its files, in 32 hex digits. Raises ValueError if the adapter is
    not supported."""
    _read_config(directory)
    digest = blake2b(digest_size=16)
    for name in (CONFIG, WEIGHTS):
        digest.update(blake2b((directory / name).read_bytes()).digest())
    return digest.hexdigest()


def read_lora(directory: Path, max_rank: int) -> dict[str, LowRank]:
    """Return the updates, keyed by the name of the module, such as "model.layers.0.self_attn.q_proj".

    Raises ValueError, which names the field or the tensor, if the adapter is malformed, has a rank above `max_rank`, or
    contains changes other than low-rank updates.
    """
    config, file = _read_config(directory), directory / WEIGHTS
    parts: dict[str, dict[str, Tensor]] = {}
    stored: dict[str, str] = {}
    try:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is not a mapping
                module, stored_name, suffix = _module_of(name, file)
                stored[module] = stored_name
                parts.setdefault(module, {})[suffix] = opened.get_tensor(name).float()
    except SafetensorError as error:
        raise ValueError(f"{file}: {error}") from None
    if not parts:
        raise ValueError(f"{file}: has no tensors")
    return {module: _low_rank(stored[module], pair, config, file, max_rank) for module, pair in parts.items()}


def _read_config(directory: Path) -> dict[str, Any]:
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            pickled = name == WEIGHTS and (directory / "adapter_model.bin").exists()
            why = "only pickled weights (.bin), which can run code; save the adapter as safetensors" if pickled else ""
            raise ValueError(f"{directory}: has {why or f'no {name}; give the directory of an adapter of peft'}")
    config = read_object(directory / CONFIG)
    for key, served in PLAIN.items():
        if config.get(key) not in served:
            raise ValueError(f"{directory / CONFIG}: {key} is {config.get(key)!r:.60}: only {served[0]!r} is supported")
    return config


def _module_of(name: str, file: Path) -> tuple[str, str, str]:
    """Return the name of a tensor's module, the name that the file gives this module, and the tensor's suffix."""
    suffix = next((each for each in SUFFIXES if name.endswith(each)), "")
    stored = name.removeprefix(PREFIX).removesuffix(suffix)
    if not suffix or not text_name(stored):
        raise ValueError(f"{file}: tensor {name[:120]} is not a low-rank update of a module of the text model")
    return text_name(stored), stored, suffix


def _low_rank(
    module: str, pair: Mapping[str, "Tensor"], config: Mapping[str, Any], file: Path, max_rank: int
) -> LowRank:
    down, up = (pair.get(suffix) for suffix in SUFFIXES)
    if down is None or up is None or down.dim() != 2 or up.dim() != 2 or len(down) != up.shape[1]:
        shapes = {suffix: tuple(pair[suffix].shape) for suffix in pair}
        raise ValueError(f"{file}: {module} has tensors {shapes}: it needs lora_A [rank, in] and lora_B [out, rank]")
    rank = len(down)
    if not 0 < rank <= max_rank:
        raise ValueError(f"{file}: {module} has rank {rank}: at most --max-lora-rank {max_rank} is allowed")
    if not bool(down.isfinite().all() and up.isfinite().all()):
        raise ValueError(f"{file}: {module} has values that are not finite")
    return LowRank(down, up * _scale(module, rank, config, file))


def _scale(module: str, rank: int, config: Mapping[str, Any], file: Path) -> float:
    """Return the factor of the update: alpha / rank, or alpha / sqrt(rank) for rank-stabilized adapters.

    As in peft, alpha comes from the first key of `alpha_pattern` that the module's name ends with.
    """
    patterns: Any = config.get("alpha_pattern") or {}
    for ending in patterns if isinstance(patterns, dict) else [patterns]:
        if ending is patterns or not re.fullmatch(r"[\w.]+", ending, re.ASCII):
            raise ValueError(f"{file.parent / CONFIG}: alpha_pattern has {ending!r:.60}: only names are supported")
    matching = (value for ending, value in patterns.items() if f".{module}".endswith(f".{ending}"))
    alpha: Any = next(matching, config.get("lora_alpha"))
    if not isinstance(alpha, int | float) or not abs(alpha) < 1e30:
        raise ValueError(f"{file.parent / CONFIG}: lora_alpha is {alpha!r:.60}: it must be a finite number")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

"""The scales of keys and values in a checkpoint, for a KV cache in float8."""

import math
from pathlib import Path

import torch

from engine.models.spec import AttentionSpec, LatentSpec, ModelConfig
from engine.weights import GGUF, Checkpoint, weight_files

NAMES = (("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"))  # compressed-tensors; AutoFP8, modelopt
Scales = list[tuple[float, float]]


def read_kv_scales(path: Path, config: ModelConfig) -> Scales:
    """Return the scale of the keys and the scale of the values of each layer that stores KV. A missing scale is 1.

    Keys and values are divided by their scales before they are stored in the pool. Raises ValueError, with the name of
    the tensor, if a scale is not one positive number.
    """
    scales = [(1.0, 1.0)] * config.num_kv_layers
    if weight_files(path)[0].suffix == GGUF:
        return scales
    checkpoint, layer = Checkpoint(path, torch.device("cpu")), -1
    for index, spec in enumerate(config.layers):
        layer += isinstance(spec.mixer, AttentionSpec | LatentSpec)
        if isinstance(spec.mixer, AttentionSpec) and not spec.mixer.norms_values:
            for names in NAMES:
                full = [f"model.layers.{index}.self_attn.{name}" for name in names]
                if all(checkpoint.dtype_of(name) is not None for name in full):
                    scales[layer] = (_scale(checkpoint, full[0]), _scale(checkpoint, full[1]))
    return scales


def _scale(checkpoint: Checkpoint, name: str) -> float:
    shape = checkpoint.shape_of(name)
    scale = float(checkpoint.take(name, *shape)) if math.prod(shape) == 1 else 0.0
    if not 0 < scale < math.inf:
        checkpoint.refuse(name, f"of shape {shape} is not one positive number, as --kv-cache-dtype fp8 needs")
    return scale

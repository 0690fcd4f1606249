"""Loads a model from a directory of Hugging Face files."""

from pathlib import Path

import torch

from engine.linear import LinearFormat, Plain
from engine.models.decoder import Decoder
from engine.models.families import FAMILIES, read_model_config
from engine.models.weight_map import assemble
from engine.weights import Checkpoint


def load_model(path: Path, dtype: torch.dtype, device: torch.device, linear: LinearFormat | None = None) -> Decoder:
    """Load a model from a Hugging Face directory onto `device`.

    `dtype` is the dtype of activations. `linear` is the format of weight matrices, by default plain tensors in `dtype`.
    Raises ValueError, with the name of the key or the tensor, if config.json or a weight file is invalid.
    """
    config, checkpoint = read_model_config(path), Checkpoint(path, device)
    names = FAMILIES[config.architecture].weights
    model = assemble(checkpoint.take, config, dtype, linear or Plain(dtype), names)
    # Some files also contain a copy of a tied matrix, or the frequencies that old versions of transformers stored.
    checkpoint.finish(("lm_head.weight",) if config.tie_word_embeddings else (), "self_attn.rotary_emb.inv_freq")
    return model

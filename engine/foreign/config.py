"""Reads the config.json of a decoder that runs through transformers, and refuses unsupported models before they are
loaded.

Importing this module does not import transformers: the import would take a second, and most nodes do not need it.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.models.config import eos_token_ids
from engine.models.families import FAMILIES, UNSUPPORTED, read_model_config
from engine.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelConfig
from engine.weights import is_gguf
from shared.config_reader import ConfigReader
from shared.model_files import read_object

OLDEST = (5, 20)
INSTALL = "in the repository, run: pip install '.[models]'"
# Layers that choose the tokens to which they attend. They are refused, because the check cannot test this choice:
# the prompts of the check are so short that a layer may choose all tokens.
SPARSE = ("indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse")
# With these kinds of rotary embedding, transformers rotates all tokens of a pass according to the largest position in
# the pass. One request would therefore change the output of another request.
UNSTABLE_ROPES = ("dynamic", "longrope")


def choose_config(directory: Path, model_impl: str) -> ModelConfig:
    """Read the config for the implementation that `--model-impl` selects.

    "auto" selects Baton's own implementation if it supports the architecture. Raises ValueError, with the reason, if
    the model cannot run with the selected implementation.
    """
    if model_impl == "transformers":
        return read_foreign_config(directory)
    names = read_object(directory / "config.json").get("architectures")
    name = str(names[0]) if isinstance(names, list) and len(names) == 1 else ""
    if model_impl == "baton" or name in FAMILIES or name in UNSUPPORTED or not is_causal(name):
        return read_model_config(directory)
    return read_foreign_config(directory)


def read_foreign_config(directory: Path) -> ModelConfig:
    """Read the config of a decoder that is to run with transformers' modules.

    The layers of the config are estimates. The sizes of keys and values are measured when the model is loaded. Raises
    ValueError, with the reason, if the model cannot run with these modules.
    """
    file = directory / "config.json"
    keys = ConfigReader(read_object(file), file)
    release = transformers_version()
    if "auto_map" in keys.values:
        keys.refuse("auto_map", "code that comes with a model is never run; use a model without auto_map")
    if keys.values.get("quantization_config"):
        keys.refuse("quantization_config", "quantized checkpoints run only on Baton's own families")
    if is_gguf(directory):
        raise ValueError(f"{directory}: GGUF files run only on Baton's own families; use safetensors")
    if keys.values.get("is_encoder_decoder"):
        keys.refuse("is_encoder_decoder", "only decoders are supported")
    if (directory / "adapter_config.json").exists():
        raise ValueError(f"{directory}: has an adapter (adapter_config.json); merge it into the model")
    names = keys.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not is_causal(str(names[0])):
        why = f"transformers {release} has no decoder of this name; it must be one class name ending in ForCausalLM"
        keys.refuse("architectures", why)
    found = parsed(directory, release)
    found.allow_global_per_layer_attribute_access = True  # allowed, because the sizes of each layer are measured later
    check_layers(found, file)
    check_ropes(found, file)
    try:
        return config_of(found, str(names[0]), release, eos_token_ids(keys, directory, found.vocab_size))
    except Exception as error:  # the classes of transformers' configurations raise errors of several kinds
        raise ValueError(f"{file}: a size of the decoder is missing: {error}") from error


def transformers_version() -> str:
    """Return the installed version. Raises ValueError if transformers is not installed or too old."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise ValueError(f"this model needs transformers, which is not installed: {INSTALL}") from None
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise ValueError(f"this model needs transformers {OLDEST[0]}.{OLDEST[1]} or newer, not {found}: {INSTALL}")
    return found


def is_causal(architecture: str) -> bool:
    """Return whether transformers has a class of this name that predicts the next token of a text."""
    if not architecture.endswith(("ForCausalLM", "LMHeadModel")) or find_spec("transformers") is None:
        return False
    return hasattr(import_module("transformers"), architecture)


def parsed(directory: Path, release: str) -> Any:
    """Return transformers' configuration of the text decoder."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"{directory / 'config.json'}: transformers {release} refuses it: {lines[0][:200]}") from error
    return config.get_text_config(decoder=True)


def check_layers(config: Any, file: Path) -> None:
    """Raise ValueError if a layer chooses the tokens that it attends to."""
    kinds = getattr(config, "layer_types", None) or ()
    if found := [kind for kind in SPARSE if kind in kinds]:
        raise ValueError(f"{file}: layer_types has {found[0]}: layers that attend to chosen tokens are not supported")


def check_ropes(config: Any, file: Path) -> None:
    """Raise ValueError if the rotation of one request depends on the other requests of a pass."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters] + [one for one in parameters.values() if isinstance(one, dict)]
    for kind in kinds:
        if kind.get("rope_type") in UNSTABLE_ROPES:
            raise ValueError(
                f"{file}: rope_type is {kind['rope_type']!r}: transformers would rotate all requests of a step "
                "according to the longest one, so answers would depend on other requests"
            )


def config_of(config: Any, architecture: str, release: str, eos: tuple[int, ...] = ()) -> ModelConfig:
    """Return the config with estimated layers. Raises AttributeError, TypeError or ValueError if a size is missing."""
    heads = config.num_attention_heads
    if config.max_position_embeddings < 1:
        raise ValueError(f"max_position_embeddings is {config.max_position_embeddings}")
    spec = AttentionSpec(
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        rope=None,
    )
    return ModelConfig(
        architecture,
        config.hidden_size,
        config.vocab_size,
        (LayerSpec(spec, MlpSpec(1)),) * config.num_hidden_layers,
        1e-6,
        bool(getattr(config, "tie_word_embeddings", False)),
        config.max_position_embeddings,
        getattr(config, "bos_token_id", None),
        eos,
        transformers=release,
    )

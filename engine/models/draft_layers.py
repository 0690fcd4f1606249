"""Draft heads in checkpoints: MTP layers of a model, and EAGLE-3 heads. Reads only the headers of weight files."""

from dataclasses import dataclass, replace
from pathlib import Path

from engine.models.families import FAMILIES, common
from engine.models.spec import AttentionSpec, LatentSpec, LayerSpec, ModelConfig, MoeSpec, state_units
from engine.weights import tensor_files
from shared.config_reader import ConfigReader
from shared.model_files import read_object


@dataclass(frozen=True, slots=True)
class MtpNames:
    """The names of the tensors of an MTP (multi-token prediction) layer, without ".weight". An MTP layer contains a
    decoder layer, whose tensors have the prefix `layer`."""

    layer: str
    embedding_norm: str
    hidden_norm: str
    joined: str
    norm: str


def mtp_names(config: ModelConfig) -> MtpNames | None:
    """Return the names of the first MTP layer's tensors, or None if the family has no such layers."""
    if "mtp." in FAMILIES[config.architecture].weights.unused:  # Qwen3-Next, Qwen3.5
        norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"
        return MtpNames("mtp.layers.0.", *norms, "mtp.fc", "mtp.norm")
    if config.drafter_layers:  # DeepSeek-V3, GLM-4.5
        own = f"model.layers.{config.num_layers}."
        return MtpNames(own, f"{own}enorm", f"{own}hnorm", f"{own}eh_proj", f"{own}shared_head.norm")
    return None


def with_mtp(config: ModelConfig, path: Path) -> ModelConfig:
    """Return the config with room in the KV pool for the MTP layer. Raises ValueError if there is no MTP layer."""
    names = mtp_names(config) if config.architecture in FAMILIES else None
    if names is None:
        raise ValueError(
            f"--speculative-config: method mtp: {config.architecture} in {path} has no MTP layer that Baton knows: use "
            f"the method ngram, or a draft model"
        )
    if not any(name.startswith(f"{names.joined}.") for name in tensor_files(path)):
        raise ValueError(
            f"--speculative-config: method mtp: {path} has no tensor {names.joined}.weight: download the checkpoint "
            f"with its MTP layer, or use the method ngram"
        )
    return with_head(config, config.hidden_size)


def with_head(config: ModelConfig, size: int) -> ModelConfig:
    """Return the config with room in the KV pool for a draft head that reads vectors of `size` numbers.

    If the model has recurrent states, each state also contains the vector that the head reads for the state's last
    token. A slice that continues from the state needs this vector and cannot compute it.
    """
    return replace(config, draft_layers=1, units=(*config.units, size) if state_units(config) else ())


def mtp_layer(config: ModelConfig) -> LayerSpec:
    """Return the MTP layer's spec. It is the spec of the model's last layer with attention, but with experts if any
    layer of the model has experts."""
    experts = [one.mlp for one in config.layers if isinstance(one.mlp, MoeSpec)]
    last = next(one for one in reversed(config.layers) if isinstance(one.mixer, AttentionSpec | LatentSpec))
    return replace(last, mlp=experts[-1]) if experts else last


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """The shape of an EAGLE-3 head, as its checkpoint describes it.

    `layer` is the head's only decoder layer, and `hidden_size` is the width of the head's states. The head reads the
    model's hidden states before the layers in `captured`. The head has logits for `vocab_size` tokens. If the model has
    more tokens, the tensor d2t maps the head's tokens to the model's. The residual is normed if `norms_residual`."""

    layer: LayerSpec
    hidden_size: int
    vocab_size: int
    captured: tuple[int, ...]
    rms_norm_eps: float
    norms_residual: bool


def read_eagle(path: Path, config: ModelConfig) -> EagleSpec:
    """Read the config.json of an EAGLE-3 checkpoint for a model. Raises ValueError, which names the key, if the
    checkpoint cannot guess tokens for this model."""
    keys = ConfigReader(read_object(path / "config.json"), path / "config.json")
    if config.transformers or not all(isinstance(one.mixer, AttentionSpec) for one in config.layers):
        raise ValueError(
            f"method eagle3 needs a model that Baton implements itself, with keys and values in every layer; "
            f"{config.architecture} is not such a model: use the method ngram"
        )
    keys.require("num_hidden_layers", 1, 1)
    own = "target_hidden_size" if keys.values.get("target_hidden_size") is not None else "hidden_size"
    for key, size in ((own, config.hidden_size), ("vocab_size", config.vocab_size)):
        if keys.size(key) != size:
            keys.refuse(key, f"the model has {size}; take the EAGLE-3 checkpoint that was trained for it")
    attention = common.attention(keys, biased=keys.flag("attention_bias"))
    for key, value, size in (
        ("num_key_value_heads", attention.kv_heads, config.num_kv_heads),
        ("head_dim", attention.head_dim, config.head_dim),
    ):
        if value != size:
            keys.refuse(key, f"it must be {size} as in the model, because both use one KV pool; use the method ngram")
    return EagleSpec(
        LayerSpec(attention, common.mlp(keys)),
        keys.size("hidden_size"),
        keys.size("draft_vocab_size", config.vocab_size),
        _captured(keys, config.num_layers),
        keys.positive("rms_norm_eps", 1e-6),
        keys.flag("norm_before_residual"),
    )


def _captured(keys: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return the indices of the layers before which states are read. vLLM writes these indices at the top level.
    SpecForge writes, in `eagle_config`, the indices of the layers after which states are read."""
    nested = keys.nested("eagle_config")
    key = "eagle_aux_hidden_state_layer_ids"
    for reader, offset in ((keys, 0), (nested, 1)):
        if reader.values.get(key):
            found = tuple(int(one) + offset for one in reader.numbers(key, 3))
            if not all(0 <= layer < num_layers for layer in found):
                reader.refuse(key, f"the model has layers 0 to {num_layers - 1}")
            return found
    if num_layers < 4:
        keys.refuse(key, f"it is required for a model of {num_layers} layers")
    return 2, num_layers // 2, num_layers - 3

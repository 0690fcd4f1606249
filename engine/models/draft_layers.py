"""The draft layers that checkpoints have besides their model's layers. Reads only headers of files."""

from dataclasses import dataclass, replace
from pathlib import Path

from engine.models.families import FAMILIES
from engine.models.spec import AttentionSpec, LatentSpec, LayerSpec, ModelConfig, MoeSpec, state_units
from engine.weights import tensor_files


@dataclass(frozen=True, slots=True)
class MtpNames:
    """The names of an MTP layer's tensors, without ".weight", and the prefix of those of its decoder layer."""

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
    """Return the config of a model whose pool has room for its MTP layer. Raises ValueError if it has none."""
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
    """Return the config of a model whose pool has room for a draft head that reads vectors of `size` numbers.

    If there are recurrent states, the vector of the last token is a part of them: a slice that begins with a state
    cannot compute it from the token before.
    """
    return replace(config, draft_layers=1, units=(*config.units, size) if state_units(config) else ())


def mtp_layer(config: ModelConfig) -> LayerSpec:
    """Return the MTP layer's spec: that of the model's last layer with attention, with experts if any has them."""
    experts = [one.mlp for one in config.layers if isinstance(one.mlp, MoeSpec)]
    last = next(one for one in reversed(config.layers) if isinstance(one.mixer, AttentionSpec | LatentSpec))
    return replace(last, mlp=experts[-1]) if experts else last

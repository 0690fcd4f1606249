"""Loads the adapters of a node's settings."""

from engine.linear import LinearFormat
from engine.lora.linear import adapt
from engine.models.decoder import Decoder, LanguageModel
from engine.options import BuildOptions, lora_adapters
from engine.runner import TorchRunner
from engine.startup import stage


def use_adapters(options: BuildOptions, runner: TorchRunner, model: LanguageModel, linear: LinearFormat) -> None:
    """Load the adapters of --lora-modules, and let the runner compute requests with them. Raises ValueError."""
    adapters = {one.digest: one.directory for one in lora_adapters(options)}
    if adapters:
        assert isinstance(model, Decoder)
        with stage(f"loading {len(adapters)} LoRA adapters", "give fewer --lora-modules"):
            runner.use_adapters(adapt(model, adapters, linear, options.max_lora_rank))

"""Loads the adapters that a node's settings list."""

from engine.linear import LinearFormat
from engine.lora.linear import ModelAdapters
from engine.models.decoder import Decoder, LanguageModel
from engine.options import BuildOptions, lora_adapters
from engine.runner import TorchRunner
from engine.startup import stage


def use_adapters(options: BuildOptions, runner: TorchRunner, model: LanguageModel, linear: LinearFormat) -> None:
    """Let the runner compute requests with adapters, and load the adapters of --lora-modules.

    Models that run through transformers do not support adapters. Raises ValueError if an adapter is invalid.
    """
    if not isinstance(model, Decoder):
        return
    runner.adapters = adapters = ModelAdapters(model, linear, options.max_lora_rank)
    given = lora_adapters(options)
    if given:
        with stage(f"loading {len(given)} LoRA adapters", "give fewer --lora-modules"):
            for directory in {one.digest: one.directory for one in given}.values():
                adapters.add(adapters.read(directory))

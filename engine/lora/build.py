"""Loads the adapters of a node's settings."""

from engine.linear import LinearFormat
from engine.lora.linear import ModelAdapters
from engine.lora.loader import AdapterLoader
from engine.models.decoder import Decoder, LanguageModel
from engine.options import BuildOptions, lora_adapters
from engine.runner import TorchRunner
from engine.startup import stage


def use_adapters(options: BuildOptions, runner: TorchRunner, model: LanguageModel, linear: LinearFormat) -> None:
    """Let the runner compute requests with adapters, and load those of --lora-modules. Raises ValueError.

    A model that transformers runs takes no adapters.
    """
    if not isinstance(model, Decoder):
        return
    runner.use_adapters(adapters := ModelAdapters(model, linear))
    loader, given = AdapterLoader(adapters, options.max_lora_rank), lora_adapters(options)
    if given:
        with stage(f"loading {len(given)} LoRA adapters", "give fewer --lora-modules"):
            for directory in {one.digest: one.directory for one in given}.values():
                loader.add(loader.read(directory))

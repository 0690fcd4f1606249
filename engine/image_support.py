"""Loads the vision module of a model that takes images."""

import logging
from pathlib import Path

from engine.media import ImageSupport
from engine.models.spec import AttentionSpec, ModelConfig
from engine.runner import Runner, TorchRunner
from engine.startup import stage
from engine.weights import is_gguf
from shared.images import read_image_rules

log = logging.getLogger("baton.engine")


def use_images(runner: Runner, path: Path, config: ModelConfig, max_step_tokens: int) -> ImageSupport | None:
    """Load the vision module of a model that takes images, and let the runner use it.

    Return None if the node cannot take images. If the model supports images but the node does not, log a warning with
    the reason. Raises ValueError if the model needs all tokens of an image in one step, and a step is too small.
    """
    if not isinstance(runner, TorchRunner):
        return ImageSupport()
    try:
        rules = None if config.transformers else read_image_rules(path)
        if rules is None:
            return None
        if any(0 < spec.window < rules.tokens for spec in config.attention if isinstance(spec, AttentionSpec)):
            raise ValueError(f"{path}: the window is smaller than the {rules.tokens} tokens of an image")
        if is_gguf(path):
            raise ValueError(f"{path}: a GGUF file contains only the text model; use safetensors")
        from engine.foreign.vision import VisionEncoder  # transformers or Pillow may not be installed

        with stage("loading the vision module", "take a smaller model"):
            encoder = VisionEncoder(path, rules)
    except ImportError as error:
        log.warning("requests with images are refused (%s): in the repository, run pip install '.[models]'", error)
        return None
    except ValueError as error:
        log.warning("requests with images are refused: %s", error)
        return None
    if max_step_tokens < rules.tokens:
        raise ValueError(
            f"--max-num-batched-tokens {max_step_tokens}: one step computes all {rules.tokens} tokens of an image of "
            f"this model; use at least {rules.tokens}"
        )
    runner.use_encoder(encoder)
    return ImageSupport(rules.is_atomic, encoder)

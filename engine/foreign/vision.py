"""Encodes images with the vision modules and image processors of transformers.

Baton has its own code only for the models' decoders. Images are encoded one at a time and in float32, so that the
features of an image depend only on its pixels.
"""

import logging
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from engine.media import ImageFeatures
from engine.weights import weight_files
from shared.images import GEMMA3, ImageRules
from shared.rpc.messages import Media

log = logging.getLogger("baton.engine")
CACHE_BYTES = 512 << 20  # limit of the kept features in bytes; the latest image is always kept
QWEN_MODULES = {
    "qwen2_5_vl": Qwen2_5_VisionTransformerPretrainedModel,
    "qwen3_vl": Qwen3VLVisionModel,
    "qwen3_5": Qwen3_5VisionModel,
    "qwen3_5_moe": Qwen3_5MoeVisionModel,
}


class VisionEncoder:
    """The vision module of one model, and the features of the images that it encoded last.

    Thread-safe: the encoder encodes one image at a time. `num_encoded` and `num_cached` count images. For `shape`, see
    `ImageEncoder`.
    """

    def __init__(self, path: Path, rules: ImageRules) -> None:
        """Load the module. Raises ValueError if a tensor is missing, unknown or of a wrong size."""
        self._rules = rules
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        deep_layers = getattr(config.vision_config, "deepstack_visual_indexes", None) or ()
        self.shape = 1 + len(deep_layers), int(config.get_text_config().hidden_size)
        self._modules = _modules(config, rules)
        _load(self._modules, path)
        self._processor = _processor(rules)
        self._encoding = threading.Lock()  # held while an image is encoded
        self._lock = threading.Lock()  # protects the cache
        self._cache: OrderedDict[bytes, ImageFeatures] = OrderedDict()
        self._cached_bytes = self.num_encoded = self.num_cached = 0

    def features(self, image: Media) -> ImageFeatures:
        """Return the features of an image. Its pixels must be set. Raises ValueError if the number of feature
        vectors differs from the number of the image's tokens."""
        with self._encoding:
            if (found := self.kept(image)) is not None:
                self.num_cached += 1
                return found
            features = self._encode(image)
            if len(features.embeddings) != image.rows * image.columns:
                raise ValueError(f"an image has {len(features.embeddings)} tokens, not {image.rows * image.columns}")
            self.num_encoded += 1
            return self.keep(image, features)

    def keep(self, image: Media, features: ImageFeatures) -> ImageFeatures:
        with self._lock:
            if image.digest not in self._cache:
                self._cache[image.digest] = features
                self._cached_bytes += _size(features)
            while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
                self._cached_bytes -= _size(self._cache.popitem(last=False)[1])
        return features

    def kept(self, image: Media) -> ImageFeatures | None:
        with self._lock:
            if image.digest in self._cache:
                self._cache.move_to_end(image.digest)
            return self._cache.get(image.digest)

    @torch.inference_mode()
    def _encode(self, image: Media) -> ImageFeatures:
        pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)
        inputs = self._processor(pixels, do_resize=False, input_data_format="channels_last", return_tensors="pt")
        if self._rules.model_type == GEMMA3:
            hidden = self._modules["vision_tower"](pixel_values=inputs["pixel_values"]).last_hidden_state
            return ImageFeatures(self._modules["multi_modal_projector"](hidden)[0])
        output = self._modules["visual"](inputs["pixel_values"], grid_thw=inputs["image_grid_thw"], return_dict=True)
        return ImageFeatures(output.pooler_output, tuple(getattr(output, "deepstack_features", None) or ()))


def _modules(config: Any, rules: ImageRules) -> nn.ModuleDict:
    """Return modules with random weights, keyed by their names in a checkpoint."""
    config.vision_config._attn_implementation = "sdpa"
    if rules.model_type == GEMMA3:
        tower = transformers.AutoModel.from_config(config.vision_config)
        made = {"vision_tower": tower, "multi_modal_projector": Gemma3MultiModalProjector(config)}
    else:
        made = {"visual": QWEN_MODULES[rules.model_type](config.vision_config)}
    return nn.ModuleDict(made).float().eval()


def _load(modules: nn.ModuleDict, path: Path) -> None:
    found: dict[str, Tensor] = {}
    for file in weight_files(path):
        with safe_open(file, "pt") as tensors:
            for stored in tensors.keys():  # noqa: SIM118 - it is not a dict
                name = stored.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
                if name.partition(".")[0] in modules:
                    found[name] = tensors.get_tensor(stored)
    try:
        modules.load_state_dict(found)
    except RuntimeError as error:
        why = " ".join(str(error).split())[:300]
        raise ValueError(f"{path}: the tensors of the vision module do not match config.json: {why}") from None


def _processor(rules: ImageRules) -> Any:
    values: dict[str, Any] = {"image_mean": rules.mean, "image_std": rules.std, "rescale_factor": rules.rescale}
    if rules.model_type == GEMMA3:
        return Gemma3ImageProcessorPil(**values)
    return Qwen2VLImageProcessorPil(
        **values, patch_size=rules.patch, merge_size=rules.merge, temporal_patch_size=rules.temporal
    )


def _size(features: ImageFeatures) -> int:
    return sum(tensor.nbytes for tensor in (features.embeddings, *features.deep))

"""A model's rules for images, from its files: the size to which an image is resized, and the number of its tokens.

Routers use the rules to count tokens, and nodes use them to check and encode pixels. The arithmetic is the same as in
transformers' image processors, which read the same files.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.config_reader import ConfigReader
from shared.model_files import read_object

QWEN = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
GEMMA3 = "gemma3"
MAX_SIDE_RATIO = 200  # limit of Qwen's processor
BILINEAR, BICUBIC = 2, 3  # Pillow's numbers for these filters


@dataclass(frozen=True, slots=True)
class ImageRules:
    """The rules of one model. Each color value of a pixel becomes `(value * rescale - mean) / std`.

    In Qwen's models, an image roughly keeps its aspect ratio, and has from `min_pixels` to `max_pixels` pixels. Each
    square with a side of `patch` * `merge` pixels becomes one token. In Gemma 3, every image has `width` x `height`
    pixels and `tokens` tokens, which attend to each other.
    """

    model_type: str
    token: int  # the token that stands for each part of an image
    marker: int  # the token that the chat template writes for an image
    end: int  # Gemma 3: the token after an image
    resample: int
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    patch: int = 1
    merge: int = 1
    temporal: int = 1
    min_pixels: int = 0
    max_pixels: int = 0
    width: int = 0
    height: int = 0
    tokens: int = 0

    @property
    def markers(self) -> tuple[int, int, int]:
        """The tokens that begin, fill and end an image. If the chat template itself writes the tokens before and after
        the image, all three are `token`."""
        return self.marker, self.token, self.end

    @property
    def is_atomic(self) -> bool:
        """Whether the tokens of an image attend to each other."""
        return self.model_type == GEMMA3

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image is resized. Raises ValueError if the image is too elongated."""
        if self.model_type == GEMMA3:
            return self.width, self.height
        if max(width, height) > MAX_SIDE_RATIO * min(width, height):
            raise ValueError(f"is {width} x {height}: one side may be at most {MAX_SIDE_RATIO} times the other")
        factor = self.patch * self.merge
        wide, high = round(width / factor) * factor, round(height / factor) * factor
        if wide * high > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            wide, high = (max(factor, math.floor(side / shrink / factor) * factor) for side in (width, height))
        elif wide * high < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            wide, high = (math.ceil(side * grow / factor) * factor for side in (width, height))
        return wide, high

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the numbers of rows and columns of an image's tokens. The image is resized to `width` x `height`."""
        if self.model_type == GEMMA3:
            side = math.isqrt(self.tokens)
            return side, side
        return height // (self.patch * self.merge), width // (self.patch * self.merge)


def read_image_rules(directory: Path) -> ImageRules | None:
    """Return the rules of a model. Raises ValueError, which names the file and the key, if a value is invalid.

    Return None if the model takes no images, or has no rules in preprocessor_config.json and processor_config.json.
    """
    config = read_object(directory / "config.json")
    kind = config.get("model_type")
    if kind not in (*QWEN, GEMMA3) or not isinstance(config.get("vision_config"), dict):
        return None
    file = directory / "processor_config.json"  # as in transformers, its values have priority
    keys = ConfigReader(read_object(file) if file.is_file() else {}, file).nested("image_processor")
    file = directory / "preprocessor_config.json"
    if not keys.values and file.is_file():
        keys = ConfigReader(read_object(file), file)
    if not keys.values:
        return None
    for key in ("do_resize", "do_rescale", "do_normalize"):
        keys.require(key, True, True)
    keys.require("do_pan_and_scan", False, False)
    own, size = ConfigReader(config, directory / "config.json"), keys.nested("size")
    common: dict[str, Any] = {
        "model_type": str(kind),
        "token": own.size(_present(own, "image_token_id", "image_token_index")),
        "rescale": keys.positive("rescale_factor", 1 / 255),
    }
    if kind == GEMMA3:
        tokens = own.size("mm_tokens_per_image")
        if math.isqrt(tokens) ** 2 != tokens:
            own.refuse("mm_tokens_per_image", "it must be a square")
        return ImageRules(
            **common, marker=own.size(_present(own, "boi_token_id", "boi_token_index")),
            end=own.size(_present(own, "eoi_token_id", "eoi_token_index")), resample=keys.size("resample", BILINEAR),
            mean=keys.numbers("image_mean", 3, (0.5, 0.5, 0.5)), std=keys.numbers("image_std", 3, (0.5, 0.5, 0.5)),
            width=size.size("width"), height=size.size("height"), tokens=tokens,
        )  # fmt: skip
    least = keys.size("min_pixels", size.size(_present(size, "shortest_edge", "min_pixels"), 56 * 56))
    most = keys.size("max_pixels", size.size(_present(size, "longest_edge", "max_pixels"), 28 * 28 * 1280))
    return ImageRules(
        **common, marker=common["token"], end=common["token"], resample=keys.size("resample", BICUBIC),
        mean=keys.numbers("image_mean", 3, (0.48145466, 0.4578275, 0.40821073)),
        std=keys.numbers("image_std", 3, (0.26862954, 0.26130258, 0.27577711)),
        patch=keys.size("patch_size", 14), merge=keys.size("merge_size", 2),
        temporal=keys.size("temporal_patch_size", 2), min_pixels=least, max_pixels=most,
    )  # fmt: skip


def _present(keys: ConfigReader, *names: str) -> str:
    """Return the first name that has a value, or names[0] if no name has a value."""
    return next((name for name in names if keys.values.get(name) is not None), names[0])

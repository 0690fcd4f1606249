"""The rules by which a model takes images: its files, the size to which images are resized, and their tokens.

Routers use the rules to count tokens, and nodes to check and encode pixels. The arithmetic is the same as in
transformers' image processors, which read the same files.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.model_files import read_object

QWEN = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
GEMMA3 = "gemma3"
MAX_SIDE_RATIO = 200  # limit of Qwen's processor
BILINEAR, BICUBIC = 2, 3  # Pillow's numbers of filters


@dataclass(frozen=True, slots=True)
class ImageRules:
    """The rules of one model. Pixels become `pixel * rescale`, minus `mean`, divided by `std`, for each color.

    In Qwen's models, an image roughly keeps its aspect ratio, has from `min_pixels` to `max_pixels` pixels, and has a
    token for each square of `patch` * `merge` pixels. In Gemma 3, it has `width` x `height` pixels and `tokens` tokens,
    which attend to each other.
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
        """The tokens that begin, fill and end an image. If the template itself writes the begin and the end, all three
        are `token`."""
        return self.marker, self.token, self.end

    @property
    def is_atomic(self) -> bool:
        """Whether the tokens of an image attend to each other."""
        return self.model_type == GEMMA3

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image is resized. Raises ValueError if the model cannot take it."""
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
        """Return the rows and columns of tokens of an image that is resized to this width and height."""
        if self.model_type == GEMMA3:
            side = math.isqrt(self.tokens)
            return side, side
        return height // (self.patch * self.merge), width // (self.patch * self.merge)


def read_image_rules(directory: Path) -> ImageRules | None:
    """Return the rules of a model. Raises ValueError, naming the file and the key, for invalid ones.

    Return None if the model takes no images, or if it has neither preprocessor_config.json nor processor_config.json.
    """
    config = read_object(directory / "config.json")
    kind = config.get("model_type")
    if kind not in {*QWEN, GEMMA3} or not isinstance(config.get("vision_config"), dict):
        return None
    file = directory / "preprocessor_config.json"
    if file.is_file():
        values = read_object(file)
    else:
        file = directory / "processor_config.json"
        values = read_object(file).get("image_processor", {}) if file.is_file() else {}
    keys = _Keys(values, file)
    if not values:
        return None
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if values.get(key, True) is not True:
            raise ValueError(f"{file}: {key} is {values[key]!r:.20}: only true is supported")
    if values.get("do_pan_and_scan"):
        raise ValueError(f"{file}: do_pan_and_scan is true: only false is supported")
    own = _Keys(config, directory / "config.json")
    token = own.count("image_token_id", "image_token_index")
    common: dict[str, Any] = {
        "model_type": str(kind),
        "token": token,
        "rescale": keys.number("rescale_factor", 1 / 255),
    }
    if kind == GEMMA3:
        tokens, size = own.count("mm_tokens_per_image"), _Keys(values.get("size") or {}, file)
        if math.isqrt(tokens) ** 2 != tokens:
            raise ValueError(f"{own.file}: mm_tokens_per_image is {tokens}: it must be a square")
        return ImageRules(
            **common, marker=own.count("boi_token_id", "boi_token_index"),
            end=own.count("eoi_token_id", "eoi_token_index"), resample=keys.count("resample", default=BILINEAR),
            mean=keys.colors("image_mean", (0.5, 0.5, 0.5)), std=keys.colors("image_std", (0.5, 0.5, 0.5)),
            width=size.count("width"), height=size.count("height"), tokens=tokens,
        )  # fmt: skip
    size = _Keys(values.get("size") or {}, file)
    least = keys.count("min_pixels", default=size.count("shortest_edge", "min_pixels", default=56 * 56))
    most = keys.count("max_pixels", default=size.count("longest_edge", "max_pixels", default=28 * 28 * 1280))
    return ImageRules(
        **common, marker=token, end=token, resample=keys.count("resample", default=BICUBIC),
        mean=keys.colors("image_mean", (0.48145466, 0.4578275, 0.40821073)),
        std=keys.colors("image_std", (0.26862954, 0.26130258, 0.27577711)),
        patch=keys.count("patch_size", default=14), merge=keys.count("merge_size", default=2),
        temporal=keys.count("temporal_patch_size", default=2), min_pixels=least, max_pixels=most,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Keys:
    values: dict[str, Any]
    file: Path

    def count(self, *names: str, default: int | None = None) -> int:
        """Return the value of the first key that is present, a positive integer."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if type(value) is not int or not 0 < value < 2**31:
                raise ValueError(f"{self.file}: {name} is {value!r:.40}: it must be a positive integer")
            return value
        if default is None:
            raise ValueError(f"{self.file}: {names[0]} is missing: it must be a positive integer")
        return default

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if type(value) not in {int, float} or not 0 < value < 1e6:
            raise ValueError(f"{self.file}: {name} is {value!r:.40}: it must be a positive number")
        return float(value)

    def colors(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        value = self.values.get(name, default)
        if (
            not isinstance(value, list | tuple)
            or len(value) != 3
            or any(type(one) not in {int, float} for one in value)
        ):
            raise ValueError(f"{self.file}: {name} is {value!r:.40}: it must be a list of 3 numbers")
        return tuple(map(float, value))

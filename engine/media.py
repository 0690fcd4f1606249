"""Images in a batch: the positions of their tokens, and the vectors that replace the tokens' embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scheduler.prefix import MediaSpan
from scheduler.request import Slice
from shared.rpc.messages import Media

NO_IMAGE = "no_image"  # the error of a slice with image tokens if this node does not have the image's features


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """The output of a vision encoder for one image of n tokens. Each tensor is [n, hidden_size].

    `embeddings` replace the tokens' embeddings. Entry i of `deep` is added to the hidden states after layer
    i (DeepStack, Meng et al. 2024, in Qwen3-VL).
    """

    embeddings: Tensor
    deep: tuple[Tensor, ...] = ()

    def to_bytes(self) -> list[bytes]:
        """Return each tensor's values as float32, row by row."""
        return [tensor.float().contiguous().numpy().tobytes() for tensor in (self.embeddings, *self.deep)]


class ImageEncoder(Protocol):
    """Computes the features of images. Thread-safe. `num_encoded` and `num_cached` count the images that it encoded and
    those that it found in its cache. `shape` is (number of tensors in an `ImageFeatures`, hidden size)."""

    num_encoded: int
    num_cached: int
    shape: tuple[int, int]

    def features(self, image: Media) -> ImageFeatures:
        """Return the features of an image. Its pixels must be set. Equal images are encoded only once while their
        features are kept.

        On a CPU, encoding may take longer than the watchdog allows for a step. The engine's thread therefore does not
        call this method.
        """

    def kept(self, image: Media) -> ImageFeatures | None:
        """Return the features of an image without waiting, or None if they are not in memory."""

    def keep(self, image: Media, features: ImageFeatures) -> ImageFeatures:
        """Keep features that another node computed, and return them."""


@dataclass(frozen=True, slots=True)
class ImageSupport:
    """How a node processes images. `encoder` is None if the node runs no model (`--runner hash`)."""

    is_atomic: bool = False  # the tokens of an image attend to each other
    encoder: ImageEncoder | None = None


@dataclass(slots=True)
class PromptImage:
    """An image of a request, with its pixels. `features` is set when the image has been encoded, and becomes None
    again when the image's last token is computed."""

    media: Media
    features: ImageFeatures | None = None


@dataclass(slots=True)
class BatchImages:
    """The image tokens of a batch. `rows`, int64 [N], has their indices in the batch. `features` has the same order."""

    rows: Tensor
    features: ImageFeatures

    def embed(self, hidden: Tensor) -> Tensor:
        """Return `hidden`, [T, hidden_size], with the rows of image tokens replaced by the images' embeddings."""
        return hidden.index_copy(0, self.rows, self.features.embeddings.to(hidden.dtype))

    def deepen(self, update: Tensor, layer: int) -> Tensor:
        """Return `update` with the images' features for `layer` added. `update`, [T, hidden_size], is what this layer
        adds to the hidden states."""
        if layer >= len(self.features.deep):
            return update
        return update.index_add(0, self.rows, self.features.deep[layer].to(update.dtype))


def images_of(slices: Sequence[Slice], encoder: ImageEncoder | None) -> tuple[BatchImages | None, set[int]]:
    """Return the image tokens of the slices, and the indices of the slices whose images have no features.

    `Request.images` has a `PromptImage` for each span, or is None if the node does not have the images' pixels.
    """
    if not any(slice_.request.media for slice_ in slices):
        return None, set()
    rows: list[Tensor] = []
    parts: list[ImageFeatures] = []
    missing: set[int] = set()
    first = 0
    for index, slice_ in enumerate(slices):
        images = slice_.request.images or [None] * len(slice_.request.media)
        for span, image in zip(slice_.request.media, images, strict=True):
            low, high = max(span.start, slice_.start), min(span.end, slice_.end)
            if low >= high:
                continue
            features = None if image is None or encoder is None else image.features or encoder.kept(image.media)
            if features is None:
                if high > slice_.start + slice_.num_stored:  # otherwise, only a draft head reads the result
                    missing.add(index)
                continue
            rows.append(torch.arange(low, high) - slice_.start + first)
            parts.append(part_of(features, low - span.start, high - span.start))
            if high == span.end:
                image.features = None
        first += slice_.count
    if not rows:
        return None, missing
    return BatchImages(torch.cat(rows), joined(parts)), missing


def atomic_spans(slices: Sequence[Slice]) -> dict[int, list[tuple[int, int]]]:
    """Return, for each slice, the positions of its images whose tokens attend to each other (see `Batch.spans`)."""
    found: dict[int, list[tuple[int, int]]] = {}
    for index, slice_ in enumerate(slices):
        for span in slice_.request.media:
            if span.is_atomic and span.start < slice_.end and slice_.start < span.end:
                found.setdefault(index, []).append((span.start, span.end))
    return found


def part_of(features: ImageFeatures, start: int, end: int) -> ImageFeatures:
    return ImageFeatures(features.embeddings[start:end], tuple(one[start:end] for one in features.deep))


def joined(parts: Sequence[ImageFeatures]) -> ImageFeatures:
    """Join the features of consecutive tokens. Raises ValueError if the parts have different numbers of tensors."""
    deep = zip(*(part.deep for part in parts), strict=True)
    return ImageFeatures(torch.cat([part.embeddings for part in parts]), tuple(map(torch.cat, deep)))


def features_from_bytes(tensors: Sequence[bytes], count: int, shape: tuple[int, int]) -> ImageFeatures:
    """Return the features of `count` tokens from the result of `ImageFeatures.to_bytes`. Raises ValueError unless the
    tensors have the given `shape` (see `ImageEncoder`)."""
    num_tensors, hidden_size = shape
    if len(tensors) != num_tensors or any(len(data) != 4 * count * hidden_size for data in tensors):
        sizes = [len(data) for data in tensors]
        raise ValueError(
            f"{sizes} bytes for {count} tokens: must be {num_tensors} tensors of {hidden_size} floats per token"
        )
    first, *deep = (torch.frombuffer(bytearray(data), dtype=torch.float32).view(count, -1) for data in tensors)
    return ImageFeatures(first, tuple(deep))


def rotary_positions(media: Sequence[MediaSpan], start: int, end: int) -> NDArray[np.int64]:
    """Return the temporal, vertical and horizontal positions, int64 [3, end - start], of the tokens [start, end).

    As in Qwen2-VL (Wang et al. 2024), the three positions of a text token are equal. In an image, the vertical and the
    horizontal position count the rows and the columns of the image's grid, and begin at the position of the image's
    first token. The text after the image continues after the largest position in the image.
    """
    at: NDArray[np.int64] = np.arange(start, end, dtype=np.int64)
    positions = np.repeat(at[None], 3, axis=0)
    shift = 0
    for span in media:
        inside = (at >= span.start) & (at < span.end)
        row, column = np.divmod(at[inside] - span.start, span.columns)
        positions[:, inside] = span.start + shift + np.stack((np.zeros_like(row), row, column))
        shift += max(span.rows, span.columns) - span.rows * span.columns
        positions[:, at >= span.end] = at[at >= span.end] + shift
    return positions


def batch_positions(slices: Sequence[Slice], positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the positions of all tokens of a batch on three axes, or None if no slice has images."""
    if not any(slice_.request.media for slice_ in slices):
        return None
    on_axes: NDArray[np.int64] = np.repeat(positions[None], 3, axis=0)
    first = 0
    for slice_ in slices:
        if slice_.request.media:
            on_axes[:, first : first + slice_.count] = rotary_positions(slice_.request.media, slice_.start, slice_.end)
        first += slice_.count
    return on_axes

"""Weights on disk: finds a model's directory, reads its safetensors files, and nothing else (no pickle, no code)."""

import json
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models.config import read_json

MAX_HEADER_BYTES = 2**20  # 128 bytes a tensor: eight times the largest dense model's
MAX_NAME_BYTES = 255  # what a file system takes
EDGE_BYTES = 2**20  # of each end of a file that the fingerprint reads
INDEX = "model.safetensors.index.json"
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def fingerprint(directory: Path) -> str:
    """Of config.json and the weights: sizes, headers, and both ends of each file, 16 hex bytes.

    Reads a few MiB whatever the size of the model. Two copies of a model agree; another revision, dtype or
    fine-tune does not, unless it differs only deep inside a file. Raises ValueError as `Checkpoint` does.
    """
    digest = blake2b((directory / "config.json").read_bytes(), digest_size=16)
    for file in weight_files(directory):
        header_bytes, size = len(_read_header(file)), file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(8 + header_bytes + EDGE_BYTES))
            stream.seek(max(0, size - EDGE_BYTES))
            digest.update(stream.read())
    return digest.hexdigest()


def weight_files(directory: Path) -> list[Path]:
    """By name. Raises ValueError when there are none, or the index names one that is not in the directory."""
    if (directory / INDEX).exists():
        named = read_json(directory / INDEX).get("weight_map")
        if not isinstance(named, dict) or not named:
            raise ValueError(f"{directory / INDEX}: weight_map must map tensors to files")
        return [_inside(directory, name) for name in sorted(set(map(str, named.values())))]
    if (directory / "model.safetensors").exists():
        return [_inside(directory, "model.safetensors")]
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        raise ValueError(f"{directory}: has only pickled weights (.bin, .pt), which can run code; use safetensors")
    raise ValueError(f"{directory}: has neither model.safetensors nor {INDEX}")


def _inside(directory: Path, name: str) -> Path:
    """The hub's cache links a snapshot's files to the blobs beside it: the one way out that is allowed."""
    file, home = directory / name, directory.resolve()
    allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    is_name = Path(name).name == name and name.isprintable() and len(name.encode()) <= MAX_NAME_BYTES
    if not is_name or file.resolve().parent not in allowed or file.suffix != ".safetensors":
        raise ValueError(f"{directory}: weight file {name[:100]!r} is not a safetensors file in this directory")
    if not file.is_file():
        raise ValueError(f"{file}: missing, though {INDEX} names it; download the model again")
    return file


def weight_bytes(directory: Path) -> int:
    """Return the size of the weights on disk. Raises ValueError as `weight_files` does."""
    return sum(file.stat().st_size for file in weight_files(directory))


def stored_dtype(directory: Path) -> str:
    """torch's name of the dtype of the first matrix. Raises ValueError as `Checkpoint` does."""
    for file in weight_files(directory):
        opened = _open(file)
        for name in _tensor_names(file):
            piece = opened.get_slice(name)
            if len(piece.get_shape()) == 2:
                return DTYPE_NAMES[piece.get_dtype()]
    raise ValueError(f"{directory}: no file has a matrix of weights")


class Checkpoint:
    """The tensors of a directory, each to be taken once, checked, in its own dtype and on the device asked for."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._directory = directory
        self._device = device
        self._files: dict[str, Path] = {}  # by tensor
        for file in weight_files(directory):
            names = _tensor_names(file)
            _open(file)  # raises for what our own look at the header does not see
            for name in names:
                if name in self._files:
                    raise ValueError(f"{file}: tensor {name!r} is in another file too")
                self._files[name] = file

    def take(self, name: str, *shape: int) -> Tensor:
        """Raises ValueError when the tensor is missing (or was taken already), or has another shape."""
        if name not in self._files:
            raise ValueError(f"{self._directory}: tensor {name!r} is missing; the config asks for {list(shape)}")
        # Opened for each tensor: a mapping that stays keeps what was read of the file in our memory beside the copy.
        with _open(self._files.pop(name)) as file:
            found = file.get_slice(name).get_shape()
            if list(shape) != found:
                raise ValueError(f"{self._directory}: tensor {name!r} is {found}, the config asks for {list(shape)}")
            # A copy: whoever overwrites the file must not change a running model.
            tensor: Tensor = file.get_tensor(name)
            return tensor.to(self._device, copy=True)

    def skip(self, name: str) -> None:
        self._files.pop(name, None)

    def finish(self) -> None:
        """Raises ValueError when a tensor was not asked for: the config is then not this model's."""
        if self._files:
            raise ValueError(
                f"{self._directory}: {len(self._files)} tensors that the config has no place for, "
                f"such as {min(self._files)[:100]!r}"
            )


def check_finite(directory: Path) -> None:
    """Reads every weight, which takes as long as loading them. Raises ValueError naming a tensor with NaN or infinity,
    and as `Checkpoint` does."""
    for file in weight_files(directory):
        for name in _tensor_names(file):
            with _open(file) as opened:
                if not bool(opened.get_tensor(name).isfinite().all()):
                    raise ValueError(f"{file}: tensor {name!r} holds NaN or infinity; download the model again")


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file}: {error}") from None


def _read_header(file: Path) -> bytes:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(
                f"{file}: header of {length} bytes in a file of {size}, at most {MAX_HEADER_BYTES} allowed"
            )
        return stream.read(length)


def _tensor_names(file: Path) -> list[str]:
    """Raises ValueError unless the tensors' bytes fill the file, in some order, without a hole."""
    header = _read_header(file)
    try:
        entries = json.loads(header, object_pairs_hook=_unique)
        entries.pop("__metadata__", None)
        spans = sorted(
            (*entry["data_offsets"], name, entry["shape"], entry["dtype"]) for name, entry in entries.items()
        )
        end = 0
        for start, stop, name, shape, dtype in spans:
            if dtype not in ITEM_BYTES:
                raise ValueError(f"tensor {name!r} is {dtype}; supported are {', '.join(ITEM_BYTES)}")
            if any(type(size) is not int or size < 0 for size in shape):
                raise ValueError(f"tensor {name!r} has shape {shape}")
            if start != end or stop - start != prod(shape) * ITEM_BYTES[dtype]:
                raise ValueError(f"tensor {name!r} has bytes {start} to {stop}: a hole, an overlap or a wrong size")
            end = stop
        if end != file.stat().st_size - 8 - len(header):
            raise ValueError("it is longer or shorter than its tensors; download the model again")
        return list(entries)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file}: malformed safetensors header ({error!r:.100})") from None
    except ValueError as error:
        raise ValueError(f"{file}: {str(error)[:300]}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in the header")
    return found

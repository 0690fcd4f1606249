"""Reads a model's weight files: safetensors or GGUF. Rejects pickled weights, and runs no code from the files."""

import logging
import time
from collections.abc import Collection
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from safetensors import SafetensorError, safe_open

from engine.formats.scheme import read_scheme
from shared.model_files import is_multimodal, read_object

if TYPE_CHECKING:  # most functions read only headers, and importing torch takes seconds
    import torch

log = logging.getLogger("baton.engine")
PROGRESS_S = 5.0
MAX_NAME_BYTES = 255  # the limit of most file systems
EDGE_BYTES = 2**20  # number of bytes at each end of a file that the fingerprint covers
GGUF = ".gguf"
INDEX = "model.safetensors.index.json"
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
NOT_TEXT = (  # prefixes of the names of tensors outside of the text model, in multimodal models
    "vision_tower.", "visual.", "multi_modal_projector.", "audio_tower.", "embed_vision.", "embed_audio.",
    "vision_embedder.",
)  # fmt: skip
VOCABULARY_MAPS = ("d2t", "t2d")  # tensors of EAGLE-3 checkpoints that contain integers and booleans
CODE_DTYPES = ("I64", "I32", "I8", "U8", "F8_E4M3", "F8_E8M0")  # dtypes of codes and scales in quantized checkpoints


def fingerprint(directory: Path) -> str:
    """Return a digest of config.json and of the weight files' names, sizes, headers and ends, as 32 hex digits.

    Reads only the header and 2 MiB of each file. Copies of a model have equal digests. Revisions, dtypes and
    fine-tunes of a model have different digests, unless they differ only in the middle of a file. Raises the same
    errors as `Checkpoint`.
    """
    digest = blake2b((directory / "config.json").read_bytes(), digest_size=16)
    for file in weight_files(directory):
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        length = 0
        if file.suffix != GGUF:
            with _open(file), file.open("rb") as stream:  # safetensors checks the length of the header
                length = 8 + int.from_bytes(stream.read(8), "little")
        with file.open("rb") as stream:
            digest.update(stream.read(length + EDGE_BYTES))
            stream.seek(max(0, size - EDGE_BYTES))
            digest.update(stream.read())
    return digest.hexdigest()


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files, sorted by name. Raises ValueError if no file is found, or if a file in the index is
    missing."""
    if (directory / INDEX).exists():
        named = read_object(directory / INDEX).get("weight_map")
        if not isinstance(named, dict) or not named:
            raise ValueError(f"{directory / INDEX}: weight_map must map tensors to files")
        return [_inside(directory, name) for name in sorted(set(map(str, named.values())))]
    if (directory / "model.safetensors").exists():
        return [_inside(directory, "model.safetensors")]
    if ggufs := sorted(directory.glob("*.gguf")):
        if len(ggufs) > 1:
            raise ValueError(f"{directory}: has {len(ggufs)} GGUF files; keep one, which must hold the whole model")
        return [_inside(directory, ggufs[0].name, GGUF)]
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        raise ValueError(f"{directory}: has only pickled weights (.bin, .pt), which can run code; use safetensors")
    raise ValueError(f"{directory}: has neither model.safetensors nor {INDEX}")


def is_gguf(directory: Path) -> bool:
    """Return whether the weights are in a GGUF file. Unlike `weight_files`, accept a directory without weights."""
    return any(directory.glob(f"*{GGUF}")) and weight_files(directory)[0].suffix == GGUF


def _inside(directory: Path, name: str, suffix: str = ".safetensors") -> Path:
    """Return the file's path. Raises ValueError if it is not a file with this suffix inside the directory.

    Files of a snapshot in the hub's cache may be links into the hub's blob directory. Other links that lead out of the
    directory are rejected.
    """
    file, home = directory / name, directory.resolve()
    allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    is_name = Path(name).name == name and name.isprintable() and len(name.encode()) <= MAX_NAME_BYTES
    if not is_name or file.resolve().parent not in allowed or file.suffix != suffix:
        raise ValueError(f"{directory}: weight file {name[:100]!r} is not a {suffix[1:]} file in this directory")
    if not file.is_file():
        raise ValueError(f"{file}: missing, though {INDEX} names it; download the model again")
    return file


def weight_bytes(directory: Path) -> int:
    """Return the size of the weights on disk. Raises the same errors as `weight_files`."""
    return sum(file.stat().st_size for file in weight_files(directory))


def stored_dtype(directory: Path) -> str:
    """Return torch's name of the dtype of the first matrix in the weight files. Raises the same errors as
    `Checkpoint`."""
    for file in weight_files(directory):
        if file.suffix == GGUF:
            return "bfloat16"
        opened = _open(file)
        for name in _tensor_names(file):
            tensor = opened.get_slice(name)
            if len(tensor.get_shape()) == 2 and text_name(name) and tensor.get_dtype() in DTYPE_NAMES:
                return DTYPE_NAMES[tensor.get_dtype()]
    raise ValueError(f"{directory}: the files contain no weight matrix")


def stored_vocabulary(directory: Path) -> int | None:
    """Return the number of tokens in the embedding of a GGUF file, or None if the directory has no such file. Some
    converters remove the rows of tokens that the tokenizer lacks."""
    if not is_gguf(directory):
        return None
    from engine.formats.gguf import read_header

    entry = read_header(weight_files(directory)[0])[1].get("token_embd.weight")
    return None if entry is None else entry.shape[0]


def text_name(name: str) -> str:
    """Return the text model's name for a tensor of a multimodal model, or "" if the text model lacks this tensor."""
    for prefix, own in (
        ("language_model.model.", "model."),
        ("language_model.", ""),
        ("model.language_model.", "model."),
    ):
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return "" if name.removeprefix("model.").startswith(NOT_TEXT) else name


def tensor_files(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor. Reads only headers. Raises ValueError if a file is malformed or incomplete, or a
    tensor is in two files."""
    files: dict[str, Path] = {}
    for file in weight_files(directory):
        if file.suffix == GGUF:
            from engine.formats.gguf import read_header

            return dict.fromkeys(read_header(file)[1], file)
        for name in _tensor_names(file):
            if name in files:
                raise ValueError(f"{file}: tensor {name!r} is also in another file")
            files[name] = file
    return files


class LoadProgress:
    """Logs the share of a model's bytes that has been read, at most every `PROGRESS_S` seconds."""

    def __init__(self, directory: Path) -> None:
        self._total = max(1, weight_bytes(directory))
        self._read = 0
        self._logged = time.monotonic()

    def add(self, num_bytes: int) -> None:
        self._read += num_bytes
        if time.monotonic() - self._logged >= PROGRESS_S:
            self._logged = time.monotonic()
            share, total = min(1.0, self._read / self._total), self._total / 2**20
            log.info("read %.0f %% of %.0f MiB of weights", 100 * share, total)


class Checkpoint:
    """The tensors of a model directory. `take` returns each tensor once, in its stored dtype, on `device`.

    Raises the same errors as `tensor_files`.
    """

    def __init__(self, directory: Path, device: "torch.device") -> None:
        self._directory = directory
        self._device = device
        self._files = tensor_files(directory)
        self._progress = LoadProgress(directory)
        self._stored = {name: name for name in self._files}
        if is_multimodal(read_object(directory / "config.json")):
            self._stored = {}
            for name in self._files:
                own = text_name(name)
                if own in self._stored:
                    self.refuse(name, f"is stored in addition to another tensor for {own}")
                if own:
                    self._stored[own] = name
        # Embedding models are saved without the output head, and their tensors' names lack the prefix "model.".
        self.is_headless = "embed_tokens.weight" in self._files
        if self.is_headless:
            self._stored = {f"model.{name}": name for name in self._files}
        self._files = {own: self._files[name] for own, name in self._stored.items()}

    def take(self, name: str, *shape: int) -> "torch.Tensor":
        """Return a tensor of floats. Raises ValueError if it is missing, was already taken, or has a shape other than
        `shape`."""
        return self._taken(name, DTYPE_NAMES, shape)

    def codes(self, name: str, dtypes: "torch.dtype | tuple[torch.dtype, ...]", *shape: int) -> "torch.Tensor":
        """Return a tensor in one of `dtypes`. Raises the same errors as `take`, and ValueError for another dtype."""
        tensor = self._taken(name, (*DTYPE_NAMES, *CODE_DTYPES), shape)
        allowed = dtypes if isinstance(dtypes, tuple) else (dtypes,)
        if tensor.dtype not in allowed:
            self.refuse(name, f"is {tensor.dtype}; its format needs {' or '.join(map(str, allowed))}")
        return tensor

    def dtype_of(self, name: str) -> str | None:
        """Return safetensors' name of the tensor's dtype, or None if the tensor is missing or was taken."""
        if name not in self._files:
            return None
        with _open(self._files[name]) as file:
            return str(file.get_slice(self._stored[name]).get_dtype())

    def has(self, prefix: str, suffix: str) -> bool:
        """Return whether a tensor whose name has this prefix and suffix is stored and was not taken yet."""
        return any(name.startswith(prefix) and name.endswith(suffix) for name in self._files)

    def is_copy(self, name: str, other: str) -> bool:
        """Return whether the tensor `name` is missing or equal to the tensor `other`."""
        if name not in self._files:
            return True
        if other not in self._files or self.dtype_of(name) != self.dtype_of(other):
            return False
        both = []
        for each in (name, other):
            with _open(self._files[each], "pt") as file:
                both.append(file.get_tensor(self._stored[each]))
        return bool(both[0].equal(both[1]))

    def shape_of(self, name: str) -> list[int]:
        """Return the tensor's shape. Raises ValueError if it is missing."""
        if name not in self._files:
            self.refuse(name, "is missing, but the format of the checkpoint requires it")
        with _open(self._files[name]) as file:
            return list(file.get_slice(self._stored[name]).get_shape())

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raise ValueError with the name of a tensor and the reason."""
        raise ValueError(f"{self._directory}: tensor {name!r} {why}")

    def _taken(self, name: str, dtypes: Collection[str], shape: tuple[int, ...]) -> "torch.Tensor":
        if name not in self._files:
            self.refuse(name, f"is missing; the config needs {list(shape)}")
        # Open the file for each tensor, because an open mapping would keep the file's pages in memory.
        with _open(self._files.pop(name), "pt") as file:
            stored = file.get_slice(self._stored[name])
            found, dtype = stored.get_shape(), stored.get_dtype()
            if list(shape) != found:
                self.refuse(name, f"is {found}, the config needs {list(shape)}")
            if dtype not in dtypes:
                self.refuse(name, f"is {dtype}; supported are {', '.join(dtypes)}")
            # Copy the tensor, so that overwriting the file does not change a running model.
            tensor: torch.Tensor = file.get_tensor(self._stored[name])
            self._progress.add(tensor.nbytes)
            return tensor.to(self._device, copy=True)

    def finish(self, known: tuple[str, ...], suffixes: tuple[str, ...], prefixes: tuple[str, ...] = ()) -> None:
        """Raise ValueError if a tensor of the files was not taken: the config then belongs to another model.

        Tensors are exempt if their names are in `known`, end with one of `suffixes`, or begin with one of `prefixes`.
        """
        left = [name for name in self._files if name not in known and not name.endswith(suffixes)]
        if left := [name for name in left if not name.startswith(prefixes)]:
            raise ValueError(
                f"{self._directory}: {len(left)} tensors are not part of the model that config.json describes, "
                f"such as {min(left)[:100]!r}"
            )


def check_finite(directory: Path) -> None:
    """Raise ValueError if a weight is NaN or infinite. Reads all weights, which takes as long as loading the model."""
    for file in weight_files(directory):
        if file.suffix == GGUF:
            _check_finite_gguf(file)
            continue
        for name in _tensor_names(file):
            with _open(file, "pt") as opened:
                if not bool(opened.get_tensor(name).float().isfinite().all()):
                    raise ValueError(f"{file}: tensor {name!r} holds NaN or infinity; download the model again")


def _check_finite_gguf(file: Path) -> None:
    import torch

    from engine.formats.forms import dense
    from engine.formats.gguf import read_header, read_tensor

    for name, entry in read_header(file)[1].items():
        if not bool(dense(read_tensor(file, entry, torch.device("cpu"))).isfinite().all()):
            raise ValueError(f"{file}: tensor {name!r} holds NaN or infinity; download the model again")


def _open(file: Path, framework: str = "np") -> Any:
    """Open a file to read torch ("pt") or numpy ("np") tensors. Raises ValueError if its header or size is wrong."""
    try:
        return safe_open(file, framework=framework)
    except SafetensorError as error:
        raise ValueError(f"{file}: {error}; download the model again") from None


def _tensor_names(file: Path) -> list[str]:
    """Return the names of the tensors in a file. Raises ValueError if the file is malformed or has an unknown dtype."""
    with _open(file) as opened:
        names: list[str] = list(opened.keys())
        found = {name: opened.get_slice(name).get_dtype() for name in names}
    if others := {
        name: dtype for name, dtype in found.items() if dtype not in DTYPE_NAMES and name not in VOCABULARY_MAPS
    }:
        config = file.parent / "config.json"
        allowed = (*DTYPE_NAMES, *CODE_DTYPES) if config.exists() and read_scheme(file.parent) else (*DTYPE_NAMES,)
        for name, dtype in others.items():
            if dtype not in allowed:
                raise ValueError(f"{file}: tensor {name[:100]!r} is {dtype}; supported are {', '.join(allowed)}")
    return names

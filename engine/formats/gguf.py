"""Reads the tensors of GGUF files (llama.cpp). config.json and tokenizer.json in their directory describe the model.

The library gguf knows the names of the tensors and decodes quantized types. Headers are parsed here: gguf's own reader
takes seconds for the vocabulary, which is not needed. Each length in a header is checked against the size of the file
before it is used, because files are not trusted.
"""

import math
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import Q4_K, dequantize
from numpy.typing import NDArray
from torch import Tensor

from engine.formats.forms import E2M1, INTEGERS, GroupedWeight, Weight, dense, joined, packed, rows_of
from engine.models.spec import ModelConfig

ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "MixtralForCausalLM": "llama",
    "SmolLM3ForCausalLM": "smollm3", "GraniteForCausalLM": "granite", "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2", "Qwen2MoeForCausalLM": "qwen2moe", "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe", "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3",
    "GptOssForCausalLM": "gpt-oss",
}  # fmt: skip
# In these architectures, rows 2i and 2i + 1 of a query or key are rotated together. In Hugging Face checkpoints, rows i
# and i + head_dim / 2 are.
ROTATES_ADJACENT = {"llama", "smollm3", "granite"}
EXPERT = re.compile(r"(?<=\.experts)\.(\d+)")  # its number is removed: the experts of a layer are one tensor
DERIVED = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}  # follow from config.json
FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
STRING, ARRAY = 8, 9
# How `struct` reads a value of each other type.
FORMS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
Value = str | int | float | None
MAX_DIMS = 4
HEADER_BYTES = 2**26  # maximum size of a header, which consists mainly of the tokenizer's vocabulary (a few MiB)


@dataclass(frozen=True, slots=True)
class Entry:
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int  # offset in the file
    num_bytes: int

    def part(self, index: int) -> "Entry":
        """Return the part of the tensor with this index in its first dimension."""
        num_bytes = self.num_bytes // self.shape[0]
        return Entry(self.kind, self.shape[1:], self.start + index * num_bytes, num_bytes)


def decimal(value: float) -> float:
    """Return the number with the fewest decimal digits that is stored as the same 32-bit float. This is the number that
    the converter read from config.json."""
    return float(str(np.float32(value)))


class _Header:
    """A cursor over the first bytes of a file. Reading beyond these bytes raises ValueError."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with file.open("rb") as stream:
            self._data = stream.read(min(HEADER_BYTES, file.stat().st_size))
        self.at = 0

    def skip(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise self._malformed()
        self.at += count
        return self._data[self.at - count : self.at]

    def scalar(self, form: str) -> int | float:
        (value,) = struct.unpack(form, self.skip(struct.calcsize(form)))
        return decimal(value) if form == "<f" else value

    def number(self, form: str = "<Q") -> int:
        return int(self.scalar(form))

    def text(self) -> str:
        return self.skip(self.number()).decode(errors="replace")

    def value(self) -> Value:
        """Read a value. Return None for an array."""
        kind = self.number("<I")
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.scalar(self._form(kind))
        kind, count = self.number("<I"), self.number()
        if kind == STRING:
            for _ in range(count):
                self.skip(self.number())
        else:
            self.skip(count * struct.calcsize(self._form(kind)))
        return None

    def _form(self, kind: int) -> str:
        if kind not in FORMS:
            raise self._malformed()
        return FORMS[kind]

    def _malformed(self) -> ValueError:
        return ValueError(f"{self.file}: the header is cut off or malformed; download the file again")


def read_header(file: Path) -> tuple[dict[str, Value], dict[str, Entry]]:
    """Return the metadata and the tensors of a file. Arrays in the metadata become None. Raises ValueError if the
    header is malformed, a tensor extends beyond the end of the file, or a tensor's type is not supported."""
    header = _Header(file)
    if header.skip(4) != b"GGUF" or header.number("<I") not in {2, 3}:
        raise ValueError(f"{file}: not a GGUF file of version 2 or 3")
    num_tensors, num_values = header.number(), header.number()
    values = {}
    for _ in range(num_values):
        name = header.text()
        values[name] = header.value()
    found = []
    for _ in range(num_tensors):
        name = header.text()
        if (num_dims := header.number("<I")) > MAX_DIMS:
            raise ValueError(f"{file}: tensor {name[:100]!r} has {num_dims} dimensions; ggml has at most {MAX_DIMS}")
        dims = [header.number() for _ in range(num_dims)]
        found.append((name, tuple(reversed(dims)), header.number("<I"), header.number()))
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"{file}: general.alignment is {alignment!r}: it must be a positive number")
    start, size, entries = -(-header.at // alignment) * alignment, file.stat().st_size, {}
    for name, shape, number, offset in found:
        if number not in GGMLQuantizationType.__members__.values():
            raise ValueError(f"{file}: tensor {name[:100]!r} has type {number} of ggml, which is not supported")
        kind = GGMLQuantizationType(number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        count = math.prod(shape)
        num_bytes = count // block * block_bytes
        if not shape or not count or shape[-1] % block or start + offset + num_bytes > size or name in entries:
            raise ValueError(f"{file}: tensor {name[:100]!r} is malformed or cut off; download the file again")
        entries[name] = Entry(kind, shape, start + offset, num_bytes)
    return values, entries


class GgufCheckpoint:
    """The tensors of a GGUF file. Callers request each tensor once, by its name in Hugging Face checkpoints.

    Tensors are returned on `device`. Matrices in Q4_0, Q4_K and MXFP4 keep their 4-bit codes. Other quantized tensors
    become float16. Methods raise ValueError, with the tensor's name, if a tensor is missing or its shape differs from
    the config's. As in llama.cpp, an output matrix in the file is used even if config.json states that it is tied to
    the embeddings.
    """

    def __init__(self, file: Path, config: ModelConfig, device: torch.device) -> None:
        self._file = file
        self._device = device
        values, self._entries = read_header(file)
        self._architecture = values.get("general.architecture")
        self._unused = self._entries.keys() - DERIVED
        self.config = replace(config, tie_word_embeddings=False) if "output.weight" in self._entries else config
        expected = ARCHITECTURES.get(config.architecture)
        if expected is None:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"{file}: GGUF is supported for {known}; use safetensors for {config.architecture}")
        if self._architecture != expected:
            raise ValueError(
                f"{file}: general.architecture is {self._architecture!r}, but config.json describes {expected!r}"
            )
        number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == expected)
        self._names = get_tensor_name_map(number, config.num_layers)

    def take(self, name: str, *shape: int) -> Tensor:
        if name.endswith("gate_up_proj_bias"):
            halves = [self.take(one, shape[0], shape[1] // 2) for one in _gate_and_up(name)]
            return torch.stack(halves, -1).flatten(1)
        return dense(self._read(name.replace("_proj_bias", "_proj.bias"), shape, codes=False))

    def matrix(self, name: str, out: int, width: int) -> Weight:
        return self._read(f"{name}.weight", (out, width), codes=True)

    def stacked(self, name: str, count: int, width: int, out: int) -> list[Weight]:
        """Return the matrices [out, width] of all experts of gpt-oss. As in its safetensors, the rows of gate and up
        alternate."""
        if name.endswith("gate_up_proj"):
            alternating = torch.arange(out).view(2, -1).T.flatten()
            gates, ups = (self.stacked(one, count, width, out // 2) for one in _gate_and_up(name))
            return [rows_of(joined([gate, up]), alternating) for gate, up in zip(gates, ups, strict=True)]
        return [self.matrix(name.replace(".experts.", f".experts.{index}."), out, width) for index in range(count)]

    def finish(self) -> None:
        """Raise ValueError if a tensor was not requested, except those that follow from config.json."""
        if self._unused:
            raise ValueError(
                f"{self._file}: {len(self._unused)} tensors are not part of the model that config.json describes, "
                f"such as {min(self._unused)[:100]!r}"
            )

    def _read(self, name: str, shape: tuple[int, ...], codes: bool) -> Weight:
        found = EXPERT.search(name)
        expert = None if found is None else int(found[1])
        own = self._stored_name(EXPERT.sub("", name))
        entry = self._entries.get(own)
        if entry is None:
            raise ValueError(f"{self._file}: tensor {own!r} is missing; the config needs {list(shape)}")
        self._unused.discard(own)
        needed = shape if expert is None else (max(entry.shape[0], expert + 1), *shape)
        if needed not in {entry.shape, (1, *entry.shape)}:  # a matrix with one output is stored as a vector
            raise ValueError(f"{self._file}: tensor {own!r} is {list(entry.shape)}, the config needs {list(needed)}")
        entry = replace(entry, shape=needed) if expert is None else entry.part(expert)
        weight = read_tensor(self._file, entry, self._device, codes)
        if self._architecture not in ROTATES_ADJACENT or name.split(".")[-2] not in {"q_proj", "k_proj"}:
            return weight
        halves = torch.arange(shape[0], device=self._device).view(-1, self.config.head_dim // 2, 2)
        return rows_of(weight, halves.transpose(1, 2).flatten())

    def _stored_name(self, name: str) -> str:
        """Return the name in the file of a tensor of Hugging Face's."""
        stem, _, kind = (name if name.endswith((".weight", ".bias")) else f"{name}.weight").rpartition(".")
        return f"{self._names.get_name(stem) or stem}.{kind}"


def _gate_and_up(name: str) -> tuple[str, str]:
    return name.replace("gate_up_proj", "gate_proj"), name.replace("gate_up_proj", "up_proj")


def read_tensor(file: Path, entry: Entry, device: torch.device, codes: bool = False) -> Weight:
    """Read a tensor. Quantized tensors become float16, but if `codes` is true, types with 4-bit codes become a
    `GroupedWeight`. Raises ValueError if the type is not supported."""
    with file.open("rb") as stream:
        stream.seek(entry.start)
        data = bytearray(stream.read(entry.num_bytes))
    if entry.kind in FLOATS:
        return torch.frombuffer(data, dtype=FLOATS[entry.kind]).view(entry.shape).to(device)
    stored = np.frombuffer(data, np.uint8)
    if codes and entry.kind in GROUPED:
        weight = GROUPED[entry.kind](stored.reshape(-1, GGML_QUANT_SIZES[entry.kind][1]), entry.shape)
        zeros = None if weight.zeros is None else weight.zeros.to(device)
        return GroupedWeight(weight.codes.to(device), weight.table, weight.scales.to(device), zeros)
    try:
        values = dequantize(stored.reshape(math.prod(entry.shape[:-1]), -1), entry.kind)
    except NotImplementedError:
        raise ValueError(f"{file}: it has a tensor of the type {entry.kind.name}, which is not supported") from None
    return torch.from_numpy(values.astype(np.float16)).view(entry.shape).to(device)


def _grouped(
    codes: NDArray[np.uint8], table: tuple[float, ...], scales: NDArray[np.float32], shape: tuple[int, ...]
) -> GroupedWeight:
    """Return a matrix from the codes of each group, [groups, bytes]. The low bits of a group's bytes hold the first
    half of its columns, and the high bits hold the second half."""
    columns = torch.from_numpy(np.concatenate((codes & 15, codes >> 4), 1)).view(shape)
    return GroupedWeight(packed(columns), table, torch.from_numpy(scales).view(shape[0], -1))


def _q4_0(blocks: NDArray[np.uint8], shape: tuple[int, ...]) -> GroupedWeight:
    return _grouped(blocks[:, 2:], INTEGERS, blocks[:, :2].copy().view(np.float16).astype(np.float32), shape)


def _mxfp4(blocks: NDArray[np.uint8], shape: tuple[int, ...]) -> GroupedWeight:
    return _grouped(blocks[:, 1:], E2M1, np.ldexp(np.float32(1), blocks[:, 0].astype(np.int32) - 127), shape)


def _q4_k(blocks: NDArray[np.uint8], shape: tuple[int, ...]) -> GroupedWeight:
    """Return a matrix from blocks of eight groups. The values of a group are scale * code - minimum."""
    factors, minima = Q4_K.get_scale_min(blocks[:, 4:16])
    both = blocks[:, :4].copy().view(np.float16).astype(np.float32)
    scales, minima = both[:, :1] * factors, both[:, 1:] * minima
    pairs = blocks[:, 16:].reshape(-1, 4, 1, 32)
    codes = np.concatenate((pairs & 15, pairs >> 4), 2).reshape(-1, 8, 32)
    constant = scales == 0
    codes[constant] = ZERO_CODE
    scales[constant] = 1
    zeros = minima / scales - np.where(constant, 0, ZERO_CODE)
    made = [torch.from_numpy(one.astype(np.float32)).view(shape[0], -1) for one in (scales, zeros)]
    return GroupedWeight(packed(torch.from_numpy(codes).view(shape)), INTEGERS, *made)


ZERO_CODE = 8  # the code of 0 in INTEGERS
GROUPED = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.MXFP4: _mxfp4,
    GGMLQuantizationType.Q4_K: _q4_k,
}

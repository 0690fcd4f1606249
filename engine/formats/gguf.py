"""Reads GGUF files (llama.cpp). Only the tensors are used; config.json and tokenizer.json describe the model.

Each length in the header is checked against the size of the file before it is used, because files are not trusted.
"""

import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.formats.forms import INTEGERS, GroupedWeight, Weight, dense, packed, rows_of
from engine.models.spec import ModelConfig

ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
# Keyed by ggml's number of a tensor type: the type's name, the values per block, and the bytes per block.
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144), 14: ("Q6_K", 256, 210),
}  # fmt: skip
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # size of a value of each type
STRING, ARRAY = 8, 9
MAX_DIMS = 4
HEADER_BYTES = 2**26  # maximum size of a header, which consists mainly of the tokenizer's vocabulary (a few MiB)


@dataclass(frozen=True, slots=True)
class Entry:
    kind: str
    shape: tuple[int, ...]
    start: int  # offset in the file
    num_bytes: int


class _Header:
    """A cursor over the first bytes of a file. Reading beyond these bytes raises ValueError."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with file.open("rb") as stream:
            self._data = stream.read(min(HEADER_BYTES, file.stat().st_size))
        self.at = 0

    def skip(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise ValueError(f"{self.file}: the header is cut off or malformed; download the file again")
        self.at += count
        return self._data[self.at - count : self.at]

    def number(self, form: str = "<Q") -> int:
        (value,) = struct.unpack(form, self.skip(struct.calcsize(form)))
        return int(value)

    def text(self) -> str:
        return self.skip(self.number()).decode(errors="replace")

    def value(self) -> str | int | None:
        """Read a value. Return a string or a 32-bit integer, and return None for a value of another type."""
        kind = self.number("<I")
        if kind == STRING:
            return self.text()
        if kind in {4, 5}:
            return self.number("<I")
        if kind == ARRAY:
            kind, count = self.number("<I"), self.number()
            if kind == STRING:
                for _ in range(count):
                    self.skip(self.number())
                return None
            self.skip(count * VALUE_BYTES.get(kind, len(self._data)))
            return None
        self.skip(VALUE_BYTES.get(kind, len(self._data)))
        return None


def read_entries(file: Path) -> tuple[str, dict[str, Entry]]:
    """Return the architecture and the tensors of a file. Raises ValueError if the header is malformed, a tensor extends
    beyond the end of the file, or a tensor's type is not supported."""
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
        if number not in TYPES:
            supported = ", ".join(kind for kind, _, _ in TYPES.values())
            raise ValueError(f"{file}: tensor {name[:100]!r} has type {number} of ggml; supported are {supported}")
        kind, block, block_bytes = TYPES[number]
        count = math.prod(shape)
        num_bytes = count // block * block_bytes
        if not shape or shape[-1] % block or start + offset + num_bytes > size or name in entries:
            raise ValueError(f"{file}: tensor {name[:100]!r} is malformed or cut off; download the file again")
        entries[name] = Entry(kind, shape, start + offset, num_bytes)
    return str(values.get("general.architecture")), entries


class GgufCheckpoint:
    """The tensors of a GGUF file. Callers request each tensor once, by its name in Hugging Face checkpoints.

    Tensors are returned on `device`. Matrices in Q4_0 keep their 4-bit codes. Other quantized tensors become float16.
    Methods raise ValueError, with the tensor's name, if a tensor is missing or its shape differs from the config's.
    As in llama.cpp, an output matrix in the file is used even if config.json states that it is tied to the embeddings.
    """

    def __init__(self, file: Path, config: ModelConfig, device: torch.device) -> None:
        self._file = file
        self._device = device
        self._architecture, self._entries = read_entries(file)
        self.config = replace(config, tie_word_embeddings=False) if "output.weight" in self._entries else config
        expected = ARCHITECTURES.get(config.architecture)
        if expected is None:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"{file}: GGUF is supported for {known}; use safetensors for {config.architecture}")
        if self._architecture != expected:
            raise ValueError(
                f"{file}: general.architecture is {self._architecture!r}, but config.json describes {expected!r}"
            )

    def take(self, name: str, *shape: int) -> Tensor:
        return dense(self._read(name, shape, codes=False))

    def matrix(self, name: str, out: int, width: int) -> Weight:
        return self._read(f"{name}.weight", (out, width), codes=True)

    def finish(self) -> None:
        """Raise ValueError if a tensor was not requested. `rope_freqs` is exempt, because its values follow from
        config.json."""
        if left := self._entries.keys() - {"rope_freqs.weight"}:
            raise ValueError(
                f"{self._file}: {len(left)} tensors are not part of the model that config.json describes, "
                f"such as {min(left)[:100]!r}"
            )

    def _read(self, name: str, shape: tuple[int, ...], codes: bool) -> Weight:
        entry = self._entries.pop(own := gguf_name(name), None)
        if entry is None:
            raise ValueError(f"{self._file}: tensor {own!r} is missing; the config needs {list(shape)}")
        if entry.shape != shape:
            raise ValueError(f"{self._file}: tensor {own!r} is {list(entry.shape)}, the config needs {list(shape)}")
        weight = read_tensor(self._file, entry, self._device, codes)
        part = name.split(".")[-2]
        if self._architecture != "llama" or part not in {"q_proj", "k_proj"}:
            return weight
        # llama.cpp rotates adjacent rows of a head together. Hugging Face rotates rows i and i + head_dim / 2 together.
        halves = torch.arange(shape[0], device=self._device).view(-1, self.config.head_dim // 2, 2)
        return rows_of(weight, halves.transpose(1, 2).flatten())


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES.get(stem, stem)}.{kind}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{NAMES.get(part, part)}.{kind}"


def read_tensor(file: Path, entry: Entry, device: torch.device, codes: bool = False) -> Weight:
    """Read a tensor. Quantized tensors become float16, but if `codes` is true, Q4_0 becomes a `GroupedWeight`."""
    with file.open("rb") as stream:
        stream.seek(entry.start)
        data = bytearray(stream.read(entry.num_bytes))
    stored = torch.frombuffer(data, dtype=torch.uint8).to(device)
    if entry.kind in FLOATS:
        return stored.view(FLOATS[entry.kind]).view(entry.shape)
    _, _, block_bytes = next(one for one in TYPES.values() if one[0] == entry.kind)
    blocks = stored.view(-1, block_bytes)
    if entry.kind == "Q4_0":
        four = torch.cat((blocks[:, 2:] & 15, blocks[:, 2:] >> 4), 1).view(entry.shape)
        scales = _halves(blocks[:, :2]).view(*entry.shape[:-1], -1)
        weight = GroupedWeight(packed(four), INTEGERS, scales)
        return weight if codes else weight.dense().half()
    values = {"Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k}[entry.kind](blocks)
    return values.half().view(entry.shape)


def _halves(stored: Tensor) -> Tensor:
    """Return the float16 number in each pair of bytes, uint8 [blocks, 2], as float32 [blocks, 1]."""
    return stored.contiguous().view(torch.float16).float()


def _q8_0(blocks: Tensor) -> Tensor:
    return _halves(blocks[:, :2]) * blocks[:, 2:].contiguous().view(torch.int8)


def _q4_k(blocks: Tensor) -> Tensor:
    """Return the weights of blocks that have eight groups of 32 values. Each group has a 6-bit scale and a
    6-bit minimum."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1) * _halves(blocks[:, :2])
    least = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1) * _halves(blocks[:, 2:4])
    pairs = blocks[:, 16:].view(-1, 4, 1, 32)
    codes = torch.cat((pairs & 15, pairs >> 4), 2).view(-1, 8, 32)
    return scales[..., None] * codes - least[..., None]


def _q6_k(blocks: Tensor) -> Tensor:
    """Return the weights of blocks that have sixteen groups of 16 values. Each group has an 8-bit scale. The upper two
    bits of the codes are stored separately."""
    low = blocks[:, :128].view(-1, 2, 1, 2, 32)
    low = torch.cat((low & 15, low >> 4), 2).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(4, 1)
    codes = low | (blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts & 3) << 4
    scales = _halves(blocks[:, 208:]) * blocks[:, 192:208].contiguous().view(torch.int8)
    return scales[..., None] * (codes.view(-1, 16, 16).float() - 32)

"""Writers of GGUF files and of random quantized blocks, from the published layout of the format."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.formats.gguf import gguf_name

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Stored = tuple[bytes, list[float]]  # a block of random codes, and the values that it represents


def _bytes(count: int) -> list[int]:
    return torch.randint(0, 256, (count,)).tolist()


def _scale(least: float = 0.002) -> tuple[bytes, float]:
    data = struct.pack("<e", least * (1 + torch.rand(()).item()))
    return data, struct.unpack("<e", data)[0]


def q4_0() -> Stored:
    (data, scale), codes = _scale(0.02), _bytes(16)
    return data + bytes(codes), [scale * ((code & 15) - 8) for code in codes] + [scale * ((c >> 4) - 8) for c in codes]


def q8_0() -> Stored:
    (data, scale), codes = _scale(), _bytes(32)
    return data + bytes(codes), [scale * (code - 256 if code > 127 else code) for code in codes]


def q4_k() -> Stored:
    (data, scale), (more, least), six, codes = _scale(0.0005), _scale(0.0005), _bytes(12), _bytes(128)
    values = []
    for group in range(8):
        if group < 4:
            factor, minimum = six[group] & 63, six[group + 4] & 63
        else:
            factor = six[group + 4] & 15 | six[group - 4] >> 6 << 4
            minimum = six[group + 4] >> 4 | six[group] >> 6 << 4
        for place in range(32):
            code = codes[group // 2 * 32 + place] >> 4 * (group % 2) & 15
            values.append(scale * factor * code - least * minimum)
    return data + more + bytes(six) + bytes(codes), values


def q6_k() -> Stored:
    low, high, factors, (data, scale) = _bytes(128), _bytes(64), _bytes(16), _scale(0.0001)
    values = []
    for place in range(256):
        half, quarter, index = place // 128, place % 128 // 32, place % 32
        code = low[64 * half + 32 * (quarter % 2) + index] >> 4 * (quarter // 2) & 15
        code |= (high[32 * half + index] >> 2 * quarter & 3) << 4
        factor = factors[place // 16]
        values.append(scale * (factor - 256 if factor > 127 else factor) * (code - 32))
    return bytes(low + high + factors) + data, values


BLOCKS: dict[str, tuple[Callable[[], Stored], int]] = {
    "Q4_0": (q4_0, 32), "Q8_0": (q8_0, 32), "Q4_K": (q4_k, 256), "Q6_K": (q6_k, 256),
}  # fmt: skip


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(tensors: list[tuple[str, list[int], int, int]], architecture: str) -> bytes:
    """Return a header with metadata of several types. `tensors` has the name, shape, type and offset of each tensor."""
    values = [
        text("general.architecture") + struct.pack("<I", 8) + text(architecture),
        text("general.alignment") + struct.pack("<II", 4, 64),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
        text("tokenizer.ggml.scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.5, 1.0),
        text("llama.rope.freq_base") + struct.pack("<If", 6, 10000.0),
    ]
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values)
    for name, shape, kind, offset in tensors:
        data += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
    return data + bytes(-len(data) % 64)


def convert(source: Path, target: Path, kind: str, architecture: str) -> None:
    """Write the model in `source` to `target` as a GGUF file. If `kind` is a quantized type, the matrices get random
    values. Write the values that the file represents back to `source`."""
    target.mkdir()
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    tensors, entries, data = load_file(source / "model.safetensors"), [], b""
    for name, tensor in tensors.items():
        own = kind if tensor.ndim == 2 else "F32"
        if own in BLOCKS:
            make, size = BLOCKS[own]
            blocks = [make() for _ in range(tensor.numel() // size)]
            stored = b"".join(block for block, _ in blocks)
            values = torch.tensor([value for _, block in blocks for value in block]).view(tensor.shape)
            in_layer = ".layers." in name and own == "Q4_0"
            values = values if in_layer else values.half().float()  # all but Q4_0 in layers are rounded to float16
        else:
            values = tensor.to(FLOATS[own])
            stored, values = values.view(torch.uint8).numpy().tobytes(), values.float()
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        tensors[name] = _halved(values, config[heads]) if heads and architecture == "llama" else values
        entries.append((gguf_name(name), list(tensor.shape), NUMBERS[own], len(data)))
        data += stored + bytes(-len(stored) % 64)
    save_file({name: one.contiguous() for name, one in tensors.items()}, source / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    (target / "model.gguf").write_bytes(header(entries, architecture) + data)


def _halved(values: Tensor, heads: int) -> Tensor:
    """Return the rows in the order of Hugging Face: row 2i of a head becomes row i, and row 2i + 1 becomes row i + d /
    2, where d is the number of rows of the head."""
    by_head = values.view(heads, -1, values.shape[1])
    return torch.cat((by_head[:, 0::2], by_head[:, 1::2]), 1).flatten(0, 1)

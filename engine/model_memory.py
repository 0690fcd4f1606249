"""A table for users: the memory of a model's weights, KV and recurrent states. Reads only the headers of files."""

import logging
from pathlib import Path

from engine.formats.scheme import read_scheme
from engine.models.families.listing import parts_of
from engine.models.spec import ModelConfig
from engine.weights import is_gguf, stored_dtype, weight_bytes
from scheduler.geometry import Geometry, Group
from shared.kv.layout import KVLayout

log = logging.getLogger("baton.engine")
LENGTHS = (1024, 8192, 32768)  # lengths of requests, in tokens


def memory_of(
    path: Path, config: ModelConfig, layout: KVLayout, groups: tuple[Group, ...], chunk: int
) -> dict[str, str]:
    """Return the table: the text of each named row. `chunk` is the maximum number of tokens of a request in a step."""
    geometry = Geometry(layout.block_tokens, groups)
    row, size = layout.block_bytes, layout.block_tokens
    full_rows = sum(group.rows for group in groups if group.kind == "full")
    rows = {
        "architecture": f"{config.architecture}, {config.num_layers} layers"
        + (f", run by transformers {config.transformers}" if config.transformers else ""),
        "layers contain": ", ".join(parts_of(config)) or "attention and MLPs",
        "weights": f"{_size(weight_bytes(path))} in files, {_format(path)}",
        "KV of a token": f"{_size(full_rows * row / size)} in {layout.dtype}",
    }
    for group in groups:
        if group.kind == "window":
            most = (group.size // size + 1) * group.rows * row
            rows[f"KV in windows of {group.size}"] = f"at most {_size(most)} while a request generates"
    if geometry.state_rows:
        rows["states of a request"] = f"2 of {_size(geometry.state_rows * row)}"
    blocks = geometry.capacity(layout.num_blocks, chunk, config.max_position_embeddings)
    unit = f"blocks of {size} tokens" if len(groups) == 1 and not geometry.state_rows else "rows"
    rows["KV pool"] = f"{_size(layout.num_blocks * row)}, {layout.num_blocks - 1:,} {unit}, {_size(row)} each"
    rows["longest request"] = f"{min(max(0, blocks) * size, config.max_position_embeddings):,} tokens"
    for length in LENGTHS:
        if length <= min(blocks * size, config.max_position_embeddings):
            count = (layout.num_blocks - 1) // geometry.rows_for(length, min(length, chunk))
            rows[f"requests of {length:,} tokens"] = f"{count:,} at once, without common prefixes"
    return rows


def aligned(rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"  {name:{width}}  {text}" for name, text in rows.items())


def log_table(rows: dict[str, str]) -> None:
    """Log each row separately, because the log escapes the line ends within a message."""
    for line in aligned(rows).splitlines():
        log.info("model: %s", line.strip())


def _format(path: Path) -> str:
    if is_gguf(path):
        return "GGUF"
    scheme = read_scheme(path)
    return stored_dtype(path) if scheme is None else f"quantized ({scheme.method}, {scheme.bits} bits)"


def _size(num_bytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:,.0f} bytes"

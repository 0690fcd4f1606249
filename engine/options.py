"""The settings from which an engine is built, and the components that a build returns."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from engine.cuda.kv.pool import PoolClient
from engine.cuda.memory import DeviceMemory
from engine.emulation import Emulation
from engine.runner import Runner
from engine.weights import fingerprint
from shared.kv.layout import KVLayout
from shared.kv.memory import HostMemory


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The settings of a node that concern computation, with the same names."""

    model: str
    runner: str = "torch"
    device: str = "cpu"
    dtype: str = "auto"
    weight_dtype: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    attention_backend: str = "auto"
    enforce_eager: bool = False
    gpu_memory_utilization: float = 0.9
    block_size: int = 0
    kv_cache_memory: int = 0
    num_blocks: int = 0
    max_model_len: int = 0
    max_num_seqs: int = 64
    max_step_tokens: int = 512
    threads: int = 0
    emulate: str = ""


@dataclass(slots=True)
class EngineComponents:
    """The parts that a node computes with.

    Two nodes may exchange KV if and only if their `fingerprint`s are equal. `attributes` describes other properties,
    which affect the speed, for users.
    """

    runner: Runner
    memory: HostMemory | DeviceMemory | PoolClient
    layout: KVLayout
    max_model_len: int
    vocab_size: int
    fingerprint: str
    attributes: dict[str, str]
    emulation: Emulation | None = None


def exchange_fingerprint(runner: str, path: Path, layout: KVLayout, sums: str) -> str:
    """Return a digest, 24 hex digits, of all properties that must be equal for two nodes to exchange KV.

    `sums` names the checksum that the KV memory computes over its rows.
    """
    parts = (runner, fingerprint(path), layout.describe(), sums)
    return hashlib.blake2b("|".join(parts).encode(), digest_size=12).hexdigest()

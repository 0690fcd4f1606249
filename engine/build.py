"""Builds what a node computes with: the model, its KV pool and the runner over both."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention.torch_backend import TorchAttention
from engine.hash_model import HashRunner
from engine.kv_pool import KVPool, blocks_for
from engine.models.config import ModelConfig
from engine.models.decoder import load_model
from engine.runner import Runner, TorchRunner
from engine.weights import fingerprint
from shared.kv.layout import KVLayout
from shared.kv.memory import HostMemory
from shared.model_files import resolve

HASH_LAYERS = 2  # of the testing model that hashes instead of computing


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What of a node's settings concerns its arithmetic; names as there."""

    model: str
    runner: str
    device: str
    dtype: str
    block_size: int
    kv_cache_memory: int
    num_blocks: int
    max_model_len: int
    threads: int


@dataclass(slots=True)
class Computer:
    """`fingerprint` is equal on two nodes exactly when they may exchange KV."""

    runner: Runner
    memory: HostMemory
    layout: KVLayout
    max_model_len: int
    vocab_size: int
    fingerprint: str


def build(options: BuildOptions) -> Computer:
    """Raises ValueError, with the fix in the message, when the model, the memory or the device cannot be had."""
    if options.device not in {"auto", "cpu"}:
        raise ValueError(f"device {options.device!r}: this version computes on the CPU only; use --device cpu")
    if options.dtype not in {"auto", "float32"}:
        raise ValueError(f"dtype {options.dtype!r}: CPUs compute 8 to 10 times slower in 16 bits; use --dtype float32")
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    path = resolve(options.model)
    config = ModelConfig.from_directory(path)
    max_model_len = options.max_model_len or config.max_position_embeddings
    if max_model_len > config.max_position_embeddings:
        raise ValueError(
            f"--max-model-len {max_model_len} is over the {config.max_position_embeddings} positions of {path}"
        )
    layout = _layout(options, config)
    memory = HostMemory(layout.num_blocks, layout.block_bytes)
    if options.runner == "hash":
        runner: Runner = HashRunner(memory.rows, layout.block_tokens, HASH_LAYERS, config.vocab_size)
    else:
        pool = KVPool(layout, memory)
        model = load_model(path, torch.float32, torch.device("cpu"))
        runner = TorchRunner(model, pool, TorchAttention(pool), torch.device("cpu"))
    return Computer(runner, memory, layout, max_model_len, config.vocab_size, _fingerprint(options, path, layout))


def _layout(options: BuildOptions, config: ModelConfig) -> KVLayout:
    def layout(num_blocks: int) -> KVLayout:
        if options.runner == "hash":
            return KVLayout(num_blocks, 1, HASH_LAYERS, options.block_size, 1, "float32")
        return KVLayout(
            num_blocks, config.num_kv_heads, config.num_layers, options.block_size, config.head_dim, "float32"
        )

    if options.num_blocks == 1:
        raise ValueError("--num-blocks 1: one block is kept as a dummy, so at least 2 are needed")
    one = layout(1)
    return layout(options.num_blocks or blocks_for(options.kv_cache_memory, one))


def _fingerprint(options: BuildOptions, path: Path, layout: KVLayout) -> str:
    parts = (options.runner, fingerprint(path), layout.describe())
    return hashlib.blake2b("|".join(parts).encode(), digest_size=12).hexdigest()

"""Builds what a node computes with: the model, its KV pool and the runner over both."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.attention.selection import attention_on_cpu
from engine.cpu.malloc import give_back, keep_large_blocks, map_large_blocks, share_one
from engine.cuda.memory import DeviceMemory
from engine.emulated_runner import EMULATED_HEAD_DIM, EmulatedRunner
from engine.emulation import Emulation, load_emulation
from engine.hash_model import HashRunner
from engine.kernels.selection import kernels_on_cpu
from engine.kv_pool import KVPool, blocks_for, check_holds
from engine.linear.interface import LinearFormat
from engine.linear.selection import linear_on_cpu
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, load_model
from engine.runner import Runner, TorchRunner
from engine.startup import stage
from engine.weights import fingerprint, weight_bytes
from shared.kv.layout import HOST_KV_BYTES, KVLayout
from shared.kv.memory import HostMemory
from shared.kv_gpu.pool import PoolClient
from shared.model_files import resolve

HASH_LAYERS = 2  # of the testing model that hashes instead of computing
CPU_BLOCK_TOKENS = 16
SMALLER_MODEL = "take a smaller model, or fewer bits for its weights (--weight-dtype bfloat16, --quantization int8)"


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What of a node's settings concerns its arithmetic; names as there."""

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
    """`fingerprint` is equal on two nodes exactly when they may exchange KV. `facts`: what else shapes their speed."""

    runner: Runner
    memory: HostMemory | DeviceMemory | PoolClient
    layout: KVLayout
    max_model_len: int
    vocab_size: int
    fingerprint: str
    attributes: dict[str, str]
    emulation: Emulation | None = None


def build(options: BuildOptions, borrowed: PoolClient | None = None) -> EngineComponents:
    """`borrowed`: to compute in, instead of KV memory of its own. Raises ValueError, with the fix in the message, when
    the model, the memory or the device cannot be had."""
    with stage(f"--device {options.device}", "free memory on it, or choose another"):
        return _build(options, borrowed)


def _build(options: BuildOptions, borrowed: PoolClient | None) -> EngineComponents:
    path = resolve(options.model)
    config = ModelConfig.from_directory(path)
    max_model_len = options.max_model_len or config.max_position_embeddings
    if max_model_len > config.max_position_embeddings:
        raise ValueError(
            f"--max-model-len {max_model_len} is over the {config.max_position_embeddings} positions of {path}"
        )
    if borrowed is not None:
        options = replace(options, num_blocks=borrowed.num_rows)
    emulation = load_emulation(options.emulate) if options.emulate else None
    computes = emulation is None and options.runner != "hash"
    if not computes and options.device.startswith("cuda"):
        raise ValueError(f"--device {options.device}: what does not compute a model needs no GPU; use --device cpu")
    if on_gpu(options.device, computes=computes):
        from engine.cuda.build import build_on_cuda
        from engine.cuda.device import CudaAccelerator

        gpu = CudaAccelerator("cuda" if options.device == "auto" else options.device, borrowed)
        computer = build_on_cuda(replace(options, max_model_len=max_model_len), config, path, gpu)
        check_holds(computer.layout, options.max_model_len)
        return computer
    return _build_on_cpu(options, config, path, max_model_len, emulation, borrowed)


def _build_on_cpu(
    options: BuildOptions,
    config: ModelConfig,
    path: Path,
    max_model_len: int,
    emulation: Emulation | None,
    borrowed: PoolClient | None,
) -> EngineComponents:
    if options.dtype not in {"auto", "float32"}:
        raise ValueError(
            f"dtype {options.dtype!r}: on the CPU activations are float32; use --dtype float32, and --weight-dtype "
            f"{options.dtype} to hold the weights so"
        )
    options = replace(
        options,
        block_size=options.block_size or CPU_BLOCK_TOKENS,
        kv_cache_memory=options.kv_cache_memory or HOST_KV_BYTES,
    )
    share_one()
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    layout = _layout(options, config, emulation)
    check_holds(layout, options.max_model_len)  # not the model's own length, which few requests have
    rows, size = layout.num_blocks, layout.block_bytes
    memory = HostMemory(rows, size) if borrowed is None else borrowed.fitting(size)
    name = _name(options, emulation)
    facts = {"runner": name, "device": "cpu", "dtype": "float32", "kv_cache_dtype": layout.dtype}
    runner: Runner
    if emulation is not None:
        runner = EmulatedRunner(memory.rows, layout.block_tokens, config.vocab_size, emulation)
    elif options.runner == "hash":
        runner = HashRunner(memory.rows, layout.block_tokens, HASH_LAYERS, config.vocab_size)
    else:
        runner, its_facts = _torch_runner(options, config, path, KVPool(layout, memory))
        facts |= its_facts
    print_ = exchange_fingerprint(name, path, layout, memory.sums)
    facts |= {"threads": str(torch.get_num_threads()), "torch": torch.__version__}
    return EngineComponents(runner, memory, layout, max_model_len, config.vocab_size, print_, facts, emulation)


def _torch_runner(
    options: BuildOptions, config: ModelConfig, path: Path, pool: KVPool
) -> tuple[TorchRunner, dict[str, str]]:
    """The runner, and which parts it was made of."""
    map_large_blocks()
    # On a thread that ends: its team of OpenMP threads goes with it. A second team in the process makes more
    # threads than cores, and libgomp then lets every team sleep between two products, at 50 us for each.
    loads = stage(f"loading {weight_bytes(path) / 2**30:.1f} GiB of weights", SMALLER_MODEL)
    with ThreadPoolExecutor(1) as loading, loads:
        linear, model = loading.submit(_load_on_cpu, options, path).result()
    give_back()
    keep_large_blocks()
    attention = attention_on_cpu(options.attention_backend, pool)
    kernels = kernels_on_cpu(config, pool)
    runner = TorchRunner(model, pool, attention, kernels, torch.device("cpu"))
    return runner, {"attention": attention.name, "kernels": kernels.name, "weights": linear.name}


def _load_on_cpu(options: BuildOptions, path: Path) -> tuple[LinearFormat, Decoder]:
    linear = linear_on_cpu(options.weight_dtype, options.quantization)  # tries some of the CPU's products
    return linear, load_model(path, torch.float32, torch.device("cpu"), linear)


def on_gpu(device: str, *, computes: bool) -> bool:
    """Whether a node on `device` computes on a GPU; what `computes` no model never does."""
    return computes and (device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()))


def exchange_fingerprint(runner: str, path: Path, layout: KVLayout, sums: str) -> str:
    """Of all that two nodes must have in common to exchange KV; `sums`: how its memory takes checksums of rows."""
    parts = (runner, fingerprint(path), layout.describe(), sums)
    return hashlib.blake2b("|".join(parts).encode(), digest_size=12).hexdigest()


def _name(options: BuildOptions, emulation: Emulation | None) -> str:
    """Of what computes."""
    return options.runner if emulation is None else f"emulated {emulation.name}"


def _layout(options: BuildOptions, config: ModelConfig, emulation: Emulation | None) -> KVLayout:
    kv_dtype = options.kv_cache_dtype
    if kv_dtype == "auto":  # who computes in 8 bits has given up exactness, and is to have the speed
        kv_dtype = "float16" if options.quantization == "int8" else "float32"

    def layout(num_blocks: int) -> KVLayout:
        if emulation is not None:
            return KVLayout(num_blocks, 1, 1, options.block_size, EMULATED_HEAD_DIM, "float32")
        if options.runner == "hash":
            return KVLayout(num_blocks, 1, HASH_LAYERS, options.block_size, 1, "float32")
        return KVLayout(
            num_blocks, config.num_kv_heads, config.num_layers, options.block_size, config.head_dim, kv_dtype
        )

    if options.num_blocks == 1:
        raise ValueError("--num-blocks 1: one block is kept as a dummy, so at least 2 are needed")
    if options.num_blocks:
        return layout(options.num_blocks)
    if emulation is not None:
        return layout(1 + emulation.kv_tokens // options.block_size)
    return layout(blocks_for(options.kv_cache_memory, layout(1)))

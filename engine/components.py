"""Builds the engine's components: the model, its KV pool, and the runner that uses both."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from engine.cpu.malloc import give_back, keep_large_blocks, map_large_blocks, share_one
from engine.cpu.selection import attention_on_cpu, kernels_on_cpu, linear_on_cpu
from engine.cuda.kv.pool import PoolClient
from engine.emulation import Emulation, load_emulation
from engine.hash_model import LANES, EmulatedRunner, HashRunner
from engine.kv_pool import KVPool, blocks_for, check_holds
from engine.linear import LinearFormat
from engine.models.decoder import Decoder
from engine.models.families import read_model_config
from engine.models.load import load_model
from engine.models.spec import ModelConfig
from engine.runner import Runner, TorchRunner
from engine.startup import BuildOptions, EngineComponents, exchange_fingerprint, stage
from engine.weights import weight_bytes
from shared.kv.layout import HOST_KV_BYTES, KVLayout
from shared.kv.memory import HostMemory
from shared.model_files import resolve

CPU_BLOCK_TOKENS = 16
SMALLER_MODEL = "take a smaller model, or fewer bits for its weights (--weight-dtype bfloat16, --quantization int8)"


def build(options: BuildOptions, borrowed: PoolClient | None = None) -> EngineComponents:
    """Build the components for `options`.

    If `borrowed` is given, the node uses this KV memory, which another node owns, and allocates none. Raises ValueError
    if the model, the memory or the device is not available; the message states the remedy.
    """
    with stage(f"--device {options.device}", "free memory on it, or choose another"):
        return _build(options, borrowed)


def _build(options: BuildOptions, borrowed: PoolClient | None) -> EngineComponents:
    path = resolve(options.model)
    config = read_model_config(path)
    max_model_len = options.max_model_len or config.max_position_embeddings
    if max_model_len > config.max_position_embeddings:
        raise ValueError(
            f"--max-model-len {max_model_len} exceeds the {config.max_position_embeddings} positions of {path}"
        )
    if options.num_blocks == 1:
        raise ValueError("--num-blocks 1: one block is kept as a dummy, so at least 2 are needed")
    if borrowed is not None:
        options = replace(options, num_blocks=borrowed.num_rows)
    emulation = load_emulation(options.emulate) if options.emulate else None
    computes = emulation is None and options.runner != "hash"
    if not computes and options.device.startswith("cuda"):
        raise ValueError(f"--device {options.device}: this runner computes no model and needs no GPU; use --device cpu")
    if on_gpu(options.device, computes=computes):
        from engine.cuda.build import build_on_cuda
        from engine.cuda.device import CudaAccelerator

        gpu = CudaAccelerator("cuda" if options.device == "auto" else options.device, borrowed)
        components = build_on_cuda(replace(options, max_model_len=max_model_len), config, path, gpu)
        check_holds(components.layout, options.max_model_len)
        return components
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
            f"{options.dtype} to store the weights in that type"
        )
    share_one()
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    layout = _layout(options, config, emulation)
    # The pool need not have room for a request of the model's maximum length, which few requests reach.
    check_holds(layout, options.max_model_len)
    memory = (
        HostMemory(layout.num_blocks, layout.block_bytes) if borrowed is None else borrowed.fitting(layout.block_bytes)
    )
    name = options.runner if emulation is None else f"emulated {emulation.name}"
    attributes = {"runner": name, "device": "cpu", "dtype": "float32", "kv_cache_dtype": layout.dtype}
    runner: Runner
    if emulation is not None:
        runner = EmulatedRunner(memory.rows, layout.block_tokens, config.vocab_size, emulation)
    elif options.runner == "hash":
        runner = HashRunner(memory.rows, layout.block_tokens, config.vocab_size)
    else:
        runner, parts = _torch_runner(options, config, path, KVPool(layout, memory))
        attributes |= parts
    digest = exchange_fingerprint(name, path, layout, memory.sums)
    attributes |= {"threads": str(torch.get_num_threads()), "torch": torch.__version__}
    return EngineComponents(runner, memory, layout, max_model_len, config.vocab_size, digest, attributes, emulation)


def _torch_runner(
    options: BuildOptions, config: ModelConfig, path: Path, pool: KVPool
) -> tuple[TorchRunner, dict[str, str]]:
    """Return the runner, and the names of its attention backend, kernels and weight format."""
    map_large_blocks()
    # Load on a thread that ends afterwards, so that its team of OpenMP threads ends too. With a second team, there are
    # more OpenMP threads than cores, so libgomp puts every team to sleep between two products, which costs 50 us.
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
    linear = linear_on_cpu(options.weight_dtype, options.quantization)  # runs small matrix products to test the CPU
    return linear, load_model(path, torch.float32, torch.device("cpu"), linear)


def on_gpu(device: str, *, computes: bool) -> bool:
    """Return whether a node with this `--device` uses a GPU. `computes` is false for runners without a model."""
    return computes and (device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()))


def _layout(options: BuildOptions, config: ModelConfig, emulation: Emulation | None) -> KVLayout:
    dtype = options.kv_cache_dtype
    if dtype == "auto":  # a user who chooses int8 weights prefers speed to exactness
        dtype = "float16" if options.quantization == "int8" else "float32"
    size = options.block_size or CPU_BLOCK_TOKENS
    one = KVLayout(1, config.num_kv_heads, config.num_layers, size, config.head_dim, dtype)
    num_blocks = options.num_blocks
    if emulation is not None or options.runner == "hash":
        one = KVLayout(1, 1, 1, size, LANES, "float32")
    if emulation is not None:
        num_blocks = num_blocks or 1 + emulation.kv_tokens // size
    return replace(one, num_blocks=num_blocks or blocks_for(options.kv_cache_memory or HOST_KV_BYTES, one))

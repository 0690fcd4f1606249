"""Builds the engine's components on a GPU: weights, kernels, CUDA graphs, and a KV pool in the remaining memory."""

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.batch import BlockRows
from engine.cuda.device import CudaAccelerator
from engine.cuda.runner import CudaRunner, Sampler
from engine.cuda.selection import (
    attention_on_cuda,
    block_tokens_on_cuda,
    kernels_on_cuda,
    kv_dtype_on_cuda,
    usable_on_cuda,
    weights_on_cuda,
)
from engine.cuda.staging import StepCapacity
from engine.formats.kv_scales import read_kv_scales
from engine.kv_pool import KVPool
from engine.lora.build import use_adapters
from engine.model_memory import log_table, memory_of
from engine.models.decoder import Decoder
from engine.models.kv_places import kv_places
from engine.models.load import load_model
from engine.models.spec import ModelConfig
from engine.options import BuildOptions, blocks_for, lora_adapters
from engine.startup import EngineComponents, build_digest, exchange_fingerprint, stage
from engine.weights import fingerprint, stored_dtype, weight_bytes
from scheduler.request import Request, Slice, Step, cdiv
from shared.grammar import GrammarTokenizer
from shared.kv.layout import KVLayout
from shared.rpc.messages import SamplingParams

log = logging.getLogger("baton.engine")
GIB = 2**30
CONTEXT_BYTES = 3 * GIB // 4  # estimate of the memory that torch does not count: CUDA's context, libraries, kernels
SMALLER_MODEL = "take a smaller model, or a GPU with more free memory"
SMALLER_STEP = "lower --max-num-batched-tokens or --max-num-seqs, or take a smaller model"
LESS_KV = "lower --gpu-memory-utilization, or --num-blocks or --kv-cache-memory if one is given"
GRAPH_BYTES = GIB  # estimate of the memory for graphs; after the capture, the actual size is logged


def build_on_cuda(options: BuildOptions, config: ModelConfig, path: Path, gpu: CudaAccelerator) -> EngineComponents:
    """Build the components on `gpu`. Experimental.

    `options.max_model_len` must be set. Raises ValueError, with a fix in its message, if a setting or a package is
    unsuitable or there is too little memory. Raises OSError if the driver fails for another reason.
    """
    log.warning("CUDA support is experimental: it was tested on one H200, with small models")
    dtype = _dtype(options, path)
    triton = gpu.has_triton()
    linear = weights_on_cuda(dtype, triton)
    with _stage(gpu, f"loading {_gib(weight_bytes(path))} of weights", SMALLER_MODEL):
        model = load_model(path, dtype, gpu.device, linear)
    options = replace(options, attention_backend=usable_on_cuda(options.attention_backend, gpu.device))
    one_block = _one_block(options, model)
    largest = f"running a step of {options.max_step_tokens} tokens and up to {options.most_requests} requests"
    with _stage(gpu, largest, SMALLER_STEP):
        # Run this even if the size of the KV pool is given, to compile the kernels before the first request.
        held = gpu.most_held(lambda: _largest_step(options, model, one_block, gpu, triton))
    num_blocks = options.num_blocks or blocks_for(
        options.kv_cache_memory or _room(options, one_block, held, gpu), one_block
    )
    layout = replace(one_block, num_blocks=num_blocks)
    places = kv_places(config, layout.block_bytes)
    log_table(memory_of(path, config, layout, places.groups, options.max_step_tokens))
    with _stage(gpu, f"allocating {_gib(layout.num_blocks * layout.block_bytes)} for KV", LESS_KV):
        memory = gpu.allocate(layout.num_blocks, layout.block_bytes)
        scales = read_kv_scales(path, config) if options.kv_cache_dtype == "fp8" else ()
        runner = _runner(options, model, KVPool(layout, memory, places, scales), gpu, triton)
    use_adapters(options, runner, model, linear)
    if not options.enforce_eager and model.can_be_captured(runner.kernels):
        with _stage(gpu, "capturing CUDA graphs", f"{LESS_KV}, or use --enforce-eager", "try --enforce-eager"):
            _capture(runner, gpu)
    revision = fingerprint(path)
    attributes = {
        "revision": revision,
        "build": build_digest(),
        "runner": "torch",
        "device": str(gpu.device),
        "gpu": gpu.name,
        "dtype": linear.name,
        "weights": linear.name,
        "kv_cache_dtype": layout.dtype,
        **runner.attributes(),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
    }
    digest = exchange_fingerprint("torch", revision, layout, memory.sums, places.groups)
    return EngineComponents(
        runner, memory, layout, options.max_model_len, config.vocab_size, digest, attributes,
        groups=places.groups, grammars=GrammarTokenizer(path, config.vocab_size),
        adapters={one.name: one.digest for one in lora_adapters(options)},
    )  # fmt: skip


def _dtype(options: BuildOptions, path: Path) -> torch.dtype:
    """Return the dtype that vLLM would choose: the requested dtype, else a stored 16-bit dtype, else bfloat16."""
    name = options.dtype
    if name == "auto":
        stored = stored_dtype(path)
        name = "bfloat16" if stored == "float32" else stored
    if options.quantization != "none":
        raise ValueError(f"--quantization {options.quantization}: runs only on CPUs; omit it with --device cuda")
    if options.weight_dtype not in {"auto", name}:
        raise ValueError(f"--weight-dtype {options.weight_dtype}: on a GPU weights are stored in --dtype ({name})")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _capacity(options: BuildOptions, pool: KVPool) -> StepCapacity:
    block_tokens = pool.layout.block_tokens
    return StepCapacity(
        slices=options.most_slices,  # the scheduler's own limit
        tokens=options.max_step_tokens,
        blocks=cdiv(options.max_model_len, block_tokens),
        block_tokens=block_tokens,
        tables=pool.places.num_tables,
        state_rows=pool.places.state_rows,
    )


def _runner(options: BuildOptions, model: Decoder, pool: KVPool, gpu: CudaAccelerator, triton: bool) -> CudaRunner:
    attention = attention_on_cuda(options.attention_backend, pool, triton, model.dtype)
    kernels = kernels_on_cuda(model.config, pool, triton)
    return CudaRunner(model, pool, attention, kernels, gpu.device, _capacity(options, pool), _sampler(triton))


def _sampler(triton: bool) -> Sampler | None:
    if not triton:
        return None
    from engine.cuda.draw import draw

    return draw


def _capture(runner: CudaRunner, gpu: CudaAccelerator) -> None:
    before, _ = gpu.memory()
    runner.capture(gpu.graphs())
    after, _ = gpu.memory()
    log.info("graphs take %d MiB of GPU memory", (before - after) >> 20)


def _stage(gpu: CudaAccelerator, doing: str, if_too_large: str, otherwise: str = "") -> AbstractContextManager[None]:
    free, total = gpu.memory()
    return stage(f"{doing} ({gpu.name}: {_gib(free)} of {_gib(total)} free)", if_too_large, otherwise)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


# ---- memory for KV ----------------------------------------------------------------------------------------------


def _one_block(options: BuildOptions, model: Decoder) -> KVLayout:
    config = model.config
    dtype = kv_dtype_on_cuda(options.kv_cache_dtype, model.dtype, model.device)
    size = options.block_size or block_tokens_on_cuda(options.attention_backend, model.device)
    return KVLayout(1, config.num_kv_heads, kv_places(config).row_layers, size, config.head_dim, dtype)


def _room(options: BuildOptions, one: KVLayout, held: int, gpu: CudaAccelerator) -> int:
    """Return the bytes for KV: the node's share of GPU memory, minus context, weights, largest step and graphs."""
    most = held + CONTEXT_BYTES + (0 if options.enforce_eager else GRAPH_BYTES)
    free, total = gpu.memory()
    share = int(total * options.gpu_memory_utilization)
    given = f"--gpu-memory-utilization {options.gpu_memory_utilization}"
    if share - most < 2 * one.block_bytes:
        raise ValueError(
            f"{given}: weights and a step take {most / GIB:.1f} of {share / GIB:.1f} GiB (the GPU has "
            f"{total / GIB:.1f}) and leave no room for KV: increase --gpu-memory-utilization, lower "
            "--max-num-batched-tokens, or use a smaller model"
        )
    if share - most > free:
        raise ValueError(
            f"{given}: {(share - most) / GIB:.1f} GiB are needed for KV, but other processes leave "
            f"{free / GIB:.1f} GiB of {gpu.name} free: lower --gpu-memory-utilization, so that its values "
            "for all nodes on this GPU add up to less than 1"
        )
    return share - most


@dataclass(slots=True)
class _Scratch:
    """KV memory for a step whose results are discarded."""

    rows: Tensor


def _largest_step(options: BuildOptions, model: Decoder, one: KVLayout, gpu: CudaAccelerator, triton: bool) -> None:
    """Run a step with the maximum number of tokens and of sampled rows. Its KV is stored in the dummy block.

    Each row has a bias and logprobs, because both need further tensors of the size of the logits.
    """
    rows = torch.zeros((2, one.block_bytes), dtype=torch.uint8, device=gpu.device)
    places = kv_places(model.config, one.block_bytes)
    runner = _runner(options, model, KVPool(replace(one, num_blocks=2), _Scratch(rows), places), gpu, triton)
    block_rows = BlockRows(places)
    count = options.most_slices
    sampling = SamplingParams(top_p=0.9, logit_bias={0: 1.0}, logprobs=1)
    longest = min(options.max_step_tokens - count + 1, options.max_model_len)
    slices = []
    for length in (longest, *[1] * (count - 1)):
        request = Request("largest", [0] * length, length, 1, sampling=sampling)
        slices.append(block_rows.use_dummy(Slice(request, 0, length, samples=True, epoch=0), one.block_tokens))
    runner.run(Step(0, slices, []))

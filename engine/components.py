"""Builds the engine's components: the model, its KV pool, and the runner that uses both."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from engine.cpu.malloc import give_back, keep_large_blocks, map_large_blocks, share_one
from engine.cpu.selection import attention_on_cpu, kernels_on_cpu, linear_on_cpu
from engine.cuda.kv.pool import PoolClient
from engine.draft_head import DraftHead, head_places
from engine.draft_model import DraftModel
from engine.emulation import load_emulation
from engine.hash_model import EmulatedRunner, HashRunner
from engine.image_support import use_images
from engine.kv_pool import KVPool, PrivateMemory
from engine.linear import LinearFormat
from engine.lora.build import use_adapters
from engine.model_memory import log_table, memory_of
from engine.models.decoder import Decoder, LanguageModel
from engine.models.families import read_model_config
from engine.models.kv_places import kv_places
from engine.models.load import load_eagle, load_model, load_mtp
from engine.models.spec import ModelConfig
from engine.options import (
    BuildOptions,
    check_draft_model,
    check_holds,
    check_options,
    cpu_layout,
    groups_of,
    lora_adapters,
)
from engine.runner import Runner, TorchRunner
from engine.startup import EngineComponents, build_digest, exchange_fingerprint, stage
from engine.weights import fingerprint, weight_bytes
from scheduler.geometry import Group
from shared.grammar import GrammarTokenizer
from shared.kv.layout import KVLayout
from shared.kv.memory import HostMemory
from shared.model_files import resolve

log = logging.getLogger("baton.engine")
SMALLER_MODEL = (
    "take a smaller model, or store its weights in fewer bits (--weight-dtype bfloat16, --quantization int8)"
)


def build(options: BuildOptions, borrowed: PoolClient | None = None) -> EngineComponents:
    """Build the components for `options`.

    If `borrowed` is given, the node uses this KV memory of another node, and allocates no KV memory of its own.
    Raises ValueError if the model, the memory or the device is not available. The message states the remedy.
    """
    with stage(f"starting the engine (--device {options.device})", "free memory on it, or choose another"):
        components = _build(options, borrowed)
        components.max_num_seqs = options.most_requests
        return components


def _build(options: BuildOptions, borrowed: PoolClient | None) -> EngineComponents:
    if borrowed is not None:
        options = replace(options, num_blocks=borrowed.num_rows)
    path, config = check_options(options, num_pools=1 if borrowed is None else 0)
    max_model_len = options.max_model_len or config.max_position_embeddings
    if options.on_gpu:
        from engine.cuda.build import build_on_cuda
        from engine.cuda.device import CudaAccelerator

        gpu = CudaAccelerator("cuda" if options.device == "auto" else options.device, borrowed)
        components = build_on_cuda(replace(options, max_model_len=max_model_len), config, path, gpu)
        check_holds(components.layout, components.groups, options)
        return components
    if reason := options.unused_gpu:
        log.warning("--device auto: computing on the CPU, because %s", reason)
    return _build_on_cpu(options, config, path, max_model_len, borrowed)


def _build_on_cpu(
    options: BuildOptions, config: ModelConfig, path: Path, max_model_len: int, borrowed: PoolClient | None
) -> EngineComponents:
    share_one()
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    emulation = load_emulation(options.emulate) if options.emulate else None
    runs_model = emulation is None and options.runner == "torch"
    loaded = None
    if runs_model and config.transformers:  # the sizes of keys and values are known only after a probe pass
        loaded = _loaded_on_cpu(options, config, path)
        config = loaded[1].config
    layout = cpu_layout(options, config)
    groups = groups_of(options, config, layout.block_bytes)
    check_holds(layout, groups, options)
    size = layout.num_blocks, layout.block_bytes
    memory = HostMemory(*size) if borrowed is None else borrowed.fitting(layout.block_bytes)
    name = options.runner if emulation is None else f"emulated {emulation.name}"
    attributes = {"runner": name, "device": "cpu", "dtype": "float32", "kv_cache_dtype": layout.dtype}
    runner: Runner
    drafter: DraftHead | DraftModel | None = None
    if emulation is not None:
        runner = EmulatedRunner(memory.rows, layout.block_tokens, config.vocab_size, emulation)
    elif options.runner == "hash":
        runner = HashRunner(memory.rows, layout.block_tokens, config.vocab_size, groups)
    else:
        loaded = loaded or _loaded_on_cpu(options, config, path)
        pool = KVPool(layout, memory, kv_places(config, layout.block_bytes))
        loaded[1].config = replace(loaded[1].config, draft_layers=config.draft_layers, units=config.units)
        runner, parts = _torch_runner(options, *loaded, pool)
        attributes |= parts
        drafter = _draft_head(options, path, *loaded, pool, runner) if config.draft_layers else None
        use_adapters(options, runner, loaded[1], loaded[0])
        log_table(memory_of(path, config, layout, groups, options.max_step_tokens))
        name += f" transformers {config.transformers}" if config.transformers else ""
    images = use_images(runner, path, config, options.max_step_tokens)
    revision = fingerprint(path)
    name += _drafter_name(options) if config.draft_layers else ""
    digest = exchange_fingerprint(name, revision, layout, memory.sums, groups)
    attributes |= {"revision": revision, "build": build_digest()}
    attributes |= {"threads": str(torch.get_num_threads()), "torch": torch.__version__}
    if runs_model and options.draft_method == "draft_model":
        drafter = _draft_model(options, path, config, layout, groups)
    grammars = GrammarTokenizer(path, config.vocab_size) if runs_model else None
    adapters = {one.name: one.digest for one in lora_adapters(options)}
    return EngineComponents(
        runner,
        memory,
        layout,
        max_model_len,
        config.vocab_size,
        digest,
        attributes,
        emulation,
        groups,
        grammars,
        drafter,
        adapters,
        images,
    )


def _drafter_name(options: BuildOptions) -> str:
    """Return a name for the draft head. Two nodes can exchange the head's KV only if this name is the same on both."""
    own = f" {fingerprint(resolve(options.draft_model))}" if options.draft_model else ""
    return f" {options.draft_method}{own}"


def _draft_head(
    options: BuildOptions, path: Path, linear: LinearFormat, model: LanguageModel, pool: KVPool, runner: TorchRunner
) -> DraftHead:
    """Return a draft head that observes the steps of the runner."""
    assert isinstance(model, Decoder)
    eagle = resolve(options.draft_model) if options.draft_method == "eagle3" else None
    head = load_mtp(path, model, linear) if eagle is None else load_eagle(eagle, model, linear)
    own = KVPool(pool.layout, pool.memory, head_places(pool.places))
    code = kernels_on_cpu(head.config, own), attention_on_cpu(options.attention_backend, own)
    drafter = DraftHead(head, own, *code, options.speculative_tokens)
    runner.use_head(drafter)
    return drafter


def _draft_model(
    options: BuildOptions, path: Path, config: ModelConfig, layout: KVLayout, groups: tuple[Group, ...]
) -> DraftModel:
    draft = check_draft_model(options, path, config)
    linear, model = _loaded_on_cpu(options, read_model_config(draft), draft)
    theirs = model.config
    places = kv_places(theirs)
    own = replace(layout, kv_heads=theirs.num_kv_heads, layers=places.row_layers, head_dim=theirs.head_dim)
    # The pages of this array take memory only once they are written.
    memory = PrivateMemory(np.zeros((own.num_blocks, own.block_bytes), np.uint8))
    runner, _ = _torch_runner(options, linear, model, KVPool(own, memory, places))
    return DraftModel(runner, layout.block_tokens, groups[0].rows)


def _torch_runner(
    options: BuildOptions, linear: LinearFormat, model: LanguageModel, pool: KVPool
) -> tuple[TorchRunner, dict[str, str]]:
    """Return the runner, and the names of its attention backend, kernels and weight format."""
    give_back()
    keep_large_blocks()
    attention = attention_on_cpu(options.attention_backend, pool)
    kernels = kernels_on_cpu(model.config, pool)
    runner = TorchRunner(model, pool, attention, kernels, torch.device("cpu"))
    version = model.config.transformers
    return runner, {
        "attention": attention.name, "kernels": kernels.name, "weights": linear.name,
        "model_impl": f"transformers {version}" if version else "baton",
    }  # fmt: skip


def _loaded_on_cpu(options: BuildOptions, config: ModelConfig, path: Path) -> tuple[LinearFormat, LanguageModel]:
    map_large_blocks()
    # Load on a temporary thread. When the thread ends, its team of OpenMP threads ends too. If the team remained, there
    # would be more OpenMP threads than cores. libgomp would then put every team to sleep between two matrix products,
    # which costs 50 us each time.
    with ThreadPoolExecutor(1) as loading:
        return loading.submit(_load_on_cpu, options, config, path).result()


def _load_on_cpu(options: BuildOptions, config: ModelConfig, path: Path) -> tuple[LinearFormat, LanguageModel]:
    linear = linear_on_cpu(options.weight_dtype, options.quantization)  # runs small matrix products to test the CPU
    with stage(f"loading {weight_bytes(path) / 2**20:,.0f} MiB of weights", SMALLER_MODEL):
        if not config.transformers:
            return linear, load_model(path, torch.float32, torch.device("cpu"), linear)
        from engine.foreign.load import load_foreign  # transformers may not be installed

        backend = partial(attention_on_cpu, options.attention_backend)
        return linear, load_foreign(path, config, linear, backend)

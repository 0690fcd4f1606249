"""The options of a node's engine, and checks of these options. The checks read only the headers of the model's files.

This module imports torch only if a GPU may be used. `baton up` can therefore make the checks quickly, before it starts
a process.
"""

from dataclasses import dataclass, fields, replace
from os.path import expanduser
from pathlib import Path

from engine.emulation import GPU_NUM_SEQS, load_emulation
from engine.foreign.config import choose_config
from engine.lora.files import lora_digest
from engine.models.draft_layers import read_eagle, with_head, with_mtp
from engine.models.families import read_model_config
from engine.models.kv_places import kv_places
from engine.models.spec import ModelConfig, state_units
from engine.weights import tensor_files
from scheduler.geometry import UNIFORM, Geometry, Group
from shared.kv.layout import HOST_KV_BYTES, KVLayout
from shared.kv.memory import available_bytes
from shared.model_files import resolve

CPU_BLOCK_TOKENS = 16
CPU_NUM_SEQS = 64  # the default of --max-num-seqs on CPUs
DEFAULT_STATES = 24  # a pool of the default size has room for this many recurrent states
HASH_LANES = 4  # number of 64-bit integers that the hash model stores for a token
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap")  # of Linux, WSL and Jetson: at least one exists if CUDA works


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The settings of a node that affect computation. They have the same names as in the node's settings."""

    model: str
    model_impl: str = "auto"
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
    max_num_seqs: int = 0
    max_step_tokens: int = 512
    draft_method: str = ""
    draft_model: str = ""
    speculative_tokens: int = 0  # maximum number of guessed tokens of a request in one step
    threads: int = 0
    emulate: str = ""
    lora_modules: tuple[str, ...] = ()
    max_lora_rank: int = 64

    @classmethod
    def from_settings(cls, settings: object, **changes: object) -> "BuildOptions":
        """Return options copied from the settings of the same names, with `changes` applied."""
        names = {field.name for field in fields(cls)} - {"max_step_tokens"}
        return cls(**({name: getattr(settings, name) for name in names} | changes))

    @property
    def most_slices(self) -> int:
        """The largest number of slices in a step. Each guessed token counts as a slice."""
        return min(self.most_requests * (1 + self.speculative_tokens), self.max_step_tokens)

    @property
    def most_requests(self) -> int:
        """The largest number of requests that run at the same time."""
        if self.max_num_seqs:
            return self.max_num_seqs
        if self.emulate:
            return load_emulation(self.emulate).max_num_seqs
        return GPU_NUM_SEQS if self.on_gpu else CPU_NUM_SEQS

    @property
    def on_gpu(self) -> bool:
        """Whether the engine uses a GPU. Imports torch if --device is auto and this machine may have one."""
        if self.emulate or self.runner == "hash" or self.device == "cpu":
            return False
        return self.device != "auto" or (_may_have_gpu() and not why_no_cuda())

    @property
    def unused_gpu(self) -> str:
        """Why --device auto does not use the GPU that this machine may have, or "". Imports torch like `on_gpu`."""
        if self.emulate or self.runner == "hash" or self.device != "auto" or not _may_have_gpu():
            return ""
        return why_no_cuda()


def check_options(options: BuildOptions, num_pools: int = 1) -> tuple[Path, ModelConfig]:
    """Return the model's directory and its config. `num_pools` is the number of KV pools that this machine will hold.

    Raises ValueError if the model or a setting cannot be used. The message names the setting or the file, and the fix.
    """
    path = resolve(options.model)
    config = choose_config(path, options.model_impl)
    if options.max_model_len > config.max_position_embeddings:
        raise ValueError(
            f"--max-model-len {options.max_model_len} exceeds the {config.max_position_embeddings} positions of {path}"
        )
    if options.num_blocks == 1:
        raise ValueError("--num-blocks 1: must be at least 2, because one block is a dummy")
    if (options.emulate or options.runner == "hash") and options.device.startswith("cuda"):
        raise ValueError(f"--device {options.device}: --emulate and --runner hash need no GPU; use --device cpu")
    if options.speculative_tokens and state_units(config):
        _check_returns(options, config)
    tensor_files(path)
    if options.draft_method == "mtp":
        config = check_draft_head(options, with_mtp(config, path))
    if options.draft_method == "eagle3":
        try:
            eagle = resolve(options.draft_model)
            tensor_files(eagle)
            config = with_head(config, read_eagle(eagle, config).hidden_size)
        except ValueError as error:
            raise ValueError(f"--speculative-config: {error}") from None
        config = check_draft_head(options, config)
    if options.draft_method == "draft_model":
        check_draft_model(options, path, config)
    if lora_adapters(options) and config.transformers:
        raise ValueError(
            "--lora-modules: adapters work only with models that Baton implements itself; see `baton models`"
        )
    if options.on_gpu:
        if config.transformers:
            raise ValueError(f"--device {options.device}: models of transformers run on CPUs only; use --device cpu")
        check_gpu("cuda" if options.device == "auto" else options.device)
    else:
        _check_cpu(options, config, num_pools)
    return path, config


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    name: str
    digest: str
    directory: Path


def lora_adapters(options: BuildOptions) -> list[LoraAdapter]:
    """Return the adapters of --lora-modules. Raises ValueError, which names the flag, if an adapter is invalid."""
    found: dict[str, LoraAdapter] = {}
    for given in options.lora_modules:
        name, _, directory = given.partition("=")
        if not name or not directory or name in found:
            raise ValueError(f"--lora-modules {given[:100]}: must be name=directory, and each name must be unique")
        path = Path(expanduser(directory))  # unlike Path.expanduser, this does not fail if the user is unknown
        try:
            found[name] = LoraAdapter(name, lora_digest(path), path)
        except ValueError as error:
            raise ValueError(f"--lora-modules {name}: {error}") from None
    return list(found.values())


def check_draft_model(options: BuildOptions, path: Path, config: ModelConfig) -> Path:
    """Return the directory of the draft model. Raises ValueError if it cannot guess tokens for the model in `path`."""
    try:
        draft = resolve(options.draft_model)
        theirs = read_model_config(draft)
        tensor_files(draft)
    except ValueError as error:
        raise ValueError(f"--speculative-config: {error}") from None
    what = f"--speculative-config: the draft model {draft}"
    if theirs.vocab_size != config.vocab_size or _vocabulary(draft) != _vocabulary(path):
        raise ValueError(f"{what} has a different vocabulary from {path}: choose a model of the same family")
    if kv_places(theirs).groups != UNIFORM or state_units(theirs):
        raise ValueError(f"{what} has sliding windows or recurrent layers: choose one with plain attention")
    if kv_places(config).groups[0].kind != "full":
        raise ValueError(f"{what}: {path} has sliding windows in all layers; use the method ngram")
    if theirs.max_position_embeddings < (options.max_model_len or config.max_position_embeddings):
        raise ValueError(
            f"{what} has {theirs.max_position_embeddings} positions: lower --max-model-len, or choose another one"
        )
    if options.on_gpu:
        raise ValueError(f"{what}: draft models run on CPUs only; use --device cpu, or the method ngram")
    return draft


def _check_returns(options: BuildOptions, config: ModelConfig) -> None:
    """Raise ValueError if the model's recurrent layers cannot go back to the state before a wrong guess."""
    what = f"--speculative-config: {config.architecture} has recurrent layers, so speculative decoding"
    if options.on_gpu:
        raise ValueError(f"{what} runs on CPUs only: use --device cpu, or omit the flag")
    if config.transformers or options.runner == "hash":
        raise ValueError(
            f"{what} needs a model that Baton implements itself (see `baton models`) and --runner torch: omit the flag"
        )


def check_draft_head(options: BuildOptions, config: ModelConfig) -> ModelConfig:
    """Return the config of a model with a draft head. Raises ValueError if the head cannot run here."""
    what = f"--speculative-config: method {options.draft_method}:"
    if any(group.kind == "window" for group in kv_places(config).groups):
        raise ValueError(f"{what} {config.architecture} has sliding windows: use the method ngram")
    if options.on_gpu:
        raise ValueError(f"{what} it runs on CPUs only; use --device cpu, or the method ngram")
    return config


def _vocabulary(path: Path) -> dict[str, int]:
    """Return the ids of all tokens, or an empty dictionary if there is no tokenizer.json."""
    file = path / "tokenizer.json"
    if not file.exists():
        return {}
    import tokenizers  # the import takes some time, and few nodes have a draft model

    return dict(tokenizers.Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True))


def _may_have_gpu() -> bool:
    return any(Path(name).exists() for name in GPU_FILES)


def why_no_cuda() -> str:
    """Return why torch finds no CUDA device, such as a driver that is too old, or "" if it finds one."""
    import torch

    if torch.cuda.is_available():
        return ""
    reason = ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:  # AssertionError: torch was built without CUDA
        reason = f" ({str(error).partition(chr(10))[0]})"
    return f"torch {torch.__version__} finds no CUDA device{reason}"


def check_gpu(name: str) -> None:
    """Raise ValueError if torch finds no CUDA device `name`, such as cuda:0."""
    import torch

    if reason := why_no_cuda():
        raise ValueError(f"--device {name}: {reason}; use --device cpu")
    if int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices, numbered from cuda:0")


def check_channel(name: str, options: BuildOptions) -> None:
    """Raise ValueError if `--kv-channel name` cannot transfer the KV of this engine."""
    local = "cuda_ipc" if options.on_gpu else "shm"
    if name not in {"auto", "tcp", "pool", local}:
        raise ValueError(f"--kv-channel {name}: not available for KV on --device {options.device}: use {local} or tcp")


def _check_cpu(options: BuildOptions, config: ModelConfig, num_pools: int) -> None:
    if options.dtype not in {"auto", "float32"}:
        raise ValueError(
            f"--dtype {options.dtype}: the CPU computes in float32; omit --dtype, and use --weight-dtype "
            f"{options.dtype} to store weights in that type"
        )
    if options.kv_cache_dtype == "fp8":
        raise ValueError("--kv-cache-dtype fp8: runs only on GPUs; use float16 or bfloat16 on a CPU")
    if options.attention_backend not in {"auto", "numba", "torch"}:
        raise ValueError(
            f"--attention-backend {options.attention_backend}: does not run on a CPU; use auto, numba or torch"
        )
    if options.quantization != "none" and options.weight_dtype != "auto":
        raise ValueError(f"--weight-dtype {options.weight_dtype}: omit it with --quantization {options.quantization}")
    layout = cpu_layout(options, config)
    # A pool that is too small for a request of the model's maximum length is accepted: few requests are that long.
    check_holds(layout, groups_of(options, config, layout.block_bytes), options)
    size, available = num_pools * layout.num_blocks * layout.block_bytes, available_bytes()
    if size > available:
        flag = "--num-blocks" if options.num_blocks else "--kv-cache-memory"
        pools = f"{num_pools} KV pools take" if num_pools > 1 else "the KV pool takes"
        raise ValueError(
            f"{flag}: {pools} {size / 2**20:,.0f} MiB, but {available / 2**20:,.0f} MiB are available; lower {flag}"
        )


def cpu_layout(options: BuildOptions, config: ModelConfig) -> KVLayout:
    """Return the layout of a KV pool in host memory. Raises ValueError if fewer than two blocks fit."""
    dtype = options.kv_cache_dtype
    if dtype == "auto":  # a user who chooses int8 weights prefers speed to exactness
        dtype = "float16" if options.quantization == "int8" else "float32"
    emulation = load_emulation(options.emulate) if options.emulate else None
    size = options.block_size or (emulation.block_tokens if emulation else CPU_BLOCK_TOKENS)
    one = KVLayout(1, config.num_kv_heads, kv_places(config).row_layers, size, config.head_dim, dtype)
    num_blocks = options.num_blocks
    if options.emulate or options.runner == "hash":
        one = KVLayout(1, 1, 1, size, HASH_LANES, "float32")
    if emulation:
        num_blocks = num_blocks or 1 + emulation.kv_tokens // size
    states = Geometry(size, groups_of(options, config, one.block_bytes)).state_rows * DEFAULT_STATES * one.block_bytes
    return replace(one, num_blocks=num_blocks or blocks_for(options.kv_cache_memory or HOST_KV_BYTES + states, one))


def groups_of(options: BuildOptions, config: ModelConfig, row_bytes: int) -> tuple[Group, ...]:
    """Return the groups of layers and states. For each group, a request has rows of `row_bytes` bytes in the pool.

    The hash model's rows are too small for the states of the real model. The hash model has its own states of two rows.
    """
    if options.emulate:
        return UNIFORM
    if options.runner != "hash":
        return kv_places(config, row_bytes).groups
    return (*kv_places(config).groups, *([Group("state", 2)] if state_units(config) else []))


def check_holds(layout: KVLayout, groups: tuple[Group, ...], options: BuildOptions) -> None:
    """Raise ValueError if the pool cannot hold a request of `max_model_len` tokens (if 0: a request of 1 token)."""
    geometry, chunk = Geometry(layout.block_tokens, groups), options.max_step_tokens
    room = geometry.capacity(layout.num_blocks, chunk, options.max_model_len or 1) * layout.block_tokens
    if (options.max_model_len or 1) > room:
        needed = 1 + geometry.rows_for(options.max_model_len or 1, chunk)
        raise ValueError(
            f"--max-model-len {options.max_model_len}: the KV pool holds {max(0, room)} tokens "
            f"({layout.num_blocks - 1} blocks of {layout.block_tokens}); use --num-blocks {needed} or "
            f"--kv-cache-memory {needed * layout.block_bytes}"
        )


def blocks_for(memory_bytes: int, one_block: KVLayout) -> int:
    """Return how many blocks fit into the memory, including the dummy block. Raises ValueError if fewer than two
    blocks fit."""
    num_blocks = memory_bytes // one_block.block_bytes
    if num_blocks < 2:
        raise ValueError(
            f"--kv-cache-memory {memory_bytes} holds {max(0, num_blocks)} blocks of {one_block.block_bytes} bytes "
            f"({one_block.layers} layers x {one_block.kv_heads} heads x {one_block.block_tokens} tokens x 2 x "
            f"{one_block.head_dim} x {one_block.dtype}); at least 2 are needed, which "
            f"take {2 * one_block.block_bytes} bytes"
        )
    return num_blocks

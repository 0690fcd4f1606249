"""Selects the attention and the kernels of a node on a GPU: those that were requested, or the fastest on this GPU."""

import logging

import torch

from engine.attention import AttentionBackend, TorchAttention
from engine.cuda.flash_attention import (
    FLASH_2,
    FLASH_3,
    GENERATIONS,
    HOPPER,
    FlashAttention,
    first_loadable,
    installed,
    load,
)
from engine.kernels import Kernels, TorchKernels
from engine.kv_pool import KVPool
from engine.linear import Plain
from engine.models.spec import ModelConfig

log = logging.getLogger("baton.engine")
OWN = "own"  # Baton's Triton kernels if they run here, otherwise torch's
FLOAT8_CAPABILITY = (8, 9)
MAX_HEAD_DIM = 256  # largest head size that the Triton kernels support
BLOCK_TOKENS = 64  # tokens per KV block on a GPU; with 64 tokens, the keys and values of one head take 32 KiB
NO_FLASH_ATTN = (
    "--attention-backend flash_attn: no flash-attn package for this GPU is installed: in the repository, run "
    "pip install '.[gpu]', or use auto"
)


def attention_on_cuda(name: str, pool: KVPool, triton: bool, computed: torch.dtype | None = None) -> AttentionBackend:
    """Return the attention backend `name` for a GPU. Experimental.

    `triton` is true if the Triton package works. `computed` is the dtype of queries. None means the dtype of the pool.
    "auto" selects FlashAttention 3 if it is installed and supports the GPU and the pool. Otherwise, "auto" selects OWN,
    because the other generations of FlashAttention are slower or in beta. Raises ValueError if the backend is not
    available or does not support the pool.
    """
    if name == "numba":
        raise ValueError("--attention-backend numba: runs on a CPU only; use auto")
    if name == "triton" and not triton:
        raise ValueError(
            "--attention-backend triton: the package triton is not installed, or cannot launch kernels here; use torch"
        )
    ours: AttentionBackend = TorchAttention(pool)
    # A layout with one KV head may hold latents. The kernels support latents that are larger than MAX_HEAD_DIM.
    fits = pool.layout.head_dim <= MAX_HEAD_DIM or pool.layout.kv_heads == 1
    if triton and name != "torch" and (name == "triton" or fits):
        from engine.cuda.attention import TritonAttention

        ours = TritonAttention(pool)
    if name not in {"auto", "flash_attn"}:
        return ours
    found = flash_attn_here(pool.tensor.device)
    suits = computed in {None, pool.tensor.dtype}
    if name == "auto":
        return _flash_3_or(ours, pool) if suits and FLASH_3 in found else ours
    if not found:
        raise ValueError(NO_FLASH_ATTN)
    if not suits:
        raise ValueError(
            f"--attention-backend flash_attn: KV in {pool.layout.dtype} does not match activations in {computed}: omit "
            "--kv-cache-dtype, or use triton"
        )
    return FlashAttention(pool, first_loadable(found), ours)


def kv_dtype_on_cuda(name: str, computed: torch.dtype, device: torch.device) -> str:
    """Return the dtype of KV for --kv-cache-dtype `name`. Raises ValueError for fp8 if the GPU has no float8."""
    if name != "fp8":
        return str(computed).removeprefix("torch.") if name == "auto" else name
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        raise ValueError(
            f"--kv-cache-dtype fp8: {torch.cuda.get_device_name(device)} has no float8; use auto, or a GPU of the "
            "generations Ada, Hopper or later"
        )
    return "float8_e4m3fn"


def usable_on_cuda(name: str, device: torch.device) -> str:
    """Return `name`. If `name` is "auto" and FlashAttention 3 would be used but does not load, return OWN instead.

    Log the failure here, so that it is logged once and not for each pool.
    """
    if name == "auto" and FLASH_3 in flash_attn_here(device):
        try:
            load(FLASH_3)
        except ValueError as error:
            log.warning("using Baton's attention kernels instead of FlashAttention 3: %s", error)
            return OWN
    return name


def _flash_3_or(ours: AttentionBackend, pool: KVPool) -> AttentionBackend:
    try:
        return FlashAttention(pool, FLASH_3, ours)
    except ValueError as error:
        log.info("using %s attention instead of FlashAttention 3: %s", ours.name, error)
        return ours


def block_tokens_on_cuda(name: str, device: torch.device) -> int:
    """Return the default number of tokens per KV block. FlashAttention 2 needs at least 256."""
    found = flash_attn_here(device) if name == "flash_attn" else []
    return 256 if found and first_loadable(found) == FLASH_2 else BLOCK_TOKENS


def flash_attn_here(device: torch.device) -> list[str]:
    """Return the generations of flash-attn that are installed and run on this GPU, best first."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else HOPPER
    return [name for name in installed() if major in GENERATIONS[name].runs_on]


def kernels_on_cuda(config: ModelConfig, pool: KVPool, triton: bool) -> Kernels:
    """Return the fused Triton kernels if `triton` is true, and otherwise torch's kernels."""
    if not triton:
        return TorchKernels(config, pool)
    from engine.cuda.layer import TritonKernels

    return TritonKernels(config, pool)


def weights_on_cuda(dtype: torch.dtype, triton: bool) -> Plain:
    """Return a format that keeps weights as plain tensors. If `triton` is true, the format can also keep 4-bit codes,
    and it computes all experts of a layer in one launch."""
    if not triton:
        return Plain(dtype)
    from engine.cuda.products import TritonFormat

    return TritonFormat(dtype)

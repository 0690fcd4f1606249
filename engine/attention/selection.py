"""Which attention backend a node uses: the one asked for, or the fastest that can run here."""

import logging

import torch

from engine.attention.interface import AttentionBackend
from engine.attention.torch_attention import TorchAttention
from engine.cpu.numba_support import why_not_compiled
from engine.cuda.flash_attention import FLASH_2, FLASH_3, HOPPER, RUNS_ON, FlashAttention, installed, load
from engine.kv_pool import KVPool

log = logging.getLogger("baton.engine")
OWN = "own"  # Triton's kernels where they run, torch's elsewhere
BLOCK_TOKENS = 64  # on a GPU: a head's keys and values of a block are 32 KiB together
NO_FLASH_ATTN = (
    "--attention-backend flash_attn: no flash-attn package that runs on this GPU is installed: pip install "
    "baton-serve[gpu], or use auto"
)


def attention_on_cpu(name: str, pool: KVPool) -> AttentionBackend:
    """Raises ValueError for a backend that cannot run on a CPU, or not here."""
    if name not in {"auto", "numba", "torch"}:
        raise ValueError(f"--attention-backend {name}: does not run on a CPU; use auto, numba or torch")
    if name == "torch" or (name == "auto" and why_not_compiled()):
        return TorchAttention(pool)
    if why_not_compiled():
        raise ValueError(f"--attention-backend numba: cannot run here: {why_not_compiled()}; use auto or torch")
    from engine.cpu.attention import NumbaAttention

    return NumbaAttention(pool)


def attention_on_cuda(name: str, pool: KVPool, triton: bool, computed: torch.dtype | None = None) -> AttentionBackend:
    """`triton`: whether that package is here; `computed`: what queries are in, as the pool when it is not said.

    `auto` is FlashAttention 3 where that is installed, on the GPUs it was written for, and our own kernels elsewhere:
    the other generations prefill or decode more slowly than they do, or are in beta. Raises ValueError for a backend
    that is not here, or that the pool does not suit.
    """
    if name == "numba":
        raise ValueError("--attention-backend numba: runs on a CPU only; use auto")
    if name == "triton" and not triton:
        raise ValueError(
            "--attention-backend triton: the package triton is not installed, or cannot launch kernels here; use torch"
        )
    ours: AttentionBackend = TorchAttention(pool)
    if triton and name != "torch":
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
            f"--attention-backend flash_attn: KV in {pool.layout.dtype} under activations in {computed}: leave "
            "--kv-cache-dtype out, or use triton"
        )
    return FlashAttention(pool, found[0], ours)


def usable_on_cuda(name: str, device: torch.device) -> str:
    """`name`, or "own" in place of "auto" where the FlashAttention 3 that it would take cannot be loaded.

    The log says so once, however many pools attention is chosen for.
    """
    if name == "auto" and FLASH_3 in flash_attn_here(device):
        try:
            load(FLASH_3)
        except ValueError as error:
            log.warning("our own attention kernels instead of FlashAttention 3: %s", error)
            return OWN
    return name


def _flash_3_or(ours: AttentionBackend, pool: KVPool) -> AttentionBackend:
    try:
        return FlashAttention(pool, FLASH_3, ours)
    except ValueError as error:
        log.info("%s instead of FlashAttention 3: %s", ours.name, error)
        return ours


def block_tokens_on_cuda(name: str, device: torch.device) -> int:
    """Tokens of a KV block where none are asked for: FlashAttention 2 takes no fewer than 256."""
    forced = name == "flash_attn" and flash_attn_here(device)[:1] == [FLASH_2]
    return 256 if forced else BLOCK_TOKENS


def flash_attn_here(device: torch.device) -> list[str]:
    """Generations of flash-attn that are installed and run on this GPU, best first."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else HOPPER
    return [name for name in installed() if major in RUNS_ON[name]]

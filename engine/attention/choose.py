"""Which attention backend a node uses: the one asked for, or the fastest that can run here."""

import importlib.util

from engine.attention.interface import AttentionBackend
from engine.attention.torch_backend import TorchAttention
from engine.kv_pool import KVPool


def attention_on_cpu(name: str, pool: KVPool) -> AttentionBackend:
    """Raises ValueError for a backend that cannot run on a CPU, or not here."""
    if name not in {"auto", "numba", "torch"}:
        raise ValueError(f"--attention-backend {name}: does not run on a CPU; use auto, numba or torch")
    has_numba = importlib.util.find_spec("numba") is not None
    if name == "numba" and not has_numba:
        raise ValueError("--attention-backend numba: the package numba is not installed; install it, or use torch")
    if name == "torch" or not has_numba:
        return TorchAttention(pool)
    from engine.attention.numba_backend import NumbaAttention

    return NumbaAttention(pool)


def attention_on_cuda(name: str, pool: KVPool, triton: bool) -> AttentionBackend:
    """`triton`: whether that package is here. Raises ValueError for a backend that is not, or that the pool does not
    suit."""
    if name == "numba":
        raise ValueError("--attention-backend numba: runs on a CPU only; use auto")
    if name == "triton" and not triton:
        raise ValueError("--attention-backend triton: the package triton is not installed; install it, or use torch")
    ours: AttentionBackend = TorchAttention(pool)
    if triton and name != "torch":
        from engine.attention.triton_backend import TritonAttention

        ours = TritonAttention(pool)
    if name != "flash_attn":
        return ours
    from engine.attention.flash_backend import FlashAttention, installed

    if not (found := installed()):
        raise ValueError("--attention-backend flash_attn: no flash-attn package is installed; install it, or use auto")
    return FlashAttention(pool, found[0], ours)

"""Which attention backend a node uses: the one asked for, or the fastest that can run here."""

from engine.attention.interface import AttentionBackend
from engine.attention.torch_backend import TorchAttention
from engine.kv_pool import KVPool


def attention_on_cpu(name: str, pool: KVPool) -> AttentionBackend:
    """Raises ValueError for a backend that cannot run on a CPU."""
    if name not in {"auto", "torch"}:
        raise ValueError(f"--attention-backend {name}: does not run on a CPU; use auto, numba or torch")
    return TorchAttention(pool)

"""Which kernels a node uses: the fastest that can run here."""

from engine.kernels.interface import Kernels
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_pool import KVPool
from engine.models.config import ModelConfig


def kernels_on_cpu(config: ModelConfig, pool: KVPool) -> Kernels:
    return TorchKernels(config, pool)

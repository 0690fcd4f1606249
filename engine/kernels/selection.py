"""Which kernels a node uses: the fastest that can run here."""

from engine.cpu.numba_support import why_not_compiled
from engine.kernels.interface import Kernels
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_pool import KVPool
from engine.models.config import ModelConfig


def kernels_on_cpu(config: ModelConfig, pool: KVPool) -> Kernels:
    if why_not_compiled():
        return TorchKernels(config, pool)
    from engine.cpu.layer import NumbaKernels

    return NumbaKernels(config, pool)


def kernels_on_cuda(config: ModelConfig, pool: KVPool, triton: bool) -> Kernels:
    """`triton`: whether that package is here, whose kernels are the fused ones."""
    if not triton:
        return TorchKernels(config, pool)
    from engine.cuda.layer import TritonKernels

    return TritonKernels(config, pool)

"""The interface through which `engine.cuda.build` uses a GPU. Tests replace it with a fake."""

import importlib.util
import logging
import subprocess
from collections.abc import Callable

import torch

from engine.cuda.graphs import CudaGraphPool
from engine.cuda.kv.pool import PoolClient
from engine.cuda.memory import DeviceMemory
from engine.options import check_gpu
from engine.startup import cause

log = logging.getLogger("baton.engine")


class CudaAccelerator:
    """The CUDA device called `name`, such as cuda:0. Raises ValueError if torch does not find the device.

    If `borrowed` is given, `allocate` returns the KV memory of another process instead of new memory.
    """

    def __init__(self, name: str, borrowed: PoolClient | None = None) -> None:
        self._borrowed = borrowed
        check_gpu(name)
        self.device = torch.device("cuda", torch.device(name).index or 0)
        torch.cuda.set_device(self.device)
        self.name = torch.cuda.get_device_name(self.device)

    def memory(self) -> tuple[int, int]:
        """Return the device's free memory and its total memory, in bytes."""
        return torch.cuda.mem_get_info(self.device)

    def most_held(self, work: Callable[[], object]) -> int:
        """Run `work`. Return the largest number of bytes that torch held during `work`. Memory that was allocated
        earlier counts too."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        torch.cuda.synchronize(self.device)
        most = torch.cuda.max_memory_reserved(self.device)
        torch.cuda.empty_cache()
        return most

    def allocate(self, num_rows: int, row_bytes: int) -> DeviceMemory:
        """Return KV memory, zeroed if it is new. Raises OSError if there is too little memory."""
        region = None if self._borrowed is None else self._borrowed.fitting(row_bytes).region
        return DeviceMemory(self.device, num_rows, row_bytes, region)

    def graphs(self) -> CudaGraphPool:
        return CudaGraphPool(self.device)

    @staticmethod
    def has_triton() -> bool:
        """Return whether Triton is installed and can build launchers, which needs a C compiler and a writable cache."""
        if importlib.util.find_spec("triton") is None:
            return False
        try:
            from triton.runtime import driver

            return driver.active.utils is not None
        except AssertionError as error:  # raised if `ldconfig -p` does not list libcuda.so.1
            fix = ": set TRITON_LIBCUDA_PATH to the directory of libcuda.so.1"
            log.warning("using torch's kernels, which are slower than Triton's: %s%s", cause(error), fix)
        except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
            log.warning("using torch's kernels, which are slower than Triton's: %s", cause(error))
        return False

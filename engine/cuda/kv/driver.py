"""Calls the CUDA driver through NVIDIA's cuda-bindings, to share GPU memory with other processes and to copy it.

The memory is allocated outside torch, because some settings of torch's allocator prevent sharing.
"""

import ctypes
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, Self


class CudaError(OSError):
    """A call of the driver failed. The message names the call and the error."""


class Driver:
    """The driver, called through `api`: the module `cuda.bindings.driver`, or a substitute in tests."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.call("cuInit", 0)
        self.by_descriptor = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    @classmethod
    @cache
    def load(cls) -> "Driver":
        """Return the driver of this machine. Raises CudaError if the machine has no driver or no GPU."""
        try:
            from cuda.bindings import driver

            return cls(driver)
        except (ImportError, RuntimeError) as error:  # RuntimeError: libcuda is not installed
            raise CudaError(f"no CUDA driver is available: {error}; install the extra `gpu`") from error

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function and return its result. Return None if the function has no result. Raises CudaError if
        the call fails."""
        code, *result = getattr(self.api, name)(*arguments)
        if code:
            raise CudaError(f"{name} failed: {code.name} ({int(code)})")
        return result[0] if result else None

    def uuids(self) -> list[str]:
        """Return the UUIDs of this process's GPUs in the order of their ordinals, which differ between processes."""
        ordinals = range(self.call("cuDeviceGetCount"))
        return [self.call("cuDeviceGetUuid", self.call("cuDeviceGet", ordinal)).bytes.hex() for ordinal in ordinals]


class CudaDevice:
    """One GPU. Like torch, it uses the GPU's primary context. `ordinal` is torch's device index."""

    def __init__(self, ordinal: int, driver: Driver | None = None) -> None:
        self.driver = driver or Driver.load()
        self._device = self.driver.call("cuDeviceGet", ordinal)
        self.uuid = self.driver.uuids()[ordinal]
        self._context = self.driver.call("cuDevicePrimaryCtxRetain", self._device)
        self.location = self.driver.api.CUmemLocation()
        self.location.type = self.driver.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.location.id = ordinal

    def use(self) -> Driver:
        """Make this GPU current for the next calls of this thread, and return the driver."""
        self.driver.call("cuCtxSetCurrent", self._context)
        return self.driver

    def reaches(self, uuid: str) -> bool:
        """Return whether this GPU can copy to the GPU `uuid`, which may be this GPU itself or another visible GPU."""
        uuids = self.driver.uuids()
        if uuid not in uuids or uuid == self.uuid:
            return uuid == self.uuid
        peer = self.driver.call("cuDeviceGet", uuids.index(uuid))
        return bool(self.driver.call("cuDeviceCanAccessPeer", self._device, peer))


class CudaRegion:
    """`size` bytes of GPU memory at `address`: our own memory (`allocate`), or a peer's memory (`attach`).

    `descriptor` lets a peer map our own memory. The memory stays allocated as long as at least one process maps it.
    """

    def __init__(self, gpu: CudaDevice, size: int, memory: Any) -> None:
        """Map `memory` and release its handle: the mapping keeps the memory allocated. Raises CudaError on failure."""
        self.gpu = gpu
        self.size = size
        self.descriptor: int | None = None
        driver, access = gpu.use(), gpu.driver.api.CUmemAccessDesc()
        access.location, access.flags = gpu.location, driver.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with ExitStack() as release, ExitStack() as undo:
            release.callback(driver.call, "cuMemRelease", memory)
            self.address = int(driver.call("cuMemAddressReserve", size, 0, 0, 0))
            undo.callback(driver.call, "cuMemAddressFree", self.address, size)
            driver.call("cuMemMap", self.address, size, 0, memory, 0)
            undo.callback(driver.call, "cuMemUnmap", self.address, size)
            driver.call("cuMemSetAccess", self.address, size, [access], 1)
            undo.pop_all()

    @classmethod
    def allocate(cls, gpu: CudaDevice, size: int) -> Self:
        """Allocate zeroed memory. Raises CudaError if there is too little memory or the driver fails."""
        driver, wanted = gpu.use(), gpu.driver.api.CUmemAllocationProp()
        wanted.type = driver.api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.requestedHandleTypes, wanted.location = driver.by_descriptor, gpu.location
        least = driver.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = driver.call("cuMemGetAllocationGranularity", wanted, least)
        size = -(-size // unit) * unit
        memory = driver.call("cuMemCreate", size, wanted, 0)
        descriptor = driver.call("cuMemExportToShareableHandle", memory, driver.by_descriptor, 0)
        region = cls(gpu, size, memory)
        region.descriptor = int(descriptor)
        stream = CudaStream(gpu)
        stream.clear(region.address, size)
        stream.wait()
        stream.close()
        return region

    @classmethod
    def attach(cls, gpu: CudaDevice, size: int, descriptor: int) -> Self:
        """Map a peer's region. The caller still owns `descriptor`. Raises CudaError if the driver fails."""
        driver = gpu.use()
        return cls(gpu, size, driver.call("cuMemImportFromShareableHandle", descriptor, driver.by_descriptor))

    def close(self) -> None:
        """Unmap the memory. Idempotent. All copies from or to the memory that this process started must have ended."""
        address, self.address = self.address, 0
        if not address:
            return
        driver = self.gpu.use()
        driver.call("cuMemUnmap", address, self.size)
        driver.call("cuMemAddressFree", address, self.size)
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class CudaStream:
    """A stream for copies that run while the GPU computes. Only one thread may use it."""

    def __init__(self, gpu: CudaDevice) -> None:
        self._driver = gpu.use()
        # Unlike other streams, a non-blocking stream does not wait for the default stream.
        flags = self._driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = self._driver.call("cuStreamCreate", int(flags))

    def clear(self, address: int, size: int) -> None:
        """Start setting `size` bytes at `address` to zero."""
        self._driver.call("cuMemsetD8Async", address, 0, size, self._stream)

    def copy(self, target: int, source: int, size: int) -> None:
        """Start a copy of GPU memory to GPU memory."""
        self._driver.call("cuMemcpyDtoDAsync", target, source, size, self._stream)

    def to_host(self, target: int, source: int, size: int) -> None:
        self._driver.call("cuMemcpyDtoHAsync", target, source, size, self._stream)

    def from_host(self, target: int, source: int, size: int) -> None:
        self._driver.call("cuMemcpyHtoDAsync", target, source, size, self._stream)

    def wait(self) -> None:
        """Wait until all operations started on this stream have ended."""
        self._driver.call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        self._driver.call("cuStreamDestroy", self._stream)


class PinnedStaging:
    """Page-locked memory for copies from and to a GPU; see Staging. It grows to the size that the largest call needs.

    A row may be read only after the step that computes it has ended. Callers push only such rows.
    """

    def __init__(self, region: CudaRegion, row_bytes: int) -> None:
        self._region = region
        self._row_bytes = row_bytes
        self._stream = CudaStream(region.gpu)
        self._address = 0
        self._num_rows = 0

    def read(self, rows: Sequence[int]) -> list[memoryview]:
        views = self.room(rows)
        for host, device in self._places(rows):
            self._stream.to_host(host, device, self._row_bytes)
        self._stream.wait()
        return views

    def room(self, rows: Sequence[int]) -> list[memoryview]:
        if len(rows) > self._num_rows:
            self._grow(len(rows))
        one = ctypes.c_ubyte * self._row_bytes
        return [memoryview(one.from_address(host)).cast("B") for host, _ in self._places(rows)]

    def write(self, rows: Sequence[int]) -> None:
        for host, device in self._places(rows):
            self._stream.from_host(device, host, self._row_bytes)
        self._stream.wait()

    def close(self) -> None:
        self._grow(0)
        self._stream.close()

    def _places(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Return each row's address on the host and its address on the GPU."""
        size, device = self._row_bytes, self._region.address
        return [(self._address + index * size, device + row * size) for index, row in enumerate(rows)]

    def _grow(self, num_rows: int) -> None:
        driver = self._region.gpu.use()
        if self._address:
            driver.call("cuMemFreeHost", self._address)
        size, self._num_rows = num_rows * self._row_bytes, num_rows
        self._address = driver.call("cuMemHostAlloc", size, 0) if size else 0

"""The CUDA driver through ctypes: GPU memory that another process can map, and copies of its rows. Does not use torch.

The memory is allocated outside the allocators of frameworks, whose settings can make memory impossible to share.
"""

import ctypes
import os
from collections.abc import Sequence
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from functools import cache
from typing import Any, Self

from shared.kv_gpu.cuda_calls import (
    BATCH_COPY,
    BATCH_COPY_TYPES,
    CALLS,
    Access,
    AllocationProperties,
    CopyAttributes,
    IpcHandle,
    Location,
)

VMM, LEGACY = "vmm", "legacy"
SHARE_BY_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE, and also CU_MEM_ALLOCATION_TYPE_PINNED
READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
CAN_SHARE_BY_DESCRIPTOR = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not synchronized with the default stream
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


class CudaError(OSError):
    """A call of the driver failed. The text has the name of the call and that of the error."""


class Driver:
    """Calls `library`: libcuda, or a substitute in tests. It has the functions of `CALLS`, and perhaps `BATCH_COPY`."""

    def __init__(self, library: Any) -> None:
        self._library = library
        for name, types in CALLS.items():
            getattr(library, name).argtypes = types
        self.copies_batches = hasattr(library, BATCH_COPY)
        if self.copies_batches:
            getattr(library, BATCH_COPY).argtypes = BATCH_COPY_TYPES
        self.call("cuInit", 0)

    @classmethod
    @cache
    def load(cls) -> "Driver":
        """Return the driver of this machine. Raises CudaError if it has no driver or no GPU."""
        try:
            return cls(ctypes.CDLL("libcuda.so.1"))
        except (OSError, AttributeError) as error:
            raise CudaError(f"no CUDA driver to use here: {error}") from error

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function without the interpreter lock, so that other threads can run. Raises CudaError."""
        code = getattr(self._library, name)(*arguments)
        if code:
            text = c_char_p()
            self._library.cuGetErrorName(code, byref(text))
            raise CudaError(f"{name} failed: {(text.value or b'unknown').decode()} ({code})")

    def uuids(self) -> list[str]:
        """Return the UUIDs of the GPUs that this process may use, by ordinal. Ordinals differ between processes."""
        count, found = c_int(), []
        self.call("cuDeviceGetCount", byref(count))
        for ordinal in range(count.value):
            uuid = (c_char * 16)()
            self.call("cuDeviceGetUuid_v2", byref(uuid), self.device(ordinal))
            found.append(bytes(uuid).hex())
        return found

    def device(self, ordinal: int) -> int:
        device = c_int()
        self.call("cuDeviceGet", byref(device), ordinal)
        return device.value


class CudaDevice:
    """One GPU, used through its primary context, as frameworks do. `ordinal` counts GPUs as they do."""

    def __init__(self, ordinal: int, driver: Driver | None = None) -> None:
        self.driver = driver or Driver.load()
        self.device = self.driver.device(ordinal)
        self.uuid = self.driver.uuids()[ordinal]
        self._context = c_void_p()
        self.driver.call("cuDevicePrimaryCtxRetain", byref(self._context), self.device)

    def use(self) -> Driver:
        """Make this GPU current for the next calls of this thread, and return the driver."""
        self.driver.call("cuCtxSetCurrent", self._context)
        return self.driver

    def reaches(self, uuid: str) -> bool:
        """Return whether it can copy to the GPU with this UUID: itself, or a peer that this process sees."""
        uuids = self.driver.uuids()
        if uuid not in uuids or uuid == self.uuid:
            return uuid == self.uuid
        can = c_int()
        self.driver.call("cuDeviceCanAccessPeer", byref(can), self.device, self.driver.device(uuids.index(uuid)))
        return bool(can.value)

    def can_share_by_descriptor(self) -> bool:
        can = c_int()
        self.driver.call("cuDeviceGetAttribute", byref(can), CAN_SHARE_BY_DESCRIPTOR, self.device)
        return bool(can.value)


class CudaRegion:
    """`size` bytes of GPU memory at `address`: our own (`allocate`) or those of a peer (`attach`).

    `kind` is how a peer maps it. "vmm": by `descriptor`, and the memory exists as long as a process maps it. "legacy":
    by the 64 bytes of `handle`, and peers must not access the memory once its owner is gone.
    """

    def __init__(self, gpu: CudaDevice, kind: str, size: int, address: int, *, is_own: bool) -> None:
        self.gpu = gpu
        self.kind = kind
        self.size = size
        self.address = address
        self.descriptor: int | None = None
        self.handle = b""
        self._is_own = is_own

    @classmethod
    def allocate(cls, gpu: CudaDevice, size: int) -> Self:
        """Allocate zeroed memory. Raises CudaError, also if there is too little memory."""
        region = cls._created(gpu, size) if gpu.can_share_by_descriptor() else cls._allocated(gpu, size)
        with_stream = CudaStream(gpu)
        gpu.driver.call("cuMemsetD8Async", region.address, 0, region.size, with_stream.handle)
        with_stream.wait()
        with_stream.close()
        return region

    @classmethod
    def attach(cls, gpu: CudaDevice, kind: str, size: int, descriptor: int | None, handle: bytes) -> Self:
        """Map a region of a peer into this process. The caller still owns `descriptor`. Raises CudaError."""
        driver = gpu.use()
        if kind == VMM:
            memory = c_uint64()
            driver.call("cuMemImportFromShareableHandle", byref(memory), descriptor, SHARE_BY_DESCRIPTOR)
            return cls(gpu, kind, size, _mapped(gpu, memory, size), is_own=False)
        address = c_uint64()
        name = IpcHandle((c_ubyte * 64).from_buffer_copy(handle))
        driver.call("cuIpcOpenMemHandle_v2", byref(address), name, LAZY_PEER_ACCESS)
        return cls(gpu, kind, size, address.value, is_own=False)

    def close(self) -> None:
        """Unmap or free the memory. Idempotent. No copy of this process may still use it."""
        address, self.address = self.address, 0
        if not address:
            return
        driver = self.gpu.use()
        if self.kind == VMM:
            driver.call("cuMemUnmap", address, self.size)
            driver.call("cuMemAddressFree", address, self.size)
        else:
            driver.call("cuMemFree_v2" if self._is_own else "cuIpcCloseMemHandle", address)
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    @classmethod
    def _created(cls, gpu: CudaDevice, size: int) -> Self:
        driver, wanted = (
            gpu.use(),
            AllocationProperties(ON_DEVICE, SHARE_BY_DESCRIPTOR, Location(ON_DEVICE, gpu.device)),
        )
        step, memory, descriptor = c_size_t(), c_uint64(), c_int(-1)
        driver.call("cuMemGetAllocationGranularity", byref(step), byref(wanted), 0)
        size = -(-size // step.value) * step.value
        driver.call("cuMemCreate", byref(memory), size, byref(wanted), 0)
        driver.call("cuMemExportToShareableHandle", byref(descriptor), memory, SHARE_BY_DESCRIPTOR, 0)
        region = cls(gpu, VMM, size, _mapped(gpu, memory, size), is_own=True)
        region.descriptor = descriptor.value
        return region

    @classmethod
    def _allocated(cls, gpu: CudaDevice, size: int) -> Self:
        driver, address, handle = gpu.use(), c_uint64(), IpcHandle()
        driver.call("cuMemAlloc_v2", byref(address), size)
        driver.call("cuIpcGetMemHandle", byref(handle), address)
        region = cls(gpu, LEGACY, size, address.value, is_own=True)
        region.handle = bytes(handle.reserved)
        return region


def _mapped(gpu: CudaDevice, memory: c_uint64, size: int) -> int:
    """Map `memory`, release its handle, and return its address. The mapping keeps the memory allocated."""
    driver, address, access = gpu.driver, c_uint64(), Access(Location(ON_DEVICE, gpu.device), READ_AND_WRITE)
    try:
        driver.call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        driver.call("cuMemMap", address, size, 0, memory, 0)
        driver.call("cuMemSetAccess", address, size, byref(access), 1)
    finally:
        driver.call("cuMemRelease", memory)
    return address.value


class CudaStream:
    """A stream of copies, which run while the GPU computes. Used by one thread."""

    def __init__(self, gpu: CudaDevice) -> None:
        self._driver = gpu.use()
        self.handle = c_void_p()
        self._driver.call("cuStreamCreate", byref(self.handle), NON_BLOCKING)

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Start copies within GPUs, each (target address, source address, bytes). Their order is undefined."""
        if not self._driver.copies_batches or len(copies) < 2:
            for target, source, size in copies:
                self._driver.call("cuMemcpyDtoDAsync_v2", target, source, size, self.handle)
            return
        count = len(copies)
        targets, sources = ((c_uint64 * count)(*(copy[side] for copy in copies)) for side in (0, 1))
        sizes = (c_size_t * count)(*(copy[2] for copy in copies))
        how, first, failed = CopyAttributes(IN_STREAM_ORDER), c_size_t(0), c_size_t()
        self._driver.call(
            BATCH_COPY, targets, sources, sizes, count, byref(how), byref(first), 1, byref(failed), self.handle
        )

    def to_host(self, target: int, source: int, size: int) -> None:
        self._driver.call("cuMemcpyDtoHAsync_v2", target, source, size, self.handle)

    def from_host(self, target: int, source: int, size: int) -> None:
        self._driver.call("cuMemcpyHtoDAsync_v2", target, source, size, self.handle)

    def wait(self) -> None:
        """Wait until all copies that were started have ended."""
        self._driver.call("cuStreamSynchronize", self.handle)

    def close(self) -> None:
        self._driver.call("cuStreamDestroy_v2", self.handle)


class PinnedStaging:
    """Page-locked memory for copies from and to a GPU. It grows to the largest number of rows of any call.

    Rows must be fully computed before they are read. Callers push only rows of steps that have ended.
    """

    def __init__(self, region: CudaRegion, row_bytes: int) -> None:
        self._region = region
        self._row_bytes = row_bytes
        self._stream = CudaStream(region.gpu)
        self._address = ctypes.c_void_p()
        self._num_rows = 0

    def read(self, rows: Sequence[int]) -> list[memoryview]:
        views = self.room(rows)
        for host, row in zip(self._addresses(), rows, strict=False):
            self._stream.to_host(host, self._region.address + row * self._row_bytes, self._row_bytes)
        self._stream.wait()
        return views

    def room(self, rows: Sequence[int]) -> list[memoryview]:
        if len(rows) > self._num_rows:
            self._grow(len(rows))
        one = ctypes.c_ubyte * self._row_bytes
        hosts = zip(self._addresses(), rows, strict=False)
        return [memoryview(one.from_address(host)).cast("B") for host, _ in hosts]

    def write(self, rows: Sequence[int]) -> None:
        for host, row in zip(self._addresses(), rows, strict=False):
            self._stream.from_host(self._region.address + row * self._row_bytes, host, self._row_bytes)
        self._stream.wait()

    def close(self) -> None:
        self._grow(0)
        self._stream.close()

    def _addresses(self) -> range:
        first = self._address.value or 0
        return range(first, first + self._num_rows * self._row_bytes, self._row_bytes)

    def _grow(self, num_rows: int) -> None:
        driver = self._region.gpu.use()
        if self._address:
            driver.call("cuMemFreeHost", self._address)
        self._address, self._num_rows = ctypes.c_void_p(), num_rows
        if num_rows:
            driver.call("cuMemHostAlloc", ctypes.byref(self._address), num_rows * self._row_bytes, 0)

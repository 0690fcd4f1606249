"""A fake of `cuda.bindings.driver`. Its GPU memory is host memory in memfds, which other processes can map.

Copies run only when their stream is synchronized, so that tests detect a missing wait.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from enum import IntEnum
from functools import wraps
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from engine.cuda.kv.driver import CudaDevice, CudaRegion, Driver, PinnedStaging
from shared.kv.memory import Staging, checksums

NUM_GPUS = 3
UNIT = 1 << 16  # the granularity of allocations
MAX_ALLOCATION = 1 << 30
NONE, ALL = 0, mmap.PROT_READ | mmap.PROT_WRITE
FIXED, HIDDEN = 0x10, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

CUresult = IntEnum("CUresult", {"CUDA_SUCCESS": 0, "CUDA_ERROR_INVALID_VALUE": 1, "CUDA_ERROR_OUT_OF_MEMORY": 2})
STRUCTURES = {
    "CUmemLocation": ("type", "id"),
    "CUmemAllocationProp": ("type", "requestedHandleTypes", "location"),
    "CUmemAccessDesc": ("location", "flags"),
}


def check(condition: object, code: int = 1) -> None:
    if not condition:
        raise ValueError(code)


class FakeCuda:
    """A driver with NUM_GPUS GPUs. GPUs 0 and 1 can access each other's memory. `calls` has the names of all calls."""

    CUmemAllocationHandleType = IntEnum("CUmemAllocationHandleType", {"CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": 1})
    CUmemLocationType = IntEnum("CUmemLocationType", {"CU_MEM_LOCATION_TYPE_DEVICE": 1})
    CUmemAllocationType = IntEnum("CUmemAllocationType", {"CU_MEM_ALLOCATION_TYPE_PINNED": 1})
    CUmemAccess_flags = IntEnum("CUmemAccess_flags", {"CU_MEM_ACCESS_FLAGS_PROT_READWRITE": 3})
    CUmemAllocationGranularity_flags = IntEnum(
        "CUmemAllocationGranularity_flags", {"CU_MEM_ALLOC_GRANULARITY_MINIMUM": 0}
    )
    CUstream_flags = IntEnum("CUstream_flags", {"CU_STREAM_NON_BLOCKING": 1})

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_failing = 0  # how many of the next copies fail
        self.memories: dict[int, int] = {}  # memfds, by handle
        self.sizes: dict[int, int] = {}  # sizes of the reserved address ranges, by address
        self.streams: dict[int, list[tuple[int, int, int]]] = {}
        self.pinned: dict[int, Any] = {}
        self._last = 100

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return found

        @wraps(found)
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            try:
                result = found(*arguments)
            except (OSError, ValueError, KeyError) as error:
                return (CUresult(2 if error.args == (2,) else 1),)
            return (CUresult(0),) if result is None else (CUresult(0), result)

        return call

    def _new(self) -> int:
        self._last += 1
        return self._last

    def cuInit(self, flags: int) -> None:
        check(flags == 0)

    def cuDeviceGet(self, ordinal: int) -> int:
        check(0 <= ordinal < NUM_GPUS)
        return ordinal

    def cuDeviceGetCount(self) -> int:
        return NUM_GPUS

    def cuDeviceGetUuid(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(bytes=bytes([device] * 16))

    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> int:
        return int({device, peer} == {0, 1})

    def cuDevicePrimaryCtxRetain(self, device: int) -> int:
        return 1000 + device

    def cuCtxSetCurrent(self, context: int) -> None:
        check(context >= 1000)

    # ---- memory -------------------------------------------------------------------------------------------------

    def cuMemGetAllocationGranularity(self, wanted: Any, option: int) -> int:
        check(wanted.type == 1 and wanted.location.type == 1 and option == 0)
        return UNIT

    def cuMemCreate(self, size: int, wanted: Any, flags: int) -> int:
        check(size % UNIT == 0 and wanted.requestedHandleTypes == 1 and flags == 0)
        check(size <= MAX_ALLOCATION, 2)
        return self._keep(_memfd(size))

    def _keep(self, descriptor: int) -> int:
        handle = self._new()
        self.memories[handle] = descriptor
        return handle

    def cuMemRelease(self, memory: int) -> None:
        os.close(self.memories.pop(memory))

    def cuMemAddressReserve(self, size: int, alignment: int, where: int, flags: int) -> int:
        check(size % UNIT == 0 and (alignment, where, flags) == (0, 0, 0))
        address = int(_libc.mmap(None, size, NONE, HIDDEN, -1, 0))
        self.sizes[address] = size
        return address

    def cuMemAddressFree(self, address: int, size: int) -> None:
        check(self.sizes.pop(address) == size)
        _libc.munmap(address, size)

    def cuMemMap(self, address: int, size: int, offset: int, memory: int, flags: int) -> None:
        descriptor = self.memories[memory]
        check(self.sizes[address] == size == os.fstat(descriptor).st_size and (offset, flags) == (0, 0))
        check(_libc.mmap(address, size, NONE, mmap.MAP_SHARED | FIXED, descriptor, 0) == address)

    def cuMemUnmap(self, address: int, size: int) -> None:
        check(self.sizes[address] == size)
        _libc.mmap(address, size, NONE, HIDDEN | FIXED, -1, 0)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> None:
        check(self.sizes[address] == size and len(access) == count == 1)
        check(access[0].flags == 3 and access[0].location.type == 1)
        check(_libc.mprotect(address, size, ALL) == 0)

    def cuMemExportToShareableHandle(self, memory: int, kind: int, flags: int) -> int:
        check((kind, flags) == (1, 0))
        return os.dup(self.memories[memory])

    def cuMemImportFromShareableHandle(self, descriptor: int, kind: int) -> int:
        check(kind == 1)
        return self._keep(os.dup(descriptor))

    def cuMemHostAlloc(self, size: int, flags: int) -> int:
        check(flags == 0)
        buffer = (ctypes.c_ubyte * size)()
        self.pinned[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def cuMemFreeHost(self, address: int) -> None:
        del self.pinned[address]

    # ---- copies -------------------------------------------------------------------------------------------------

    def cuStreamCreate(self, flags: int) -> int:
        check(flags == 1)
        stream = self._new()
        self.streams[stream] = []
        return stream

    def cuStreamDestroy(self, stream: int) -> None:
        check(self.streams.pop(stream) == [])

    def cuStreamSynchronize(self, stream: int) -> None:
        for target, source, size in self.streams[stream]:
            ctypes.memmove(target, source, size) if source else ctypes.memset(target, 0, size)
        self.streams[stream].clear()

    def _copy(self, target: int, source: int, size: int, stream: int) -> None:
        self.num_failing, failing = max(0, self.num_failing - 1), self.num_failing
        check(not failing)
        self.streams[stream].append((target, source, size))

    cuMemcpyDtoDAsync = cuMemcpyDtoHAsync = cuMemcpyHtoDAsync = _copy  # noqa: N815

    def cuMemsetD8Async(self, target: int, value: int, size: int, stream: int) -> None:
        check(value == 0)
        self._copy(target, 0, size, stream)


for _name, _fields in STRUCTURES.items():
    setattr(FakeCuda, _name, type(_name, (), {"__slots__": _fields}))


def _memfd(size: int) -> int:
    descriptor = os.memfd_create("baton-kv")
    os.ftruncate(descriptor, size)
    return descriptor


def gpu(ordinal: int = 0) -> CudaDevice:
    return CudaDevice(ordinal, Driver(FakeCuda()))


class FakeDeviceMemory:
    """A KV pool in the memory of a fake GPU. `rows` is a view of its bytes, uint8 [num_rows, row_bytes]."""

    sums: ClassVar[str] = "xxh3"

    def __init__(self, num_rows: int, row_bytes: int, device: CudaDevice | None = None) -> None:
        self.num_rows, self.row_bytes = num_rows, row_bytes
        self.region = CudaRegion.allocate(device or gpu(), num_rows * row_bytes)
        flat = (ctypes.c_ubyte * (num_rows * row_bytes)).from_address(self.region.address)
        self.rows: NDArray[np.uint8] = np.ctypeslib.as_array(flat).reshape(num_rows, row_bytes)

    def checksums(self, rows: Sequence[int]) -> bytes:
        return checksums(self.rows, rows)

    def staging(self) -> Staging:
        return PinnedStaging(self.region, self.row_bytes)

    def close(self) -> None:
        self.rows = np.zeros((self.num_rows, self.row_bytes), np.uint8)
        self.region.close()

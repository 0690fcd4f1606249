"""A double of the CUDA driver: memory of a GPU is host memory in memfds, which other processes map by the same rules.

It is called through the very types of `shared.kv_gpu.cuda_calls`, as libcuda would be. Copies wait until somebody waits
for their stream, so that one which nobody waited for is missed.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, c_int
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shared.kv.memory import Staging, checksums
from shared.kv_gpu.cuda_calls import BATCH_COPY, BATCH_COPY_TYPES, CALLS
from shared.kv_gpu.cuda_driver import LEGACY, VMM, CudaDevice, CudaRegion, Driver, PinnedStaging

NAMES = {1: b"CUDA_ERROR_INVALID_VALUE", 2: b"CUDA_ERROR_OUT_OF_MEMORY"}
STEP = 1 << 16  # bytes that memory comes in
MOST = 1 << 30
NOTHING, ALL = 0, mmap.PROT_READ | mmap.PROT_WRITE
FIXED, HIDDEN = 0x10, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, c_int, c_int, c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, c_int)


class Refused(Exception):
    pass


def check(fine: object, code: int = 1) -> None:
    if not fine:
        raise Refused(code)


class FakeCuda:
    """`kind`: "legacy" for GPUs that share no descriptors. The UUID of GPU n is the byte n, 16 times; GPU 0 and 1 are
    peers. `said`: the calls so far."""

    def __init__(self, kind: str = VMM, batch: bool = True) -> None:
        self.kind = kind
        self.said: list[str] = []
        self.refusing = 0  # so many of the next copies
        self.memories: dict[int, int] = {}  # handles and legacy memory -> their memfds
        self.sizes: dict[int, int] = {}  # what is mapped, reserved or pinned
        self.streams: dict[int, list[tuple[int, int, int]]] = {}
        self._pinned: dict[int, Any] = {}
        self._last = 100
        calls = CALLS | ({BATCH_COPY: BATCH_COPY_TYPES} if batch else {})
        for name, types in calls.items():
            setattr(self, name, CFUNCTYPE(c_int, *types)(self._guarded(name)))

    def _guarded(self, name: str) -> Callable[..., int]:
        call = getattr(self, f"_{name}")

        def guarded(*arguments: Any) -> int:
            self.said.append(name)
            try:
                call(*arguments)
            except Refused as error:
                return int(error.args[0])
            except (OSError, ValueError, KeyError):
                return 1
            return 0

        return guarded

    def _new(self) -> int:
        self._last += 1
        return self._last

    def _cuInit(self, flags: int) -> None:
        check(flags == 0)

    def _cuGetErrorName(self, code: int, text: Any) -> None:
        text[0] = NAMES[code]

    def _cuDeviceGet(self, device: Any, ordinal: int) -> None:
        check(0 <= ordinal < 3)
        device[0] = ordinal

    def _cuDeviceGetCount(self, count: Any) -> None:
        count[0] = 3

    def _cuDeviceGetUuid_v2(self, uuid: Any, device: int) -> None:
        ctypes.memset(uuid, device, 16)

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, _device: int) -> None:
        check(attribute == 103)
        value[0] = self.kind == VMM

    def _cuDeviceCanAccessPeer(self, can: Any, device: int, other: int) -> None:
        can[0] = {device, other} == {0, 1}

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:
        context[0] = 1000 + device

    def _cuCtxSetCurrent(self, context: int) -> None:
        check(context >= 1000)

    # ---- memory -------------------------------------------------------------------------------------------------

    def _cuMemGetAllocationGranularity(self, step: Any, wanted: Any, option: int) -> None:
        check(wanted[0].type == 1 and wanted[0].location.type == 1 and option == 0)
        step[0] = STEP

    def _cuMemCreate(self, memory: Any, size: int, wanted: Any, flags: int) -> None:
        check(size % STEP == 0 and wanted[0].handle_types == 1 and flags == 0)
        check(size <= MOST, 2)
        memory[0] = self._new()
        self.memories[memory[0]] = _memfd(size)

    def _cuMemRelease(self, memory: int) -> None:
        os.close(self.memories.pop(memory))

    def _cuMemAddressReserve(self, address: Any, size: int, alignment: int, where: int, flags: int) -> None:
        check(size % STEP == 0 and (alignment, where, flags) == (0, 0, 0))
        address[0] = _libc.mmap(None, size, NOTHING, HIDDEN, -1, 0)
        self.sizes[address[0]] = size

    def _cuMemAddressFree(self, address: int, size: int) -> None:
        check(self.sizes.pop(address) == size)
        _libc.munmap(address, size)

    def _cuMemMap(self, address: int, size: int, offset: int, memory: int, flags: int) -> None:
        descriptor = self.memories[memory]
        check(self.sizes[address] == size == os.fstat(descriptor).st_size and (offset, flags) == (0, 0))
        check(_libc.mmap(address, size, NOTHING, mmap.MAP_SHARED | FIXED, descriptor, 0) == address)

    def _cuMemUnmap(self, address: int, size: int) -> None:
        check(self.sizes[address] == size)
        _libc.mmap(address, size, NOTHING, HIDDEN | FIXED, -1, 0)

    def _cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> None:
        check(self.sizes[address] == size and count == 1 and access[0].flags == 3 and access[0].location.type == 1)
        check(_libc.mprotect(address, size, ALL) == 0)

    def _cuMemExportToShareableHandle(self, descriptor: Any, memory: int, kind: int, flags: int) -> None:
        check((kind, flags) == (1, 0))
        descriptor[0] = os.dup(self.memories[memory])

    def _cuMemImportFromShareableHandle(self, memory: Any, descriptor: int, kind: int) -> None:
        check(kind == 1)
        memory[0] = self._new()
        self.memories[memory[0]] = os.dup(descriptor)

    def _cuMemAlloc_v2(self, address: Any, size: int) -> None:
        check(size <= MOST, 2)
        address[0] = self._shown(_memfd(size))

    def _cuMemFree_v2(self, address: int) -> None:
        os.close(self.memories.pop(address))
        _libc.munmap(address, self.sizes.pop(address))

    _cuIpcCloseMemHandle = _cuMemFree_v2  # noqa: N815

    def _cuIpcGetMemHandle(self, handle: Any, address: int) -> None:
        ctypes.memmove(handle, f"/proc/{os.getpid()}/fd/{self.memories[address]}".encode().ljust(64, b"\0"), 64)

    def _cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> None:
        check(flags == 1)
        address[0] = self._shown(os.open(bytes(handle.reserved).rstrip(b"\0"), os.O_RDWR))

    def _shown(self, descriptor: int) -> int:
        size = os.fstat(descriptor).st_size
        address = int(_libc.mmap(None, size, ALL, mmap.MAP_SHARED, descriptor, 0))
        self.memories[address], self.sizes[address] = descriptor, size
        return address

    def _cuMemHostAlloc(self, address: Any, size: int, flags: int) -> None:
        check(flags == 0)
        buffer = (ctypes.c_ubyte * size)()
        address[0] = ctypes.addressof(buffer)
        self._pinned[ctypes.addressof(buffer)] = buffer

    def _cuMemFreeHost(self, address: int) -> None:
        del self._pinned[address]

    # ---- copies -------------------------------------------------------------------------------------------------

    def _cuStreamCreate(self, stream: Any, flags: int) -> None:
        check(flags == 1)
        stream[0] = self._new()
        self.streams[stream[0]] = []

    def _cuStreamDestroy_v2(self, stream: int) -> None:
        check(self.streams.pop(stream) == [])

    def _cuStreamSynchronize(self, stream: int) -> None:
        for target, source, size in self.streams[stream]:
            ctypes.memmove(target, source, size) if source else ctypes.memset(target, 0, size)
        self.streams[stream].clear()

    def _copy(self, target: int, source: int, size: int, stream: int) -> None:
        if self.refusing:
            self.refusing -= 1
            raise Refused(1)
        self.streams[stream].append((target, source, size))

    _cuMemcpyDtoDAsync_v2 = _cuMemcpyDtoHAsync_v2 = _cuMemcpyHtoDAsync_v2 = _copy  # noqa: N815

    def _cuMemsetD8Async(self, target: int, value: int, size: int, stream: int) -> None:
        check(value == 0)
        self._copy(target, 0, size, stream)

    def _cuMemcpyBatchAsync(self, targets: Any, sources: Any, sizes: Any, count: int, *rest: Any) -> None:
        how, first, num_ways, _failed, stream = rest
        check((how[0].source_order, how[0].flags, first[0], num_ways) == (1, 0, 0, 1))
        for index in range(count):
            self._copy(targets[index], sources[index], sizes[index], stream)


def _memfd(size: int) -> int:
    descriptor = os.memfd_create("baton-kv")
    os.ftruncate(descriptor, size)
    return descriptor


def gpu(ordinal: int = 0, kind: str = VMM, batch: bool = True) -> CudaDevice:
    return CudaDevice(ordinal, Driver(FakeCuda(kind, batch)))


class FakeDeviceMemory:
    """A pool on a GPU of the double. `rows`: its bytes as the GPU has them, uint8 [num_rows, row_bytes]."""

    sums: ClassVar[str] = "xxh3"

    def __init__(self, num_rows: int, row_bytes: int, device: CudaDevice | None = None) -> None:
        self.num_rows, self.row_bytes = num_rows, row_bytes
        self.region = CudaRegion.allocate(device or gpu(), num_rows * row_bytes)
        self.rows: NDArray[np.uint8] = _array(self.region.address, num_rows * row_bytes).reshape(num_rows, row_bytes)

    def checksums(self, rows: Sequence[int]) -> bytes:
        return checksums(self.rows, rows)

    def staging(self) -> Staging:
        return PinnedStaging(self.region, self.row_bytes)

    def close(self) -> None:
        self.rows = np.zeros((self.num_rows, self.row_bytes), np.uint8)
        self.region.close()


def _array(address: int, size: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))


__all__ = ["LEGACY", "VMM", "FakeCuda", "FakeDeviceMemory", "gpu"]

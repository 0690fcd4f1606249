"""The functions and structures of the CUDA driver that Baton uses, as cuda.h declares them."""

from ctypes import POINTER, Structure, c_char, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any


class Location(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class AllocationProperties(Structure):
    """CUmemAllocationProp, 32 bytes."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", c_ubyte * 8),
    )


class Access(Structure):
    """CUmemAccessDesc, 12 bytes."""

    _fields_ = (("location", Location), ("flags", c_int))


class IpcHandle(Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", c_ubyte * 64),)


class CopyAttributes(Structure):
    """CUmemcpyAttributes, 24 bytes."""

    _fields_ = (("source_order", c_int), ("source", Location), ("target", Location), ("flags", c_uint))


# The name and the argument types of each function; all return a CUresult. Device pointers are 64-bit numbers.
CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetUuid_v2": (POINTER(c_char * 16), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(AllocationProperties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(Access), c_size_t),
    "cuMemExportToShareableHandle": (POINTER(c_int), c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemsetD8Async": (c_uint64, c_ubyte, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamDestroy_v2": (c_void_p,),
}
# Available from CUDA 12.8 on. CUDA 13 adds a second version, without the index of the failed copy.
BATCH_COPY = "cuMemcpyBatchAsync"
BATCH_COPY_TYPES: tuple[Any, ...] = (
    POINTER(c_uint64),
    POINTER(c_uint64),
    POINTER(c_size_t),
    c_size_t,
    POINTER(CopyAttributes),
    POINTER(c_size_t),
    c_size_t,
    POINTER(c_size_t),
    c_void_p,
)

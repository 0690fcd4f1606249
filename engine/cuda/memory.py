"""The memory of a KV pool on a GPU, allocated outside torch so that other processes may map it."""

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor

from engine.cuda.kv.driver import CudaDevice, CudaRegion, PinnedStaging
from shared.kv.memory import Staging
from shared.kv.shm import runs

PIECE_BYTES = 16 << 20  # bytes of rows summed at once; the rows and products fit into an H200's L2 cache (50 MB)
WORD_BYTES = 8


class DeviceMemory:
    """KV memory on a GPU: `rows` is uint8 [num_rows, row_bytes] on `device`.

    The node owns this object: the engine's thread computes in the memory, and KV channels read and write rows from
    other threads and streams. A channel may read a row only after the step that filled the row has ended. If `region`
    is given, the memory is this region of a peer. Otherwise, new memory is allocated and set to zero. Raises ValueError
    if a size is not positive or `row_bytes` is not a multiple of 8. Raises OSError (`CudaError`) if the driver fails or
    there is too little memory.
    """

    sums: ClassVar[str] = "linear64"

    def __init__(self, device: torch.device, num_rows: int, row_bytes: int, region: CudaRegion | None = None) -> None:
        if num_rows < 1 or row_bytes < 1 or row_bytes % WORD_BYTES:
            raise ValueError(
                f"KV memory of {num_rows} rows of {row_bytes} bytes: both must be at least 1, and the bytes "
                f"a multiple of {WORD_BYTES}; choose another --block-size"
            )
        self.num_rows, self.row_bytes = num_rows, row_bytes
        if region is None:
            region = CudaRegion.allocate(CudaDevice(device.index or 0), num_rows * row_bytes)
        self.region = region
        self.device = device
        self.rows = _tensor(region, device, num_rows * row_bytes).view(num_rows, row_bytes)
        self._weights = _weights(row_bytes // WORD_BYTES, device)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # Wait until `_weights` is on the device: checksums use a separate stream, so that no step waits for them.
            torch.cuda.synchronize(device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def checksums(self, rows: Sequence[int]) -> bytes:
        """Return a little-endian 8-byte checksum for each row. Rows that differ in one word have different checksums.

        A checksum is the sum modulo 2^64 of the row's 64-bit words, each multiplied by an odd number that depends on
        the word's position (multilinear hashing). A separate stream computes the checksums. The call waits for them.
        """
        words = self.rows.view(torch.int64)
        with torch.inference_mode(), ExitStack() as stack:
            if self._stream is not None:  # without this context, torch would initialize the first GPU
                stack.enter_context(torch.cuda.device(self.device))
                stack.enter_context(torch.cuda.stream(self._stream))
            pieces = runs(rows, rows, max(1, PIECE_BYTES // self.row_bytes))
            sums = [(words[rows[start] : rows[end - 1] + 1] * self._weights).sum(dim=1) for start, end in pieces]
            return torch.cat(sums).cpu().numpy().astype("<i8").tobytes() if sums else b""

    def staging(self) -> Staging:
        return PinnedStaging(self.region, self.row_bytes)

    def close(self) -> None:
        """Free the memory. Idempotent. The device must be idle. Views of the rows must not be used afterwards."""
        self.rows = torch.empty((0, 0), dtype=torch.uint8)
        self.region.close()


def _weights(count: int, device: torch.device) -> Tensor:
    """Return odd pseudorandom numbers, int64 [count], computed from the positions as in splitmix64."""
    place = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    mixed = place * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    return (mixed ^ (mixed >> 27)) | 1


def _tensor(region: CudaRegion, device: torch.device, size: int) -> Tensor:
    if device.type == "cuda":
        # torch wraps memory with the CUDA array interface without copying or owning it.
        raw = {"shape": (size,), "typestr": "|u1", "data": (region.address, False), "version": 3, "strides": None}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=raw), device=device)
    # In tests, a fake driver provides host memory.
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(region.address), dtype=torch.uint8)

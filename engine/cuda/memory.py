"""The memory of a KV pool on a GPU: our own allocation, outside torch's, which other processes may map."""

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from typing import ClassVar

import torch
from torch import Tensor

from shared.kv.staging import PinnedStaging, Staging
from shared.kv_gpu.cuda_driver import CudaDevice, CudaRegion

PIECE_BYTES = 16 << 20  # summed at once: with its products it stays in the L2 cache of an H200 (50 MB)
WORD_BYTES = 8


class DeviceMemory:
    """`num_rows` rows of `row_bytes` bytes: `rows` is uint8 [num_rows, row_bytes] on `device`.

    `region`: memory of a peer to use instead of an allocation of our own, which is zeroed. Raises ValueError for a
    size that is not positive, or rows that are no whole 8-byte words; OSError (`CudaError`) when the driver refuses,
    for want of memory too. What reads the rows from another stream than the one that computes relies on this: whoever
    names a row was told of it after the step that filled it had been waited for.
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
            # A stream of its own, for which no step waits; the weights are there before its first use.
            torch.cuda.synchronize(device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def checksums(self, rows: Sequence[int]) -> bytes:
        """8 bytes of each row, little-endian: the sum modulo 2^64 of its 64-bit words, each times an odd number of its
        place (multilinear hashing). One word that differs always shows. Computed on the device, on a stream of its own;
        waits for it."""
        words = self.rows.view(torch.int64)
        with torch.inference_mode(), ExitStack() as beside:
            if self._stream is not None:  # the device first: a thread's own is the first one, and would be woken for it
                beside.enter_context(torch.cuda.device(self.device))
                beside.enter_context(torch.cuda.stream(self._stream))
            sums = [self._sums(words[first:last]) for first, last in _runs(rows, max(1, PIECE_BYTES // self.row_bytes))]
            return torch.cat(sums).cpu().numpy().astype("<i8").tobytes() if sums else b""

    def staging(self) -> Staging:
        return PinnedStaging(self.region, self.row_bytes)

    def close(self) -> None:
        """Idempotent. The device must be idle; no tensor over the rows may be used afterwards."""
        self.rows = torch.empty((0, 0), dtype=torch.uint8)
        self.region.close()

    def _sums(self, words: Tensor) -> Tensor:
        return (words * self._weights).sum(dim=1)


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd 64-bit numbers that look random, int64 [count]: the mixing steps of splitmix64 over the places."""
    place = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    mixed = place * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    return (mixed ^ (mixed >> 27)) | 1


class _Raw:
    """Raw device memory as torch takes it without a copy (the CUDA array interface); it keeps nothing alive."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def _tensor(region: CudaRegion, device: torch.device, size: int) -> Tensor:
    if device.type == "cuda":
        return torch.as_tensor(_Raw(region.address, size), device=device)
    return torch.frombuffer(
        (ctypes.c_ubyte * size).from_address(region.address), dtype=torch.uint8
    )  # a driver's double


def _runs(rows: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Neighbours of `rows` that follow each other, at most `limit` together, as [first, last)."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row and row - runs[-1][0] < limit:
            runs[-1] = runs[-1][0], row + 1
        else:
            runs.append((row, row + 1))
    return runs

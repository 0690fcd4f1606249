"""Compiles kernels for this machine's CPU with numba and runs them on torch's own OpenMP threads: the one importer
of numba, imported only where a numba kernel was chosen.

Numba's own parallel loops bring a second OpenMP (or thread pool) into the process, whose spinning threads fight torch's
for the cores. So a kernel here is a plain C function that every thread of a team runs, and the team is started by
`GOMP_parallel` of the OpenMP that torch has loaded, in whatever file that lies.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import llvmlite.binding
import numba
import torch
from numba.core import types

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger(__name__)

# Work of a kernel call, in elementary operations, from which a team of threads pays: waking it takes some microseconds.
PARALLEL_WORK = 1 << 15

_TORCH = ctypes.CDLL(torch._C.__file__)  # looks a symbol up in all that torch was linked with
# Under names of our own, so that compiled code finds these and no others.
for _name in ("omp_get_thread_num", "omp_get_num_threads"):
    llvmlite.binding.add_symbol(f"baton_{_name}", ctypes.cast(getattr(_TORCH, _name), ctypes.c_void_p).value)
thread_number: Callable[[], int] = types.ExternalFunction("baton_omp_get_thread_num", types.int32())
num_threads: Callable[[], int] = types.ExternalFunction("baton_omp_get_num_threads", types.int32())
_parallel = _TORCH.GOMP_parallel
_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_parallel.restype = None


def _writable(where: Path) -> bool:
    """Makes the directory if it can be ours alone: code is loaded from it."""
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=where):
            return where.stat().st_uid == os.getuid() and not where.stat().st_mode & 0o022
    except OSError:
        return False


def _cache_directory(source: Path) -> Path:
    """Where the kernels of a file stay: beside this module, else in the user's cache, else in a temporary directory.
    Its name changes with all that they are made of; numba itself looks only at the one file, and at the CPU."""
    here = Path(__file__).parent
    files = sorted({here / "jit.py", here / "vectors.py", source, *source.parent.glob("numba_*.py")})
    name = hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=8).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    for place in (here / "__pycache__", cache / "baton", Path(tempfile.gettempdir()) / f"baton-{os.getuid()}"):
        if _writable(place / f"kernels-{name}"):
            return place / f"kernels-{name}"
    return Path(tempfile.mkdtemp(prefix="baton-"))  # not found again, but it works


@contextmanager
def _cached(source: Path) -> Iterator[None]:
    """Of several nodes that start together, the first compiles and the others load what it has stored."""
    directory = _cache_directory(source)
    numba.config.CACHE_DIR = str(directory)
    with (directory / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if lock.tell() == 0:
            lock.write("of the process that compiles")
            log.warning("compiling kernels for this CPU, once: some seconds (kept in %s)", directory)
        yield


class Kernel:
    """A compiled function of one pointer to int64 values: numbers and addresses of tensors."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled  # numba's, for looking at its code
        self._address: int = compiled.address
        self._alone = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self._address)

    def __call__(self, work: int, *values: int) -> None:
        """`work` in elementary operations: little is done in place, keeping the interpreter's lock; much by as many
        threads as torch uses, without it. The memory behind addresses must outlive the call and be laid out as the
        kernel expects."""
        packed = array("q", values)
        address = packed.buffer_info()[0]
        if work < PARALLEL_WORK:
            self._alone(address)
        else:
            _parallel(self._address, address, torch.get_num_threads(), 0)


def kernel(function: Callable[[Any], None]) -> Kernel:
    """Compiles, or loads from disk, a function of `values` (a pointer to int64) that every thread of a team runs:
    it shares the work by `thread_number()` and `num_threads()`, or by a counter. Raise nothing in it."""
    signature = types.void(types.CPointer(types.int64))  # type: ignore[attr-defined]
    with _cached(Path(function.__code__.co_filename)):
        return Kernel(numba.cfunc(signature, cache=True, error_model="numpy")(function))


def part(function: F) -> F:
    """Compiled with the kernels that call it."""
    return numba.njit(error_model="numpy")(function)  # type: ignore[no-any-return]


def inlined(function: F) -> F:
    """Compiled into every place that calls it: for what passes vectors."""
    return numba.njit(error_model="numpy", forceinline=True)(function)  # type: ignore[no-any-return]


def cpu_features() -> frozenset[str]:
    """What LLVM may use of this CPU, as in "avx512f"; NUMBA_CPU_FEATURES can take something away."""
    flags = numba.config.CPU_FEATURES or llvmlite.binding.get_host_cpu_features().flatten()
    return frozenset(flag[1:] for flag in flags.split(",") if flag.startswith("+"))

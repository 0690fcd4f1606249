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
import platform
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from stat import S_ISDIR
from typing import Any, TypeVar

import llvmlite.binding
import numba
import torch
from numba.core import types

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
# Work of a kernel call, in elementary operations, from which a team of threads pays: waking it takes some microseconds.
PARALLEL_WORK = 1 << 15


def cpu_features() -> frozenset[str]:
    """What LLVM may use of this CPU, as in "avx512f"; NUMBA_CPU_FEATURES can take something away."""
    flags = numba.config.CPU_FEATURES
    if flags is None:
        flags = llvmlite.binding.get_host_cpu_features().flatten()
    return frozenset(flag[1:] for flag in flags.split(",") if flag.startswith("+"))


if platform.machine() == "x86_64" and "f16c" not in cpu_features():  # LLVM would end the process at the first float16
    raise ImportError("this CPU cannot convert float16 (F16C), which compiled kernels need")

_TORCH = ctypes.CDLL(torch._C.__file__)  # looks a symbol up in all that torch was linked with
# Under names of our own, so that compiled code finds these and no others.
for _name in ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier"):
    llvmlite.binding.add_symbol(f"baton_{_name}", ctypes.cast(getattr(_TORCH, _name), ctypes.c_void_p).value)
thread_number: Callable[[], int] = types.ExternalFunction("baton_omp_get_thread_num", types.int32())
num_threads: Callable[[], int] = types.ExternalFunction("baton_omp_get_num_threads", types.int32())
# Returns when all threads of the team have come to it; at once in a kernel that runs alone.
wait_for_all: Callable[[], None] = types.ExternalFunction("baton_GOMP_barrier", types.void())
_parallel = _TORCH.GOMP_parallel
_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_parallel.restype = None


def _is_ours(directory: Path) -> bool:
    """Whether it can be written, by us alone, made if need be: code is loaded from it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()  # of a link, which another user could turn elsewhere, not of what it points to
        with tempfile.TemporaryFile(dir=directory):
            return S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    except OSError:
        return False


def _places() -> Iterator[Path]:
    """Where compiled kernels may stay, best first: beside this module, in the user's cache, among temporary files."""
    yield HERE / "__pycache__"
    yield Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "baton")
    with suppress(OSError):
        yield Path(tempfile.gettempdir(), f"baton-{os.getuid()}")


def _cache_directory(source: Path, places: Iterable[Path]) -> Path | None:
    """Of the kernels of a file, in the first place that is ours: who owns a directory may exchange those in it. Its
    name changes with all that kernels are made of; numba itself looks only at the one file, and at the CPU."""
    files = {*HERE.glob("*.py"), HERE.parent / "counter_rng.py", HERE.parent / "sampling.py"}
    made_of = b"".join(file.read_bytes() for file in sorted(files | {source}))
    name = f"kernels-{hashlib.blake2b(made_of, digest_size=8).hexdigest()}"
    return next((at / name for at in places if at.is_absolute() and _is_ours(at) and _is_ours(at / name)), None)


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Of several nodes that start together, the first compiles and the others load what it has stored."""
    with (directory / "lock").open("a+") as lock:
        with suppress(OSError):  # where files cannot be locked, each compiles
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock.fileno()).st_size == 0:
            lock.write("of the process that compiles")
            log.warning("compiling kernels for this CPU, once: about 10 seconds (kept in %s)", directory)
        yield


def _compiled(function: Callable[[Any], None]) -> Any:
    """From disk where it is there; what is damaged there goes, and nothing is kept where that fails."""
    compiling = partial(numba.cfunc, types.void(types.CPointer(types.int64)), error_model="numpy")  # type: ignore[attr-defined]
    directory = _cache_directory(Path(function.__code__.co_filename), _places())
    if directory is not None:
        numba.config.CACHE_DIR = str(directory)
        try:
            with _alone_in(directory):
                return compiling(cache=True)(function)
        except (OSError, EOFError, UnpicklingError) as error:
            log.warning("compiled kernels in %s are of no use, compiling them anew: %s", directory, error)
            shutil.rmtree(directory, ignore_errors=True)
    return compiling()(function)


class Kernel:
    """A compiled function of one pointer to int64 values: numbers and addresses of tensors."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled  # numba's, for looking at its code
        self.address: int = compiled.address  # of a C function
        self._alone = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def __call__(self, work: int, *values: int) -> None:
        """`work` in elementary operations: little is done in place, keeping the interpreter's lock; much by as many
        threads as torch uses, without it. The memory behind addresses must outlive the call and be laid out as the
        kernel expects."""
        packed = array("q", values)
        address = packed.buffer_info()[0]
        if work < PARALLEL_WORK:
            self._alone(address)
        else:
            _parallel(self.address, address, torch.get_num_threads(), 0)


def kernel(function: Callable[[Any], None]) -> Kernel:
    """Compiles, or loads from disk, a function of `values` (a pointer to int64) that every thread of a team runs:
    it shares the work by `thread_number()` and `num_threads()`, or by a counter. Raise nothing in it."""
    return Kernel(_compiled(function))


def part(function: F) -> F:
    """Compiled with the kernels that call it."""
    return numba.njit(error_model="numpy")(function)  # type: ignore[no-any-return]


def inlined(function: F) -> F:
    """Compiled into every place that calls it: for what passes vectors."""
    return numba.njit(error_model="numpy", forceinline=True)(function)  # type: ignore[no-any-return]

"""Compiles kernels for this machine's CPU with numba and runs them on torch's OpenMP threads.

Numba's own parallel loops would add a second OpenMP runtime (or thread pool) to the process. Threads of this runtime
would spin, and compete with torch's threads for the cores. A kernel is therefore a plain C function that every thread
of a team runs. The team is started by `GOMP_parallel` of the OpenMP library that torch has loaded.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - the error that numba raises for a damaged file
from stat import S_ISDIR
from typing import Any, TextIO, TypeVar

import llvmlite.binding
import numba
import torch
from numba.core import types

from shared.limits import GREEDY_BELOW

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
# A kernel call with at least this many elementary operations uses a thread team. Waking the team takes microseconds.
PARALLEL_WORK = 1 << 15


def cpu_features() -> frozenset[str]:
    """Return the features of this CPU that LLVM may use, such as "avx512f". NUMBA_CPU_FEATURES overrides them."""
    flags = numba.config.CPU_FEATURES
    if flags is None:
        flags = llvmlite.binding.get_host_cpu_features().flatten()
    return frozenset(flag[1:] for flag in flags.split(",") if flag.startswith("+"))


if platform.machine() == "x86_64" and "f16c" not in cpu_features():  # LLVM would abort when compiling float16
    raise ImportError("compiled kernels need F16C (float16 conversion), which this CPU lacks")

_TORCH = ctypes.CDLL(torch._C.__file__)  # looks up symbols in all libraries that torch is linked with
# The symbols get separate names, so that compiled code cannot resolve them to another OpenMP library.
for _name in ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier"):
    llvmlite.binding.add_symbol(f"baton_{_name}", ctypes.cast(getattr(_TORCH, _name), ctypes.c_void_p).value)
thread_number: Callable[[], int] = types.ExternalFunction("baton_omp_get_thread_num", types.int32())
num_threads: Callable[[], int] = types.ExternalFunction("baton_omp_get_num_threads", types.int32())
# Waits until all threads of the team have called it. In a kernel that runs on one thread, it returns at once.
wait_for_all: Callable[[], None] = types.ExternalFunction("baton_GOMP_barrier", types.void())
_parallel = _TORCH.GOMP_parallel
_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_parallel.restype = None


def is_ours(directory: Path) -> bool:
    """Create the directory if necessary. Return whether only this user can write to the directory, which holds code."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()  # not `stat`, since another user could redirect a symbolic link
        with tempfile.TemporaryFile(dir=directory):
            return S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    except OSError:
        return False


def cache_places() -> Iterator[Path]:
    """Yield directories for kernels, best first: in this package, in the user's cache, in the temporary directory."""
    yield HERE / "__pycache__"
    yield Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "baton")
    with suppress(OSError):
        yield Path(tempfile.gettempdir(), f"baton-{os.getuid()}")


def cache_directory(source: Path, places: Iterable[Path]) -> Path | None:
    """Return a cache directory for the kernels of a file, in the first of `places` to which only this user can write.

    The directory's name contains a hash of all kernels' sources, because numba detects only changes of the CPU and of
    the kernel's own file."""
    others = ("counter_rng.py", "kernels.py")  # their constants are compiled into kernels
    files = {*HERE.glob("*.py"), *(HERE.parent / name for name in others), source}
    made_of = repr(GREEDY_BELOW).encode() + b"".join(file.read_bytes() for file in sorted(files))
    name = f"kernels-{hashlib.blake2b(made_of, digest_size=8).hexdigest()}"
    return next((at / name for at in places if at.is_absolute() and is_ours(at) and is_ours(at / name)), None)


def num_kernels() -> int:
    return sum(file.read_text().count("\n@kernel\n") for file in HERE.glob("*.py"))


@contextmanager
def _alone_in(directory: Path, name: str) -> Iterator[None]:
    """Lock the directory while the kernel `name` is compiled or loaded, so that only one process compiles it.

    The lock file has a line for each kernel: its name and, once it is compiled, how many seconds compilation took.
    """
    with (directory / "lock").open("a+") as lock:
        with suppress(OSError):  # if files cannot be locked, every process compiles
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not _compile_times(lock):  # log this only at the first kernel; the other process logs the rest
                    log.info("waiting for another process to compile the kernels")
                fcntl.flock(lock, fcntl.LOCK_EX)
        compiled = _compile_times(lock)
        if name in compiled:
            yield
            return
        number, total, started = len(compiled) + 1, num_kernels(), time.monotonic()
        kept = f", once; they are kept in {directory}" if number == 1 else ""
        log.info("compiling kernels for this CPU (%d of %d)%s", number, total, kept)
        print(f"\n{name}", end="", file=lock, flush=True)
        yield
        seconds = time.monotonic() - started
        print(f" {seconds:.2f}", end="", file=lock, flush=True)
        if number == total:
            log.info("compiled %d kernels in %.0f s", total, sum(compiled.values()) + seconds)


def _compile_times(lock: TextIO) -> dict[str, float]:
    """Return the compile times of the kernels that have been compiled, in seconds, keyed by the kernel's name."""
    lock.seek(0)
    lines = [line.split() for line in lock.read().splitlines()]
    return {line[0]: float(line[1]) for line in lines if len(line) == 2}


def _compiled(function: Callable[[Any], None]) -> Any:
    """Load the kernel from the on-disk cache, or compile it.

    A corrupt cache is deleted. If the cache is not writable, the kernel is compiled without caching.
    """
    compiling = partial(numba.cfunc, types.void(types.CPointer(types.int64)), error_model="numpy")  # type: ignore[attr-defined]
    directory = cache_directory(Path(function.__code__.co_filename), cache_places())
    if directory is not None:
        numba.config.CACHE_DIR = str(directory)
        try:
            with _alone_in(directory, function.__qualname__):
                return compiling(cache=True)(function)
        except (OSError, EOFError, UnpicklingError) as error:
            log.warning("compiled kernels in %s cannot be used, compiling them again: %s", directory, error)
            shutil.rmtree(directory, ignore_errors=True)
    return compiling()(function)


class Kernel:
    """A compiled function that takes a pointer to int64 values, which are numbers and the addresses of tensors."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled  # numba's object, for inspecting the code
        self.address: int = compiled.address  # address of the C function
        self._alone = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def __call__(self, work: int, *values: int) -> None:
        """Run the kernel on `values`. `work` is the number of elementary operations.

        A small call runs on this thread and keeps the interpreter lock. A large call releases the lock and uses as many
        threads as torch. The memory at each address in `values` must have the layout that the kernel expects, and must
        stay valid during the call.
        """
        packed = array("q", values)
        address = packed.buffer_info()[0]
        if work < PARALLEL_WORK:
            self._alone(address)
        else:
            _parallel(self.address, address, torch.get_num_threads(), 0)


def kernel(function: Callable[[Any], None]) -> Kernel:
    """Compile, or load from disk, a function of `values` (a pointer to int64) that every thread of a team runs.

    The function finds its thread's share of the work with `thread_number()` and `num_threads()`, or with a counter that
    the threads share. The function must not raise.
    """
    return Kernel(_compiled(function))


def part(function: F) -> F:
    """Mark a function to be compiled with the kernels that call it."""
    return numba.njit(error_model="numpy")(function)  # type: ignore[no-any-return]


def inlined(function: F) -> F:
    """Mark a function to be inlined at every call. Functions with vector arguments need this."""
    return numba.njit(error_model="numpy", forceinline=True)(function)  # type: ignore[no-any-return]

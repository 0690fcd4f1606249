"""Whether kernels can be compiled for this machine's CPU. Where they cannot, plain torch computes."""

import importlib
import logging
from functools import cache

log = logging.getLogger("baton.engine")


@cache
def why_not_compiled() -> str:
    """What kernels lack here: numba, torch's OpenMP, a CPU that LLVM knows; empty where they run. Logged once."""
    try:
        importlib.import_module("engine.cpu.jit")
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        log.warning("no compiled kernels here, torch computes instead, more slowly: %s", error)
        return str(error)
    return ""

"""Kernels for CPUs, compiled by numba, and a check of whether this machine can compile them."""

import importlib
import logging
from functools import cache

log = logging.getLogger("baton.engine")


@cache
def why_not_compiled() -> str:
    """Return the reason why kernels cannot be compiled on this machine, or "" if they can. Log the reason once."""
    try:
        importlib.import_module("engine.cpu.jit")
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        log.warning("kernels cannot be compiled on this machine; using torch, which is slower: %s", error)
        return str(error)
    return ""

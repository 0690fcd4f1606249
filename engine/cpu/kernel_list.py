"""Many kernels in one call, as machine code for this CPU. Importing it compiles, or loads what was compiled before."""

from typing import Any

from llvmlite import ir
from numba.core import types

from engine.cpu.jit import kernel, wait_for_all
from engine.cpu.simd import address_at, emit_pointer, written

_LONG = ir.IntType(64)


def _call(builder: Any, function: Any, values: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_LONG.as_pointer()])
    builder.call(emit_pointer(builder, function, kind), [emit_pointer(builder, values, _LONG)])


_call_kernel = written(types.void, (types.int64, types.int64), _call)


@kernel
def run(values: Any) -> None:
    """values: how many kernels, the list of their addresses, the values of the first, and how many bytes behind them
    those of the next lie. Each kernel begins when all threads are done with the one before."""
    kernels, given, stride = values[1], values[2], values[3]
    for index in range(values[0]):
        _call_kernel(address_at(kernels + 8 * index), given + stride * index)
        wait_for_all()

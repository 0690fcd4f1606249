"""Fixes for Triton's interpreter. test_interpreter.py runs the files here in a process with the interpreter enabled."""

import os

import numpy as np
import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _numbers_for_dot() -> None:
    """Make `dot` convert bfloat16 to float32. The interpreter would multiply the bits as integers."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreter.py, which sets TRITON_INTERPRET=1"
    dot = InterpreterBuilder.create_dot

    def widened(operand: TensorHandle) -> TensorHandle:
        if operand.dtype.scalar is not tl.bfloat16:
            return operand
        return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot_of_numbers(self, a, b, *rest):
        return dot(self, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = dot_of_numbers


@pytest.fixture(scope="session", autouse=True)
def _rounding_to_float8() -> None:
    """Make conversions to float8 round as a GPU does. The interpreter loses a carry into the exponent: 126 becomes 64
    instead of 128."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_by_torch(numbers, given, wanted, rounding_mode):
        if (given, wanted) != (tl.float32, tl.float8e4nv):
            return convert(numbers, given, wanted, rounding_mode)
        rounded = torch.from_numpy(np.ascontiguousarray(numbers, np.float32)).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8).numpy().reshape(numbers.shape)

    interpreter._convert_float = convert_by_torch

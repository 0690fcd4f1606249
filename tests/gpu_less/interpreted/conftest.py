"""Mends Triton's interpreter. The files here are run by test_interpreter.py, in a process where it is switched on."""

import os

import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def _numbers_for_dot() -> None:
    """The interpreter holds bfloat16 as uint16 and would multiply the bits."""
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

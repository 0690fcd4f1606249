"""A fix for Triton's interpreter. test_interpreter.py runs the files here in a process with the interpreter enabled."""

import os

import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def _numbers_for_dot() -> None:
    """Make `dot` convert bfloat16, which the interpreter holds as uint16 and would multiply as integers."""
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

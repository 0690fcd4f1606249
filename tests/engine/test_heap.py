"""Test that all layers of a long step reuse the same heap memory for a tensor that each layer allocates and frees."""

import platform
import subprocess
import sys

import pytest

# Each layer allocates a tensor, then a small object that stays, and frees the tensor.
LAYERS = """
import torch
from engine.cpu.malloc import empty, keep_large_blocks

keep_large_blocks()
found, kept = set(), []
for layer in range(12):
    tensor = empty(2048, 768)
    found.add(tensor.data_ptr())
    assert tensor.shape == (2048, 768) and tensor.dtype == torch.float32 and tensor.data_ptr() % 64 == 0
    kept.append(bytearray(100_000))
    del tensor
print(len(found))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_each_layer_reuses_the_memory_of_the_previous_layers_tensor() -> None:
    found = subprocess.run([sys.executable, "-c", LAYERS], capture_output=True, text=True, check=True, timeout=600)
    assert int(found.stdout) <= 2

"""The KV pool of a device, which is a typed view of memory to which peers may also write, and checks of its size."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shared.kv.layout import KVLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Block 0 is never allocated to a request. The padding of block tables refers to it.
DUMMY_BLOCK = 0


class PoolMemory(Protocol):
    """Memory with one row of bytes per block, uint8 [num_rows, row_bytes], on the host (numpy) or a GPU (torch)."""

    @property
    def rows(self) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]] | Tensor": ...


class KVPool:
    """A view of `memory` as a tensor of shape `layout.shape`. It shares the memory that peers write to.

    Raises ValueError if the memory's rows do not match the layout's blocks.
    """

    def __init__(self, layout: KVLayout, memory: PoolMemory) -> None:
        wanted = (layout.num_blocks, layout.block_bytes)
        if tuple(memory.rows.shape) != wanted:
            raise ValueError(f"KV memory has {tuple(memory.rows.shape)} rows x bytes, but the layout needs {wanted}")
        self.layout = layout
        self.memory = memory  # a reference, so that the mapping exists as long as the view
        rows = memory.rows if isinstance(memory.rows, Tensor) else torch.from_numpy(memory.rows)
        self.tensor = rows.view(DTYPES[layout.dtype]).view(layout.shape)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the K and V of one layer as strided views [num_blocks, kv_heads, block_tokens, head_dim]."""
        both = self.tensor[:, :, index]
        return both[..., 0, :], both[..., 1, :]


def check_holds(layout: KVLayout, max_model_len: int) -> None:
    """Raise ValueError unless a request of `max_model_len` tokens fits into the pool."""
    room = (layout.num_blocks - 1) * layout.block_tokens
    if max_model_len > room:
        needed = 1 + -(-max_model_len // layout.block_tokens)
        raise ValueError(
            f"--max-model-len {max_model_len}: the KV pool holds {room} tokens ({layout.num_blocks - 1} blocks of "
            f"{layout.block_tokens}); use --num-blocks {needed} or --kv-cache-memory {needed * layout.block_bytes}"
        )


def blocks_for(memory_bytes: int, one_block: KVLayout) -> int:
    """Return how many blocks fit into the memory, with the dummy block. Raises ValueError if fewer than two fit."""
    num_blocks = memory_bytes // one_block.block_bytes
    if num_blocks < 2:
        raise ValueError(
            f"{memory_bytes} bytes of KV memory hold {max(0, num_blocks)} blocks of {one_block.block_bytes} bytes "
            f"({one_block.layers} layers x {one_block.kv_heads} heads x {one_block.block_tokens} tokens x 2 x "
            f"{one_block.head_dim} x {one_block.dtype}); at least 2 are needed, which "
            f"take {2 * one_block.block_bytes} bytes"
        )
    return num_blocks

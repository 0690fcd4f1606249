"""The KV pool of a device: a typed view of memory that peers may also write."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.models.kv_places import KVPlaces, all_in_one_row
from shared.kv.layout import KVLayout

DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn
}  # fmt: skip
FLOAT8_LIMIT = 448.0  # the largest finite number of float8_e4m3fn

# Block 0 is never allocated to a request. The padding of block tables refers to block 0.
DUMMY_BLOCK = 0


class PoolMemory(Protocol):
    """Memory with one row of bytes per block, uint8 [num_rows, row_bytes], on the host (numpy) or a GPU (torch)."""

    @property
    def rows(self) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]] | Tensor": ...


@dataclass(frozen=True, slots=True)
class PrivateMemory:
    """Memory that no peer maps."""

    rows: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]"


class KVPool:
    """A view of `memory` as a tensor of shape `layout.shape`. Data that peers write to `memory` appear in the tensor.

    `places` has the place of each layer in the rows. By default, a row holds all layers. If the pool's dtype is float8,
    a layer's keys and values are divided by its two `scales` (1 by default) and limited to the dtype's range.
    Raises ValueError if the memory's rows do not match the layout's blocks.
    """

    def __init__(
        self,
        layout: KVLayout,
        memory: PoolMemory,
        places: KVPlaces | None = None,
        scales: Sequence[tuple[float, float]] = (),
    ) -> None:
        wanted = (layout.num_blocks, layout.block_bytes)
        if tuple(memory.rows.shape) != wanted:
            raise ValueError(f"KV memory has {tuple(memory.rows.shape)} rows x bytes, but the layout needs {wanted}")
        self.layout = layout
        self.places = places or all_in_one_row(layout.layers)
        self.memory = memory  # this reference keeps the memory mapped as long as the view exists
        rows = memory.rows if isinstance(memory.rows, Tensor) else torch.from_numpy(memory.rows)
        self.tensor = rows.view(DTYPES[layout.dtype]).view(layout.shape)
        self.is_float8 = self.tensor.dtype == torch.float8_e4m3fn
        self.scales = scales or ((1.0, 1.0),) * self.places.num_layers
        # int64 [2, units]: the row of each unit of a state (see `unit_places`), and the unit's offset in the row
        self.units = torch.tensor(self.places.units, dtype=torch.int64, device=rows.device).view(-1, 2).T.contiguous()

    @property
    def floats(self) -> Tensor:
        """The pool as a flat float32 tensor, for recurrent states."""
        return self.tensor.view(-1).view(torch.float32)

    def stored(self, layer: int, rows: Tensor) -> Tensor:
        """Return keys and values, [..., 2, n], in the form that the pool stores."""
        if self.is_float8:
            key_scale, value_scale = self.scales[layer]
            rows = torch.stack((rows[..., 0, :] / key_scale, rows[..., 1, :] / value_scale), dim=-2)
            rows = rows.clamp(-FLOAT8_LIMIT, FLOAT8_LIMIT)
        return rows.to(self.tensor.dtype)

    def state_places(self, rows: Tensor) -> Tensor:
        """Return the offset in `floats` of each unit of the given states, int64 [..., units]. `rows`, int64 [..., R],
        has the rows of the states. If a unit's row is -1, its offset is -1 too."""
        own = rows[..., self.units[0]]
        return torch.where(own < 0, own, own * (self.layout.block_bytes // 4) + self.units[1])

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the K and V of one layer as strided views [num_blocks, kv_heads, block_tokens, head_dim].

        Only the blocks in the layer's block table belong to the layer.
        """
        both = self.tensor[:, :, self.places.places[index]]
        return both[..., 0, :], both[..., 1, :]

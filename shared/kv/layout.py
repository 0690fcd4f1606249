"""The layout of a KV pool. Only this module defines the order of heads, layers and tokens inside a block."""

from dataclasses import dataclass
from math import prod

HOST_KV_BYTES = 512 << 20  # default size of the KV pool of a node on the CPU
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layout of a pool: block-major, heads before layers. It is vLLM's BHLNC, with K and V packed (vLLM PR #33339).

    A block with all its layers is one contiguous row, so that a handoff moves few large pieces. Within a block, a range
    of heads is contiguous too, so that peers can divide the heads differently. Raises ValueError if a size is below one
    or the dtype is not supported.
    """

    num_blocks: int
    kv_heads: int
    layers: int
    block_tokens: int
    head_dim: int
    dtype: str  # the name of a torch dtype

    def __post_init__(self) -> None:
        if self.dtype not in BYTES_OF:
            raise ValueError(f"KV dtype {self.dtype!r} is not one of {', '.join(BYTES_OF)}")
        if min(self.shape) < 1:
            raise ValueError(f"KV layout: the shape is {self.shape}, every size must be positive")

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """The shape of the pool: [num_blocks, kv_heads, layers, block_tokens, 2 (K and V), head_dim]."""
        return self.num_blocks, self.kv_heads, self.layers, self.block_tokens, 2, self.head_dim

    @property
    def block_bytes(self) -> int:
        """The size of one row of the pool in bytes. A row is a block with all its layers."""
        return prod(self.shape[1:]) * BYTES_OF[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """The size in bytes of the keys and values of one head in one layer of a block. These bytes are contiguous."""
        return self.block_bytes // (self.kv_heads * self.layers)

    def describe(self) -> str:
        """Return a text that is equal for two pools that can exchange blocks. It omits the number of blocks."""
        return (
            f"kv=BHLNC heads={self.kv_heads} layers={self.layers} block_tokens={self.block_tokens} "
            f"head_dim={self.head_dim} dtype={self.dtype}"
        )

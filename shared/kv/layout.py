"""The shape of a KV pool: the one place that orders heads, layers and tokens inside a block."""

from dataclasses import dataclass, fields
from math import prod

HOST_KV_BYTES = 512 << 20  # that a node on a CPU takes when nothing else is asked for
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Block-major, heads before layers (vLLM's BHLNC with K and V packed; PR #33339 there shows why it pays).

    A block of all layers is one contiguous row, so a handoff moves few large pieces; a range of the heads of a
    block is one contiguous piece too, for peers that split heads differently. Raises ValueError for a size that is
    no positive integer or a dtype that no pool holds.
    """

    num_blocks: int
    kv_heads: int
    layers: int
    block_tokens: int
    head_dim: int
    dtype: str  # torch's name of it

    def __post_init__(self) -> None:
        if self.dtype not in BYTES_OF:
            raise ValueError(f"KV dtype {self.dtype!r} is not one of {', '.join(BYTES_OF)}")
        for size in fields(self)[:-1]:
            value = getattr(self, size.name)
            if type(value) is not int or value < 1:
                raise ValueError(f"KV layout: {size.name} is {value!r}, it must be a positive integer")

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """[num_blocks, kv_heads, layers, block_tokens, K and V, head_dim]."""
        return self.num_blocks, self.kv_heads, self.layers, self.block_tokens, 2, self.head_dim

    @property
    def block_bytes(self) -> int:
        """Size of one block of all layers: one row of the pool."""
        return prod(self.shape[1:]) * BYTES_OF[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """Of one head's keys and values of one layer in a block: one contiguous piece."""
        return self.block_bytes // (self.kv_heads * self.layers)

    def describe(self) -> str:
        """What two peers must have in common to exchange blocks; the number of blocks is each one's own."""
        return (
            f"kv=BHLNC heads={self.kv_heads} layers={self.layers} block_tokens={self.block_tokens} "
            f"head_dim={self.head_dim} dtype={self.dtype}"
        )

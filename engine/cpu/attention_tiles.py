"""The tiles in which attention kernels read a context: finds their rows in the KV pool, and prefetches them."""

from engine.cpu.jit import part
from engine.cpu.simd import FLOAT32, LANES, address_at, index_at, load_some, prefetch, put_address, store

TILE = 96  # tokens: whole panels of a product's rows
FEW_ROWS = 8  # an item of at most this many rows (query heads that share a key head) is computed as a decode
FEW_TILE = 32  # tokens of a decode's tile, so that the current and the next tile fit into the first two caches
LINE = 64  # bytes of a cache line
FIELDS = 7  # of an item: see `engine.cpu.attention.AttentionWork`
# Bytes of a block and of a token, tokens of a block, the code of the pool's dtype, and the dimensions of a head.
Sizes = tuple[int, int, int, int, int]


@part
def tile_of(rows: int) -> int:
    return FEW_TILE if rows <= FEW_ROWS else TILE


@part
def locate(table: int, low: int, high: int, base: int, sizes: Sizes, rows: int) -> int:
    """List the addresses of the key and value of each token in positions [low, high). Return their number."""
    block_bytes, token_bytes, block_tokens, _, _ = sizes
    count = high - low
    token = 0
    while token < count:
        position = low + token
        inside = position % block_tokens
        row = base + index_at(table + 4 * (position // block_tokens)) * block_bytes + inside * token_bytes
        for _ in range(min(block_tokens - inside, count - token)):
            put_address(row, rows + 8 * token)
            row += token_bytes
            token += 1
    return count


@part
def fetch(rows: int, tokens: int, token_bytes: int) -> None:
    """Prefetch the keys and values of a list of tokens."""
    for token in range(tokens):
        row = address_at(rows + 8 * token)
        for at in range(0, token_bytes, LINE):
            prefetch(row + at)


@part
def fill_up(rows: int, tokens: int, columns: int, zeros: int) -> None:
    """Pad a list of `tokens` to `columns` entries with the address of a row of zeros."""
    for token in range(tokens, columns):
        put_address(zeros, rows + 8 * token)


@part
def widen(rows: int, count: int, sizes: Sizes, wide: int, widened: int) -> None:
    """Copy keys and values as float32, padded with zeros to whole vectors, and list their new addresses."""
    _, _, _, code, head_dim = sizes
    item = 4 if code == FLOAT32 else 2
    padded = (head_dim + LANES - 1) // LANES * LANES
    for token in range(count):
        row, to = address_at(rows + 8 * token), wide + 8 * padded * token
        put_address(to, widened + 8 * token)
        for at in range(0, head_dim, LANES):
            store(load_some(row + at * item, head_dim - at, code), to + 4 * at)
            store(load_some(row + (head_dim + at) * item, head_dim - at, code), to + 4 * (padded + at))


@part
def shares(rows: int, padded: int, token_bytes: int) -> tuple[int, int]:
    """Return how many cache lines of the next tile to prefetch with each vector of a key, and with each value.

    The prefetches are spread evenly over the current tile, because after a burst the CPU would wait for the memory. A
    group of LANES tokens is assumed to be contiguous; if it is not, only the speed is lower."""
    by_values = max(1, token_bytes // (4 * LINE))
    left = LANES * max(0, token_bytes // LINE - by_values)
    steps = rows * padded // LANES
    return (left + steps - 1) // steps, by_values


@part
def first_tile(
    unit: int, units: int, items: int, table: int, table_width: int, pool: int, head_bytes: int, kv_heads: int,
    group: int, sizes: Sizes, rows: int,
) -> int:  # fmt: skip
    """List the addresses of the tokens in a unit's first tile. Return their number, or 0 if the unit does not exist."""
    if unit >= units:
        return 0
    item = items + 4 * FIELDS * (unit // kv_heads)
    blocks, base = table + 4 * index_at(item) * table_width, pool + unit % kv_heads * head_bytes
    low, high = index_at(item + 16), index_at(item + 20)
    return locate(blocks, low, min(high, low + tile_of(group * index_at(item + 8))), base, sizes, rows)

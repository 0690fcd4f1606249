"""The tiles that attention's kernels take a context in: which rows of the pool they are, and how those are read from
memory before they are wanted."""

from engine.cpu.jit import part
from engine.cpu.simd import FLOAT32, LANES, address_at, index_at, load_some, prefetch, put_address, store

TILE = 96  # tokens: whole panels of a product's rows
FEW_ROWS = 8  # of a decode: as many query heads as share a key head
FEW_TILE = 32  # tokens of a decode's tile: this one and the next, being fetched, stay in the caches close by
LINE = 64  # bytes of a cache line
FIELDS = 7  # of an item: see `numba_backend.Work`
# Bytes of a block and of a token, tokens of a block, the code of the pool's dtype, and the dimensions of a head.
Sizes = tuple[int, int, int, int, int]


@part
def tile_of(rows: int) -> int:
    return FEW_TILE if rows <= FEW_ROWS else TILE


@part
def locate(table: int, low: int, high: int, base: int, sizes: Sizes, rows: int) -> int:
    """Lists where in the pool the key and value of each token from position `low` to `high` are. Their number."""
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
    """Asks for all keys and values of the tokens of a list."""
    for token in range(tokens):
        row = address_at(rows + 8 * token)
        for at in range(0, token_bytes, LINE):
            prefetch(row + at)


@part
def fill_up(rows: int, tokens: int, columns: int, zeros: int) -> None:
    """Fills a list of `tokens` up to whole vectors with the address of a row of zeros."""
    for token in range(tokens, columns):
        put_address(zeros, rows + 8 * token)


@part
def widen(rows: int, count: int, sizes: Sizes, wide: int, widened: int) -> None:
    """Copies keys and values as float32 in whole vectors, with zeros after them, and lists where they are then."""
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
    """How many cache lines of the next tile to fetch beside each vector of a key, and beside each value, so that all
    of it is asked for evenly while this tile is computed: in bursts, the CPU would wait for memory and then memory
    for the CPU. A group of LANES tokens is taken to lie in one piece; where it does not, that only costs speed."""
    by_values = max(1, token_bytes // (4 * LINE))
    left = LANES * max(0, token_bytes // LINE - by_values)
    steps = rows * padded // LANES
    return (left + steps - 1) // steps, by_values


@part
def first_tile(
    unit: int, units: int, items: int, table: int, table_width: int, pool: int, head_bytes: int, kv_heads: int,
    group: int, sizes: Sizes, rows: int,
) -> int:  # fmt: skip
    """Lists where the tokens of a unit's first tile are. Their number, 0 if there is no such unit."""
    if unit >= units:
        return 0
    item = items + 4 * FIELDS * (unit // kv_heads)
    blocks, base = table + 4 * index_at(item) * table_width, pool + unit % kv_heads * head_bytes
    low, high = index_at(item + 16), index_at(item + 20)
    return locate(blocks, low, min(high, low + tile_of(group * index_at(item + 8))), base, sizes, rows)

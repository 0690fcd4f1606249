"""Divides the attention of a step into items of work, which threads take in order.

The division is compiled, because with NumPy it would take longer than some layers of a small model.
"""

from array import array
from typing import Any

import numpy as np
import torch
from numba import carray

from engine.batch import Batch
from engine.cpu.attention_tiles import FIELDS
from engine.cpu.jit import kernel
from engine.cpu.simd import pointer_to

# Maximum number of rows that are computed together. A row is a query of one query head. All rows share a key head. The
# matrix product of 128 rows and the keys consists of whole panels, and the sums of 128 rows fit into the L2 cache.
MAX_ROWS = 128
MIN_PART = 256  # minimum number of tokens in each part of a divided context
PARTS_PER_THREAD = 2  # long contexts are divided so that each thread gets about this many parts


@kernel
def divide(values: Any) -> None:
    """Store the items of a step, and the items whose parts must be merged (see `AttentionWork`).

    The code below names the `values`. `at_once` is the number of queries per item, `group` the number of query heads
    per key head, and `first_key` the first visible position. All contexts together are divided into about `shares`
    parts, or are not divided if `shares` is 0. There is memory for `most` items. The `results` are the number of items,
    the number of items to merge, the number of rows of partial results, and the number of operations."""
    slices, at_once, group, window, first_key = values[0], values[3], values[4], values[5], values[6]
    kv_heads, shares, most = values[7], values[8], values[9]
    starts, ends = carray(pointer_to(values[1]), slices, np.int64), carray(pointer_to(values[2]), slices, np.int64)
    items = carray(pointer_to(values[10]), (most, FIELDS), np.int32)
    merged = carray(pointer_to(values[11]), (most, FIELDS), np.int32)
    results = carray(pointer_to(values[12]), 4, np.int64)
    whole, costs = np.empty((most, 6), np.int64), np.empty(most, np.int64)
    count = row = total = 0
    for index in range(slices):
        for start in range(starts[index], ends[index], at_once):
            end = min(start + at_once, ends[index])
            low = max(first_key, start + 1 - window) if window else first_key
            whole[count, 0], whole[count, 1], whole[count, 2] = index, row, end - start
            whole[count, 3], whole[count, 4], whole[count, 5] = start, low, end
            costs[count] = (end - low) * ((end - start) * group + 8)  # the 8 accounts for reading the keys and values
            total += costs[count]
            row += end - start
            count += 1
    fair = max(1, kv_heads * total // shares) if shares else total + 1  # intended cost of a part
    num_items = num_merged = part_rows = 0
    for at in np.argsort(-costs[:count], kind="mergesort"):  # costliest first, so that threads finish together
        low, length = whole[at, 4], whole[at, 5] - whole[at, 4]
        parts = max(1, min((costs[at] + fair - 1) // fair, length // MIN_PART))
        if parts > 1:
            merged[num_merged, 0], merged[num_merged, 1] = whole[at, 1], whole[at, 2]
            merged[num_merged, 2], merged[num_merged, 3] = part_rows, parts
            num_merged += 1
        for number in range(parts):
            for field in range(4):
                items[num_items, field] = whole[at, field]
            items[num_items, 4] = low + length * number // parts
            items[num_items, 5] = low + length * (number + 1) // parts
            items[num_items, 6] = part_rows if parts > 1 else -1
            part_rows += whole[at, 2] * kv_heads * group if parts > 1 else 0
            num_items += 1
    results[0], results[1], results[2], results[3] = num_items, num_merged, part_rows, kv_heads * total


class AttentionWork:
    """The attention of a step for one window size, divided into items.

    An item consists of adjacent queries of one slice, and of all or a part of the context that these queries read.
    Threads take units of work: a unit is the work of one item for one key head.

    Fields of an item, int32: slice, row of the first query, number of queries, position of the first query, start and
    end of the context, and the row where the item's result begins if the context is divided (otherwise -1). Fields of
    an entry to merge: row of the first query, number of queries, row of the first part's result, and number of parts.
    """

    def __init__(self, batch: Batch, kv_heads: int, group: int, window: int, threads: int) -> None:
        at_once = max(1, MAX_ROWS // group)
        starts, ends, results = array("q", batch.starts), array("q", batch.kv_lens), array("q", bytes(32))
        shares = threads * PARTS_PER_THREAD if threads > 1 else 0
        most = 2 * shares + sum(-(-count // at_once) for count in batch.counts)
        self._memory = torch.empty(2, most, FIELDS, dtype=torch.int32)
        self.items_at, self.merged_at = (each.data_ptr() for each in self._memory)
        divide(
            0, len(starts), starts.buffer_info()[0], ends.buffer_info()[0], at_once, group, window, batch.first_key,
            kv_heads, shares, most, self.items_at, self.merged_at, results.buffer_info()[0],
        )  # fmt: skip
        self.num_items, self.num_merged, self.part_rows, self.operations = results

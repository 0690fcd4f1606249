"""Checks a decoder that runs through transformers: its logits must not depend on how prompts are chunked or batched."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from engine.attention import AttentionBackend
from engine.batch import BlockRows, build
from engine.cpu.selection import kernels_on_cpu
from engine.foreign.decoder import ForeignDecoder
from engine.kv_pool import KVPool
from engine.models.kv_places import STATE_BYTES, all_in_one_row, with_states
from engine.models.spec import ModelConfig, state_units
from scheduler.request import Request, Slice, StateUse, cdiv
from shared.kv.layout import KVLayout
from shared.kv.memory import HostMemory

LENGTHS = (40, 3, 17)
BLOCK_TOKENS = 4
TOLERANCE = 1e-4  # largest accepted difference of two logits, relative to the range of all logits
# Ways to compute the prompts: the sizes of the chunks of each prompt, and whether prompts share steps. The tokens of a
# prompt that remain after these chunks form one more chunk.
CUTS: dict[str, tuple[Sequence[Sequence[int]], bool]] = {
    "whole and alone": (((), (), ()), False),
    "in chunks, with other prompts": (((7, 1, 5, 13), (1, 1), (4, 9)), True),
    "resumed token by token": (((37, 1, 1), (1, 1), (14, 1, 1)), True),
}


def check(
    decoder: ForeignDecoder,
    backend: Callable[[KVPool], AttentionBackend],
    expected: list[Tensor] | None = None,
    tolerance: float = TOLERANCE,
) -> list[Tensor]:
    """Compare the decoder's logits with `expected`, for each entry of `CUTS`.

    By default, the same module computes the expected logits with transformers' own eager attention. Returns the
    expected logits. Raises ValueError, which names the entry, if logits differ by over `tolerance` times their range.
    """
    prompts = prompts_of(decoder.config)
    expected = own_logits(decoder, prompts) if expected is None else expected
    span = max(float(one.max() - one.min()) for one in expected)
    if not all(bool(one.isfinite().all()) for one in expected) or span == 0:
        raise ValueError("transformers' own logits are all equal, infinite or NaN: the weights are damaged")
    for name, (cuts, together) in CUTS.items():
        found = packed_logits(decoder, backend, prompts, cuts, together)
        for prompt, ours, theirs in zip(prompts, found, expected, strict=True):
            difference = float((ours - theirs).abs().max()) / span
            if not difference <= tolerance:
                why = "" if decoder.takes_positions else "; its code takes no position_ids, so it cannot compute chunks"
                raise ValueError(
                    f"the check failed: a prompt of {len(prompt)} tokens computed {name} has logits that differ from "
                    f"transformers' own by {difference:.1e} of their range, more than {tolerance:.0e}{why}"
                )
    return expected


def prompts_of(config: ModelConfig) -> list[list[int]]:
    random = Random(0)
    return [
        [random.randrange(config.vocab_size) for _ in range(min(length, config.max_position_embeddings))]
        for length in LENGTHS
    ]


@torch.inference_mode()
def own_logits(decoder: ForeignDecoder, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    with decoder.own_attention() as module:
        return [module(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float() for prompt in prompts]


@torch.inference_mode()
def packed_logits(
    decoder: ForeignDecoder,
    backend_of: Callable[[KVPool], AttentionBackend],
    prompts: Sequence[Sequence[int]],
    cuts: Sequence[Sequence[int]],
    together: bool,
) -> list[Tensor]:
    """Compute all prompts in chunks, over a pool whose unused memory is NaN. Return the logits of all positions."""
    config = decoder.config
    row = row_layout(config)
    places, size = with_states(all_in_one_row(config.num_kv_layers), config, row.block_bytes), row.block_tokens
    blocks = [cdiv(len(prompt) + 1, size) for prompt in prompts]
    layout = replace(row, num_blocks=1 + sum(blocks) + 2 * places.state_rows * len(prompts))
    pool = KVPool(layout, HostMemory(layout.num_blocks, layout.block_bytes), places)
    pool.tensor.fill_(torch.nan)
    backend, kernels = backend_of(pool), kernels_on_cpu(config, pool)
    free = list(range(layout.num_blocks - 1, 0, -1))
    slices: list[list[Slice]] = []
    for number, (prompt, count, sizes) in enumerate(zip(prompts, blocks, cuts, strict=True)):
        # Logits are computed only at positions before the last token of a prompt. One more token is therefore added.
        request = Request(f"check-{number}", [*prompt, 0], len(prompt) + 1, 1, needs_prompt_logprobs=True)
        request.tables[0] = [free.pop() for _ in range(count)]
        sets = [tuple(free.pop() for _ in range(places.state_rows)) for _ in range(2)]
        slices.append(chunks(request, len(prompt), sizes, sets if places.state_rows else None))
    found: list[list[Tensor]] = [[] for _ in prompts]
    for step in steps(slices, together):
        batch = build(step, size, torch.device("cpu"), rows=BlockRows(places))
        logits = decoder.logits(decoder.forward(batch, kernels.begin(batch), backend.plan(batch)))
        for one, part in zip(step, torch.split(logits, [one.count for one in step]), strict=True):
            found[int(one.request.id.removeprefix("check-"))].append(part)
    return [torch.cat(parts) for parts in found]


def row_layout(config: ModelConfig) -> KVLayout:
    """Return the layout of one row of a small pool. The row is large enough for the largest unit of a state."""
    layout = KVLayout(1, config.num_kv_heads, config.num_kv_layers, BLOCK_TOKENS, config.head_dim, "float32")
    while layout.block_bytes < STATE_BYTES * max(state_units(config), default=0):
        layout = replace(layout, block_tokens=2 * layout.block_tokens)
    return layout


def chunks(
    request: Request, length: int, sizes: Sequence[int], states: Sequence[tuple[int, ...]] | None = None
) -> list[Slice]:
    """Divide a prompt into chunks. `states` are the rows of the request's two states. After each chunk, the state to
    read and the state to write are swapped."""
    cut: list[Slice] = []
    start = 0
    for size in (*sizes, length):
        count = min(size, length - start)
        if count:
            use = (
                None if states is None else StateUse(states[len(cut) % 2 - 1] if start else None, states[len(cut) % 2])
            )
            cut.append(Slice(request, start, count, False, 0, use))
        start += count
    return cut


def steps(slices: list[list[Slice]], together: bool) -> list[list[Slice]]:
    """Return the slices of each step. If `together`, the n-th chunks of all prompts share a step."""
    if not together:
        return [[one] for row in slices for one in row]
    longest = max(map(len, slices))
    return [[row[number] for row in slices if number < len(row)] for number in range(longest)]

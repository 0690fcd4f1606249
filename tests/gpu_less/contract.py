"""Checks of the Triton kernels against float64, run on a device and, with tiny shapes, under Triton's slow interpreter.
Unwritten memory of a pool is NaN, so that a wrong read makes the result NaN."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import torch
from torch import Tensor
from torch.nn.functional import gelu

from engine.attention import AttentionBackend, AttentionLayer
from engine.batch import Batch
from engine.kernels import Kernels, StepKernels
from engine.kv_pool import DTYPES, FLOAT8_LIMIT, KVPool
from engine.models.rope import inverse_frequencies
from engine.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, MoeSpec, Rope
from engine.routing import by_expert, route
from shared.kv.layout import KVLayout

FLOAT8 = torch.float8_e4m3fn
NAMES = {dtype: name for name, dtype in DTYPES.items()}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2, FLOAT8: 2**-4}

PLAIN = MoeSpec(10, 3, MlpSpec(8))
ROUTERS = {
    "softmax": PLAIN,
    "of the chosen": replace(PLAIN, scores_chosen=True),
    "softmax, not renormalized, one expert": replace(PLAIN, top_k=1, renormalizes=False),
    "sigmoid, groups, correction": replace(
        PLAIN, num_experts=12, score="sigmoid", corrects=True, groups=4, top_groups=2
    ),
    "groups by their best": replace(PLAIN, num_experts=12, groups=3, top_groups=1, group_scores=1),
}


class TensorMemory:
    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        self.rows = torch.empty((layout.num_blocks, layout.block_bytes), dtype=torch.uint8, device=device)


def pool_of(
    kv_heads: int,
    head_dim: int,
    page: int,
    dtype: torch.dtype,
    num_blocks: int,
    device: torch.device,
    layers: int = 2,
    scales: tuple[float, float] = (1.0, 1.0),
) -> KVPool:
    """Return a pool. `scales` are those of the keys and values of layer 1, for float8."""
    layout = KVLayout(num_blocks, kv_heads, layers, page, head_dim, NAMES[dtype])
    pool = KVPool(layout, TensorMemory(layout, device), scales=[(1.0, 1.0), scales] if layers == 2 else ())
    pool.tensor.fill_(torch.nan)
    return pool


def batch_of(spans: Sequence[tuple[int, int]], page: int, num_blocks: int, device: torch.device) -> Batch:
    """Return a batch with a slice per span (start, end) and random blocks. The span (-1, 0) is a padding decode."""
    free = list(range(1, num_blocks))
    Random(0).shuffle(free)
    rows = [[free.pop() for _ in range(-(-end // page))] for _, end in spans]
    width = max(1, *map(len, rows))
    positions = [position for start, end in spans for position in range(start, end)]
    slots = [
        row[position // page] * page + position % page if position >= 0 else -1
        for row, (start, end) in zip(rows, spans, strict=True)
        for position in range(start, end)
    ]
    cu_q = [0]
    for start, end in spans:
        cu_q.append(cu_q[-1] + end - start)

    def on_device(values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Batch(
        tokens=on_device([0] * len(positions), torch.int64),
        positions=on_device([max(0, position) for position in positions], torch.int64),
        slots=on_device(slots, torch.int64),
        cu_q=on_device(cu_q, torch.int32),
        kv_len=on_device([end for _, end in spans], torch.int32),
        block_table=on_device([row + [0] * (width - len(row)) for row in rows], torch.int32),
        logit_rows=on_device([], torch.int64),
        starts=[start for start, _ in spans],
        kv_lens=[end for _, end in spans],
        sampled=[],
        scored=[],
    )


def random(shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def fill(pool: KVPool, batch: Batch, layer: int) -> list[Tensor]:
    """Store random K and V for each slice's context. Return them as float64 [context, kv_heads, 2, head_dim]."""
    layout, contexts = pool.layout, []
    scales = torch.tensor(pool.scales[layer], device=pool.tensor.device, dtype=torch.float64)[:, None]
    for index, end in enumerate(batch.kv_lens):
        both = random((end, layout.kv_heads, 2, layout.head_dim), pool.tensor.dtype, pool.tensor.device, index)
        at = torch.arange(end, device=pool.tensor.device)
        blocks = batch.block_table[index].long()[at // layout.block_tokens]
        pool.tensor[:, :, layer][blocks, :, at % layout.block_tokens] = both
        contexts.append(both.double() * scales)
    return contexts


def attended(
    q: Tensor, context: Tensor, start: int, window: int, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Return attention, by its definition, in float64. Row i of q [n, heads, head_dim] is at position `start` + i."""
    group = q.shape[1] // context.shape[1]
    keys, values = (context[:, :, which].repeat_interleave(group, dim=1) for which in (0, 1))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * q.shape[2] ** -0.5
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    position = torch.arange(start, start + len(q), device=q.device)[:, None]
    key = torch.arange(len(context), device=q.device)
    seen = (key <= position) & ((key > position - window) if window else True)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(context)], values)


def check_attention(
    backend: AttentionBackend,
    pool: KVPool,
    batch: Batch,
    heads: int,
    dtype: torch.dtype,
    window: int = 0,
    pad: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Check attention over a batch. `pad` rows of NaN follow the last slice, and their output must be zero."""
    contexts = fill(pool, batch, layer=1)
    rows = len(batch.tokens)
    q = random((rows + pad, heads, pool.layout.head_dim), dtype, pool.tensor.device, 99)
    q[rows:] = torch.nan
    out = backend.plan(batch).attend(AttentionLayer(1, window, softcap, sinks), q)
    assert out.dtype == dtype
    assert out.shape == q.shape
    assert not out[rows:].any()
    for index, (start, end) in enumerate(zip(batch.starts, batch.kv_lens, strict=True)):
        first = int(batch.cu_q[index])
        got = out[first : first + end - start].double()
        if end == 0:
            assert not got.any()
            continue
        expected = attended(q[first : first + end - start], contexts[index], start, window, softcap, sinks)
        worst = (got - expected).abs().max().item()
        assert worst <= TOLERANCE[dtype] * max(1.0, expected.abs().max().item()), (index, start, end, worst)


def config_of(hidden: int, heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    layer = LayerSpec(AttentionSpec(heads, kv_heads, head_dim, qk_norm=True), MlpSpec(2 * hidden))
    return ModelConfig("Qwen3ForCausalLM", hidden, 100, (layer, layer), 1e-5, False, 4096)


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    assert got.shape == expected.shape
    worst = (got.double() - expected).abs().max().item()
    assert worst <= TOLERANCE[dtype] * max(1.0, expected.abs().max().item()), worst


def normed(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    rows = rows.double()
    return rows * (rows.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.double()


def check_norms(kernels: Kernels, batch: Batch, width: int, dtype: torch.dtype, device: torch.device) -> None:
    step = kernels.begin(batch)
    hidden, update = (random((5, width), dtype, device, seed) for seed in (1, 2))
    weight = random((width,), dtype, device, 3)
    close(step.norm(hidden, weight), normed(hidden, weight, 1e-5), dtype)
    stacked = hidden.view(5, 1, width).expand(5, 2, width)
    close(step.norm(stacked, weight), normed(stacked, weight, 1e-5), dtype)
    total = hidden + update
    added, after = step.add_norm(hidden, update, weight)
    close(added, total.double(), dtype)
    close(after, normed(total, weight, 1e-5), dtype)
    gate_up = random((3, 2 * width), dtype, device, 4)
    gate, up = gate_up.double().chunk(2, dim=1)
    close(step.gated(gate_up, "silu"), gate * gate.sigmoid() * up, dtype)
    close(step.gated(gate_up, "gelu_tanh"), gelu(gate, approximate="tanh") * up, dtype)
    gate, up = (3 * gate).clamp(max=7.0), (3 * up).clamp(-7.0, 7.0)  # gpt-oss limits these values to 7
    close(step.gated(3 * gate_up, "clamped_swiglu"), gate * (1.702 * gate).sigmoid() * (up + 1), dtype)
    outputs, weights = random((8, width), dtype, device, 5), random((4, 2), torch.float32, device, 6)
    places = torch.tensor([[3, 0], [7, 1], [2, 5], [6, 4]], device=device)
    expected = (outputs.double()[places] * weights.double()[..., None]).sum(1)
    close(step.combine(outputs, places, weights), expected, dtype)


def check_rotation(
    kernels: Kernels, config: ModelConfig, pool: KVPool, batch: Batch, dtype: torch.dtype, norms: bool
) -> None:
    """Check the rotated queries and the stored KV of every slice. The KV of padding must not be stored."""
    device, layer, dim = pool.tensor.device, 1, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    qkv = random((len(batch.tokens), (heads + 2 * kv_heads) * dim), dtype, device, 5)
    weights = [random((dim,), dtype, device, seed) for seed in (6, 7)] if norms else [None, None]
    parts = qkv.clone().view(len(qkv), -1, dim).double().split((heads, kv_heads, kv_heads), dim=1)
    frequencies = inverse_frequencies(Rope(), dim).to(device)
    angle = (batch.positions.float()[:, None] * frequencies).double()[:, None]

    def turned(rows: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            rows = normed(rows, weight, 1e-5)
        left, right = rows.chunk(2, dim=-1)
        return torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), dim=-1)

    close(kernels.begin(batch).rotate_and_store(layer, qkv, *weights), turned(parts[0], weights[0]), dtype)
    expected = torch.stack((turned(parts[1], weights[1]), parts[2]), dim=2)
    if pool.is_float8:
        expected = expected / torch.tensor(pool.scales[layer], device=device, dtype=torch.float64)[:, None]
        expected = expected.clamp(-FLOAT8_LIMIT, FLOAT8_LIMIT)
    stored = batch.slots >= 0
    blocks, offsets = batch.slots[stored] // pool.layout.block_tokens, batch.slots[stored] % pool.layout.block_tokens
    close(pool.tensor[:, :, layer][blocks, :, offsets], expected[stored], pool.tensor.dtype)
    numbers = expected[stored].numel()
    assert int(pool.tensor.float().isfinite().sum()) == numbers, "KV was stored outside the batch's slots"


def padded(batch: Batch, rows: int) -> Batch:
    """Return the batch with `rows` tokens of padding, whose KV is not stored."""
    return replace(
        batch,
        tokens=torch.cat((batch.tokens, batch.tokens.new_zeros(rows))),
        positions=torch.cat((batch.positions, batch.positions.new_zeros(rows))),
        slots=torch.cat((batch.slots, batch.slots.new_full((rows,), -1))),
    )


def check_router(step: StepKernels, spec: MoeSpec, device: torch.device, tokens: int = 9) -> None:
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(tokens, spec.num_experts, generator=random).to(device)
    logits[1] = 0.5  # all scores of this token are equal
    logits[2, 4:7] = 3.0
    correction, factors = torch.randn(2, spec.num_experts, generator=random).to(device)
    given = correction if spec.corrects else None, factors
    weights, chosen = step.route(spec, logits, *given)
    wanted, theirs = route(spec, logits, *given)
    assert torch.equal(chosen, theirs)
    torch.testing.assert_close(weights, wanted)


def check_order(step: StepKernels, count: int, device: torch.device, num_experts: int = 10) -> None:
    chosen = torch.randint(0, num_experts - 1, (count, 3), generator=torch.Generator().manual_seed(count)).to(device)
    found = step.by_expert(chosen.T.contiguous().T, num_experts)  # in column-major order
    for one, other in zip(found, by_expert(chosen, num_experts), strict=True):
        assert torch.equal(one, other)

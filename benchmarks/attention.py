"""Paged attention and the element-wise kernels on a CPU: numba's against the torch reference.

    python -m benchmarks attention --repeats 15

The shape is that of the 110M model (12 query and 4 key heads x 64, 12 layers); a call takes the next layer, so keys and
values come from memory as in a real step. Arms take turns; a figure is the lower quartile of the repeats, one layer.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random
from statistics import quantiles

import torch
from torch import Tensor

from benchmarks.result import Cell, Result, Table, in_turn, parser
from engine.attention.selection import attention_on_cpu
from engine.batch import Batch, build
from engine.kernels import StepKernels, TorchKernels, kernels_on_cpu
from engine.kv_pool import KVPool
from engine.models.config import ModelConfig, Rope
from scheduler.request import Request, Slice
from shared.kv.layout import BYTES_OF, KVLayout
from shared.kv.memory import HostMemory

HEADS, KV_HEADS, HEAD_DIM, LAYERS, HIDDEN, INNER = 12, 4, 64, 12, 768, 2048
DECODES = ((1, 512), (8, 512), (32, 512), (32, 1024))  # sequences, tokens of each one's context
CHUNKS = ((512, 512), (512, 4608), (2048, 2048))  # tokens computed, tokens of the context with them
CONFIG = ModelConfig(
    "LlamaForCausalLM", HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, 8192, 1e-5, Rope(), False, False, False,
    False, False, (0,) * LAYERS, 8192, None, (),
)  # fmt: skip


def scene(sequences: int, computed: int, context: int, block_tokens: int, dtype: str) -> tuple[KVPool, Batch]:
    """A filled pool whose blocks are in random order, and the last `computed` tokens of every context as a batch."""
    per_sequence = -(-context // block_tokens)
    layout = KVLayout(1 + sequences * per_sequence, KV_HEADS, LAYERS, block_tokens, HEAD_DIM, dtype)
    pool = KVPool(layout, HostMemory(layout.num_blocks, layout.block_bytes))
    for block in pool.tensor:
        block.normal_()
    blocks = list(range(1, layout.num_blocks))
    Random(0).shuffle(blocks)
    slices = []
    for index in range(sequences):
        request = Request(f"r{index}", [0] * context, context, 1)
        request.blocks = [blocks.pop() for _ in range(per_sequence)]
        slices.append(Slice(request, context - computed, computed, True, 0))
    return pool, build(slices, block_tokens, torch.device("cpu"))


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def attention_s(pool: KVPool, batch: Batch, repeats: int) -> dict[str, list[float]]:
    """Seconds of a layer, by backend. The step's plan is not in it: all layers share it."""
    q = torch.randn(len(batch.tokens), HEADS, HEAD_DIM)
    layers = count()

    def layer_of(name: str) -> Callable[[], float]:
        plan = attention_on_cpu(name, pool).plan(batch)
        plan.attend(0, q, 0)
        return lambda: timed(lambda: plan.attend(next(layers) % LAYERS, q, 0))

    return in_turn({name: layer_of(name) for name in ("numba", "torch")}, repeats)


def elementwise_s(pool: KVPool, batch: Batch, repeats: int) -> dict[str, list[float]]:
    """Seconds of what a layer does beside products and attention: two norms, rotation and storing, silu."""
    tokens = len(batch.tokens)
    hidden, update, norm = torch.randn(tokens, HIDDEN), torch.zeros(tokens, HIDDEN), torch.ones(HIDDEN)
    qkv, gate_up = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM), torch.randn(tokens, 2 * INNER)

    def layer(step: StepKernels) -> Tensor:
        step.add_norm(hidden, update, norm)
        step.rotate_and_store(0, qkv, None, None)
        step.add_norm(hidden, update, norm)
        return step.silu_mul(gate_up)

    steps = {"numba": kernels_on_cpu(CONFIG, pool).begin(batch), "torch": TorchKernels(CONFIG, pool).begin(batch)}
    arms = {name: partial(timed, partial(layer, step)) for name, step in steps.items()}
    in_turn(arms, 1)
    return in_turn(arms, repeats)


def quarter(values: list[float]) -> float:
    return quantiles(values, n=4)[0]


@torch.inference_mode()
def main() -> None:
    flags = parser(__doc__, repeats=15)
    flags.add_argument("--threads", type=int, default=torch.get_num_threads())
    flags.add_argument("--block-size", type=int, default=16)
    flags.add_argument("--dtypes", nargs="+", default=list(BYTES_OF), choices=list(BYTES_OF))
    args = flags.parse_args()
    torch.set_num_threads(args.threads)
    decodes: list[list[Cell]] = []
    chunks: list[list[Cell]] = []
    small: list[list[Cell]] = []
    for dtype in args.dtypes:
        for sequences, context in DECODES:
            pool, batch = scene(sequences, 1, context, args.block_size, dtype)
            took = {name: quarter(times) for name, times in attention_s(pool, batch, args.repeats).items()}
            size = sequences * context * 2 * KV_HEADS * HEAD_DIM * BYTES_OF[dtype]
            decodes.append(
                [dtype, sequences, context, took["numba"] * 1e3, size / took["numba"] / 1e9, took["torch"] * 1e3]
            )
            print(decodes[-1], flush=True)
        for computed, context in CHUNKS:
            pool, batch = scene(1, computed, context, args.block_size, dtype)
            took = {name: quarter(times) for name, times in attention_s(pool, batch, args.repeats).items()}
            work = 4 * HEADS * HEAD_DIM * computed * (context - (computed - 1) / 2) / 1e9
            rates = [took["numba"] * 1e3, work / took["numba"], took["torch"] * 1e3, work / took["torch"]]
            chunks.append([dtype, computed, context - computed, *rates])
            print(chunks[-1], flush=True)
    for sequences, computed in ((1, 1), (8, 1), (32, 1), (1, 512)):
        pool, batch = scene(sequences, computed, computed, args.block_size, "float32")
        took = {name: quarter(times) for name, times in elementwise_s(pool, batch, args.repeats * 10).items()}
        small.append([sequences * computed, took["numba"] * 1e6, took["torch"] * 1e6])
    note = f"{args.threads} threads, blocks of {args.block_size} tokens, {HEADS} query and {KV_HEADS} key heads x 64."
    Result(
        "attention",
        "One layer's attention over the paged pool, and its element-wise work, by our kernels and by plain torch.",
        [
            Table("Decode", ["KV", "sequences", "context", "numba ms", "GB/s", "torch ms"], decodes, note),
            Table(
                "Chunks of a prompt",
                ["KV", "tokens", "cached before", "numba ms", "GF/s", "torch ms", "torch GF/s"],
                chunks,
                note,
            ),
            Table("Two norms, rotation with storing, silu", ["tokens", "numba us", "torch us"], small, note),
        ],
    ).finish(args.out)


if __name__ == "__main__":
    main()

"""What the products of one step with all weight matrices of a model take, by weight format and number of rows.

    python -m benchmarks linear --shape 110m --repeats 7

Every matrix is multiplied once, in order, so that weights come from memory as they do in a real step. Arms take turns;
a figure is the lower quartile of the repeats. `plain` is torch's own product of float32.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import quantiles

import torch

from benchmarks.models import SHAPES, tensor_shapes
from benchmarks.result import Cell, Result, Table, in_turn, parser
from engine.linear.interface import Linear, LinearFormat
from engine.linear.plain import Plain
from engine.linear.selection import linear_on_cpu

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
ASKED = {"float32": ("float32", "none"), "bfloat16": ("bfloat16", "none"), "int8": ("auto", "int8")}


def matrices(shape: str) -> list[tuple[int, int]]:
    """(in, out) of a model's matrices as the decoder has them: Q, K and V are one, and so are gate and up."""
    config = SHAPES[shape]
    shapes = tensor_shapes(config)
    layer = "model.layers.0"

    def fused(*names: str) -> tuple[int, int]:
        found = [shapes[f"{layer}.{name}_proj.weight"] for name in names]
        return found[0][1], sum(out for out, _ in found)

    parts = (("self_attn.q", "self_attn.k", "self_attn.v"), ("self_attn.o",), ("mlp.gate", "mlp.up"), ("mlp.down",))
    layers = [fused(*names) for names in parts] * config["num_hidden_layers"]
    return [*layers, (config["hidden_size"], config["vocab_size"])]


def made(linear: LinearFormat, sizes: list[tuple[int, int]]) -> list[Linear]:
    source = torch.Generator().manual_seed(0)
    return [linear.make(torch.empty(out, width).normal_(0, 0.02, generator=source), None) for width, out in sizes]


@torch.inference_mode()
def step_s(linears: list[Linear], inputs: list[torch.Tensor]) -> float:
    start = time.perf_counter()
    for linear, rows in zip(linears, inputs, strict=True):
        linear(rows)
    return time.perf_counter() - start


def measure(shape: str, rows: tuple[int, ...], repeats: int) -> dict[int, dict[str, list[float]]]:
    """Seconds of every repeat, by number of rows and format."""
    sizes = matrices(shape)
    formats = {"plain": made(Plain(torch.float32), sizes)}
    formats |= {name: made(linear_on_cpu(*asked), sizes) for name, asked in ASKED.items()}
    runs = {}
    for count in rows:
        by_width = {width: torch.randn(count, width) for width, _ in sizes}
        inputs = [by_width[width] for width, _ in sizes]
        arms: dict[str, Callable[[], float]] = {
            name: partial(step_s, linears, inputs) for name, linears in formats.items()
        }
        in_turn(arms, 1)
        runs[count] = in_turn(arms, max(3, repeats * 4) if count <= 32 else repeats)
        print(count, {name: f"{quarter(times) * 1e3:.2f} ms" for name, times in runs[count].items()}, flush=True)
    return runs


def quarter(values: list[float]) -> float:
    return quantiles(values, n=4)[0]


def main() -> None:
    flags = parser(__doc__, repeats=7)
    flags.add_argument("--shape", choices=list(SHAPES), default="110m")
    flags.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    flags.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = flags.parse_args()
    torch.set_num_threads(args.threads)
    weights = sum(width * out for width, out in matrices(args.shape))
    runs = measure(args.shape, tuple(args.rows), args.repeats)
    names = ["plain", *ASKED]
    rows: list[list[Cell]] = []
    for count, times in runs.items():
        best = {name: quarter(times[name]) for name in names}
        giga = 2 * count * weights / 1e9
        took_ms, rates = [best[name] * 1e3 for name in names], [giga / best[name] for name in names]
        rows.append([count, *took_ms, *rates, *(best["plain"] / best[name] for name in ASKED)])
    columns = ["rows", *(f"{n} ms" for n in names), *(f"{n} GF/s" for n in names), *(f"{n} x plain" for n in ASKED)]
    note = (
        f"{weights / 1e6:.0f}M weights, {args.threads} threads. The bytes of a step of one row, at its GB/s: "
        + ", ".join(
            f"{name} {weights * size / quarter(runs[min(runs)][name]) / 1e9:.0f}"
            for name, size in zip(names, (4, 4, 2, 1), strict=True)
        )
        + "."
    )
    Result(
        "linear",
        "Products of one step with all weight matrices, by the format that the weights are held in.",
        [Table(f"{args.shape}: matrix products of one step", columns, rows, note)],
        {"seconds": runs},
    ).finish(args.out)


if __name__ == "__main__":
    main()

"""What int8 and 16-bit weights cost in quality: perplexity on text that the demo model was not trained on.

    python -m benchmarks perplexity --texts alice29.txt paradise_lost.txt …

The text is the last twentieth of every file, which demo/train.py holds out, cut into windows; every token of a window
but its first is scored, by the runner that a node uses.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.result import Cell, Result, Table, parser
from engine.attention.selection import attention_on_cpu
from engine.kernels import kernels_on_cpu
from engine.kv_pool import KVPool
from engine.linear.interface import Linear, LinearFormat
from engine.linear.selection import linear_on_cpu
from engine.models.config import ModelConfig
from engine.models.decoder import load_model
from engine.runner import TorchRunner
from scheduler.request import Request, Slice, Step
from shared.kv.layout import KVLayout
from shared.kv.memory import HostMemory
from shared.rpc.messages import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ROOT.parent / "shared" / "data" / "text"
HELD_OUT, GOAL = 0.05, 0.01
BLOCK_TOKENS = 16
CPU = torch.device("cpu")
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=0)


@dataclass(slots=True)
class ExceptHead:
    """A format for all matrices but the last, which is told by its size."""

    layers: LinearFormat
    head: LinearFormat
    vocab_size: int
    name: str = ""

    def make(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return (self.head if len(weight) == self.vocab_size else self.layers).make(weight, bias)


def windows(model: Path, texts: list[Path], length: int, limit: int) -> list[list[int]]:
    """Held-out tokens in windows of `length`, at most `limit` of a file."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found = []
    for file in texts:
        text = file.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
        held_out = tokenizer.encode(text[text.find("\n", int(len(text) * (1 - HELD_OUT))) :]).ids
        found += [held_out[at : at + length] for at in range(0, len(held_out) - 1, length)][:limit]
    return found


def loss(model: Path, linear: LinearFormat, pieces: list[list[int]]) -> float:
    """Mean negative log-likelihood of a token, in nats."""
    config = ModelConfig.from_directory(model)
    num_blocks = 1 + math.ceil((max(map(len, pieces)) + 1) / BLOCK_TOKENS)
    layout = KVLayout(num_blocks, config.num_kv_heads, config.num_layers, BLOCK_TOKENS, config.head_dim, "float32")
    pool = KVPool(layout, HostMemory(layout.num_blocks, layout.block_bytes))
    decoder = load_model(model, torch.float32, CPU, linear)
    runner = TorchRunner(decoder, pool, attention_on_cpu("auto", pool), kernels_on_cpu(config, pool), CPU)
    total, count = 0.0, 0
    for number, tokens in enumerate(pieces):
        request = Request(f"window {number}", tokens, len(tokens), 1, sampling=SCORED, needs_prompt_logprobs=True)
        request.blocks = list(range(1, num_blocks))
        [output] = runner.run(Step(number, [Slice(request, 0, len(tokens), True, 0)], []))
        total -= sum(entry.logprob for entry in output.prompt_logprobs)
        count += len(output.prompt_logprobs)
    return total / count


def formats(vocab_size: int) -> dict[str, LinearFormat]:
    floats, int8 = linear_on_cpu("float32", "none"), linear_on_cpu("auto", "int8")
    return {
        "float32": floats,
        "float16": linear_on_cpu("float16", "none"),
        "bfloat16": linear_on_cpu("bfloat16", "none"),
        "int8": int8,
        "int8, head float32": ExceptHead(int8, floats, vocab_size),
        "float32, head int8": ExceptHead(floats, int8, vocab_size),
    }


def main() -> None:
    flags: argparse.ArgumentParser = parser(__doc__, repeats=1)
    flags.add_argument("--model", type=Path, default=ROOT / "demo" / "model")
    flags.add_argument("--texts", type=Path, nargs="+", default=sorted(TEXTS.glob("*.txt")))
    flags.add_argument("--window", type=int, default=1024, help="tokens")
    flags.add_argument("--limit", type=int, default=16, help="windows of a file, at most")
    args = flags.parse_args()
    if not args.texts:
        flags.error("--texts: name text files")
    pieces = windows(args.model, args.texts, args.window, args.limit)
    losses = {}
    for name, linear in formats(ModelConfig.from_directory(args.model).vocab_size).items():
        losses[name] = loss(args.model, linear, pieces)
        print(f"{name}: perplexity {math.exp(losses[name]):.4f}", flush=True)
    rows: list[list[Cell]] = []
    for name, nats in losses.items():
        change = math.expm1(nats - losses["float32"])
        rows.append([name, f"{math.exp(nats):.4f}", f"{change:+.3%}", abs(change) <= GOAL])
    tokens = sum(len(piece) - 1 for piece in pieces)
    Result(
        "perplexity",
        "Perplexity of the demo model (3.5M weights) by the format that its weights are held in.",
        [
            Table(
                f"{tokens:,} held-out tokens in windows of {args.window}",
                ["weights", "perplexity", "against float32", f"within {GOAL:.0%}"],
                rows,
                f"Texts: {', '.join(file.name for file in args.texts)}.",
            )
        ],
        losses,
    ).finish(args.out)


if __name__ == "__main__":
    main()

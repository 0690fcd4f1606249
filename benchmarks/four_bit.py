"""Compare 4-bit with bfloat16 weights on a CPU: decoding and prefilling with one model shape and random weights.

    python -m benchmarks four_bit

The first run writes two checkpoints to the benchmarks' cache: one in bfloat16, and one in AWQ with groups of 128, whose
embedding and output head are bfloat16. Each model runs in its own process. While one process runs, the other is paused.
"""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.cpu import SpeedRow, speeds_of
from benchmarks.models import CACHE, LLAMA
from benchmarks.process import PeerProcess
from benchmarks.result import Cell, Result, Table, median, parser

CONTEXT, STEPS, PROMPT, GROUP = 512, 32, 512, 128
HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, VOCAB = 2048, 22, 32, 4, 5632, 32_000  # TinyLlama 1.1B
CONFIG: dict[str, Any] = LLAMA | {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "intermediate_size": INNER, "vocab_size": VOCAB, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
KV = KV_HEADS * HIDDEN // HEADS
MATRICES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV, HIDDEN), "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
DECODES = [{"batch": batch, "context": CONTEXT, "steps": STEPS} for batch in (1, 8)]
ROWS = [SpeedRow(f"decode, batch {each['batch']}", "decode", each, "awq", ("bfloat16",)) for each in DECODES]
ROWS.append(SpeedRow(f"prefill {PROMPT}", "prefill", {"tokens": PROMPT}, "awq", ("bfloat16",)))


def written(kind: str) -> Path:
    """Return the path of the checkpoint "bfloat16" or "awq". If the checkpoint does not exist, make it."""
    path = CACHE / f"1.1b-{kind}"
    if (path / "config.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16) * 0.02

    tensors = {"model.embed_tokens.weight": noise(VOCAB, HIDDEN), "lm_head.weight": noise(VOCAB, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        for name, (out, width) in MATRICES.items():
            if kind == "bfloat16":
                tensors[f"{prefix}{name}.weight"] = noise(out, width)
                continue
            for suffix, rows in (("qweight", width), ("qzeros", width // GROUP)):
                shape = rows, out // 8
                tensors[f"{prefix}{name}.{suffix}"] = torch.randint(-(2**31), 2**31, shape).int()
            tensors[f"{prefix}{name}.scales"] = torch.full((width // GROUP, out), 0.004, dtype=torch.float16)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = CONFIG if kind == "bfloat16" else CONFIG | {"quantization_config": AWQ}
    # Write this file last, so that an incomplete checkpoint is written again.
    (path / "config.json").write_text(json.dumps(config))
    return path


def main() -> None:
    arguments = parser(__doc__).parse_args()
    threads = len(os.sched_getaffinity(0))
    workers: dict[str, PeerProcess] = {}
    with ExitStack() as stack:
        for kind in ("bfloat16", "awq"):
            options = {"model": str(written(kind)), "threads": threads}
            workers[kind] = PeerProcess("benchmarks.peers.baton", options, pauses=True)
            stack.callback(workers[kind].close)
        runs = {row.label: speeds_of(row, workers, arguments.repeats) for row in ROWS}
    rows: list[list[Cell]] = []
    for label, found in runs.items():
        bf16, four = median(found["bfloat16"]), median(found["awq"])
        rows.append([label, bf16, four, four / bf16])
    columns = ["tokens/s", "bfloat16", "4-bit", "4-bit / bfloat16"]
    title = f"1.1B (hidden {HIDDEN}, {LAYERS} layers), {CONTEXT} tokens of context, {threads} threads"
    what = "An AWQ checkpoint, whose products read 4-bit codes, and a bfloat16 checkpoint of the same shape."
    Result("four_bit", what, [Table(title, columns, rows)], runs).finish(arguments.out)

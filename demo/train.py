"""Train a demo model of Baton on public-domain texts. The output is a Hugging Face model directory.

    pip install -e '.[train]'
    python demo/train.py --texts alice29.txt paradise_lost.txt … --out /tmp/short --phases 256:2200 8192:60
    python demo/train.py --texts … --init /tmp/short --out demo/model --learning-rate 1e-3 --phases 1024:150 8192:60
    python demo/train.py --texts … --kind hybrid --out demo/hybrid --phases 256:1000 2048:20

`--kind dense`, the default, trains a small Llama. `hybrid` trains a small Qwen3.5 (gated DeltaNet and attention), and
`moe` trains a small Qwen3-MoE (experts). An interrupted training continues from `checkpoint.safetensors` in `--out`.

Any UTF-8 text files work. The last twentieth of every file is held out for evaluation. Training begins with short
sequences, which are cheap and reduce the loss most. Longer sequences, up to the whole context, then train the later
positions. `training.json`, next to the weights, records the held-out loss by position.
"""

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

BOS, EOS = "<|begin|>", "<|end|>"
HELD_OUT = 0.05
GOLDEN_LENGTHS = (20, 300, 1000, 3000)  # lengths of the prompts of golden.json, in characters
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state for each parameter
ROUTER_BALANCE = 0.01  # weight of the loss that spreads tokens evenly over the experts
# The texts contain plays, so the template formats a dialogue as lines of a play.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ {'user': 'First Citizen', 'assistant': 'Second Citizen', 'system': 'PROLOGUE'}.get(message['role'], "
    "message['role']) }}:\n{{ message['content'] | trim }}\n\n"
    "{% endfor %}{% if add_generation_prompt %}Second Citizen:\n{% endif %}"
)


KINDS: dict[str, Callable[[dict[str, Any]], PreTrainedConfig]] = {
    "dense": lambda sizes: LlamaConfig(**sizes, intermediate_size=704, rms_norm_eps=1e-5),
    "hybrid": lambda sizes: Qwen3_5TextConfig(  # three layers of gated DeltaNet, then one of attention
        **sizes,
        intermediate_size=640,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    ),
    "moe": lambda sizes: Qwen3MoeConfig(
        **sizes,
        intermediate_size=704,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        norm_topk_prob=True,
    ),
}


def split_texts(files: list[Path]) -> tuple[list[str], list[str]]:
    """Split each file at the end of a line into a training text and a held-out text. Return both lists."""
    train, held_out = [], []
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
        cut = text.find("\n", int(len(text) * (1 - HELD_OUT)))
        train.append(text[:cut])
        held_out.append(text[cut:])
    return train, held_out


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which encodes every byte string losslessly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str], rng: random.Random) -> torch.Tensor:
    """Return the ids of all texts in one int64 tensor, with EOS and BOS between documents of about 40 paragraphs."""
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    ids: list[int] = []
    for text in texts:
        ids.append(bos)
        for paragraph in text.split("\n\n"):
            ids += tokenizer.encode(paragraph + "\n\n", add_special_tokens=False).ids
            if rng.random() < 1 / 40:
                ids += [eos, bos]
        ids.append(eos)
    return torch.tensor(ids)


def batches(stream: torch.Tensor, length: int, rows: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    while True:
        starts = torch.randint(0, max(1, len(stream) - length - 1), (rows,), generator=generator)
        yield torch.stack([stream[s : s + length + 1] for s in starts.tolist()])


def cross_entropy(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each predicted token, [rows, length]."""
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, stream: torch.Tensor, length: int) -> dict[str, float]:
    """Return the mean loss of the held-out text, in nats per token, for each range of positions."""
    model.eval()
    rows = [stream[i : i + length + 1] for i in range(0, len(stream) - length, length)][:8]
    losses = torch.cat(
        [cross_entropy(model(input_ids=row[None, :-1], use_cache=False).logits, row[None]) for row in rows]
    )
    model.train()
    edges = [e for e in (0, 128, 512, 2048, 4096, 8192) if e <= length]
    return {f"{a}-{b}": round(losses[:, a:b].mean().item(), 4) for a, b in itertools.pairwise(edges)}


def learning_rate(step: int, steps: int, peak: float) -> float:
    warm = min(1.0, (step + 1) / 50)
    return peak * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def save_checkpoint(
    file: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, step: int, seconds: float
) -> None:
    tensors = {}
    for name, weight in model.named_parameters():
        tensors[f"weight {name}"] = weight
        tensors |= {f"{moment} {name}": optimizer.state[weight][moment] for moment in MOMENTS}
    save_file(tensors, file.with_suffix(".new"), {"step": str(step), "seconds": str(seconds)})
    file.with_suffix(".new").rename(file)


def load_checkpoint(file: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
    """Load the checkpoint if it exists. Return the number of steps done, and the seconds that they took."""
    if not file.exists():
        return 0, 0.0
    with safe_open(file, "pt") as saved:
        step, seconds = int(saved.metadata()["step"]), float(saved.metadata()["seconds"])
        for name, weight in model.named_parameters():
            weight.data.copy_(saved.get_tensor(f"weight {name}"))
            moments = {moment: saved.get_tensor(f"{moment} {name}") for moment in MOMENTS}
            optimizer.state[weight] = moments | {"step": torch.tensor(float(step))}
    return step, seconds


def train(model: PreTrainedModel, stream: torch.Tensor, args: argparse.Namespace) -> float:
    """Run all phases of training, and return the seconds that they took, including the time before an interruption."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    generator = torch.Generator().manual_seed(args.seed)
    steps = sum(count for _, count in args.phases)
    schedule = itertools.chain.from_iterable(
        itertools.islice(batches(stream, length, max(1, args.batch_tokens // length), generator), count)
        for length, count in args.phases
    )
    router_logits = {"output_router_logits": True} if args.kind == "moe" else {}
    checkpoint = args.out / "checkpoint.safetensors"
    first, before = load_checkpoint(checkpoint, model, optimizer)
    started = time.monotonic() - before
    for step, rows in itertools.islice(enumerate(schedule), first, None):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, args.learning_rate)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
            output = model(input_ids=rows[:, :-1], use_cache=False, **router_logits)
            loss = cross_entropy(output.logits, rows).mean()
            total = loss + ROUTER_BALANCE * output.aux_loss if router_logits else loss
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}/{steps} loss {loss.item():.3f} {time.monotonic() - started:.0f} s", flush=True)
        if step % 100 == 99:
            save_checkpoint(checkpoint, model, optimizer, step + 1, time.monotonic() - started)
    checkpoint.unlink(missing_ok=True)
    return time.monotonic() - started


def write_model(model: PreTrainedModel, tokenizer: Tokenizer, record: dict[str, object], out: Path) -> None:
    model.half().save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": model.config.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def golden_cases(directory: Path, tokenizer: Tokenizer, texts: list[str]) -> list[dict[str, object]]:
    """Return the greedy answers of transformers, computed in float32, to the beginnings of some texts.

    `min_gap` is the smallest difference, over the steps of an answer, between the two largest logits of a step.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    cases: list[dict[str, object]] = []
    for text, length in zip(texts, GOLDEN_LENGTHS, strict=False):
        prompt = tokenizer.encode(text[:length]).ids
        answer = model.generate(
            torch.tensor([prompt]), max_new_tokens=64, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        top = torch.cat(answer.logits).topk(2).values
        tokens = answer.sequences[0, len(prompt) :].tolist()
        gap = round((top[:, 0] - top[:, 1]).min().item(), 5)
        cases.append({"prompt": text[:length], "token_ids": tokens, "text": tokenizer.decode(tokens), "min_gap": gap})
    return cases


def new_model(tokenizer: Tokenizer, args: argparse.Namespace) -> PreTrainedModel:
    sizes = {
        "vocab_size": args.vocab_size,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": args.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
    }
    return AutoModelForCausalLM.from_config(KINDS[args.kind](sizes), attn_implementation="sdpa")


def phase(text: str) -> tuple[int, int]:
    length, _, steps = text.partition(":")
    return int(length), int(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=KINDS, default="dense")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument(
        "--phases", type=phase, nargs="+", default=[(256, 1400), (1024, 500), (8192, 80)], metavar="LENGTH:STEPS"
    )
    parser.add_argument("--init", type=Path, help="continue from this model, with its tokenizer")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--bfloat16", action="store_true", help="compute products in bfloat16, which is faster")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.context = max(length for length, _ in args.phases)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)

    train_texts, held_out_texts = split_texts(args.texts)
    if args.init:
        tokenizer = Tokenizer.from_file(str(args.init / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(train_texts, args.vocab_size)
    stream = token_stream(tokenizer, train_texts, random.Random(args.seed))
    held_out = token_stream(tokenizer, held_out_texts, random.Random(args.seed))
    model = (
        AutoModelForCausalLM.from_pretrained(args.init, dtype=torch.float32)
        if args.init
        else new_model(tokenizer, args)
    )
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(stream):,} training tokens")
    seconds = train(model, stream, args)
    before = json.loads((args.init / "training.json").read_text()) if args.init else None
    record = {
        "texts": [f.name for f in args.texts],
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_tokens": len(stream),
        "held_out_tokens": len(held_out),
        "steps_by_length": {str(length): steps for length, steps in args.phases},
        "batch_tokens": args.batch_tokens,
        "seconds": round(seconds),
        "continues": before,
        "held_out_loss_by_position": held_out_loss(model, held_out, args.context),
        "held_out_bytes_per_token": round(sum(len(t.encode()) for t in held_out_texts) / len(held_out), 3),
    }
    write_model(model, tokenizer, record, args.out)
    golden = golden_cases(args.out, tokenizer, held_out_texts)
    (args.out / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()

"""Measure the cost of grammars: tokens per second of a batch whose answers must match a grammar, and of the same batch
without a grammar.

    python -m benchmarks grammar --weights int8 --repeats 40

The model has the shape of Qwen2.5-0.5B, random weights, and a vocabulary of 151,936 tokens. Its tokenizer, which has
random merges, uses 150,000 of these tokens. Tokens are drawn at temperature 1, which is the worst case for masks: a
trained model stays in states whose masks are small or already computed.
"""

import random
import tempfile
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.models import CACHE, SHAPES, checkpoint
from benchmarks.peers.baton import BatonEngine
from benchmarks.result import Cell, Result, Table, in_turn, median, parser, ratio, versions
from engine.token_masks import TokenMatcher
from scheduler.request import Request
from shared.grammar import GrammarTokenizer, json_grammar, lark_grammar, regex_grammar
from shared.rpc.messages import SamplingParams

BATCH, CONTEXT, STEPS = 8, 64, 24
VOCABULARY = 150_000
GOAL = 0.97
PERSON = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string", "maxLength": 40},
        "address": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "string"}}},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "on loan"]}, "maxItems": 5},
    },
    "required": ["id", "name", "address", "tags"],
    "additionalProperties": False,
}
# Grammars of texts that do not end during a measurement, so that every step has the whole batch.
GRAMMARS = {
    "a JSON schema": json_grammar({"type": "array", "items": PERSON, "minItems": 10_000}),
    "any JSON": json_grammar({"type": "array", "minItems": 10_000}),
    "a regular expression": regex_grammar(r"([A-Z][a-z]{2,8} \d{1,3}; ){2000}"),
    "a grammar": lark_grammar(
        'start: (sum ";"){2000}\nsum: product ("+" product)*\nproduct: value ("*" value)*\n'
        'value: /[0-9]+/ | NAME "(" sum ")"\nNAME: /[a-z_]{1,12}/\n'
    ),
}


def vocabulary(directory: Path) -> GrammarTokenizer:
    """Return a byte-level tokenizer of `VOCABULARY` tokens: the byte characters, and random merges of two tokens."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys(characters)
    source, merges = random.Random(0), []
    pool = [character for character in characters if character.isascii()] + ["\u0120"]
    while len(tokens) < VOCABULARY:
        left, right = source.choice(pool), source.choice(pool[:500])
        if len(left + right) <= 16 and left + right not in tokens:
            tokens[left + right] = None
            pool.append(left + right)
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return GrammarTokenizer(directory, SHAPES["0.5b"]["vocab_size"])


class GrammarEngine(BatonEngine):
    """Decodes a batch with or without a grammar. The grammars are compiled before the clock starts."""

    def bound(self, tokenizer: GrammarTokenizer, grammar: str) -> float:
        """Return the tokens per second over `STEPS` steps with a batch of `BATCH` requests."""
        requests = []
        for index in range(BATCH):
            matcher = TokenMatcher(tokenizer, grammar) if grammar else None
            # The first token comes with the KV and may violate the grammar. It counts as part of the prompt, so the
            # matcher does not get it.
            request = Request(f"r{index}", self.prompt(CONTEXT), CONTEXT + 1, STEPS + 4, receive_kv=True)
            request.sampling, request.matcher = SamplingParams(seed=index), matcher
            requests.append(request)
        return BATCH * STEPS / self.seconds(requests, STEPS)


def main() -> None:
    flags = parser(__doc__, repeats=40)
    flags.add_argument("--weights", choices=["float32", "bfloat16", "int8"], default="int8")
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--directory", type=Path, default=CACHE, help="directory of the generated model")
    args = flags.parse_args()
    options = {"quantization": "int8"} if args.weights == "int8" else {"weight_dtype": args.weights}
    engine = GrammarEngine(str(checkpoint("0.5b", args.directory)), args.threads, **options)
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = vocabulary(Path(directory))
        tokenizer.matcher(GRAMMARS["any JSON"])  # reads the tokenizer's files before they are deleted
    found, rows = {}, list[list[Cell]]()
    for name, grammar in GRAMMARS.items():
        arms = {"with": partial(engine.bound, tokenizer, grammar), "without": partial(engine.bound, tokenizer, "")}
        runs = {arm: values[1:] for arm, values in in_turn(arms, args.repeats + 1).items()}  # the first is a warm-up
        found[name] = runs
        share = ratio(runs["with"], runs["without"])
        rows.append([name, median(runs["with"]), median(runs["without"]), share, f"≥ {GOAL}", share >= GOAL])
        print(rows[-1], flush=True)
    columns = ["the answer must match", "tokens/s", "without a grammar", "ratio", "goal", ""]
    title = f"Grammars on a CPU: {BATCH} answers at once, {args.weights} weights, a vocabulary of {VOCABULARY:,}"
    note = f"A run has {STEPS} steps, and the grammar is compiled before. Ratios are medians over the repeats."
    what = "Tokens are drawn at random from those that the grammar allows. The model has the shape of Qwen2.5-0.5B."
    libraries = versions("torch", "numba", "llguidance")
    Result("grammar", what, [Table(title, columns, rows, note)], found, libraries).finish(args.out)

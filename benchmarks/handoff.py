"""What a handoff adds to a request: its first token's time against a co-located node, and what of the transfer shows.

    python -m benchmarks handoff

Two clusters at once, one with a prefill and a decode node, one with a single co-located node, every node with as many
threads. Each prompt goes to one and then to the other, in turns, while nothing else runs. TTFT is the client's; the
exposed transfer and the prefill are the router's phases of that request (its timeline).
"""

import json
import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.models import checkpoint
from benchmarks.result import Result, Table, median, parser, ratio, versions
from benchmarks.router import free_port
from benchmarks.stalls import cluster
from cluster.plan import DEMO_MODEL
from router.text.model_files import read_model

ARMS = {
    "disaggregated": ("--prefill", "1", "--decode", "1", "--disaggregate", "always"),
    "colocated": ("--mode", "colocated", "--decode", "1"),
}
PROMPTS = (1000, 2000, 4000, 8000)
SETTLED_S = 10.0  # in which the nodes tell what they recorded


def asked(client: httpx.Client, prompt: list[int]) -> dict[str, float]:
    """One request for three tokens, and milliseconds of it."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "stream": True}
    sent, first, identity = time.monotonic(), 0.0, ""
    with client.stream("POST", "/v1/completions", json=body | {"return_token_ids": True}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {") and not first:
                first, identity = time.monotonic(), json.loads(line[6:])["id"]
    story = story_of(client, identity)
    phases = story["phases_ms"]
    return {
        "ttft_ms": (first - sent) * 1000,
        "prefill_ms": phases["prefill"],
        "exposed_ms": phases["transfer_exposed"],
        "exposed_of_prefill": phases["transfer_exposed"] / phases["prefill"],
        "attempts": story["attempts"],  # more than one: a node was lost, and the TTFT is not the handoff's
    }


def story_of(client: httpx.Client, identity: str) -> dict[str, Any]:
    """The router's account of a request, with its phases. Raises TimeoutError when these are not known in time."""
    deadline = time.monotonic() + SETTLED_S
    while time.monotonic() < deadline:
        story = dict(client.get(f"/v1/requests/{identity}/timeline").json())
        if story.get("phases_ms") is not None:
            return story
        time.sleep(0.1)
    raise TimeoutError(f"{identity} has no phases after {SETTLED_S} s")


def measured(model: Path, threads: int, repeats: int) -> dict[int, dict[str, list[dict[str, float]]]]:
    """By prompt length and arm. The arms take turns; a first prompt warms each of them."""
    vocab_size = read_model(model, "model", 0, 0).vocab_size
    flags = ("--model", str(model), "--served-model-name", "model", "--threads", str(threads))
    with ExitStack() as stack:
        clients = {}
        for name, own in ARMS.items():
            url = stack.enter_context(cluster(free_port(), (*own, *flags)))
            clients[name] = stack.enter_context(httpx.Client(base_url=url, timeout=300))
        runs: dict[int, dict[str, list[dict[str, float]]]] = {size: {name: [] for name in ARMS} for size in PROMPTS}
        for size in PROMPTS:
            for repeat in range(-1, repeats):
                prompt = [random.randrange(3, vocab_size) for _ in range(size)]
                for name in list(ARMS) if repeat % 2 else list(ARMS)[::-1]:
                    found = asked(clients[name], prompt)
                    if repeat >= 0:
                        runs[size][name].append(found)
                        print(
                            model.name, size, name, {key: round(value, 3) for key, value in found.items()}, flush=True
                        )
    return runs


def row_of(model: str, size: int, runs: dict[str, list[dict[str, float]]]) -> list[Any]:
    ours, theirs = ([run["ttft_ms"] for run in runs[name]] for name in ARMS)
    exposed = [run["exposed_of_prefill"] for run in runs["disaggregated"]]
    ttft, share = ratio(ours, theirs), median(exposed)
    # The goal for the transfer is one of a 4k prompt: of a shorter one the last chunk is a larger part.
    return [
        model,
        size,
        median(ours),
        median(theirs),
        ttft,
        ttft <= 1.03,
        100 * share,
        share <= 0.03 if size >= 4000 else None,
    ]


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--models", nargs="+", default=["demo", "110m"], help="demo, or a shape of benchmarks.models")
    flags.add_argument("--threads", type=int, default=1, help="of each computing node")
    args = flags.parse_args()
    directories = {name: DEMO_MODEL if name == "demo" else checkpoint(name) for name in args.models}
    runs = {name: measured(directory, args.threads, args.repeats) for name, directory in directories.items()}
    columns = ["model", "prompt", "TTFT, ms", "co-located", "ratio", "≤ 1.03", "exposed, % of prefill", "≤ 3 %"]
    rows = [row_of(name, size, found) for name, sizes in runs.items() for size, found in sizes.items()]
    Result(
        "handoff",
        "One request at a time on a prefill and a decode node, against the same on a single co-located node.",
        [Table("Handoff over shared memory", columns, rows, f"{args.threads} thread(s) a node; medians.")],
        {name: {str(size): found for size, found in sizes.items()} for name, sizes in runs.items()},
        versions("torch", "numpy", "numba"),
    ).finish(args.out)


if __name__ == "__main__":
    main()

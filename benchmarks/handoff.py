"""Measure what a handoff adds to a request: its time to first token against a co-located node.

    python -m benchmarks handoff

Two clusters run at once: one prefill and one decode node, and a single co-located node, with the same number of threads
per node. Each prompt is sent to both in turn while nothing else runs. TTFT is measured at the client; the exposed
transfer and the prefill are phases of the request's timeline at the router.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.models import checkpoint
from benchmarks.result import Result, Table, free_port, median, parser, ratio, versions
from router.text.model_files import read_model
from shared.model_files import DEMO_MODEL

ARMS = {
    "disaggregated": ("--prefill", "1", "--decode", "1", "--disaggregate", "always"),
    "colocated": ("--mode", "colocated", "--decode", "1"),
}
PROMPTS = (1000, 2000, 4000, 8000)
START_S = 60.0
TIMELINE_S = 10.0  # for the nodes to report what they recorded


@contextmanager
def running_cluster(flags: tuple[str, ...], num_nodes: int) -> Iterator[str]:
    """Start `baton up` and yield its URL once `num_nodes` nodes are alive. Raises TimeoutError."""
    port = free_port()
    command = [sys.executable, "-m", "cluster", "up", "--port", str(port), "--log-level", "warning", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while _num_alive(url) < num_nodes:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no cluster at {url} after {START_S:g} s")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _num_alive(url: str) -> int:
    try:
        return sum(node["alive"] for node in httpx.get(url + "/v1/status", timeout=2).json()["nodes"])
    except httpx.HTTPError:
        return 0


def send(client: httpx.Client, prompt: list[int]) -> dict[str, float]:
    """Send one request for three tokens and return its times in milliseconds."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "stream": True}
    sent, first, identity = time.monotonic(), 0.0, ""
    with client.stream("POST", "/v1/completions", json=body | {"return_token_ids": True}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {") and not first:
                first, identity = time.monotonic(), json.loads(line[6:])["id"]
    timeline = timeline_of(client, identity)
    phases = timeline["phases_ms"]
    return {
        "ttft_ms": (first - sent) * 1000,
        "prefill_ms": phases["prefill"],
        "exposed_ms": phases["transfer_exposed"],
        "exposed_of_prefill": phases["transfer_exposed"] / phases["prefill"],
        "attempts": timeline["attempts"],  # more than one: a node was lost, so the TTFT is not the handoff's
    }


def timeline_of(client: httpx.Client, identity: str) -> dict[str, Any]:
    """Return the router's timeline of a request, with its phases. Raises TimeoutError if they are not known in time."""
    deadline = time.monotonic() + TIMELINE_S
    while time.monotonic() < deadline:
        timeline = dict(client.get(f"/v1/requests/{identity}/timeline").json())
        if timeline.get("phases_ms") is not None:
            return timeline
        time.sleep(0.1)
    raise TimeoutError(f"{identity} has no phases after {TIMELINE_S} s")


def measured(model: Path, threads: int, repeats: int) -> dict[int, dict[str, list[dict[str, float]]]]:
    """Return runs by prompt length and arm. The arms alternate; a first prompt warms each of them up."""
    vocab_size = read_model(model, "model", 0, 0).vocab_size
    flags = ("--model", str(model), "--served-model-name", "model", "--threads", str(threads))
    with ExitStack() as stack:
        clients = {}
        for name, own in ARMS.items():
            url = stack.enter_context(running_cluster((*own, *flags), 1 + ("--prefill" in own)))
            clients[name] = stack.enter_context(httpx.Client(base_url=url, timeout=300))
        runs: dict[int, dict[str, list[dict[str, float]]]] = {size: {name: [] for name in ARMS} for size in PROMPTS}
        for size in PROMPTS:
            for repeat in range(-1, repeats):
                prompt = [random.randrange(3, vocab_size) for _ in range(size)]
                for name in list(ARMS) if repeat % 2 else list(ARMS)[::-1]:
                    found = send(clients[name], prompt)
                    if repeat >= 0:
                        runs[size][name].append(found)
                        print(model.name, size, name, {key: round(ms, 3) for key, ms in found.items()}, flush=True)
    return runs


def row_of(model: str, size: int, runs: dict[str, list[dict[str, float]]]) -> list[Any]:
    ours, theirs = ([run["ttft_ms"] for run in runs[name]] for name in ARMS)
    exposed = [run["exposed_of_prefill"] for run in runs["disaggregated"]]
    ttft, share = ratio(ours, theirs), median(exposed)
    # The transfer's goal is for a 4k prompt: the last chunk is a larger part of a shorter one.
    goal = share <= 0.03 if size >= 4000 else None
    return [model, size, median(ours), median(theirs), ttft, ttft <= 1.03, 100 * share, goal]


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--models", nargs="+", default=["demo", "110m"], help="demo, or a shape of benchmarks.models")
    flags.add_argument("--threads", type=int, default=1, help="threads of each computing node")
    args = flags.parse_args()
    directories = {name: DEMO_MODEL if name == "demo" else checkpoint(name) for name in args.models}
    runs = {name: measured(directory, args.threads, args.repeats) for name, directory in directories.items()}
    columns = ["model", "prompt", "TTFT, ms", "co-located", "ratio", "≤ 1.03", "exposed, % of prefill", "≤ 3 %"]
    rows = [row_of(name, size, found) for name, sizes in runs.items() for size, found in sizes.items()]
    Result(
        "handoff",
        "One request at a time on a prefill and a decode node, against the same on a single co-located node.",
        [Table("Handoff over shared memory", columns, rows, f"{args.threads} thread(s) per node; medians.")],
        {name: {str(size): found for size, found in sizes.items()} for name, sizes in runs.items()},
        versions("torch", "numpy", "numba"),
    ).finish(args.out)


if __name__ == "__main__":
    main()

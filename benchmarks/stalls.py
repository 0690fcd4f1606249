"""What a long prompt does to streams that are decoding: their worst gap between two tokens, idle and while it arrives.

    python -m benchmarks.stalls --repeats 5 --out benchmarks/results/stalls.json

Arms: one co-located node on all cores under `stall_free` and under `prefill_first`, and a prefill and a decode node on
half of the cores each. Arms alternate, each repeat starts a fresh cluster and a fresh prompt.
"""

import argparse
import asyncio
import itertools
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ARMS = {
    "colocated stall_free": ("--mode", "colocated", "--decode", "1", "--policy", "stall_free"),
    "colocated prefill_first": ("--mode", "colocated", "--decode", "1", "--policy", "prefill_first"),
    "disaggregated 1p1d": ("--prefill", "1", "--decode", "1"),
}
NUM_STREAMS, NUM_PROMPT = 8, 8000
SETTLE_S, IDLE_S = 1.0, 4.0


@dataclass(slots=True)
class Stream:
    """Monotonic arrival times of one stream's tokens."""

    times: list[float] = field(default_factory=list)

    def worst_gap(self, start: float, end: float) -> float:
        """Longest time without a token within [start, end], in seconds."""
        inside = [t for t in self.times if start <= t <= end]
        edges = [start, *inside, end] if inside else [start, end]
        return max(b - a for a, b in itertools.pairwise(edges))


@contextmanager
def cluster(port: int, flags: tuple[str, ...]) -> Iterator[str]:
    command = [sys.executable, "-m", "cluster", "up", "--port", str(port), "--log-level", "warning", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    wanted = 1 + ("--prefill" in flags)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                nodes = httpx.get(url + "/v1/status", timeout=2).json()["nodes"]
                if sum(node["alive"] for node in nodes) >= wanted:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        else:
            raise TimeoutError(f"no cluster at {url}")
        yield url
    finally:
        process.terminate()
        process.wait(60)


async def follow(client: httpx.AsyncClient, prompt: list[int], stream: Stream, max_tokens: int = 6000) -> None:
    body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    async with client.stream(
        "POST", "/v1/completions", json=body | {"stream": True, "return_token_ids": True}
    ) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                stream.times.append(time.monotonic())


async def measure(url: str, seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    prompt = [rng.randrange(3, 2048) for _ in range(NUM_PROMPT)]
    streams = [Stream() for _ in range(NUM_STREAMS)]
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        warm = {"model": "model", "prompt": prompt[::-1][:600], "max_tokens": 2}
        (await client.post("/v1/completions", json=warm)).raise_for_status()
        followers = [
            asyncio.create_task(follow(client, [rng.randrange(3, 2048) for _ in range(16)], stream))
            for stream in streams
        ]
        while not all(len(stream.times) > 20 for stream in streams):  # noqa: ASYNC110 - several make it true
            await asyncio.sleep(0.05)
        await asyncio.sleep(SETTLE_S)
        idle_from = time.monotonic()
        await asyncio.sleep(IDLE_S)
        sent = time.monotonic()
        arrival = Stream()
        await follow(client, prompt, arrival, max_tokens=2)
        first, answered = arrival.times[0], time.monotonic()
        await asyncio.sleep(0.5)
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
    gaps = [b - a for s in streams for a, b in zip(s.times, s.times[1:], strict=False) if idle_from <= a and b <= sent]
    busy = [b - a for s in streams for a, b in zip(s.times, s.times[1:], strict=False) if sent <= a and b <= answered]
    return {
        "idle_median_gap_s": statistics.median(gaps),
        "idle_worst_gap_s": max(stream.worst_gap(idle_from, sent) for stream in streams),
        "busy_median_gap_s": statistics.median(busy) if busy else answered - sent,
        "busy_worst_gap_s": max(stream.worst_gap(sent, answered) for stream in streams),
        "until_first_token_worst_gap_s": max(stream.worst_gap(sent, first) for stream in streams),
        "prompt_ttft_s": first - sent,
        "prompt_second_token_s": answered - first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    for repeat in range(args.repeats):
        for name in list(ARMS) if repeat % 2 == 0 else list(ARMS)[::-1]:
            with cluster(args.port, (*ARMS[name], "--max-num-batched-tokens", str(args.budget))) as url:
                rows[name].append(asyncio.run(measure(url, repeat)))
                print(name, json.dumps({k: round(v, 4) for k, v in rows[name][-1].items()}), flush=True)
    medians = {
        name: {key: statistics.median(row[key] for row in runs) for key in runs[0]} for name, runs in rows.items()
    }
    fair, stalling, apart = (medians[name] for name in ARMS)
    summary = {
        "stall_free / prefill_first, worst gap": fair["busy_worst_gap_s"] / stalling["busy_worst_gap_s"],
        "disaggregated worst gap / its idle worst gap": apart["busy_worst_gap_s"] / apart["idle_worst_gap_s"],
        "disaggregated worst gap until the prompt's first token / its idle worst gap": (
            apart["until_first_token_worst_gap_s"] / apart["idle_worst_gap_s"]
        ),
        "disaggregated median gap / its idle median gap": apart["busy_median_gap_s"] / apart["idle_median_gap_s"],
    }
    report = {
        "command": "python -m benchmarks.stalls " + " ".join(sys.argv[1:]),
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "streams": NUM_STREAMS,
        "prompt_tokens": NUM_PROMPT,
        "budget_tokens": args.budget,
        "medians": medians,
        "ratios": summary,
        "runs": rows,
    }
    print(json.dumps({"medians": medians, "ratios": summary}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""One --tbt-slo-ms against fixed budgets of tokens, live: who keeps the time between tokens, and who is fastest then.

    python -m benchmarks.slo_budget --out benchmarks/results/slo_budget.json

One co-located node on one compute thread, fed open loop a little faster than it can serve, so that the time to finish
the same requests is its throughput. The verdict says of each load whether that was so: on a faster machine, raise the
rates. Each cluster serves two loads one after the other, unchanged: chat with moderate
prompts, then the same with long prompts among them. Arms are interleaved; a cluster's first seconds are not measured.
"""

import argparse
import asyncio
import itertools
import json
import platform
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.stalls import Stream, cluster, follow

BUDGETS = (64, 128, 256, 512, 2048)
COMMON = ("--mode", "colocated", "--decode", "1", "--threads", "1", "--max-num-seqs", "12")
WARM_UP, SEED = "warm-up", 20
BACKLOG_S = 1.0  # less is the last answer itself


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson arrivals; prompts and answers of `tokens` = (from, below), and `long_share` of prompts of `long`."""

    name: str
    rate: float  # a second
    prompt: tuple[int, int] = (50, 400)
    answer: tuple[int, int] = (30, 90)
    long: int = 2500
    long_share: float = 0.0

    def arrivals(self, seconds: float, seed: int) -> list[tuple[float, list[int], int]]:
        """(time, prompt, tokens to generate); the same for every arm."""
        rng = random.Random(f"{self.name} {seed}")
        found, at_s = [], rng.expovariate(self.rate)
        while at_s < seconds:
            length = self.long if rng.random() < self.long_share else rng.randrange(*self.prompt)
            found.append((at_s, [rng.randrange(3, 2048) for _ in range(length)], rng.randrange(*self.answer)))
            at_s += rng.expovariate(self.rate)
        return found


@dataclass(frozen=True, slots=True)
class Result:
    """`p99_s`: of the gaps between two tokens of all requests, as a client sees them."""

    p50_s: float
    p99_s: float
    worst_s: float
    tokens_per_s: float  # prompt and generated, until all are done
    backlog_s: float  # from the last arrival until then
    requests: int
    finished: int


async def serve(url: str, load: Load, seconds: float, seed: int) -> Result:
    arrivals = load.arrivals(seconds, seed)
    streams = [Stream() for _ in arrivals]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as client:
        began = time.monotonic()

        async def one(at_s: float, prompt: list[int], max_tokens: int, stream: Stream) -> None:
            await asyncio.sleep(began + at_s - time.monotonic())
            await follow(client, prompt, stream, max_tokens)

        await asyncio.gather(*(one(*arrival, stream) for arrival, stream in zip(arrivals, streams, strict=True)))
        took_s = time.monotonic() - began
    gaps = sorted(b - a for stream in streams for a, b in itertools.pairwise(stream.times))
    done = [len(stream.times) == count for stream, (_, _, count) in zip(streams, arrivals, strict=True)]
    return Result(
        p50_s=gaps[len(gaps) // 2],
        p99_s=gaps[int(0.99 * (len(gaps) - 1))],
        worst_s=gaps[-1],
        tokens_per_s=sum(len(prompt) + count for _, prompt, count in arrivals) / took_s,
        backlog_s=took_s - arrivals[-1][0],
        requests=len(arrivals),
        finished=sum(done),
    )


def judged(runs: dict[str, dict[str, list[Result]]], slo_s: float, arms: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """By load: each arm's medians, and the two claims about the arm with the SLO. A claim is null where no fixed
    budget keeps the SLO either."""
    found: dict[str, Any] = {}
    for load in next(iter(runs.values())):
        medians = {
            arm: {
                "tbt_p99_ms": 1000 * statistics.median(result.p99_s for result in runs[arm][load]),
                "tokens_per_s": statistics.median(result.tokens_per_s for result in runs[arm][load]),
            }
            for arm in arms
        }
        holds = {arm: row["tbt_p99_ms"] <= 1000 * slo_s for arm, row in medians.items()}
        *fixed, slo = arms
        rates = {arm: medians[arm]["tokens_per_s"] for arm in fixed if holds[arm]}
        best = max(rates, key=lambda arm: rates[arm], default=None)
        ratio = medians[slo]["tokens_per_s"] / rates[best] if best else None
        found[load] = {
            "fed faster than served": min(result.backlog_s for arm in arms for result in runs[arm][load]) > BACKLOG_S,
            "arms": {arm: row | {"holds": holds[arm]} for arm, row in medians.items()},
            "best fixed that holds": best,
            "throughput / the best fixed": ratio,
            "holds where any fixed one does": holds[slo] if best else None,
            "throughput at least 0.95 of it": ratio >= 0.95 if ratio is not None else None,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slo-ms", type=float, default=40.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of arrivals, a load")
    parser.add_argument("--chat-rate", type=float, default=28.0)
    parser.add_argument("--long-rate", type=float, default=12.0)
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS))
    parser.add_argument("--port", type=int, default=8320)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    loads = [Load("chat", args.chat_rate), Load("chat and long prompts", args.long_rate, long_share=0.25)]
    arms: dict[str, tuple[str, ...]] = {
        f"fixed {budget}": ("--max-num-batched-tokens", str(budget)) for budget in args.budgets
    }
    arms[f"slo {args.slo_ms:g} ms"] = ("--tbt-slo-ms", str(args.slo_ms))
    runs: dict[str, dict[str, list[Result]]] = {arm: {load.name: [] for load in loads} for arm in arms}
    for repeat in range(args.repeats):
        for arm in list(arms) if repeat % 2 == 0 else list(arms)[::-1]:
            with cluster(args.port, (*COMMON, *arms[arm])) as url:
                asyncio.run(serve(url, Load(WARM_UP, args.long_rate, long_share=0.25), args.seconds / 3, repeat))
                for load in loads:
                    result = asyncio.run(serve(url, load, args.seconds, SEED + repeat))
                    runs[arm][load.name].append(result)
                    print(f"{arm:>12} | {load.name:<21} | {result}", flush=True)
    verdict = judged(runs, args.slo_ms / 1000, arms)
    report = {
        "command": "python -m benchmarks.slo_budget " + " ".join(sys.argv[1:]),
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "slo_ms": args.slo_ms,
        "loads": {load.name: {name: getattr(load, name) for name in Load.__slots__} for load in loads},
        "verdict": verdict,
        "runs": {
            arm: {
                load: [{name: getattr(result, name) for name in Result.__slots__} for result in results]
                for load, results in by_load.items()
            }
            for arm, by_load in runs.items()
        },
    }
    print(json.dumps(verdict, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

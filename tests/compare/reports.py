"""Makes reports as a comparison writes them, from a small made-up cluster: what the tests of the page are fed with."""

import copy
import json
import math
import random
from typing import Any

HOSTILE = "</script><img src=x onerror=\"document.title='broken'\">{{data}}"
ARMS = {"colocated:2": (0, 2), "disaggregated:1p1d": (1, 1), "colocated:2@prefill_first": (0, 2)}
UNIX_MS = 1_700_000_000_000.0


def report_of(
    seed: int = 7, *, arms: tuple[str, ...] = tuple(ARMS), seconds: float = 8.0, capacity: bool = False
) -> dict[str, Any]:
    """A whole valid report of `arms`, each a run of `seconds` a seed."""
    rng = random.Random(seed)
    strips = {name: _strip(rng, name, number, seconds) for number, name in enumerate(arms)}
    runs = [
        _run(rng, arm, each, position) for position, (each, arm) in enumerate((s, a) for s in range(6) for a in arms)
    ]
    return {
        "schema": "baton.compare/1",
        "created": "2026-11-21T14:30:00Z",
        "command": "baton compare",
        "environment": {"host": "two cores", "python": "3.11.2", "torch": "2.13.0", "commit": "ccb94d0"},
        "valid": True,
        "problems": [],
        "traffic": _traffic(seconds),
        "slo": {"ttft_ms": 450.0, "tbt_ms": 40.0, "attainment": 0.9},
        "on": "live",
        "arms": [_arm(name) for name in arms],
        "parity": {"equal": True, "facts": _facts(arms)},
        "runs": runs,
        "summary": {arm: _summary([run["metrics"] for run in runs if run["arm"] == arm]) for arm in arms},
        "comparisons": [c for arm in arms[1:] for c in _comparisons(rng, arm, arms[0])],
        "tokens": {"compared": 600, "different": [], "equal": True},
        "control": {"comparisons": _comparisons(rng, arms[0], arms[0])[:2], "says": "no difference"},
        "phases": {arm: _phases(rng) for arm in arms},
        "miss_causes": {arm: {"TBT behind a prompt chunk": rng.randrange(40), "TTFT in the queue": 9} for arm in arms},
        "curves": {
            "ecdf": {
                metric: {arm: _ecdf(rng, median) for arm in arms}
                for metric, median in (("ttft_ms", 180), ("tbt_ms", 21), ("ttst_ms", 30))
            },
            "attainment": {arm: _attainment(rng) for arm in arms} if capacity else None,
        },
        "busy": {arm: _busy(rng, arm) for arm in arms},
        "strip": strips,
        "worst": [
            {"arm": arm, **copy.deepcopy(each)} for arm, strip in strips.items() for each in strip["requests"][:4]
        ][:10],
        "verdict": {
            "sentence": "At 2.4 req/s disaggregated:1p1d meets the SLO for 96.1 %, colocated:2 for 88.4 %: +7.7 points, 6 paired runs.",
            "cause": "71 % of the misses of colocated:2 are TBT stalls behind prompt chunks.",
            "flips": "colocated:2 wins if the TBT SLO is 90 ms or more.",
            "interval": "+4.1 to +11.2 points (95 %)",
        },
        "repro": "baton compare --arms colocated:2 disaggregated:1p1d --preset chat --seeds 6 --control",
    }


def hostile() -> dict[str, Any]:
    """A report in which every text that others chose tries to be markup."""
    text = json.dumps(report_of()).replace("colocated:2", json.dumps(HOSTILE)[1:-1])
    report: dict[str, Any] = json.loads(text)
    report["traffic"]["name"] = report["repro"] = report["verdict"]["sentence"] = HOSTILE
    report["problems"] = report["runs"][0]["problems"] = [HOSTILE]
    return report


def bare() -> dict[str, Any]:
    """A comparison that broke off before its first run was over: every part is there, and empty."""
    report = report_of(arms=("colocated:2", "disaggregated:1p1d"))
    report.update(
        valid=False,
        problems=["Interrupted."],
        runs=[],
        summary={},
        comparisons=[],
        control=None,
        phases={},
        miss_causes={},
    )
    report.update(busy={}, strip={}, worst=[], tokens={"compared": 0, "different": [], "equal": True}, environment={})
    report["curves"] = {"ecdf": {"ttft_ms": {}, "tbt_ms": {}, "ttst_ms": {}}, "attainment": None}
    report["parity"] = {"equal": False, "facts": []}
    report["verdict"] = {"sentence": "No verdict.", "cause": None, "flips": None, "interval": None}
    return report


def _traffic(seconds: float) -> dict[str, Any]:
    lengths = {"mean": 312.4, "p50": 207.0, "p99": 1840.0}
    return {
        "name": "azure2023_conv", "num_requests": 100, "rate": 2.4, "duration_s": seconds, "scale_tokens": 0.05,
        "prompt_tokens": lengths, "output_tokens": {"mean": 61.0, "p50": 40.0, "p99": 240.0}, "cut": 3, "refused": 0,
    }  # fmt: skip


def _nodes(name: str) -> list[str]:
    prefill, decode = ARMS.get(name, (0, 2))
    return [f"prefill-{n}" for n in range(prefill)] + [f"decode-{n}" for n in range(decode)]


def _arm(name: str) -> dict[str, Any]:
    prefill, decode = ARMS.get(name, (0, 2))
    policy = "prefill_first" if "@" in name else "mixed"
    numbers = {"devices": 2, "prefill": prefill, "decode": decode}
    return {"name": name, **numbers, "policy": policy, "settings": {"max_num_seqs": 64}}


def _facts(arms: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {"fact": "dtype", "values": dict.fromkeys(arms, "float32"), "equal": True, "declared": False},
        {"fact": "num_blocks", "values": dict.fromkeys(arms, 2048), "equal": True, "declared": False},
        {"fact": "policy", "values": {arm: _arm(arm)["policy"] for arm in arms}, "equal": False, "declared": True},
    ]


def _run(rng: random.Random, arm: str, seed: int, position: int) -> dict[str, Any]:
    blocks = 1200 + rng.randrange(90) if ARMS.get(arm, (0, 0))[0] else 0
    metrics = {
        "ttft_p50_ms": rng.gauss(180, 9), "ttft_p99_ms": rng.gauss(610, 40), "tbt_p50_ms": rng.gauss(21, 1), "tbt_p99_ms": rng.gauss(58, 5),
        "tbt_max_ms": rng.gauss(190, 20), "tpot_p50_ms": rng.gauss(24, 1), "ttst_p50_ms": rng.gauss(30, 2), "ttst_p99_ms": rng.gauss(90, 9),
        "e2e_p50_ms": rng.gauss(1600, 60), "attainment": rng.uniform(0.85, 0.98), "goodput_rps": rng.gauss(2.2, 0.1), "fluidity": 0.97,
        "throughput_tps": rng.gauss(800, 12), "exposed_transfer_p50_ms": 3.2 if blocks else None, "hidden_transfer_p50_ms": 41.0 if blocks else None,
        "interference_s": 0.4, "client_lag_p99_ms": rng.uniform(0.2, 1.1),
    }  # fmt: skip
    return {
        "arm": arm, "seed": seed, "position": position, "valid": True, "overloaded": False, "problems": [], "window_s": [1.5, 8.0],
        "arrived": 100, "finished": 100, "failed": 0, "metrics": metrics, "kv": {"handoffs": blocks // 12, "blocks": blocks, "bytes": blocks << 16},
    }  # fmt: skip


def _summary(runs: list[dict[str, float | None]]) -> dict[str, Any]:
    return {metric: _estimate([run[metric] for run in runs]) for metric in runs[0]}


def _estimate(values: list[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    if not known:
        return {"mean": None, "low": None, "high": None, "per_seed": values}
    mean = sum(known) / len(known)
    half = 1.1 * math.sqrt(sum((value - mean) ** 2 for value in known) / len(known))
    return {"mean": mean, "low": mean - half, "high": mean + half, "per_seed": values}


def _comparisons(rng: random.Random, arm: str, against: str) -> list[dict[str, Any]]:
    def one(metric: str, base: float, difference: float, says: str) -> dict[str, Any]:
        reach = abs(base) * 0.04
        return {
            "arm": arm, "against": against, "metric": metric, "difference": difference, "percent": 100 * difference / base,
            "low": difference - reach, "high": difference + reach, "p": rng.random() / 10, "says": says,
        }  # fmt: skip

    return [
        one("attainment", 0.884, 0.077, "better"),
        one("tbt_p99_ms", 58.0, -17.2, "better"),
        one("ttft_p50_ms", 180.0, 25.0, "worse"),
        one("throughput_tps", 800.0, 3.0, "too close to call"),
    ]


def _phases(rng: random.Random) -> dict[str, Any]:
    names = ("router", "prefill_queue", "prefill", "transfer_exposed", "decode_queue", "decode", "interference")
    typical = (2, 60, 140, 4, 3, 1300, 90)
    return {
        "mean": {name: value * rng.uniform(0.8, 1.2) for name, value in zip(names, typical, strict=True)},
        "missed": {name: value * rng.uniform(1, 2.5) for name, value in zip(names, typical, strict=True)},
        "residual_ms": {"median": 0.02, "p99": 0.4},
    }


def _ecdf(rng: random.Random, median: float, points: int = 300) -> dict[str, Any]:
    xs = sorted(median * math.exp(rng.gauss(0, 0.5)) for _ in range(points))
    return {"x": xs, "y": [(n + 1) / points for n in range(points)]}


def _attainment(rng: random.Random) -> dict[str, Any]:
    rates = [1.0, 1.6, 2.2, 2.8, 3.4, 4.0]
    turn = rng.uniform(2.4, 3.2)
    shares = [1 / (1 + math.exp(5 * (rate - turn))) for rate in rates]
    return {
        "rate": rates,
        "share": shares,
        "low": [s * 0.93 for s in shares],
        "high": [min(1.0, s * 1.05) for s in shares],
    }


def _busy(rng: random.Random, arm: str) -> dict[str, Any]:
    def one(node: str) -> dict[str, float]:
        prefill = 0.6 if node.startswith("prefill") else 0.0 if ARMS.get(arm, (0, 0))[0] else 0.25
        decode = 0.0 if node.startswith("prefill") else rng.uniform(0.3, 0.5)
        blocked = rng.uniform(0, 0.1)
        return {
            "busy": prefill + decode,
            "prefill": prefill,
            "decode": decode,
            "idle_blocked": blocked,
            "idle_empty": 1 - prefill - decode - blocked,
        }

    return {node: one(node) for node in _nodes(arm)}


def _strip(rng: random.Random, name: str, number: int, seconds: float) -> dict[str, Any]:
    origin = UNIX_MS + 60_000 * number  # one run after another, as a real comparison makes them
    nodes = {node: _passes(rng, node, origin, seconds) for node in _nodes(name)}
    requests = [_timeline(rng, f"cmpl-{number}{n:06x}", nodes, origin + n * seconds * 20) for n in range(40)]
    return {"seed": 0, "slo_ms": 40.0, "nodes": nodes, "requests": requests}


def _passes(rng: random.Random, node: str, origin: float, seconds: float) -> list[list[float | None]]:
    passes: list[list[float | None]] = []
    time = origin
    while time < origin + seconds * 1000:
        prompt = 0 if node.startswith("decode") and rng.random() < 0.8 else rng.randrange(32, 512)
        decodes = 0 if node.startswith("prefill") else rng.randrange(1, 24)
        duration = 6 + 0.09 * prompt + 0.3 * decodes + rng.random()
        passes.append([time, duration, prompt, decodes, duration * 0.98])
        time += duration + (rng.random() * 40 if rng.random() < 0.1 else 0.4)
    return passes


def _timeline(rng: random.Random, identity: str, nodes: dict[str, Any], start: float) -> dict[str, Any]:
    first, last = next(iter(nodes)), list(nodes)[-1]
    spans, time = [], start

    def then(kind: str, node: str | None, length: float, tokens: int | None = None, cause: str | None = None) -> None:
        nonlocal time
        spans.append(
            {"kind": kind, "node": node, "start_ms": time, "end_ms": time + length, "tokens": tokens, "cause": cause}
        )
        time += length

    then("queued", first, rng.uniform(5, 90))
    for _ in range(rng.randrange(1, 5)):
        then("chunk", first, rng.uniform(20, 60), 128)
    first_token = time
    then("transfer", last, rng.uniform(2, 9))
    for _ in range(rng.randrange(3, 20)):
        then("decode", last, rng.uniform(10, 25), 1)
        if rng.random() < 0.3:
            then("wait", last, rng.uniform(5, 60), None, rng.choice(["behind a prompt chunk", "no room", "transfer"]))
    return {
        "id": identity, "spans": spans, "prompt_tokens": 256, "generated_tokens": 30, "accepted_ms": start, "first_token_ms": first_token,
        "second_token_ms": first_token + 30, "last_token_ms": time, "ended_ms": time, "finish": "length",
    }  # fmt: skip

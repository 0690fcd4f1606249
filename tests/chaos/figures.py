"""Measure the guarantees that the matrix does not cover, and write benchmarks/results/figures.json.

Restarts, Redis outages, slow readers and cancels run on emulated nodes with steps of at least 8 ms, so their results do
not depend on the speed of this machine. `bad_inputs` uses the hash model, and `tenants` uses the demo model.
`python -m benchmarks footprint` measures how much time and memory a start takes.
"""

import argparse
import contextlib
import json
import random
import signal
import socket
import tempfile
import time
import timeit
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil

from benchmarks.result import Cell, Result, Table, median
from engine.hash_model import expected_tokens
from shared.kv.memory import checksums
from tests.chaos.drive import all_back
from tests.chaos.traffic import Ask, Load, Outcome
from tests.cluster.harness import DEMO_VOCABULARY, Cluster, RedisServer, cluster, completion, prompt_of, wait_for
from tests.router import bad_requests as bad

Row = list[Cell]
EMULATION = {
    "cost": {"overhead": 0.008, "per_token": 1e-5},
    "kv_bytes_per_token": 4096,
    "kv_tokens": 2_000_000,
    "link": "local",
    "links": {"local": {"latency_s": 1e-4, "bytes_per_s": 1e10}},
}
SLOW_CLIENTS, SLOW_TOKENS = 200, 4000


@contextlib.contextmanager
def emulated(prefill: int, decode: int, registry: str = "", **settings: object) -> Iterator[Cluster]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(EMULATION, file)
        file.flush()
        settings |= {"emulate": file.name, "num_blocks": 0, "max_num_seqs": 256}
        with cluster(prefill, decode, registry, **settings) as running:
            yield running


# ---- during streams ------------------------------------------------------------------------------------------------


def rolling_restart(seconds: float) -> list[Row]:
    """Restart every node by SIGTERM, one at a time."""

    def restart_each() -> None:
        for name in sorted(set(running.processes) - set(running.urls)):
            running.send_signal(name, signal.SIGTERM)
            running.processes[name].wait(60)
            running.start(name)
            wait_for(lambda: all_back(running), f"{name} back")

    with emulated(2, 2) as running:
        calm, restarting = during(running, lambda: time.sleep(seconds)), during(running, restart_each)
    return _compared("every node restarted under load", calm, restarting, 1.5)


def redis_outage(seconds: float) -> list[Row]:
    """Kill the Redis server that holds the registry, and restart it without data."""
    with tempfile.TemporaryDirectory() as directory, RedisServer(Path(directory)) as server:
        server.start()
        with emulated(2, 2, server.url) as running:
            calm = during(running, lambda: time.sleep(seconds / 2))
            server.kill()
            without = during(running, lambda: time.sleep(seconds))
            server.start()
            wait_for(lambda: running.status()["registry"]["state"] == "ok", "the router has reconnected to Redis")
    return _compared(f"Redis dead for {seconds:g} s", calm, without, 1.1)


def during(running: Cluster, work: Callable[[], object]) -> Load:
    """Stream answers with 8 clients while `work` runs. Wait until all streams have ended, and return their outcomes."""

    def asks(index: int) -> Ask:
        return Ask(index, tuple(prompt_of(index, 200)), 64)

    def answers(outcome: Outcome) -> list[list[int]]:
        return [expected_tokens(list(outcome.prompt), outcome.ask.max_tokens, DEMO_VOCABULARY, emulated=True)]

    with Load([running.url], running.model, 8, asks=asks, answers=answers) as load:
        work()
    return load


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def _compared(what: str, calm: Load, disturbed: Load, goal: float) -> list[Row]:
    gaps_ms = [
        [(to - at) / 1e6 for o in load.outcomes for at, to in pairwise(o.arrivals_ns)] for load in (calm, disturbed)
    ]
    usual_ms, p99_ms = (percentile(gaps, 0.99) for gaps in gaps_ms)
    text = f"{p99_ms:.1f} ms of {usual_ms:.1f}, {p99_ms / usual_ms:.2f} times"
    failed = disturbed.failures()
    return [
        [f"{what}: requests failed", f"{len(failed)} of {len(disturbed.outcomes)}", "0", not failed],
        [f"{what}: p99 between tokens", text, f"≤ {goal:g} times", p99_ms <= goal * usual_ms],
    ]


def slow_clients(seconds: float) -> list[Row]:
    """Measure how slow clients affect other clients after all requests of slow clients have left their nodes."""
    with emulated(1, 1) as running:
        router = psutil.Process(running.processes["router"].pid)
        calm = during(running, lambda: time.sleep(seconds))
        before = router.memory_info().rss
        with contextlib.ExitStack() as cleanup:
            body = completion(running.model, [5] * 20, SLOW_TOKENS, stream=True)
            sockets = [cleanup.enter_context(running.send(body, 4096)) for _ in range(SLOW_CLIENTS)]
            wait_for(lambda: _are_nodes_idle(running), "no node runs a request of a slow reader")
            grown = router.memory_info().rss - before
            disturbed = during(running, lambda: _read_slowly(sockets, seconds))
    each_kib = grown / SLOW_CLIENTS / 1024
    rows = _compared(f"{SLOW_CLIENTS} clients that each read one byte per second", calm, disturbed, 1.1)
    return [*rows, ["memory of the router per slow client", f"{each_kib:.0f} KiB", "≤ 256 KiB", each_kib <= 256]]


def _are_nodes_idle(running: Cluster) -> bool:
    time.sleep(0.2)
    return not any(node["running"] or node["waiting"] for node in running.status()["nodes"])


def _read_slowly(sockets: Sequence[socket.socket], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for each in sockets:
            each.recv(1, socket.MSG_DONTWAIT)
        time.sleep(1.0)


# ---- one at a time -------------------------------------------------------------------------------------------------


def cancels(count: int) -> list[Row]:
    """Measure the time from a client's disconnect until the router sees that no node holds a block for the request."""
    rng, took_s = random.Random(1), []
    with emulated(1, 1, heartbeat_s=0.05) as running:
        for _ in range(count):
            with running.send(completion(running.model, [5] * 20, SLOW_TOKENS, stream=True), 4096):
                time.sleep(rng.uniform(0.0, 0.3))
            began = time.monotonic()
            while any(node["blocks"]["owned"] + node["blocks"]["reserved"] for node in running.status()["nodes"]):
                time.sleep(0.002)
            took_s.append(time.monotonic() - began)
    p99_ms = 1000 * percentile(took_s, 0.99)
    text = f"{1000 * median(took_s):.0f} ms; p99 {p99_ms:.0f} ms of {count}"
    return [["from a cancel until all blocks are free, as the router reports it", text, "≤ 100 ms", p99_ms <= 100]]


def bad_inputs() -> list[Row]:
    """Send each request of the table of bad requests on its own connection, and measure the time to the answer."""
    rows = bad.JSON_ROWS + bad.HTTP_ROWS + bad.KEY_ROWS + bad.FIELD_ROWS
    took_s, statuses = [], []
    with _with_keys(dict.fromkeys((bad.ACME, bad.OTHER), "tenant"), max_connections=bad.MAX_CONNECTIONS) as running:
        for row in rows:
            with bad.Client(running.port) as client:
                began = time.monotonic()
                client.send(row.data)
                statuses.append(client.answer().status)
                took_s.append(time.monotonic() - began)
        ended = [name for name, process in running.processes.items() if process.poll() is not None]
    text = f"{1000 * median(took_s):.1f} ms; p99 {1000 * percentile(took_s, 0.99):.1f} ms; the longest {1000 * max(took_s):.0f} ms"
    num_broken = sum(status >= 500 for status in statuses)
    return [
        [f"{len(rows)} bad inputs: time to the answer", text, "≤ 50 ms", max(took_s) <= 0.05],
        [
            "5xx answers to these inputs; processes ended",
            f"{num_broken}; {len(ended)}",
            "0; 0",
            not (num_broken or ended),
        ],
    ]


def tenants(count: int) -> list[Row]:
    """Measure whether the time to the first token reveals that this or another tenant has sent the prompt before.
    The measure is the area under the ROC curve: 0.5 is no better than a guess, 1 is certainty."""
    rng = random.Random(1)
    keys = {"one": "sk-one-" + "1" * 20, "other": "sk-other-" + "2" * 20}
    with _with_keys({key: name for name, key in keys.items()}, runner="torch", num_blocks=20_000) as running:
        prompts = [[rng.randrange(3, 2048) for _ in range(400)] for _ in range(2 * count)]
        known = set(rng.sample(range(2 * count), count))
        for index in sorted(known):
            _first_token_s(running, keys["one"], prompts[index])
        samples: dict[str, list[tuple[bool, float]]] = {"other": [], "one": []}
        for name, of_tenant in samples.items():
            for index in rng.sample(range(2 * count), 2 * count):
                of_tenant.append((index in known, _first_token_s(running, keys[name], prompts[index])))
    across, within = (_area(samples[name]) for name in ("other", "one"))
    return [
        [f"another tenant's prompts, recognized by their time ({2 * count})", f"AUC {across:.3f}", "0.45 to 0.55", 0.45 <= across <= 0.55],
        ["a tenant's own prompts, inferred from timing", f"AUC {within:.3f}", "> 0.9", within > 0.9],
    ]  # fmt: skip


def _area(samples: Sequence[tuple[bool, float]]) -> float:
    """Return the share of the pairs (known prompt, unknown prompt) in which the known prompt is faster."""
    known, others = ([took_s for is_known, took_s in samples if is_known is wanted] for wanted in (True, False))
    return float(np.mean(np.array(known)[:, None] < np.array(others)[None, :]))


def _first_token_s(running: Cluster, key: str, prompt: list[int]) -> float:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    body = json.dumps(completion(running.model, prompt, 1)).encode()
    began = time.monotonic()
    with urllib.request.urlopen(urllib.request.Request(running.url + "/v1/completions", body, headers)) as answer:
        answer.read()
    return time.monotonic() - began


@contextlib.contextmanager
def _with_keys(tenants_of: dict[str, str], **settings: object) -> Iterator[Cluster]:
    """Run one co-located node behind a router that accepts only these keys (key -> tenant) and the admin key."""
    lines = [f"{name}:{sha256(key.encode()).hexdigest()}" for key, name in tenants_of.items()]
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("\n".join([*lines, f"ops:{sha256(bad.ADMIN.encode()).hexdigest()}:admin"]))
        file.flush()
        settings |= {"mode": "colocated", "api_keys_file": file.name, "api_key": bad.ADMIN}
        with cluster(0, 1, **settings) as running:
            yield running


def checks(count: int) -> list[Row]:
    """Count the flipped bits that checksums of KV rows detect, and measure the speed of these checksums."""
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 256, (64, 64 << 10), dtype=np.uint8)
    sums = [checksums(rows, [index]) for index in range(len(rows))]
    found = 0
    for row, byte, bit in zip(*(rng.integers(0, top, count) for top in (*rows.shape, 8)), strict=True):
        rows[row, byte] ^= 1 << bit
        found += checksums(rows, [row]) != sums[row]
        rows[row, byte] ^= 1 << bit
    many = np.resize(rows, (4096, rows.shape[1]))  # 256 MiB, more than the CPU caches hold
    sum_s = timeit.timeit(lambda: checksums(many, range(len(many))), number=3) / 3
    return [
        ["bits flipped in rows of 64 KiB: detected", f"{found:,} of {count:,}", "all", found == count],
        ["checksums of KV, one core", f"{many.nbytes / sum_s / 1e9:.1f} GB/s", "", None],
    ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos figures", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the Redis outage, the longest part")
    parser.add_argument("--no-write", action="store_true", help="do not write the results file")
    chosen = parser.parse_args(arguments)
    parts: list[Callable[[], list[Row]]] = [
        lambda: rolling_restart(chosen.seconds / 3),
        lambda: redis_outage(chosen.seconds),
        lambda: slow_clients(chosen.seconds / 5),
        lambda: cancels(200),
        bad_inputs,
        lambda: tenants(200),
        lambda: checks(100_000),
    ]
    rows: list[Row] = []
    for part in parts:
        rows += (found := part())
        print(*found, sep="\n", flush=True)
    result = Result(
        "figures",
        "Measurements of token times use 8 clients and emulated nodes with steps of at least 8 ms. The others use the "
        "hash model or the demo model.",
        [Table("Promises outside the matrix", ["what", "measured", "goal", "met"], rows)],
        command="python -m tests.chaos figures",
    )
    print(result.tables[0].markdown()) if chosen.no_write else result.finish()
    return 0

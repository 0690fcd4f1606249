"""Disconnect clients at random moments during random faults, and check that nothing leaks.

Once the cluster is idle, it must have released all blocks, descriptors, threads, shared memory and sockets.
"""

import argparse
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks.result import Result, Table
from tests.chaos.census import count_all, count_shared, leaks
from tests.chaos.drive import CLIENTS, KINDS, FaultThread, Supervisor, all_back
from tests.chaos.evidence import at_rest
from tests.chaos.traffic import Load, ask
from tests.cluster.harness import Cluster, cluster, http_request, wait_for

IDLE_S = 1.0  # time after which the connections to dead nodes are closed
MAX_WAIT_S = 0.5  # the longest time until a client disconnects; most clients disconnect much earlier
WARM_UP_REQUESTS = 96
FAULT_EVERY_S = 5.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos cancels", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--channel", default="shm")
    parser.add_argument("--no-faults", action="store_true", help="inject no faults")
    parser.add_argument("--no-write", action="store_true", help="do not write the results file")
    chosen = parser.parse_args(arguments)
    with cluster(2, 2, kv_channel=chosen.channel, heartbeat_s=0.5, log_format="json") as running:
        counts, leaked = cancels(running, chosen.count, 0.0 if chosen.no_faults else FAULT_EVERY_S)
    rows = [*map(list, counts.items()), ["leaks", "; ".join(leaked) or "none"]]
    result = Result(
        "cancels",
        "Clients disconnect at random moments in every phase of their requests, while nodes are killed, stopped and frozen "
        "at random. Resources are counted once the cluster is idle and compared with the counts after a warm-up.",
        [Table("Cancels and faults", ["what", "number"], rows)],
        vars(chosen),
        command=f"python -m tests.chaos cancels --count {chosen.count}",
    )
    print(result.tables[0].markdown()) if chosen.no_write else result.finish()
    return 1 if leaked else 0


def cancels(running: Cluster, count: int, fault_every_s: float, seed: int = 1) -> tuple[Counter[str], list[str]]:
    """Cancel `count` requests, and inject a random fault into a random node every `fault_every_s` seconds (0: never).

    Return the counts of requests by outcome and of faults by kind in one counter, and one line for each leak. Raises
    AssertionError if a node does not come back.
    """
    rng, nodes = random.Random(seed), sorted(set(running.processes) - set(running.urls))

    def plan() -> Iterator[tuple[float, str, str]]:
        while fault_every_s:
            yield fault_every_s, rng.choice(nodes), rng.choice(sorted(KINDS))

    with Supervisor(running, {}, thaw_s=60.0) as supervisor:
        hang_up_all(running, WARM_UP_REQUESTS, seed=seed + 1)
        _run_uncancelled(running)  # this opens every connection between nodes
        at_rest(running)
        time.sleep(IDLE_S)
        before, shared_before = count_all(running), count_shared(running)
        with FaultThread(running, plan()) as faults:
            counts = hang_up_all(running, count, seed)
        wait_for(lambda: all_back(running), "all nodes back")
        lost = _run_uncancelled(running)
        _, held = at_rest(running)
        time.sleep(IDLE_S)
        after, shared = count_all(running), count_shared(running) - shared_before
    restarts = supervisor.restarts
    # Sockets of nodes killed within the last minute may remain, because a starting process removes only older sockets.
    shared["unix sockets"] -= len(restarts)
    found = held + lost + leaks(before, after) + [f"{num} more {what}" for what, num in shared.items() if num > 0]
    if len(restarts) > (num_ended := sum(num for (_, kind), num in faults.counts.items() if "SIG" in kind)):
        found.append(f"{len(restarts) - num_ended} nodes exited without a fault: {restarts}")
    for (name, kind), num in faults.counts.items():
        counts[f"{name.partition('-')[0]} nodes: {kind}"] += num
    counts["nodes restarted"] = len(restarts)
    return counts, found


def hang_up_all(running: Cluster, count: int, seed: int) -> Counter[str]:
    """Send `count` requests and cancel each at a random moment. Return the number of requests by outcome."""

    def client(number: int) -> Counter[str]:
        rng = random.Random(seed * 1000 + number)
        return Counter(hang_up(running, index, rng) for index in range(number, count, CLIENTS))

    with ThreadPoolExecutor(CLIENTS) as pool:
        return sum(pool.map(client, range(CLIENTS)), Counter[str]())


def hang_up(running: Cluster, index: int, rng: random.Random) -> str:
    """Send a request and close the socket after a random time, often within the short phases before the first token."""
    whole = http_request(ask(index).path, ask(index).body(running.model))
    wait_s = MAX_WAIT_S * rng.random() ** 2
    received = b""
    try:
        with socket.create_connection(("127.0.0.1", running.port), 10) as connection:
            if rng.random() < 0.02:
                connection.sendall(whole[: rng.randrange(len(whole))])
                return "disconnected in the request"
            connection.sendall(whole)
            until = time.monotonic() + wait_s
            while (left_s := until - time.monotonic()) > 0 and not received.endswith(b"0\r\n\r\n"):
                connection.settimeout(left_s)
                received = received[-16:] + (data := connection.recv(65_536))
                if not data:
                    break
    except TimeoutError:
        pass
    except OSError as error:
        return f"{type(error).__name__}"
    if received.endswith(b"0\r\n\r\n"):
        return "answered before"
    return "disconnected in the answer" if received else "disconnected before the answer"


def _run_uncancelled(running: Cluster) -> list[str]:
    """Send requests without cancelling them. Return one line for each request that failed."""
    with Load([running.url], running.model, 3 * CLIENTS, 3 * CLIENTS) as load:
        pass
    return load.failures()

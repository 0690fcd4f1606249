"""Disconnect clients at random moments during random faults, and check that nothing leaks.

Once the cluster is idle, it must have released all blocks, descriptors, threads, shared memory and sockets.
"""

import argparse
import json
import random
import signal
import socket
import threading
import time
from collections import Counter
from urllib.parse import urlsplit

from benchmarks.result import Result, Table
from tests.chaos.census import count_all, leaks, left_about
from tests.chaos.drive import CLIENTS, Supervisor, all_back
from tests.chaos.evidence import at_rest
from tests.chaos.traffic import ask, check, run
from tests.cluster.harness import Cluster, cluster, wait_for

IDLE_S = 1.0  # connections to dead nodes are closed within this time
MOST_S = 0.5  # the longest time until a client disconnects; most clients disconnect much earlier
WARM = 96
FAULT_EVERY_S = 5.0
FAULTS = {
    "SIGKILL": ((0.0, signal.SIGKILL),),
    "SIGTERM": ((0.0, signal.SIGTERM),),
    "frozen 1 s": ((0.0, signal.SIGSTOP), (1.0, signal.SIGCONT)),
    "frozen 4 s": ((0.0, signal.SIGSTOP), (4.0, signal.SIGCONT)),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos cancels", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--channel", default="shm")
    parser.add_argument("--no-faults", action="store_true", help="inject no faults")
    parser.add_argument("--no-write", action="store_true", help="do not write the results file")
    chosen = parser.parse_args(arguments)
    with cluster(2, 2, kv_channel=chosen.channel, heartbeat_s=0.5, log_format="json") as running:
        left = cancels(running, chosen.count, 0.0 if chosen.no_faults else FAULT_EVERY_S)
    rows = [[what, num] for what, num in left.counts.items()]
    rows.append(["leaks", "; ".join(left.leaks) or "none"])
    result = Result(
        "cancels",
        "Clients disconnect at random moments in every phase of their requests, while nodes are killed, stopped and frozen "
        "at random. Resources are counted once the cluster is idle and compared with the counts after a warm-up.",
        [Table("Cancels and faults", ["what", "number"], rows)],
        vars(chosen),
        command=f"python -m tests.chaos cancels --count {chosen.count}",
    )
    print(result.tables[0].markdown()) if chosen.no_write else result.finish()
    return 1 if left.leaks else 0


class Left:
    """The result: the number of requests by outcome, the number of faults by kind, and the leaks."""

    def __init__(self, counts: Counter[str], leaks: list[str]) -> None:
        self.counts = counts
        self.leaks = leaks


def cancels(running: Cluster, count: int, fault_every_s: float, seed: int = 1) -> Left:
    """Cancel `count` requests while faults are injected. Raises AssertionError if a node does not come back."""
    with Supervisor(running, {}, thaw_s=60.0) as supervisor:
        hang_up_all(running, WARM, seed=seed + 1)
        _whole(running, range(3 * CLIENTS))  # this opens every connection between nodes
        at_rest(running)
        time.sleep(IDLE_S)
        before, about_before = count_all(running), left_about(running)
        faults = _Faults(running, fault_every_s, random.Random(seed))
        try:
            counts = hang_up_all(running, count, seed)
        finally:
            counts_of_faults = faults.stop()
        wait_for(lambda: all_back(running), "all nodes back")
        lost = _whole(running, range(3 * CLIENTS))
        _, held = at_rest(running)
        time.sleep(IDLE_S)
        after, about = count_all(running), left_about(running) - about_before
    restarts = supervisor.restarts
    about["unix sockets"] -= len(
        restarts
    )  # a starting process removes the sockets of killed nodes, but only those older than a minute
    found = held + lost + leaks(before, after) + [f"{num} {what} more" for what, num in about.items() if num > 0]
    if len(restarts) > (num_ended := sum(num for what, num in counts_of_faults.items() if "SIG" in what)):
        found.append(f"{len(restarts) - num_ended} nodes exited without a fault: {restarts}")
    return Left(counts + counts_of_faults + Counter({"nodes restarted": len(restarts)}), found)


def hang_up_all(running: Cluster, count: int, seed: int) -> Counter[str]:
    """Send `count` requests and cancel each at a random moment. Return the number of requests by the phase reached."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def client(number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        for index in range(number, count, CLIENTS):
            saw = hang_up(running, index, rng)
            with lock:
                counts[saw] += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


def hang_up(running: Cluster, index: int, rng: random.Random) -> str:
    """Send a request and close the socket after a random time, often within the short phases before the first token."""
    place = urlsplit(running.url)
    body = json.dumps(ask(index).body(running.model)).encode()
    path = "/v1/chat/completions" if ask(index).is_chat else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    wait_s = MOST_S * rng.random() ** 2
    received = b""
    try:
        with socket.create_connection((place.hostname or "", place.port or 0), 10) as connection:
            whole = head.encode() + body
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


def _whole(running: Cluster, indexes: range) -> list[str]:
    """Send concurrent requests without cancelling them. Return one line for each request that failed."""
    outcomes = []
    threads = [
        threading.Thread(target=lambda index=index: outcomes.append(run(running.url, running.model, ask(index))))
        for index in indexes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outcome in outcomes:
        check(outcome)
    return [f"request {o.ask.index}: {o.lost or 'wrong tokens'}" for o in outcomes if o.lost or o.is_unequal]


class _Faults:
    """A thread that injects a random fault into a random node every `every_s` seconds; 0 disables it."""

    def __init__(self, running: Cluster, every_s: float, rng: random.Random) -> None:
        self._running, self._every_s, self._rng = running, every_s, rng
        self._counts: Counter[str] = Counter()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._harm, name="faults")
        if every_s:
            self._thread.start()

    def stop(self) -> Counter[str]:
        self._over.set()
        if self._every_s:
            self._thread.join()
        return self._counts

    def _harm(self) -> None:
        while not self._over.wait(self._every_s):
            if not all_back(self._running):
                continue  # inject one fault at a time, because a cluster without nodes tests nothing
            name = self._rng.choice(sorted(set(self._running.processes) - set(self._running.urls)))
            what = self._rng.choice(sorted(FAULTS))
            self._counts[f"{name.partition('-')[0]} nodes: {what}"] += 1
            process = self._running.processes[name]
            for pause_s, number in FAULTS[what]:
                time.sleep(pause_s)
                process.send_signal(number)

"""The rows of the fault matrix that need other clusters: two routers that share a Redis, and a faulty network."""

import signal
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.result import Cell
from tests.chaos.drive import CLIENTS, all_back
from tests.chaos.evidence import at_rest
from tests.chaos.traffic import Ask, Load, Outcome, failures, run
from tests.chaos.wire import DEAD, FAR, GOOD, HERE, THERE, Line, Wire, is_permitted
from tests.cluster.harness import RedisServer, cluster, wait_for

COLUMNS = ["fault", "requests", "lost or unequal", "longest gap ms", "blocks returned"]
TALK = Ask(0, (5, 6, 7), 4000)  # the answer is so long that it is still streamed when the router is killed
ROUTERS = "routers"
NETWORKS: dict[str, tuple[str, Line, Line, float]] = {  # label, line to nodes, line back, duration in s (0: whole row)
    "network far": ("50 ms, 1 % loss, 100 Mbit", FAR, FAR, 0.0),
    "network dead": ("no packet passes for 6 s", DEAD, DEAD, 6.0),
    "network dead there": ("no packet reaches them for 6 s", DEAD, GOOD, 6.0),
    "network dead back": ("no packet comes back for 6 s", GOOD, DEAD, 6.0),
}
NAMES = [ROUTERS, *NETWORKS]


def row(name: str, requests: int) -> list[Cell] | None:
    """Run a row and print its failures. Return None if the system does not permit the faulty network of the row.

    Raises AssertionError if a node does not come back.
    """
    if name == ROUTERS:
        outcomes, num_cut, held = kill_a_router(requests)
        what = (
            f"one of two routers killed: its {num_cut} streams cut; this row counts requests through the other router"
        )
    elif is_permitted():
        what, there, back, for_s = NETWORKS[name]
        what = f"network to the decode nodes: {what}"
        outcomes, held = disturb_network(there, back, for_s, requests)
    else:
        print(f"{name}: skipped, because it needs root, /dev/net/tun and network namespaces")
        return None
    bad = failures(outcomes)
    longest_ms = round(1000 * max(outcome.gap_s for outcome in outcomes))
    print(what, *bad[:20], *held, sep="\n  ", flush=True)
    return [what, len(outcomes), len(bad), longest_ms, "; ".join(held) or "yes"]


def kill_a_router(requests: int, nodes: int = 2) -> tuple[list[Outcome], int, list[str]]:
    """Send half of the load to each router and kill one router.

    Return the outcomes of the requests to the other router, the number of streams that the kill cut, and the nodes that
    still hold blocks. Raises AssertionError if a step takes too long or the killed router has sent a wrong token.
    """
    with tempfile.TemporaryDirectory() as directory, RedisServer(Path(directory)) as redis:
        redis.start()
        with cluster(nodes, nodes, registry=redis.url, routers=2, heartbeat_s=0.5, log_format="json") as running:
            lives, dies = (Load([running.urls[name]], running.model, CLIENTS // 2, requests * (name == "router"))
                           for name in ("router", "router-1"))  # fmt: skip
            with lives, dies:
                wait_for(lambda: len(dies.outcomes) >= CLIENTS, "requests through the second router")
                talk = Outcome(TALK)
                talking = threading.Thread(target=run, args=(running.urls["router-1"], running.model, talk))
                talking.start()
                wait_for(lambda: bool(talk.tokens), "a token of the stream that the kill cuts")
                num_before = len(lives.outcomes)
                running.send_signal("router-1", signal.SIGKILL)
                wait_for(lambda: len(lives.outcomes) > num_before + CLIENTS, "the first router continues to serve")
                talking.join()
            _, held = at_rest(running)
    of_killed = [*dies.outcomes, talk]
    assert not any(outcome.is_unequal for outcome in of_killed), "the killed router has sent a wrong token"
    cut = [outcome for outcome in of_killed if outcome.lost and not outcome.lost.startswith("ConnectionRefused")]
    return lives.outcomes, len(cut), held


def disturb_network(there: Line, back: Line, for_s: float, requests: int) -> tuple[list[Outcome], list[str]]:
    """Run the router, prefill nodes and clients at this end of a wire, and the decode nodes at the other end.

    Return the outcomes and the nodes that still hold blocks. Raises AssertionError if the nodes do not come back.
    """
    with Wire() as wire:
        inside: dict[str, object] = {"host": THERE}
        with cluster(
            2,
            2,
            own={"router": {"registry_host": HERE}, "decode-0": inside, "decode-1": inside},
            prefixes={name: ["ip", "netns", "exec", wire.namespace] for name in ("decode-0", "decode-1")},
            secret=True,  # nodes require a secret to listen on addresses other than loopback
            kv_channel="tcp",
            heartbeat_s=0.5,
            log_format="json",
        ) as running:
            with Load([running.url], running.model, CLIENTS, requests) as load:
                time.sleep(2.0 if for_s else 0.0)
                wire.there, wire.back = there, back
                time.sleep(for_s)
                if for_s:
                    wire.there = wire.back = GOOD
                    wait_for(lambda: all_back(running), "decode nodes are back")
            wire.there = wire.back = GOOD
            return load.outcomes, at_rest(running)[1]

"""Kill one of two routers that share a Redis, and check that only the streams through the killed router break."""

import argparse
import signal
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.drive import CLIENTS
from tests.chaos.evidence import at_rest
from tests.chaos.traffic import Ask, Load, Outcome, run_into
from tests.cluster.harness import cluster, redis_server, wait_for

TALK = Ask(0, (5, 6, 7), 4000)  # long enough to be in progress at the kill


@dataclass(slots=True)
class Halves:
    """The results of the requests to the surviving router and to the killed router."""

    asked: int
    lost: list[str]
    longest_gap_s: float
    asked_of_killed: int
    broken_of_killed: int  # streams that the kill interrupted
    held: list[str]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos routers", description=__doc__)
    parser.add_argument("--requests", type=int, default=400, help="minimum requests to the surviving router")
    halves = kill_one(parser.parse_args(arguments).requests)
    print(
        f"surviving router: {halves.asked} requests, {len(halves.lost)} lost; killed router: {halves.asked_of_killed} requests, "
        f"{halves.broken_of_killed} streams cut; held: {halves.held or 'nothing'}",
        *halves.lost,
        sep="\n",
    )
    return 1 if halves.lost or halves.held else 0


def kill_one(requests: int, nodes: int = 2) -> Halves:
    """Send half of the load to each router and kill one router. Raises AssertionError if a step takes too long."""
    with tempfile.TemporaryDirectory() as directory, redis_server(Path(directory)) as (url, start):
        start()
        with cluster(nodes, nodes, registry=url, routers=2, heartbeat_s=0.5, log_format="json") as running:
            lives, dies = (Load(running.urls[name], running.model, CLIENTS // 2) for name in ("router", "router-1"))
            lives.start()
            dies.start()
            wait_for(lambda: len(dies.outcomes) >= CLIENTS, "requests through the second router")
            talk = Outcome(TALK)
            talking = threading.Thread(target=run_into, args=(talk, running.urls["router-1"], running.model))
            talking.start()
            wait_for(lambda: bool(talk.tokens), "a token of the stream that is to break")
            num_before = len(lives.outcomes)
            running.send_signal("router-1", signal.SIGKILL)
            wait_for(lambda: len(lives.outcomes) > num_before + CLIENTS, "the first router continues to serve")
            talking.join()
            of_killed, of_living = [*dies.finish(0), talk], lives.finish(requests)
            _, held = at_rest(running)
    wrong = [f"{o.ask.index}: {o.lost or 'unequal'}" for o in of_living if o.lost or o.is_unequal]
    wrong += [f"{o.ask.index} of the killed: unequal" for o in of_killed if o.is_unequal]
    cut = sum(bool(o.lost) and not o.lost.startswith("ConnectionRefused") for o in of_killed)
    longest_s = max(outcome.gap_s for outcome in of_living)
    return Halves(len(of_living), wrong, longest_s, len(of_killed), cut, held)

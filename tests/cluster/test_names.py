"""Test clusters of several routers without Redis: nodes join every router that a name resolves to."""

import signal
import time
from collections.abc import Iterator

import pytest

from tests.chaos.traffic import Load
from tests.cluster.harness import Cluster, cluster, expected, wait_for

NODES = {"prefill-0", "decode-0", "decode-1"}
PROMPT = [7] * 30
OUTAGE_S = 2.5  # longer than the interval between two name look-ups plus the time limit of a look-up


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster(1, 2, routers=2, names=True, node_timeout_s=30.0) as running:
        yield running


def serves(running: Cluster, router: str) -> bool:
    return running.stream(PROMPT, 4, router=router) == expected(PROMPT, 4)


def join(running: Cluster, router: str, nodes: set[str] = NODES) -> None:
    wait_for(lambda: running.answers(router) and running.alive(router) == nodes, f"all nodes have joined {router}")


def test_a_router_is_added_and_removed_under_load(running: Cluster) -> None:
    with Load(list(running.urls.values()), running.model, 2, share=0.7) as load:
        running.start("router-2")
        wait_for(lambda: running.answers("router-2"), "the new router serves")
        running.resolve_to("router", "router-1", "router-2")
        join(running, "router-2")
        with Load([running.urls["router-2"], running.url], running.model, 1) as other:
            running.resolve_to("router", "router-1")
            time.sleep(OUTAGE_S)
            assert running.alive("router-2") == NODES, "nodes stay joined to a router that is still there"
            running.send_signal("router-2", signal.SIGTERM)
            assert running.processes["router-2"].wait(60) == 0
    assert load.failures() == []
    assert other.failures() == []
    del running.urls["router-2"], running.processes["router-2"]


def test_an_outage_of_the_name_service_changes_nothing_and_late_nodes_join_afterwards(running: Cluster) -> None:
    with Load(list(running.urls.values()), running.model, 2, share=0.7) as load:
        running.resolve_to()
        running.start("decode-2")
        wait_for(lambda: "does not resolve (the name service failed)" in running.log("decode-2"), "the node says why")
        assert all(running.alive(router) == NODES for router in running.urls)
        running.resolve_to("router", "router-1")
        for router in running.urls:
            join(running, router, NODES | {"decode-2"})
        running.send_signal("decode-2", signal.SIGTERM)
        assert running.processes["decode-2"].wait(60) == 0
    assert load.failures() == []
    del running.processes["decode-2"]
    for router in running.urls:
        join(running, router)


def test_only_the_streams_of_a_killed_router_are_lost(running: Cluster) -> None:
    clients, retried = (
        2,
        ("ConnectionRefusedError", "ConnectionResetError", "RemoteDisconnected", "ValueError: status 503"),
    )
    with (
        Load([running.urls["router"]], running.model, 2, least=12) as ours,
        Load([running.urls["router-1"]], running.model, clients, least=6, refusals=retried) as theirs,
    ):
        wait_for(lambda: len(theirs.outcomes) >= 2, "requests are under way")
        running.send_signal("router-1", signal.SIGKILL)
        running.processes["router-1"].wait()
        time.sleep(OUTAGE_S)
        running.start("router-1")
        join(running, "router-1")
        assert serves(running, "router-1")
    assert ours.failures() == []
    assert len(theirs.failures()) <= clients, "one stream of each client was at the killed router"
    assert not any(outcome.is_unequal for outcome in theirs.outcomes)
    running.idle()

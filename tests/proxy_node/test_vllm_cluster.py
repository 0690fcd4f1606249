"""Test clusters of real vLLM servers: no client sees the failure of either of two replicas.

Each start of a server takes a minute and 2 GB. `BATON_PEER_VLLM=… pytest -m exhaustive -s tests/proxy_node` runs them
and prints the longest gaps; benchmarks/peers/install.sh installs the interpreter.
"""

from collections.abc import Callable, Iterator

import pytest

from tests.cluster.harness import Cluster, wait_for
from tests.proxy_node.vllm import ACTS, VLLM, VllmServer, end_in_mid_stream, served

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(not VLLM, reason="BATON_PEER_VLLM names no interpreter")]
NODES = ("decode-0", "decode-1")
Running = tuple[Cluster, dict[str, VllmServer]]


@pytest.fixture(scope="module")
def replicas() -> Iterator[Running]:
    with served(["decode", "decode"]) as running:
        yield running


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_no_client_sees_the_end_of_a_replica(replicas: Running, act: Callable[[VllmServer], None], name: str) -> None:
    running, servers = replicas
    gaps = end_in_mid_stream(running, name, servers[name], act)
    print(f"\n{act.__name__} {name}: gaps {', '.join(f'{gap:.2f} s' for gap in gaps)}")
    servers[name] = servers[name].restarted()
    wait_for(lambda: running.alive("router") == set(NODES), f"{name} is back")

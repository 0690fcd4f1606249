"""Test clusters of real vLLM servers: no client sees the end of either of two replicas.

Each start of a server takes a minute and 2 GB. `BATON_PEER_VLLM=… pytest -m exhaustive -s tests/proxy_node` runs them
and prints the longest gaps; benchmarks/peers/install.sh installs the interpreter.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.cluster.harness import Cluster, cluster, wait_for
from tests.proxy_node.vllm import MAX_MODEL_LEN, VLLM, VllmServer

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(not VLLM, reason="BATON_PEER_VLLM names no interpreter")]
NODES = ("decode-0", "decode-1")
LENGTH, NUM_STREAMS = 800, 3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, dict[str, VllmServer]]]:
    directory = tmp_path_factory.mktemp("vllm")
    servers = {name: VllmServer(directory / f"{name}.log") for name in NODES}
    try:
        for server in servers.values():
            server.ready()
        urls = {name: server.url for name, server in servers.items()}
        with cluster(0, 2, engines=urls, max_model_len=MAX_MODEL_LEN, log_level="info") as running:
            yield running, servers
    finally:
        for server in servers.values():
            server.end()


def kill_server(server: VllmServer) -> None:
    os.kill(server.process.pid, signal.SIGKILL)


def terminate_server(server: VllmServer) -> None:
    os.kill(server.process.pid, signal.SIGTERM)


def kill_engine_core(server: VllmServer) -> None:
    children = psutil.Process(server.process.pid).children(recursive=True)
    [core] = [each for each in children if "EngineCore" in "".join(each.cmdline())]
    core.kill()


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("act", [kill_server, terminate_server, kill_engine_core], ids=lambda act: act.__name__)
def test_no_client_sees_the_end_of_a_replica(
    served: tuple[Cluster, dict[str, VllmServer]], act: object, name: str, tmp_path: Path
) -> None:
    running, servers = served
    prompts = [[40 + index, *range(200, 230)] for index in range(NUM_STREAMS)]
    whole = [running.complete(prompt, LENGTH) for prompt in prompts]
    begun = [threading.Event() for _ in prompts]
    gaps = [0.0] * NUM_STREAMS

    def stream(index: int) -> list[int]:
        last = 0.0

        def seen(count: int) -> None:
            nonlocal last
            now = time.monotonic()
            gaps[index] = max(gaps[index], now - (last or now))
            last = now
            if count >= 20:
                begun[index].set()

        return running.stream(prompts[index], LENGTH, seen)

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(stream, index) for index in range(NUM_STREAMS)]
        assert all(event.wait(120) for event in begun)
        assert not any(each.done() for each in streams), "the server ends in mid-stream"
        act(servers[name])  # type: ignore[operator]
        assert [each.result() for each in streams] == whole
    moved = running.status()["requests"]["moved"]
    print(f"\n{act.__name__} {name}: gaps {', '.join(f'{gap:.2f} s' for gap in gaps)}; {moved} moved so far")  # type: ignore[attr-defined]
    servers[name].end()
    servers[name] = VllmServer(tmp_path / "log", port=servers[name].port)
    servers[name].ready()
    wait_for(lambda: running.alive("router") == set(NODES), f"{name} is back")

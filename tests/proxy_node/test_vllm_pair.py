"""Test a real prefill and a real decode engine of vLLM, whose KV moves by NIXL: the tokens are those of one engine, and
no client sees the failure of either. See test_vllm_cluster.py."""

import json
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.harness import Cluster, wait_for
from tests.proxy_node.vllm import ACTS, VLLM, VllmServer, end_in_mid_stream, served

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(not VLLM, reason="BATON_PEER_VLLM names no interpreter")]
NODES = ("prefill-0", "decode-0")
NIXL = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"})
Running = tuple[Cluster, dict[str, VllmServer]]


@pytest.fixture(scope="module")
def engines() -> Iterator[Running]:
    with served(["prefill", "decode"], "--kv-transfer-config", NIXL) as running:
        yield running


@pytest.mark.parametrize("length", [1, 33, 128, 129, 1000])
def test_prompts_move_and_the_tokens_are_those_of_one_engine(engines: Running, length: int) -> None:
    running, _ = engines
    prompt = [(37 * index + length) % 2048 for index in range(length)]
    before = running.status()
    handed_over = running.complete(prompt, 40)
    wait_for(lambda: running.status()["handoffs"] == before["handoffs"] + 1, "the handoff is counted")
    running.complete([length, 5, 6], 2)  # an idle engine does not update its metrics
    wait_for(lambda: running.status()["bytes_moved"] > before["bytes_moved"], "KV moved")
    change_role(running, "decode")
    assert running.complete(prompt, 40) == handed_over
    change_role(running, "prefill")


def change_role(running: Cluster, role: str) -> None:
    def is_changed() -> bool:
        node = running.nodes()["prefill-0"]
        return (node["role"], node["state"]) == (role, "ready")

    running.post("/v1/nodes/prefill-0/role", {"role": role})
    wait_for(is_changed, f"the node is a {role} node")


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_no_client_sees_the_end_of_either_engine(
    engines: Running, act: Callable[[VllmServer], None], name: str
) -> None:
    running, servers = engines
    gaps = end_in_mid_stream(running, name, servers[name], act)
    print(f"\n{act.__name__} {name}: gaps {', '.join(f'{gap:.2f} s' for gap in gaps)}")
    servers[name] = servers[name].restarted()
    wait_for(lambda: running.alive("router") == set(NODES), f"{name} is back")
    running.complete([7] * 300, 5)

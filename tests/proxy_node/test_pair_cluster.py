"""Test clusters of a router, two prefill and two decode nodes whose engines hand KV over: every process may end, freeze
and come back, every answer is complete and right, and no KV is read twice or after its lease has ended."""

from collections.abc import Iterator

import pytest

from tests.cluster.harness import Cluster, wait_for
from tests.proxy_node.clusters import ACTS, TIMES, Act, Engines, kill_engine, kill_proxy, lose, serving
from tests.proxy_node.vllm_stub import answer

NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
SHORT = (kill_engine, kill_proxy)  # other faults take minutes; test_cluster.py tests all faults
CASES = [pytest.param(act, marks=() if act in SHORT else pytest.mark.exhaustive, id=act.__name__) for act in ACTS]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Engines]]:
    with serving(tmp_path_factory.mktemp("engines"), NODES, connector="nixl") as running:
        yield running


def misused(engines: Engines) -> int:
    return sum(engines.get(name, "handoffs")["misused"] for name in NODES)


def test_prompts_are_handed_over_by_an_unmodified_router(served: tuple[Cluster, Engines]) -> None:
    running, engines = served
    before = running.status()["handoffs"]
    assert running.status()["mode"] == "disaggregated"
    prompts = [[index, *range(60)] for index in range(8)]
    for prompt in prompts:
        assert running.complete(prompt, 12) == answer(prompt, 12)
    wait_for(lambda: running.status()["handoffs"] == before + len(prompts), "the handoffs are counted")
    wait_for(lambda: running.status()["bytes_moved"] >= 8 * 6100, "the bytes are counted")
    kept = sum(engines.get(name, "handoffs")["kept"] for name in NODES[:2])
    assert kept >= len(prompts)
    assert running.nodes()["prefill-0"]["facts"]["connector"] == "nixl"


@pytest.mark.parametrize("name", ["prefill-0", "decode-1"])
@pytest.mark.parametrize("act", CASES)
def test_no_client_sees_the_loss_of_either_side(served: tuple[Cluster, Engines], act: Act, name: str) -> None:
    running, engines = served
    for round_ in range(TIMES):
        lose(running, engines, act, name, round_)
    assert misused(engines) == 0


def test_a_node_changes_its_role(served: tuple[Cluster, Engines]) -> None:
    running, _ = served
    running.post("/v1/nodes/decode-0/role", {"role": "prefill"})
    wait_for(lambda: running.nodes()["decode-0"]["role"] == "prefill", "the node prefills")
    prompt = [8, *range(50)]
    assert running.complete(prompt, 12) == answer(prompt, 12)
    running.post("/v1/nodes/decode-0/role", {"role": "decode"})
    wait_for(lambda: running.nodes()["decode-0"]["role"] == "decode", "the node decodes")


def test_a_prefill_node_needs_a_connector(served: tuple[Cluster, Engines]) -> None:
    _, engines = served
    engines.set("decode-1", connector="")
    found = engines.refusal(engines.urls["decode-1"], "--role", "prefill")
    engines.set("decode-1", connector="nixl")
    assert "--kv-transfer-config" in found

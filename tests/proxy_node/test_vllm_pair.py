"""Test a real prefill and a real decode engine of vLLM, whose KV moves by NIXL: the tokens are those of one engine.
test_vllm_faults.py describes how to run such tests."""

from collections.abc import Iterator

import pytest

from tests.cluster.harness import DEMO, Cluster, wait_for
from tests.proxy_node.vllm import NIXL, VLLM, VllmServer, change_role, random_qwen3, served

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(not VLLM, reason="BATON_PEER_VLLM names no interpreter")]
Running = tuple[Cluster, dict[str, VllmServer]]


@pytest.fixture(scope="module", params=["demo", "qwen3"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = DEMO if request.param == "demo" else random_qwen3(tmp_path_factory.mktemp("qwen3"))
    with served(["prefill", "decode"], "--kv-transfer-config", NIXL, model=model) as running:
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
    change_role(running, "prefill-0", "decode")
    assert running.complete(prompt, 40) == handed_over
    change_role(running, "prefill-0", "prefill")

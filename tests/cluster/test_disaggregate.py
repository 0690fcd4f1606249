"""Test conditional disaggregation and TTFT admission in clusters of emulated devices, whose step times are known."""

import itertools
import json
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.emulation import COSTS
from engine.hash_model import expected_tokens
from tests.cluster.harness import DEMO_VOCABULARY, Cluster, cluster, prompt_of, wait_for

EMULATED = {"emulate": "h200-llama-3.1-8b@100gbe", "max_num_batched_tokens": 2048}


def expected(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(prompt, count, DEMO_VOCABULARY, emulated=True)


def placements(running: Cluster) -> dict[str, int]:
    return dict(running.status()["placements"])


def learn(running: Cluster, growth: int = 150) -> None:
    """Send short and long prompts, several at once, until each node has a cost model of its steps.

    On a busy machine, too few steps may contain several prompts. A node then needs further prompts.
    """
    rounds = itertools.count()

    def has_learnt() -> bool:
        first = 12 * next(rounds)
        prompts = [prompt_of(first + index, 40 + growth * index) for index in range(12)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda one: running.complete(one, 40), prompts))
        assert found == [expected(one, 40) for one in prompts]
        running.settled()
        return all(node["cost"] for node in running.nodes().values())

    wait_for(has_learnt, "every node has a model of its steps")
    running.settled()


@pytest.fixture(scope="module")
def adaptive() -> Iterator[Cluster]:
    with cluster(prefill=1, decode=1, disaggregate="auto", **EMULATED) as running:
        assert running.complete([7, 8, 9], 5) == expected([7, 8, 9], 5)
        assert placements(running) == {"no_prediction": 1}
        learn(running)
        yield running


def test_a_short_prompt_stays_with_an_idle_decode_node(adaptive: Cluster) -> None:
    before, handoffs = placements(adaptive), adaptive.settled()["handoffs"]
    prompt = prompt_of(50, 40)
    assert adaptive.complete(prompt, 8) == expected(prompt, 8)
    after = placements(adaptive)
    assert after.get("local_sooner", 0) == before.get("local_sooner", 0) + 1, (before, after)
    assert adaptive.settled()["handoffs"] == handoffs


def test_a_long_prompt_is_not_computed_on_a_busy_decode_node(adaptive: Cluster) -> None:
    with ThreadPoolExecutor(16) as pool:
        streams = [pool.submit(adaptive.stream, prompt_of(60 + index, 30), 1000) for index in range(16)]
        wait_for(lambda: adaptive.nodes()["decode-0"]["running"] >= 16, "all 16 requests are in decode")
        before = placements(adaptive)
        prompt = prompt_of(90, 6000)
        assert adaptive.complete(prompt, 4) == expected(prompt, 4)
        assert placements(adaptive).get("remote_sooner", 0) == before.get("remote_sooner", 0) + 1
        assert [stream.result() for stream in streams] == [expected(prompt_of(60 + i, 30), 1000) for i in range(16)]
    adaptive.idle()


def test_a_request_whose_first_token_would_be_late_is_refused_with_retry_after(tmp_path: Path) -> None:
    device = json.loads((COSTS / "h200-llama-3.1-8b.json").read_text())
    device["cost"] = {"overhead": 0.005, "per_token": 0.0005}
    (tmp_path / "slow.json").write_text(json.dumps(device))
    with cluster(prefill=1, decode=1, ttft_slo_ms=2500, emulate=tmp_path / "slow.json") as running:
        learn(running, growth=40)
        with pytest.raises(urllib.error.HTTPError) as caught:
            running.complete(prompt_of(1, 8000), 4)  # takes 4 s to compute
        with caught.value as answer:
            assert answer.code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert b"over the limit of 2500 ms" in answer.read()
        assert running.status()["requests"]["refused"] == 1
        assert running.complete([5, 6, 7], 4) == expected([5, 6, 7], 4)

"""Test one prefill and one decode process behind a router, as clients see them. With the hash model, any misplaced,
stale or incomplete block changes the answer."""

import signal
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from cluster.secret import write_secret
from tests.cluster.harness import Cluster, cluster, completion, expected, prompt_of, wait_for


@pytest.fixture(scope="module")
def served() -> Iterator[Cluster]:
    with cluster(secret=True, max_num_batched_tokens=64) as running:
        yield running


def test_tokens_come_through_both_nodes_and_every_byte_is_counted(served: Cluster) -> None:
    before = served.settled()
    prompt = prompt_of(1, 200)
    assert served.complete(prompt, 20) == expected(prompt, 20)
    after = served.settled()
    assert after["handoffs"] == before["handoffs"] + 1
    block_bytes = next(iter(served.nodes().values()))["block_bytes"]
    assert after["blocks_moved"] - before["blocks_moved"] == 13
    assert after["bytes_moved"] == after["blocks_moved"] * block_bytes
    assert served.nodes()["prefill-0"]["channels"].popitem()[1] == "shm"


def test_a_prefix_that_the_decode_node_holds_is_not_sent_again(served: Cluster) -> None:
    prompt = prompt_of(2, 160)
    served.complete(prompt, 2)
    before = served.settled()["blocks_moved"]
    longer = prompt + prompt_of(3, 40)
    answer = served.post("/v1/completions", completion("model", longer, 8))
    assert answer["choices"][0]["token_ids"] == expected(longer, 8)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 160
    assert served.settled()["blocks_moved"] == before + 3, "only the new blocks move"


def test_several_samples_cost_one_prefill_and_one_handoff(served: Cluster) -> None:
    before, prompt = served.settled(), prompt_of(4, 128)
    computed = served.nodes()["prefill-0"]["prompt_tokens"]
    answer = served.post("/v1/completions", completion("model", prompt, 6, n=4))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(choice["token_ids"] == expected(prompt, 6) for choice in answer["choices"])
    assert served.settled()["handoffs"] == before["handoffs"] + 1
    assert served.nodes()["prefill-0"]["prompt_tokens"] == computed + 128


def test_groups_of_samples_wait_until_the_first_group_has_computed_the_prompt(served: Cluster) -> None:
    prompt, computed = prompt_of(5, 128), served.nodes()["prefill-0"]["prompt_tokens"]
    answer = served.post("/v1/completions", completion("model", prompt, 6, n=20))
    assert [choice["index"] for choice in answer["choices"]] == list(range(20))
    assert all(choice["token_ids"] == expected(prompt, 6) for choice in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == 128
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    served.settled()
    assert served.nodes()["prefill-0"]["prompt_tokens"] < computed + 2 * 128


def test_the_openai_client_works_with_and_without_streaming(served: Cluster) -> None:
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["model"]
    options: dict[str, Any] = {"model": "model", "max_tokens": 9, "temperature": 0}
    plain = client.completions.create(prompt="In the beginning", **options)
    pieces = client.completions.create(prompt="In the beginning", stream=True, **options)
    assert "".join(piece.choices[0].text for piece in pieces) == plain.choices[0].text
    pieces = client.completions.create(
        prompt="In the beginning", stream=True, extra_body={"stream_interval": 9, "return_token_ids": True}, **options
    )
    rows = [piece.choices[0].model_extra["token_ids"] for piece in pieces]
    assert len(rows) == 2, "the first event is sent immediately, and the last one has the other tokens"
    assert sum(map(len, rows)) == 9
    options["messages"] = [{"role": "user", "content": "Speak, speak."}]
    chat = client.chat.completions.create(**options)
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == chat.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="model", prompt="x", max_tokens=0)
    client.close()


def test_a_draining_node_finishes_its_requests_and_accepts_no_new_ones() -> None:
    with cluster(prefill=1, decode=2) as running:
        with running.streaming([prompt_of(6, 50)] * 4, 1500):
            running.send_signal("decode-0", signal.SIGTERM)
            running.send_signal("prefill-0", signal.SIGTERM)
            more = [running.complete(prompt_of(60 + index, 30), 5) for index in range(5)]
        assert more == [expected(prompt_of(60 + index, 30), 5) for index in range(5)]
        assert running.processes["decode-0"].wait(40) == 0
        assert running.processes["prefill-0"].wait(40) == 0
        # A request sent to a draining node just before the router noticed the drain may have moved to another node.
        assert running.status()["requests"]["moved"] <= len(more)


def test_a_node_with_another_secret_is_refused_and_gets_no_request(served: Cluster) -> None:
    path = served.directory / "another-secret"
    write_secret(path)
    served.own["decode-9"] = {"cluster_secret_file": path}
    served.start("decode-9")
    stranger = served.processes.pop("decode-9")
    try:
        wait_for(
            lambda: "its certificate belongs to another cluster" in served.log("decode-9"), "the node logs the reason"
        )
        prompt = prompt_of(9, 40)
        assert served.complete(prompt, 4) == expected(prompt, 4)
        time.sleep(1.0)  # time for several connection attempts
        assert set(served.nodes()) == {"prefill-0", "decode-0"}
        assert served.log("decode-9").count("not connected: its certificate") == 1, "one line for many attempts"
    finally:
        stranger.terminate()
        assert stranger.wait(20) == 0, "it drains as usual"

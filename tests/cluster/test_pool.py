"""Clusters in which a prefill node computes in the KV pool of its decode node."""

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError

import pytest

from tests.cluster.harness import Cluster, cluster, expected, wait_for


def prompts_of(seed: int, count: int, length: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 2048) for _ in range(length)] for _ in range(count)]


def all_right(running: Cluster, prompts: list[list[int]], max_tokens: int) -> None:
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(running.stream, prompt, max_tokens) for prompt in prompts]
        assert [answer.result() for answer in answers] == [expected(prompt, max_tokens) for prompt in prompts]


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with cluster(kv_channel="pool", max_num_batched_tokens=64) as running:
        yield running


def test_a_prompt_is_computed_in_the_decode_nodes_pool_and_nothing_moves(shared: Cluster) -> None:
    all_right(shared, prompts_of(1, 12, 700), 30)
    status = shared.settled()
    prefill, decode = shared.nodes()["prefill-0"], shared.nodes()["decode-0"]
    assert (status["handoffs"], status["bytes_moved"]) == (12, 0)
    assert prefill["prompt_tokens"] == 12 * 700
    assert decode["prompt_tokens"] == 0
    assert prefill["blocks"]["total"] == 1, "it has no pool of its own"
    assert prefill["channels"] == {decode["address"]: "pool"}


def test_blocks_that_the_decode_node_holds_are_not_computed_again(shared: Cluster) -> None:
    (prompt,), (other,) = prompts_of(2, 1, 640), prompts_of(3, 1, 100)
    all_right(shared, [prompt], 5)
    # The last token is always computed, for its logits. If its block is full, the whole block of 16 tokens is computed.
    for again, count in ((prompt, 16), (prompt + other, len(other))):
        before = shared.settled()["nodes"]
        all_right(shared, [again], 5)
        pairs = zip(before, shared.settled()["nodes"], strict=True)
        computed = {node["id"]: node["prompt_tokens"] - was["prompt_tokens"] for was, node in pairs}
        assert computed == {"prefill-0": count, "decode-0": 0}


def test_clients_that_disconnect_leave_no_block_behind(shared: Cluster) -> None:
    prompts = prompts_of(5, 8, 4000)

    def disconnect(_: int) -> None:
        raise ConnectionAbortedError

    with ThreadPoolExecutor(len(prompts)) as pool:
        cut = [pool.submit(shared.stream, prompt, 20, disconnect) for prompt in prompts[:4]]
        kept = [pool.submit(shared.stream, prompt, 20) for prompt in prompts[4:]]
        assert all(isinstance(one.exception(), ConnectionAbortedError) for one in cut)
        assert [one.result() for one in kept] == [expected(prompt, 20) for prompt in prompts[4:]]
    shared.idle()


def test_a_node_whose_pool_is_shared_keeps_its_role(shared: Cluster) -> None:
    for name, role in (("prefill-0", "decode"), ("decode-0", "prefill")):
        with pytest.raises(HTTPError, check=lambda error: b"its KV pool is shared" in error.read()):
            shared.post(f"/v1/nodes/{name}/role", {"role": role})


def test_requests_wait_for_room_in_a_small_pool_and_all_are_served() -> None:
    with cluster(kv_channel="pool", max_num_batched_tokens=64, num_blocks=100, max_num_seqs=8) as running:
        all_right(running, prompts_of(4, 24, 500), 40)
        running.idle()


def test_a_killed_prefill_node_loses_no_request_and_a_new_one_computes_in_the_same_pool() -> None:
    with cluster(kv_channel="pool", max_num_batched_tokens=16) as running:
        prompts = prompts_of(6, 8, 2000)
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = [pool.submit(running.stream, prompt, 20) for prompt in prompts]
            wait_for(lambda: running.nodes()["prefill-0"]["prompt_tokens"] > 0, "prompts are being computed")
            running.send_signal("prefill-0", signal.SIGKILL)
            assert [answer.result() for answer in answers] == [expected(prompt, 20) for prompt in prompts]
        assert running.status()["requests"]["moved"] > 0
        running.idle()
        running.processes["prefill-0"].wait()
        running.start("prefill-0")
        running.ready()
        all_right(running, prompts_of(7, 4, 300), 5)
        assert running.settled()["handoffs"] >= 4


def test_blocks_of_a_frozen_prefill_node_stay_in_quarantine_until_it_stops_writing() -> None:
    with cluster(kv_channel="pool", max_num_batched_tokens=16, node_timeout_s=1.0) as running:
        prompts = prompts_of(8, 4, 3000)
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = [pool.submit(running.stream, prompt, 20) for prompt in prompts]
            wait_for(lambda: running.nodes()["prefill-0"]["prompt_tokens"] > 0, "prompts are being computed")
            running.send_signal("prefill-0", signal.SIGSTOP)
            assert [answer.result() for answer in answers] == [expected(prompt, 20) for prompt in prompts]
        wait_for(lambda: running.nodes()["decode-0"]["blocks"]["quarantined"] > 0, "its blocks are in quarantine")
        running.send_signal("prefill-0", signal.SIGCONT)
        running.idle()


def test_a_killed_decode_node_ends_its_prefill_node_and_loses_no_request() -> None:
    with cluster(decode=1, kv_channel="pool") as running:
        prompts = prompts_of(9, 6, 100)
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = [pool.submit(running.stream, prompt, 1500) for prompt in prompts]
            wait_for(lambda: running.nodes()["decode-0"]["generated_tokens"] > 100, "tokens are being generated")
            running.send_signal("decode-0", signal.SIGKILL)
            for name, status in (("decode-0", -signal.SIGKILL), ("prefill-0", 70)):
                assert running.processes[name].wait(20) == status
                running.start(name)
            assert [answer.result() for answer in answers] == [expected(prompt, 1500) for prompt in prompts]
        running.ready()
        running.idle()


def test_a_second_decode_node_without_a_shared_pool_computes_its_prompts_itself() -> None:
    with cluster(decode=1, kv_channel="pool") as running:
        running.settings |= {"kv_channel": "auto"}
        running.start("decode-1")
        running.ready()
        all_right(running, prompts_of(10, 16, 200), 30)
        status = running.settled()
        nodes = {node["id"]: node for node in status["nodes"]}
        assert status["requests"]["moved"] == 0, "no prompt was sent where it cannot be handed on"
        assert nodes["decode-1"]["prompt_tokens"] == 200 * status["placements"]["no_prefill_node"] > 0
        assert nodes["prefill-0"]["prompt_tokens"] == 200 * status["handoffs"] > 0


def test_a_model_gives_the_same_tokens_in_a_shared_pool_and_in_its_own() -> None:
    prompt = "Once upon a time there was a little fox who " * 12
    answers = []
    for channel in ("pool", "shm"):
        with cluster(runner="torch", num_blocks=128, max_num_batched_tokens=48, kv_channel=channel) as running:
            answers.append(running.complete(prompt, 24))
            assert running.settled()["handoffs"] == 1
    assert answers[0] == answers[1]

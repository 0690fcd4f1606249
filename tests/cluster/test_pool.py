"""Test clusters in which a prefill node computes in the KV pool of its decode node."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.error import HTTPError

import pytest

from tests.cluster.harness import Cluster, cluster, expected, prompt_of, wait_for


def prompts_of(seed: int, count: int, length: int) -> list[list[int]]:
    return [prompt_of(100 * seed + index, length) for index in range(count)]


def all_right(running: Cluster, prompts: list[list[int]], max_tokens: int) -> None:
    with running.streaming(prompts, max_tokens):
        pass


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with cluster(kv_channel="pool", max_num_batched_tokens=64) as running:
        yield running


def test_a_prompt_is_computed_in_the_decode_nodes_pool_and_no_block_moves(shared: Cluster) -> None:
    all_right(shared, prompts_of(1, 12, 700), 30)
    status = shared.settled()
    prefill, decode = shared.nodes()["prefill-0"], shared.nodes()["decode-0"]
    assert (status["handoffs"], status["bytes_moved"]) == (12, 0)
    assert prefill["prompt_tokens"] == 12 * 700
    assert decode["prompt_tokens"] == 0
    assert prefill["blocks"]["total"] == 1, "the prefill node has no pool of its own"
    assert prefill["channels"] == {decode["address"]: "pool"}


def test_blocks_that_the_decode_node_holds_are_not_computed_again(shared: Cluster) -> None:
    (prompt,), (other,) = prompts_of(2, 1, 640), prompts_of(3, 1, 100)
    all_right(shared, [prompt], 5)
    # The last token is always computed, to get its logits. If it fills its block, all 16 tokens of the block are
    # computed.
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


@contextmanager
def in_progress(running: Cluster, node: str, count: str, prompts: list[list[int]], max_tokens: int) -> Iterator[None]:
    """Stream all prompts. The `with` block starts when `count`, a field of the node's status, has increased."""
    before = running.nodes()[node][count]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(running.stream, prompt, max_tokens) for prompt in prompts]
        wait_for(lambda: running.nodes()[node][count] > before, f"{count} of {node} increase")
        yield
        assert [answer.result() for answer in answers] == [expected(prompt, max_tokens) for prompt in prompts]


def test_frozen_and_killed_nodes_with_a_shared_pool_lose_no_request() -> None:
    with cluster(kv_channel="pool", max_num_batched_tokens=16, node_timeout_s=1.0) as running:
        # On a busy machine, all handoffs may be complete when the node is frozen.
        for seed in range(20, 30):
            with in_progress(running, "prefill-0", "prompt_tokens", prompts_of(seed, 12, 4000), 20):
                running.send_signal("prefill-0", signal.SIGSTOP)
            wait_for(lambda: not running.nodes()["decode-0"]["blocks"]["reserved"], "all handoffs end")
            if running.nodes()["decode-0"]["blocks"]["quarantined"]:
                break
            running.send_signal("prefill-0", signal.SIGCONT)
            running.ready()
        assert running.nodes()["decode-0"]["blocks"]["quarantined"], "the node was never frozen during a handoff"
        running.send_signal("prefill-0", signal.SIGCONT)
        running.idle()
        running.ready()

        with in_progress(running, "prefill-0", "prompt_tokens", prompts_of(6, 12, 4000), 20):
            running.send_signal("prefill-0", signal.SIGKILL)
        assert running.status()["requests"]["moved"] > 0
        running.idle()
        running.processes["prefill-0"].wait()
        running.start("prefill-0")
        running.ready()
        handoffs = running.settled()["handoffs"]
        all_right(running, prompts_of(7, 4, 300), 5)  # the restarted prefill node computes in the same pool
        assert running.settled()["handoffs"] >= handoffs + 4

        with in_progress(running, "decode-0", "generated_tokens", prompts_of(9, 6, 100), 1500):
            running.send_signal("decode-0", signal.SIGKILL)
            for name, status in (("decode-0", -signal.SIGKILL), ("prefill-0", 70)):
                assert running.processes[name].wait(20) == status, "the prefill node ends with its decode node"
                running.start(name)
        running.ready()
        running.idle()


def test_a_second_decode_node_without_a_shared_pool_computes_its_prompts_itself() -> None:
    with cluster(decode=1, kv_channel="pool", node_timeout_s=30, push_timeout_s=30) as running:
        running.settings |= {"kv_channel": "auto"}
        running.start("decode-1")
        running.ready()
        all_right(running, prompts_of(10, 16, 200), 30)
        status = running.settled()
        nodes = {node["id"]: node for node in status["nodes"]}
        assert status["requests"]["moved"] == 0, "no prompt was sent to a node that cannot hand it off"
        assert nodes["decode-1"]["prompt_tokens"] == 200 * status["placements"]["no_prefill_node"] > 0
        assert nodes["prefill-0"]["prompt_tokens"] == 200 * status["handoffs"] > 0

"""Nodes that die, freeze or lose their registry while clients are being served: no client sees it."""

import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.harness import Cluster, cluster, expected, redis_server, wait_for

NUM_STREAMS = 8


def prompts_of(seed: int, length: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 2048) for _ in range(length)] for _ in range(NUM_STREAMS)]


def stream_through(running: Cluster, prompts: list[list[int]], max_tokens: int, fault: Callable[[], None]) -> None:
    """Streams all prompts at once, has the fault when each has its first tokens, and checks every token."""
    counts = [0] * len(prompts)
    all_run = threading.Event()

    def seen(index: int) -> Callable[[int], None]:
        def count(tokens: int) -> None:
            counts[index] = tokens
            if min(counts) > 2:
                all_run.set()

        return count

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers: list[Future[list[int]]] = [
            pool.submit(running.stream, prompt, max_tokens, seen(index)) for index, prompt in enumerate(prompts)
        ]
        assert all_run.wait(60), f"streams under way: {counts}"
        fault()
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.result() == expected(prompt, max_tokens)


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
@pytest.mark.parametrize("channel", ["shm", "tcp"])
def test_a_killed_node_costs_no_client_a_token(victim: str, channel: str) -> None:
    with cluster(prefill=1, decode=2, kv_channel=channel) as running:
        killed = threading.Event()

        def kill() -> None:
            running.send_signal(victim, signal.SIGKILL)
            killed.set()

        stream_through(running, prompts_of(1, 100), 1200, kill)
        assert killed.is_set()
        prompt = prompts_of(2, 40)[0]
        assert running.complete(prompt, 5) == expected(prompt, 5), "what is left serves on"
        running.idle()
        reasons = running.status()["placements"]
        assert victim != "prefill-0" or reasons["no_prefill_node"] > 0, "decode nodes compute prompts themselves"


def test_a_prefill_node_killed_while_it_computes_loses_nobody() -> None:
    """Prompts of thousands of tokens in chunks of 16: the kill meets them in every phase of their handoffs."""
    with cluster(prefill=2, decode=2, max_num_batched_tokens=16, max_num_seqs=8) as running:
        prompts = prompts_of(3, 8000)
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            answers = [pool.submit(running.stream, prompt, 20) for prompt in prompts]
            wait_for(lambda: running.nodes()["prefill-0"]["prompt_tokens"] > 0, "prompts are being computed")
            running.send_signal("prefill-0", signal.SIGKILL)
            assert [answer.result() for answer in answers] == [expected(prompt, 20) for prompt in prompts]
        assert running.status()["requests"]["moved"] > 0
        running.idle()


def test_a_frozen_decode_node_is_lost_and_its_late_words_change_nothing() -> None:
    with cluster(prefill=1, decode=2, node_timeout_s=1.5) as running:

        def freeze() -> None:
            running.send_signal("decode-0", signal.SIGSTOP)
            threading.Timer(4.0, running.send_signal, ("decode-0", signal.SIGCONT)).start()

        stream_through(running, prompts_of(4, 60), 1500, freeze)
        wait_for(lambda: running.nodes().get("decode-0", {}).get("alive"), "the node comes back")
        running.idle()


def test_a_node_that_is_started_anew_is_used_again() -> None:
    with cluster() as running:
        prompt = prompts_of(5, 50)[0]
        assert running.complete(prompt, 4) == expected(prompt, 4)
        for name in ("prefill-0", "decode-0"):
            running.send_signal(name, signal.SIGKILL)
            running.processes[name].wait()
            running.start(name)
        running.ready()
        assert running.complete(prompt, 4) == expected(prompt, 4)
        assert running.settled()["handoffs"] >= 1


def test_redis_may_freeze_die_and_come_back_empty_without_a_failed_request(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, start):
        server = start()
        with cluster(registry=url) as running:
            assert running.status()["registry"] == {"kind": "redis", "state": "ok"}
            failures: list[BaseException] = []
            stop = threading.Event()

            def load() -> None:
                index = 0
                while not stop.is_set():
                    index += 1
                    prompt = [index % 2000 + 3] * 40
                    try:
                        assert running.complete(prompt, 5) == expected(prompt, 5)
                    except BaseException as error:  # noqa: BLE001 - told below
                        failures.append(error)

            worker = threading.Thread(target=load)
            worker.start()
            server.send_signal(signal.SIGSTOP)
            wait_for(lambda: running.status()["registry"]["state"] == "down", "the freeze is seen")
            time.sleep(1.0)
            server.kill()
            server.wait()
            time.sleep(1.0)
            start()
            wait_for(lambda: running.status()["registry"]["state"] == "ok", "redis is back")
            time.sleep(2.0)
            stop.set()
            worker.join()
            assert not failures, failures[0]
            assert all(node["alive"] for node in running.nodes().values())
            running.send_signal("decode-0", signal.SIGKILL)
            wait_for(lambda: "decode-0" not in running.nodes(), "a dead node leaves the list")

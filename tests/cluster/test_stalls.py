"""What a policy does to streams when long prompts arrive: a direction, on emulated nodes, not a figure."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tests.cluster.harness import Cluster, cluster

CHATS, CHAT_TOKENS = 4, 240
LONG_PROMPTS, LONG_TOKENS = 4, 8000


def prompt(number: int, length: int) -> list[int]:
    return [(7 * number + position) % 2000 + 3 for position in range(length)]


def gaps_of_a_chat(running: Cluster, number: int, begun: threading.Barrier) -> list[float]:
    """Seconds between the tokens of one stream."""
    times: list[float] = []

    def seen(_: int) -> None:
        times.append(time.monotonic())
        if len(times) == 1:
            begun.wait(30)

    running.stream(prompt(number, 100), CHAT_TOKENS, seen)
    return list(np.diff(times[1:]))


def p99_gap(policy: str) -> float:
    """Of chats that decode while 8k prompts arrive, one after another, on one co-located node."""
    with cluster(prefill=0, decode=1, emulate="h200-llama-3.1-8b", policy=policy, num_blocks=0) as running:
        begun = threading.Barrier(CHATS + 1)
        with ThreadPoolExecutor(CHATS) as pool:
            chats = [pool.submit(gaps_of_a_chat, running, number, begun) for number in range(CHATS)]
            begun.wait(30)
            for number in range(LONG_PROMPTS):
                running.complete(prompt(100 + number, LONG_TOKENS), 1)
            gaps = [gap for chat in chats for gap in chat.result()]
    return float(np.percentile(gaps, 99))


def test_whole_prompts_first_stall_the_streams_that_chunks_do_not() -> None:
    stalled, free = p99_gap("prefill_first"), p99_gap("stall_free")
    print(f"P99 TBT: prefill_first {stalled * 1e3:.0f} ms, stall_free {free * 1e3:.0f} ms, ratio {stalled / free:.1f}")
    assert stalled > free

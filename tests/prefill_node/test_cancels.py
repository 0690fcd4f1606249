"""Test that both nodes release all resources of a request that is cancelled at any moment."""

import asyncio
import random
from pathlib import Path

import pytest

from shared.lifecycle import wait_until
from tests.prefill_node.pair import Pair, pair

NUM_CANCELS = 1000  # for each kind of channel
AT_ONCE = 16


async def client(here: Pair, rng: random.Random, names: list[str]) -> None:
    """Send requests one after the other. Abort each request at a random moment, sometimes twice or after its end."""
    while names:
        name = names.pop()
        prompt = [rng.randrange(3, 97) for _ in range(rng.randrange(1, 25))]
        sent = here.submit(name, prompt, rng.randrange(1, 10), local=rng.random() < 0.2)
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        await asyncio.sleep(rng.choice([0.0, 0.0, rng.expovariate(100.0)]))
        if rng.random() < 0.1:
            await wait_until(lambda sent=sent: sent.is_over, 20.0, 0.002)
        here.abort(*[name] * rng.choice([1, 1, 2]), "unknown")


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_a_thousand_cancels_leave_no_block_reservation_or_task(kind: str, tmp_path: Path) -> None:
    rng = random.Random(NUM_CANCELS)
    async with pair(kind, tmp_path, step_s=0.001) as here:
        idle = len(asyncio.all_tasks())
        names = [f"r{index}" for index in range(NUM_CANCELS)]
        await asyncio.gather(*(client(here, rng, names) for _ in range(AT_ONCE)))
        await here.empty()
        for sent in here.sent.values():
            sent.row()
        assert here.prefill.node.stats().handoffs > 20, "some finish"
        assert any(not sent.tokens for sent in here.sent.values()), "some are aborted before their first token"
        # Wait for the last StopRequests. Connections that stay open have up to four tasks.
        assert await wait_until(lambda: len(asyncio.all_tasks()) <= idle + 4, 10.0), asyncio.all_tasks()
        here.assert_alive()

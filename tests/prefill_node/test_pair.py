"""Test handoffs between two real nodes: exceptions in one request's code, damaged rows, small pools, and lost peers."""

import asyncio
import errno
import mmap
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefill_node import decode_peers
from prefill_node.decode_peers import HandoffTiming
from scheduler.geometry import UNIFORM, Group
from shared import failpoints
from shared.failpoints import FailpointError
from shared.kv.channel import KVChannel, PeerLostError
from shared.kv.memory import HostMemory
from shared.lifecycle import wait_until
from shared.rpc.messages import NodeStats, RenewReply, RenewRequest, ReserveRequest
from shared.rpc.methods import RENEW, RESERVE, unary
from tests.node.harness import expected, quiet  # noqa: F401 - a fixture
from tests.prefill_node.pair import ForwardingChannel, Pair, pair
from tests.shared.rpc import serving

pytestmark = pytest.mark.usefixtures("quiet")
VICTIM = "victim"
SITES = [site for site in failpoints.SITES if not site.startswith("router.") and site != "engine.step"]


@pytest.fixture(autouse=True)
def unwatched() -> Iterator[None]:
    yield
    failpoints.watcher = None


async def only_the_victim_fails(here: Pair, site: str) -> None:
    """Run other requests before and after the victim. Check their tokens, and that both nodes are empty at the end."""
    victim_name = f"{VICTIM}-{site}"
    names = [f"other-0-{site}", victim_name, f"other-1-{site}", f"other-2-{site}"]
    rows = [[3 + (7 * index + at) % 90 for at in range(10 + index)] for index in range(4)]
    for name, row in zip(names, rows, strict=True):
        here.submit(name, row, 5)
    others = [here.sent[name] for name in names if name != victim_name]
    assert await wait_until(lambda: all(other.is_over for other in others), 20.0, 0.005), f"{site}: a request is stuck"
    for other in others:
        assert (other.row(), other.errors) == (expected(other.prompt, 5), []), site
    victim = here.sent[victim_name]
    victim.row()
    if site != "decode.received":  # at this site, an exception loses only the reply to the prefill node
        assert await wait_until(lambda: victim.is_over, 20.0), f"{site}: no node reported how it ended"
        assert all(delta.retry or delta.error == "internal" for delta in victim.errors), site
    here.abort(victim_name)
    await here.empty()


async def test_an_exception_at_any_failpoint_fails_its_request_alone(tmp_path: Path) -> None:
    reached: set[str] = set()

    def watch(site: str, passed: str, detail: str) -> None:
        if passed == site and detail.startswith(VICTIM):
            reached.add(site)
            raise FailpointError("injected")

    async with pair("tcp", tmp_path) as here:
        for site in SITES:
            failpoints.watcher = partial(watch, site)
            await only_the_victim_fails(here, site)
        assert reached == set(SITES)
        here.assert_alive()


# ---- rows and connections --------------------------------------------------------------------------------------------


STATES = (*UNIFORM, Group("state", 2))


class Damaging(ForwardingChannel):
    """A channel that damages row `at` of the prompt in the decode node: it flips a bit after each of the first `times`
    pushes of this row."""

    def __init__(self, inner: KVChannel, memory: HostMemory, times: int, at: int) -> None:
        super().__init__(inner)
        self._memory, self._left, self._at = memory, times, at
        self._seen: dict[int, None] = {}  # target rows in the order of the pushes

    async def push(
        self, descriptor: bytes, reservation_id: bytes, source: Sequence[int], target: Sequence[int]
    ) -> None:
        await super().push(descriptor, reservation_id, source, target)
        self._seen |= dict.fromkeys(target)
        damaged = [row for place, row in enumerate(self._seen) if place == self._at and row in target]
        if damaged and self._left:
            self._left -= 1
            self._memory.rows[damaged[0], 5] ^= 1


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize(("groups", "at"), [(UNIFORM, 0), (UNIFORM, 3), (UNIFORM, 4), (STATES, 5), (STATES, 6)])
@pytest.mark.parametrize("times", [1, 2])
async def test_damaged_rows_are_pushed_once_more_and_never_read(
    kind: str, groups: tuple[Group, ...], at: int, times: int, tmp_path: Path
) -> None:
    """Rows 5 and 6 hold the recurrent state. The checksum of the last row is sent with the commit."""
    prompt = list(range(3, 21))

    def wrap(channel: KVChannel, memory: HostMemory) -> Damaging:
        return Damaging(channel, memory, times, at)

    async with pair(kind, tmp_path, wrap=wrap, groups=groups) as here:
        sent = here.submit("r", prompt, 6)
        assert await wait_until(lambda: sent.is_over, 10.0)
        await here.empty()
        handoffs = here.prefill.node.stats().handoffs
        if times == 1:
            assert (sent.row(), sent.errors, handoffs) == (expected(prompt, 6, groups), [], 1)
        else:
            assert ("checksums differ" in sent.errors[0].error, sent.errors[0].retry) == (True, True)
            # The prefill node may have sampled the first token before it learns of the damage.
            assert (len(sent.row()) <= 1, handoffs) == (True, 0)
        assert here.decode.node.stats().rows_corrupt == times


class Refusing(ForwardingChannel):
    """A channel that fails every push while `refuses` is set."""

    refuses, tries = True, 0

    async def push(self, *given: Any) -> None:
        self.tries += 1
        if self.refuses:
            raise PeerLostError("connection refused")
        await super().push(*given)


async def test_a_peer_that_fails_repeatedly_is_not_called_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_peers, "PAUSE_S", 600.0)
    channels: list[Refusing] = []

    def wrap(channel: KVChannel, _: HostMemory) -> Refusing:
        channels.append(Refusing(channel))
        return channels[0]

    async with pair("tcp", tmp_path, wrap=wrap) as here:
        (channel,) = channels
        for index in range(8):
            sent = here.submit(f"r{index}", [5, 6, 7 + index], 4)
            assert await wait_until(lambda sent=sent: sent.is_over, 10.0)
            assert sent.errors[0].retry
        assert channel.tries == 5, "after 5 failures the breaker is open"
        assert "failed repeatedly" in sent.errors[0].error
        await here.empty()
        channel.refuses = False
        monkeypatch.setattr(decode_peers, "PAUSE_S", 1.0)
        for index in range(8, 200):
            sent = here.submit(f"r{index}", [5, 6, 7 + index % 80], 4)
            assert await wait_until(lambda sent=sent: sent.is_over, 10.0)
            if not sent.errors:
                break
            await asyncio.sleep(0.05)
        assert sent.errors == [], "a trial call is let through after a second, and succeeds"
        last = here.submit("last", [8, 9, 10], 4)
        assert await wait_until(lambda: last.is_over, 10.0)
        assert (last.row(), last.errors) == (expected([8, 9, 10], 4), [])
        await here.empty()


async def test_a_writer_that_cannot_map_the_pool_once_is_not_refused_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, original = [OSError(errno.ENOMEM, "cannot map")], mmap.mmap

    def mapped(*given: Any) -> mmap.mmap:
        if failures:
            raise failures.pop()
        return original(*given)

    async with pair("shm", tmp_path) as here:
        monkeypatch.setattr(mmap, "mmap", mapped)
        errors = []
        for index in range(3):
            sent = here.submit(f"r{index}", [5, 6, 7 + index], 4)
            assert await wait_until(lambda sent=sent: sent.is_over, 60.0)
            errors.append(len(sent.errors))
            assert all(error.retry for error in sent.errors)
            await here.empty()
        assert errors == [1, 0, 0]


async def test_an_address_that_is_no_name_does_not_end_the_renewal_of_leases() -> None:
    renewed = list[RenewRequest]()

    async def renew(request: RenewRequest) -> RenewReply:
        renewed.append(request)
        return RenewReply(has_reservations=True)

    async with serving({RENEW: unary(renew)}) as (_, address):
        peers = decode_peers.DecodePeers("a" * 32, NodeStats(), [], HandoffTiming(renew_s=0.02))
        peers.start()
        for each in ("a..b:80", address):
            peers.at(each)
        assert await wait_until(lambda: len(renewed) > 3, 60.0)
        await peers.close()


async def test_a_decode_node_that_does_not_answer_fails_all_handoffs_that_wait_for_it(tmp_path: Path) -> None:
    """The decode node receives calls but never replies, as if its network had failed. All handoffs must fail before
    `reserve_s` has passed."""
    asked: list[ReserveRequest] = []

    async def mute(stream: Any) -> None:
        asked.append(await stream.recv_message())
        await asyncio.Event().wait()

    timing = HandoffTiming(renew_s=0.05, call_s=0.2)
    async with serving({RESERVE: mute}) as (_, address), pair("tcp", tmp_path, reserve_s=600.0, timing=timing) as here:
        here.address = address
        for index in range(3):
            here.submit(f"r{index}", [5, 6, 7 + index], 4)
        assert await wait_until(lambda: all(sent.errors for sent in here.sent.values()), 20.0)
        assert all(sent.errors[0].retry for sent in here.sent.values())
        assert asked
        await here.empty()


# ---- pools ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_pools_of_two_prompts_serve_a_burst_without_deadlock(kind: str, tmp_path: Path) -> None:
    """Prompts that wait for blocks of the decode node fill the prefill node's pool, and the decode node is full too.

    The prefill node admits a prompt only if its pool has room for all blocks of the prompt and for all blocks that the
    other prompts still need. The decode node reserves all blocks of a prompt before any row is pushed. Therefore every
    handoff with a reservation can finish.
    """
    rng = random.Random(4)
    async with pair(kind, tmp_path, prefill_blocks=12, decode_blocks=12) as here:
        for index in range(30):
            prompt = [rng.randrange(3, 97) for _ in range(rng.randrange(12, 22))]
            here.submit(f"r{index}", prompt, rng.randrange(2, 12), local=index % 5 == 0)
        assert await wait_until(lambda: all(sent.is_over for sent in here.sent.values()), 20.0), "deadlock"
        for sent in here.sent.values():
            assert (sent.errors, sent.row()) == ([], expected(sent.prompt, sent.max_tokens))
        await here.empty()

"""Test the node pool with real streams to simulated nodes: which nodes it uses, and when nodes are lost or return."""

import asyncio
import json
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

import router.dispatch.dispatcher as dispatch_module
import router.nodes.connection as router_connection
from router.dispatch.admission import AdmissionQueue
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.rules import DispatchRules
from router.http.admin import Admin
from router.http.asgi import to_response
from router.nodes import pool
from router.nodes.connection import LIVENESS_INTERVALS, NodeConnection
from router.nodes.journal import NodeJournal
from router.nodes.placement import PROMPTS_PER_NODE, PoolCapacity
from router.nodes.pool import NodePool
from router.observer import RouterObserver
from scheduler.cost import CostModel
from shared.errors import RequestError, UnavailableError
from shared.lifecycle import wait_until
from shared.rpc import connection as rpc_connection
from shared.rpc.messages import (
    NodeInfo,
    NodeStats,
    NodeUpdate,
    RouterCommand,
    SamplingParams,
    SubmitRequest,
    TokenDelta,
    unpack_ids,
)
from shared.rpc.methods import ATTACH
from tests.chaos.proxy import PARTITION, Relays
from tests.shared.rpc import serving

TIMEOUT_S = 0.4
HELLO = RouterCommand("router", records=False)  # a router without a dashboard requests no records


class Listing:
    """A registry whose list of nodes is set by the test."""

    kind = "embedded"
    state = "ok"
    problem = ""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeInfo] = {}
        self.changed: Callable[[], None] = lambda: None

    async def start(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    async def close(self) -> None:
        """Do nothing."""

    def put(self, info: NodeInfo) -> None:
        self.nodes[info.id] = info
        self.changed()

    def unlist(self, name: str) -> None:
        del self.nodes[name]
        self.changed()


class StreamingNode:
    """A node that reports its load every 20 ms, unless the test makes it silent or ends its stream."""

    def __init__(self) -> None:
        self.stats = NodeStats()
        self.is_silent = False
        self.commands: list[RouterCommand] = []
        self.num_streams = 0
        self.num_open = 0
        self._stream: Any = None
        self._end = asyncio.Event()

    async def attach(self, stream: Any) -> None:
        self.num_streams += 1
        self.num_open += 1
        self._stream, self._end = stream, asyncio.Event()
        beat = asyncio.ensure_future(self._beat(stream))
        listen = asyncio.ensure_future(self._listen(stream))
        try:
            await self._end.wait()
        finally:
            self.num_open -= 1
            beat.cancel()
            listen.cancel()

    async def _beat(self, stream: Any) -> None:
        while True:
            if not self.is_silent:
                await stream.send_message(NodeUpdate([], self.stats))
            await asyncio.sleep(0.02)

    async def _listen(self, stream: Any) -> None:
        async for command in stream:
            self.commands.append(command)

    async def send(self, *deltas: TokenDelta) -> None:
        await self._stream.send_message(NodeUpdate(list(deltas)))

    def end_stream(self) -> None:
        self._end.set()


@dataclass
class Recorder:
    """A listener that records the deltas and losses that it receives."""

    deltas: list[TokenDelta] = field(default_factory=list)
    losses: list[NodeConnection] = field(default_factory=list)

    def on_delta(self, _: NodeConnection, delta: TokenDelta) -> None:
        unpack_ids(delta.tokens)
        self.deltas.append(delta)

    def on_node_lost(self, link: NodeConnection) -> None:
        self.losses.append(link)


@dataclass
class Stage:
    fleet: NodePool
    listing: Listing
    nodes: dict[str, StreamingNode]

    async def alive(self, *names: str) -> None:
        def are_alive() -> bool:
            return {info.id for info, _, alive in self.fleet.nodes() if alive} == set(names)

        assert await wait_until(are_alive, 5.0), self.fleet.nodes()

    def usable(self) -> tuple[list[str], list[str]]:
        prefill, decode = self.fleet.routable()
        return sorted(link.info.id for link in prefill), sorted(link.info.id for link in decode)


@asynccontextmanager
async def stage(
    names: str,
    mode: str = "disaggregated",
    timeout_s: float = 30.0,
    observer: RouterObserver = RouterObserver(),
    **prints: str,
) -> AsyncIterator[Stage]:
    """Start a prefill node for each name p… and a decode node for each d…. By default, no silent node is lost."""
    listing, nodes = Listing(), {name: StreamingNode() for name in names.split()}
    fleet = NodePool("router", listing, mode, timeout_s, observer)
    async with AsyncExitStack() as cleanup:
        await fleet.start()
        for name, node in nodes.items():
            _, address = await cleanup.enter_async_context(serving({ATTACH: node.attach}))
            role = "prefill" if name.startswith("p") else "decode"
            listing.put(NodeInfo(name, "boot-1", role, address, "m", prints.get(name, "print"), 4, 64, 100, 512, 8))
        cleanup.push_async_callback(fleet.close)
        here = Stage(fleet, listing, nodes)
        await here.alive(*nodes)
        yield here


def submit(identity: str) -> SubmitRequest:
    return SubmitRequest(identity, "router", b"\1\0\0\0", 1, 4, SamplingParams())


async def test_a_silent_node_is_lost_after_the_timeout_until_it_reports_again() -> None:
    async with stage("p0 d0", timeout_s=TIMEOUT_S) as here:
        link, listener = here.fleet.connections["d0"], Recorder()
        link.submit(submit("r"), listener)
        link.load.kv_tokens = link.load.outstanding_tokens = 5
        here.nodes["d0"].is_silent = True
        await here.alive("p0")
        assert (listener.losses, here.usable()) == ([link], (["p0"], []))
        assert (link.listeners, link.load.kv_tokens, link.load.outstanding_tokens) == ({}, 0, 0)
        here.nodes["d0"].is_silent = False
        await here.alive("p0", "d0")
        assert here.fleet.connections["d0"] is link


async def test_a_node_without_requests_may_be_silent_three_times_as_long_until_it_gets_one() -> None:
    async with stage("d0", timeout_s=30.0) as here:
        link, listener, node = here.fleet.connections["d0"], Recorder(), here.nodes["d0"]
        assert not node.commands[0].has_requests
        node.is_silent = True
        await asyncio.sleep(0.1)
        for _ in range(2 * LIVENESS_INTERVALS):
            link.pass_interval()
        await asyncio.sleep(0.1)
        assert link.is_alive
        link.submit(submit("r"), listener)
        assert await wait_until(lambda: node.commands[-1].has_requests, 5.0)
        link.abort("r")
        link.submit(submit("again"), listener)
        for _ in range(LIVENESS_INTERVALS):
            link.pass_interval()
        assert await wait_until(lambda: listener.losses == [link], 5.0), "further requests do not extend the time"


async def test_large_requests_that_are_placed_at_the_same_time_are_sent_in_several_messages() -> None:
    async with stage("d0") as here:
        link, node = here.fleet.connections["d0"], here.nodes["d0"]
        large = {"allowed_tokens": bytes(1 << 20)}, {"bad_words": [bytes(1 << 10)] * 1024}
        for number in range(80):  # together, they exceed the maximum size of a message
            one = submit(f"r{number}")
            one.grammar = " " * (1 << 20) * (number % 3 == 0)
            one.sampling = SamplingParams(**large[number % 2] if number % 3 else {})
            link.submit(one, Recorder())
        assert await wait_until(lambda: sum(len(command.submits) for command in node.commands) == 80, 20.0)
        assert (link.is_alive, len(link.listeners), node.num_streams) == (True, 80, 1)


async def test_a_node_whose_requests_have_ended_is_informed_of_it() -> None:
    async with stage("d0", timeout_s=TIMEOUT_S) as here:
        link, node = here.fleet.connections["d0"], here.nodes["d0"]
        link.submit(submit("r"), Recorder())
        assert await wait_until(lambda: node.commands[-1].has_requests, 5.0)
        link.forget("r")
        assert await wait_until(lambda: not node.commands[-1].has_requests, 5.0)


async def test_a_router_that_has_just_started_learns_adapters_from_the_first_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = AdmissionQueue(1.0, 0)
    async with stage("") as here:
        dispatcher = Dispatcher(here.fleet, queue, "m", DispatchRules(), RouterObserver())
        learning = asyncio.ensure_future(dispatcher.learn_adapters())
        await asyncio.sleep(0.01)
        assert (learning.done(), dispatcher.adapters()) == (False, {})
        sizes = (4, 64, 100, 512, 8)
        here.listing.put(NodeInfo("d0", "boot-1", "decode", "127.0.0.1:1", "m", "p", *sizes, adapters={"poems": "ab"}))
        await learning
        assert dispatcher.adapters() == {"poems": "ab"}
        here.listing.unlist("d0")
        await dispatcher.learn_adapters()
        assert dispatcher.adapters() == {"poems": "ab"}, "an adapter stays known while no node is there"
    monkeypatch.setattr(dispatch_module, "WAIT_NEW_S", 0.01)
    async with stage("") as here:
        with pytest.raises(UnavailableError, match="starting"):
            await Dispatcher(here.fleet, queue, "m", DispatchRules(), RouterObserver()).learn_adapters()


async def test_the_streams_of_many_nodes_do_not_make_garbage_collections_long(monkeypatch: pytest.MonkeyPatch) -> None:
    freezes, collections = list[int](), list[int]()
    monkeypatch.setattr(pool, "FEW_NODES", 0)
    collector = SimpleNamespace(freeze=lambda: freezes.append(1), collect=collections.append)
    monkeypatch.setattr(pool, "gc", collector)
    async with stage("d0 d1") as here:
        await asyncio.sleep(3 * pool.NOTIFY_S)
        before = len(freezes)
        assert 1 <= before <= 2
        assert await wait_until(lambda: len(collections) > 2, 5.0)
        assert set(collections) == {1}, "only young objects are collected"
        here.listing.put(replace(here.fleet.connections["d0"].info, id="d2", address="127.0.0.1:1"))
        here.nodes["d0"].end_stream()
        assert await wait_until(lambda: here.nodes["d0"].num_streams == 2, 5.0)
        await here.alive("d0", "d1")
        await asyncio.sleep(3 * pool.NOTIFY_S)
        assert len(freezes) == before, "neither a node without a stream nor one that returns makes a new record"


async def test_a_node_that_answers_no_ping_fell_silent_and_did_not_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a ping times out before `timeout_s` has passed, the node counts as silent, and not as crashed."""
    monkeypatch.setattr(rpc_connection, "PING_S", 0.05)
    monkeypatch.setattr(router_connection, "ANSWER_S", 0.15)
    monkeypatch.setattr(router_connection, "PING_S", 30.0)  # so that a ping times out after ANSWER_S
    with Relays() as relays:
        async with stage("p0 d0") as here:
            port = int(here.fleet.connections["d0"].info.address.split(":")[1])
            relay = relays.between("127.0.0.2", port)
            here.listing.put(replace(here.fleet.connections["d0"].info, id="d1", address=f"127.0.0.2:{port}"))
            await here.alive("p0", "d0", "d1")
            link, listener = here.fleet.connections["d1"], Recorder()
            link.submit(submit("r"), listener)
            relay.harm = PARTITION
            assert await wait_until(lambda: listener.losses == [link], 5.0)
            assert not link.has_crashed


async def test_an_observer_decides_whose_records_are_sent() -> None:
    class Reader(RouterObserver):
        asked = False

        def wants_records(self, node: str, num_nodes: int) -> bool:
            return self.asked and num_nodes == 1

    async with stage("d0", observer=(reader := Reader())) as here:
        node = here.nodes["d0"]
        assert [command.records for command in node.commands] == [False]
        reader.asked = True
        assert await wait_until(lambda: [command.records for command in node.commands] == [False, True], 5.0)
        here.fleet.connections["d0"].submit(submit("r"), Recorder())
        assert await wait_until(lambda: len(node.commands) == 3, 5.0)
        assert node.commands[2].records


async def test_many_nodes_join_and_leave_without_a_visit_of_all_nodes_at_each_change() -> None:
    async def attach(stream: Any) -> None:
        await stream.send_message(NodeUpdate([], NodeStats()))
        await asyncio.Event().wait()

    listing, prompts = Listing(), list[int]()
    rooms = partial(_note_prompts, prompts)
    fleet = NodePool("router", listing, "disaggregated", 30.0, RouterObserver(), rooms)
    async with serving({ATTACH: attach}) as (_, address):
        await fleet.start()
        try:
            for number in range(200):
                listing.put(NodeInfo(f"d{number}", "boot", "decode", address, "m", "print", 4, 64, 100, 512, 8))
            assert await wait_until(lambda: prompts[-1:] == [200 * PROMPTS_PER_NODE], 30.0), prompts
            for number in range(10):
                listing.unlist(f"d{number}")
                fleet.connections[f"d{number}"].stream_ended()
            assert await wait_until(lambda: prompts[-1:] == [190 * PROMPTS_PER_NODE], 30.0), prompts
            assert len(prompts) < 200, "the capacity is not computed at each change"
        finally:
            await fleet.close()


def _note_prompts(prompts: list[int], capacity: PoolCapacity, _now: float) -> None:
    prompts.append(capacity.prompts)


async def test_a_stall_of_the_router_loses_no_node() -> None:
    async with stage("p0 d0", timeout_s=TIMEOUT_S) as here:
        link, listener = here.fleet.connections["d0"], Recorder()
        link.submit(submit("r"), listener)
        time.sleep(3 * TIMEOUT_S)  # noqa: ASYNC251 - the whole process pauses
        await asyncio.sleep(TIMEOUT_S / 4)
        assert (listener.losses, link.is_alive) == ([], True)


async def test_a_node_whose_stream_ends_is_lost_at_once_and_reconnected() -> None:
    async with stage("d0") as here:
        link, listener, node = here.fleet.connections["d0"], Recorder(), here.nodes["d0"]
        link.submit(submit("r"), listener)
        assert await wait_until(lambda: any(command.submits for command in node.commands), 5.0)
        node.end_stream()
        assert await wait_until(lambda: listener.losses == [link], 5.0)
        link.submit(submit("too late"), listener)
        await here.alive("d0")
        assert node.num_streams == 2
        link.submit(submit("new"), listener)
        assert await wait_until(lambda: any(submit("new") in command.submits for command in node.commands), 5.0)
        sent = [sent.id for command in node.commands for sent in command.submits]
        assert sent == ["r", "new"], "requests for the old stream are not sent on the new one"


async def test_commands_reach_the_node_and_its_deltas_only_the_listeners() -> None:
    async with stage("d0") as here:
        link, node, first, second = here.fleet.connections["d0"], here.nodes["d0"], Recorder(), Recorder()
        link.submit(submit("first"), first)
        link.listen("second", second)
        link.abort("unknown")
        assert await wait_until(lambda: len(node.commands) == 2, 5.0)
        assert node.commands == [replace(HELLO, has_requests=False), replace(HELLO, submits=[submit("first")])]
        link.abort("first")
        link.abort("first")
        link.forget("second")
        assert await wait_until(lambda: len(node.commands) == 3, 5.0)
        assert node.commands[2] == replace(HELLO, aborts=["first"])
        link.listen("third", third := Recorder())
        await node.send(TokenDelta("first", 1), TokenDelta("second", 1), TokenDelta("third", 1), TokenDelta("third", 2))
        assert await wait_until(lambda: len(third.deltas) == 2, 5.0)
        assert (first.deltas, second.deltas) == ([], [])
        assert link.view().placed == 3


async def test_a_new_incarnation_replaces_the_old_one_and_its_requests_are_lost() -> None:
    async with stage("p0 d0") as here:
        old, listener, node = here.fleet.connections["d0"], Recorder(), here.nodes["d0"]
        old.submit(submit("r"), listener)
        old.stats = NodeStats(handoffs=3)
        here.fleet.prefixes.record([b"hash"], "d0")
        here.listing.put(replace(old.info, incarnation_id="boot-2"))
        assert here.fleet.connections["d0"] is not old
        assert await wait_until(lambda: listener.losses == [old], 5.0)
        await here.alive("p0", "d0")
        assert await wait_until(lambda: node.num_open == 1, 5.0), "a router has one stream to a node"
        assert here.fleet.connections["d0"].info.incarnation_id == "boot-2"
        assert here.fleet.prefixes.overlap([b"hash"]) == {}, "its cache is lost"
        assert here.fleet.status()["handoffs"] == 3, "its handoffs are still counted"


async def test_the_handoffs_of_a_node_that_returns_are_counted_once() -> None:
    async with stage("d0", timeout_s=0.3) as here:
        info, node = here.listing.nodes["d0"], here.nodes["d0"]
        node.stats = NodeStats(handoffs=3)
        for _ in range(2):
            assert await wait_until(lambda: here.fleet.status()["handoffs"] == 3, 5.0)
            node.is_silent = True
            here.listing.unlist("d0")
            assert await wait_until(lambda: not here.fleet.nodes(), 5.0)
            assert here.fleet.status()["handoffs"] == 3
            node.is_silent = False
            here.listing.put(info)
            await here.alive("d0")
        assert await wait_until(lambda: here.fleet.status()["handoffs"] == 3, 5.0)
        await asyncio.sleep(0.1)
        assert here.fleet.status()["handoffs"] == 3


async def test_an_unlisted_node_stays_until_its_stream_ends() -> None:
    async with stage("p0 d0") as here:
        listener = Recorder()
        here.fleet.connections["d0"].submit(submit("r"), listener)
        here.listing.unlist("d0")
        await here.nodes["d0"].send(TokenDelta("r", 1))
        assert await wait_until(lambda: len(listener.deltas) == 1, 5.0)
        assert here.usable() == (["p0"], ["d0"])
        here.nodes["d0"].end_stream()
        assert await wait_until(lambda: list(here.fleet.connections) == ["p0"], 5.0)
        assert len(listener.losses) == 1


async def test_an_unreachable_node_is_tried_until_it_is_unlisted() -> None:
    async with stage("d0") as here:
        info = replace(here.fleet.connections["d0"].info, id="d1", address="127.0.0.1:1")
        here.listing.put(info)
        await asyncio.sleep(0.2)
        assert here.usable() == ([], ["d0"])
        here.listing.unlist("d1")
        assert list(here.fleet.connections) == ["d0"]
        here.listing.put(replace(info, address=here.fleet.connections["d0"].info.address))
        await here.alive("d0", "d1")


async def test_colocated_mode_excludes_prefill_nodes() -> None:
    async with stage("p0 d0", mode="colocated") as here:
        assert here.usable() == ([], ["d0"])


async def test_nodes_of_two_fingerprints_get_their_shares_and_no_request_gets_both() -> None:
    async with stage("p0 p1 p2 d0 d1 d2 d3", p1="other", d3="other", p2="third") as here:
        assert here.usable() == (["p0", "p1"], ["d0", "d1", "d2", "d3"]), "no decode node can take the KV of p2"
        row = array("i", range(9))
        chosen = [here.fleet.choose(f"r{number}", row, b"", (), "always") for number in range(400)]
        pairs = Counter((each.placement.prefill, each.placement.decode) for each in chosen if each is not None)
        assert set(pairs) == {("p0", "d0"), ("p1", "d3")}
        assert 60 <= pairs["p1", "d3"] <= 140, "one of four nodes of equal size gets a quarter"
        for name in ("d0", "d1", "d2"):
            here.listing.unlist(name)
            here.nodes[name].end_stream()
        await here.alive("p0", "p1", "p2", "d3")
        assert here.usable() == (["p1"], ["d3"])


@pytest.mark.parametrize("reported_by", ["node", "registry"])
async def test_a_draining_node_gets_no_new_requests_and_keeps_its_own(reported_by: str) -> None:
    async with stage("d0 d1") as here:
        link, listener, node = here.fleet.connections["d0"], Recorder(), here.nodes["d0"]
        link.submit(submit("r"), listener)
        if reported_by == "node":
            node.stats = NodeStats("draining")
        else:
            here.listing.put(replace(link.info, state="draining"))
        assert await wait_until(lambda: here.usable() == ([], ["d1"]), 5.0)
        assert await wait_until(lambda: node.commands[-1].has_seen_drain, 5.0)
        assert node.commands[-1].has_requests
        assert link.is_alive
        await node.send(TokenDelta("r", 1))
        assert await wait_until(lambda: len(listener.deltas) == 1, 5.0)
        link.abort("r")
        assert await wait_until(lambda: node.commands[-1].aborts == ["r"], 5.0)
        assert not node.commands[-1].has_requests
        assert listener.losses == []


async def test_the_requests_of_a_stuck_node_are_aborted() -> None:
    async with stage("d0 d1") as here:
        link, listener, node = here.fleet.connections["d0"], Recorder(), here.nodes["d0"]
        link.submit(submit("r"), listener)
        node.stats = NodeStats("stuck")
        assert await wait_until(lambda: listener.losses == [link], 5.0)
        assert await wait_until(lambda: node.commands[-1].aborts == ["r"], 5.0)
        assert (link.is_alive, here.usable()) == (True, ([], ["d1"]))


async def test_a_request_without_a_listener_is_aborted() -> None:
    async with stage("d0") as here:
        link, node = here.fleet.connections["d0"], here.nodes["d0"]
        link.submit(submit("r"), Recorder())
        link.abort("r")  # before the request was sent
        await node.send(TokenDelta("other", 0, handed_off=True), TokenDelta("over", 3, b"\1\0\0\0", "length"))
        await node.send(TokenDelta("r", 0, b"\1\0\0\0"))
        assert await wait_until(lambda: node.commands[-1] == replace(HELLO, aborts=["r"]), 5.0)
        assert node.commands[1] == HELLO


async def test_avoided_nodes_are_placed_on_when_no_other_node_can_generate() -> None:
    async with stage("p0 p1 d0") as here:

        def placed(*avoid: str) -> tuple[str | None, str] | None:
            proposal = here.fleet.choose("r", array("i", range(9)), b"", avoid, "always")
            return None if proposal is None else (proposal.placement.prefill, proposal.placement.decode)

        async def lose(name: str) -> None:
            here.listing.unlist(name)
            here.nodes[name].end_stream()
            assert await wait_until(lambda: name not in here.fleet.connections, 5.0)

        assert placed("p0", "d0") == ("p1", "d0")
        assert placed("p0", "p1", "d0") == (None, "d0"), "a decode node alone is preferred to an avoided prefill node"
        await lose("d0")
        assert placed("p0") == (None, "p1")
        assert placed("p0", "p1", "d0") in {(None, "p0"), (None, "p1")}
        await lose("p1")
        assert placed("p0", "p1", "d0") == (None, "p0")
        await lose("p0")
        assert placed() is None


async def test_every_change_of_a_node_is_signalled() -> None:
    async with stage("d0") as here:
        acts: tuple[Callable[[], None], ...] = (
            lambda: here.nodes["d0"].end_stream(),
            lambda: setattr(here.nodes["d0"], "stats", NodeStats("stuck")),
            lambda: here.listing.unlist("d0"),
        )
        for act in acts:
            await here.alive("d0")
            change = asyncio.ensure_future(here.fleet.change())
            await asyncio.sleep(0)
            act()
            await asyncio.wait_for(change, 5.0)


async def test_closing_the_pool_closes_all_streams() -> None:
    async with stage("p0 d0") as here:
        await here.fleet.close()
        assert await wait_until(lambda: all(node.num_open == 0 for node in here.nodes.values()), 5.0)


async def test_malformed_tokens_end_the_stream() -> None:
    """A message is malformed if its token bytes end within an id. The router then reconnects to the node."""
    async with stage("d0 d1") as here:
        link, listener = here.fleet.connections["d0"], Recorder()
        link.submit(submit("r"), listener)
        await here.nodes["d0"].send(TokenDelta("r", 0, b"odd"))
        assert await wait_until(lambda: listener.losses == [link], 5.0)
        await here.alive("d0", "d1")


async def test_a_node_that_changes_its_role_keeps_its_stream() -> None:
    async with stage("p0 d0 d1") as here:
        info = here.listing.nodes["d1"]
        here.listing.put(replace(info, state="draining"))
        assert here.usable() == (["p0"], ["d0"])
        here.listing.put(replace(info, role="prefill"))
        assert here.usable() == (["d1", "p0"], ["d0"])
        await asyncio.sleep(0.05)
        assert here.nodes["d1"].num_streams == 1


async def test_placement_uses_the_speed_that_a_node_reports_if_it_is_valid() -> None:
    async with stage("d0") as here:
        here.nodes["d0"].stats = NodeStats(
            blocks_owned=6, prompt_tokens=5000, cost=CostModel(0.1, margin=0.2).packed(), transfer=[0.002, 1e-9]
        )
        facts = {"max_step_tokens": "2048", "tbt_slo_ms": "50"}
        here.listing.put(replace(here.listing.nodes["d0"], attributes=facts))
        link = here.fleet.connections["d0"]
        assert await wait_until(lambda: link.view().cost == CostModel(0.1, margin=0.2), 5.0)
        view = link.view()
        assert (view.budget_tokens, view.tbt_slo_s, view.decode_context, view.cost_is_learnt) == (2048, 0.05, 24, True)
        assert (view.push_s, view.byte_s, view.token_bytes) == (0.002, 1e-9, 16)
        nan = float("nan")
        here.nodes["d0"].stats = NodeStats(cost=[nan] * 7, transfer=[nan, float("inf")], running=-5)
        here.listing.put(replace(here.listing.nodes["d0"], attributes={"max_step_tokens": "all", "tbt_slo_ms": "nan"}))
        assert await wait_until(lambda: link.view().cost is None, 5.0)
        view = link.view()
        assert (view.budget_tokens, view.tbt_slo_s, view.push_s, view.cost_is_learnt) == (512, 0.0, 0.0, False)
        json.dumps(here.fleet.status(), allow_nan=False)


async def test_concurrent_role_changes_leave_a_decode_node() -> None:
    async with stage("d0 d1", mode="colocated") as here:
        handlers = dict.fromkeys((RequestError, UnavailableError), to_response)
        routes = Admin([here.fleet], 0.1).routes()
        transport = httpx.ASGITransport(Starlette(routes=routes, exception_handlers=handlers))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:

            async def post(node: str, role: str) -> int:
                return (await http.post(f"/v1/nodes/{node}/role", json={"role": role})).status_code

            # The first change fails with 503, as these nodes cannot change roles. Meanwhile, the second gets 409.
            assert list(await asyncio.gather(post("d0", "prefill"), post("d1", "prefill"))) == [503, 409]
            assert list(await asyncio.gather(post("d0", "prefill"), post("d0", "decode"))) == [503, 409]
            assert await post("d1", "prefill") == 503, "the failed change is not in progress any more"


class JournalWorld:
    """A journal with a fake clock, and a connection whose state the test sets."""

    def __init__(self) -> None:
        self.now_ns = 10**18
        self.journal = NodeJournal(lambda: self.now_ns)

    def join(self, name: str = "d0", boot: str = "boot-1", fingerprint: str = "print") -> NodeConnection:
        info = NodeInfo(name, boot, "decode", "h:1", "m", fingerprint, 4, 64, 100, 512, 8)
        connection = NodeConnection("router", info, 1.0, self.journal.changed, RouterObserver())
        self.journal.joined(connection)
        return connection

    def drop(self, connection: NodeConnection) -> None:
        connection.is_listed = False
        self.journal.dropped(connection.info.id)

    def wait(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def rows(self) -> list[tuple[str, str, str]]:
        return [(row["id"], row["state"], row["reason"]) for row in self.journal.rows()]

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.journal.events()]


def report(connection: NodeConnection, state: str = "ready") -> None:
    connection.process(NodeUpdate(stats=NodeStats(state)))


def test_the_first_node_with_another_fingerprint_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    world = JournalWorld()
    with caplog.at_level("INFO", "baton.fleet"):
        for name, fingerprint in (("d0", "a"), ("d1", "a"), ("d2", "b"), ("d3", "b"), ("d4", "a")):
            report(world.join(name, fingerprint=fingerprint))
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith("Node d2 joined")
    assert "It has b, and the other nodes have a" in warning


@pytest.mark.parametrize(
    ("states", "kinds", "state", "kept_s", "warnings"),
    [
        (["ready"], ["joined", "ready", "lost"], "lost", 600, 1),
        (["ready", "stuck"], ["joined", "ready", "lost"], "lost", 600, 1),
        (["ready", "draining"], ["joined", "ready", "draining", "left"], "left", 60, 0),
        (["ready", "breached"], ["joined", "ready", "draining", "lost"], "lost", 600, 2),
    ],
)
def test_a_node_that_is_gone_stays_visible_for_some_time(
    states: list[str], kinds: list[str], state: str, kept_s: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = JournalWorld()
    with caplog.at_level("INFO", "baton.fleet"):
        connection = world.join()
        for each in states:
            report(connection, each)
            report(connection, each)
            assert world.rows()[0][1] == each
        world.wait(1)
        connection.end_reason = "It stopped answering."
        connection.stream_ended()
        connection.stream_ended()
        world.drop(connection)
    ((_, row_state, reason),) = world.rows()
    assert (world.kinds(), row_state) == (kinds, state)
    assert reason == ("It was shut down as planned." if state == "left" else "It stopped answering.")
    assert world.journal.rows()[0]["since_ms"] == world.now_ns // 10**6
    assert [record.levelname for record in caplog.records].count("WARNING") == warnings
    assert len(caplog.records) == len(kinds), "each event is logged once"
    assert [alive for _, _, alive in world.journal.metric_rows()] == ([] if state == "left" else [False])
    world.wait(kept_s - 1)
    assert len(world.rows()) == 1
    world.wait(1)
    assert world.rows() == world.journal.metric_rows() == []


def test_a_lost_node_that_comes_back_replaces_its_row_and_one_that_never_connected_has_none_later() -> None:
    world = JournalWorld()
    first = world.join()
    assert world.rows() == [("d0", "lost", "The router has not connected to it yet.")]
    assert world.journal.rows()[0]["since_ms"] is None
    world.drop(first)
    assert world.rows() == []
    again = world.join()
    report(again)
    again.listeners = {"r": Recorder()}
    again.end_reason = "It was closed."
    again.stream_ended()
    world.wait(2.5)
    report(again)
    assert [event["text"] for event in world.journal.events()][-2:] == [
        "Node d0 is lost. It was closed. It had 1 request, which continues on other nodes.",
        "Node d0 is ready again after 2.5 s.",
    ]
    replacing = world.join(boot="boot-2")
    report(replacing)
    again.stream_ended()  # the stream of the old process ends late
    assert world.rows() == [("d0", "ready", "")]
    assert world.kinds()[-3:] == ["lost", "joined", "ready"]


def test_the_events_and_the_nodes_that_are_gone_are_bounded() -> None:
    world = JournalWorld()
    for number in range(300):
        connection = world.join(f"d{number}")
        report(connection)
        connection.stream_ended()
        world.drop(connection)
        world.wait(0.1)
    events = world.journal.events()
    assert [event["number"] for event in events] == list(range(850, 900))
    assert [row["id"] for row in world.journal.rows()] == [f"d{number}" for number in range(44, 300)]


def test_an_outage_of_the_registry_is_an_event_and_so_is_its_end() -> None:
    world = JournalWorld()
    for problem in ("", "Redis does not answer.", "Redis does not answer.", "", ""):
        world.journal.registry_changed(problem)
        world.wait(2)
    texts = [(event["kind"], event["node"], event["text"]) for event in world.journal.events()]
    assert texts == [
        ("registry", "", "Redis does not answer."),
        ("registry", "", "The registry answers again after 4 s."),
    ]

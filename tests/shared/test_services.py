"""Test RPCs between peers that send too much, disappear or do not reply."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from shared.lifecycle import wait_until
from shared.rpc import connection as grpc_connection
from shared.rpc.codec import MAX_MESSAGE_BYTES
from shared.rpc.connection import RpcChannel
from shared.rpc.messages import (
    Ack,
    NodeInfo,
    NodeStats,
    NodeUpdate,
    RenewReply,
    ReserveReply,
    RouterCommand,
    StopRequest,
)
from shared.rpc.methods import ATTACH, JOIN, STOP, STREAM_ENDED, PeerError, Rpc, RpcServer, unary
from tests.chaos.proxy import NONE, PARTITION, Harm, Proxy, Relays
from tests.shared.rpc import Handlers, connected, serving


class Recorder:
    """A handler that records every message and replies with the name of its class."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    async def take(self, message: Any) -> Ack:
        self.received.append(message)
        return Ack(type(message).__name__)

    def handlers(self, *rpcs: Rpc[Any, Any]) -> Handlers:
        return {rpc: unary(self.take) for rpc in rpcs}


@asynccontextmanager
async def over_a_relay() -> AsyncIterator[tuple[Proxy, RpcChannel]]:
    """Yield a relay, and a channel through it on which one STOP call has succeeded."""
    with Relays() as relays:
        async with serving(Recorder().handlers(STOP)) as (_, address):
            relay = relays.between("127.0.0.2", int(address.split(":")[1]))
            async with connected(address.replace("127.0.0.1", "127.0.0.2"), answer_s=0.15) as channel:
                assert (await STOP.call(channel, StopRequest(b"", ""), 30.0)).error == "StopRequest"
                yield relay, channel


async def test_a_message_of_the_maximum_size_is_accepted_and_a_larger_one_is_refused() -> None:
    recorder = Recorder()
    async with serving(recorder.handlers(STOP)) as (_, address), connected(address) as channel:
        overhead = len(b"\x91\xc6....")  # an array of bytes with a 32-bit length
        largest = MAX_MESSAGE_BYTES - overhead
        assert (await STOP.call(channel, StopRequest(bytes(largest)), 30.0)).error == "StopRequest"
        with pytest.raises(PeerError):
            await STOP.call(channel, StopRequest(bytes(largest + 1)), 30.0)
        assert [len(message.reservation_id) for message in recorder.received] == [largest]
        assert (await STOP.call(channel, StopRequest(b"next"), 5.0)).error == "StopRequest", (
            "the connection still works"
        )


async def test_a_reply_over_the_limit_is_a_peer_error() -> None:
    async def flood(_: StopRequest) -> Ack:
        return Ack("x" * MAX_MESSAGE_BYTES)

    async with serving({STOP: unary(flood)}) as (_, address), connected(address) as channel:
        with pytest.raises(PeerError, match="over the limit"):
            await STOP.call(channel, StopRequest(b""), 30.0)


async def test_the_errors_of_both_sides_name_the_invalid_field() -> None:
    wrong_question = Rpc(STOP.path, RenewReply, Ack)
    wrong_answer = Rpc(STOP.path, StopRequest, ReserveReply)
    async with serving(Recorder().handlers(STOP)) as (_, address), connected(address) as channel:
        with pytest.raises(PeerError, match=r"StopRequest\.reservation_id is str, not bytes"):
            await wrong_question.call(channel, RenewReply("error"), 5.0)
        with pytest.raises(PeerError, match=r"ReserveReply\.reservation_id is str, not bytes"):
            await wrong_answer.call(channel, StopRequest(b""), 5.0)


async def test_an_absent_or_unresponsive_peer_is_a_peer_error() -> None:
    async def never(_: StopRequest) -> Ack:
        await asyncio.Event().wait()
        return Ack()

    async with serving({STOP: unary(never)}) as (_, address), connected(address) as channel:
        with pytest.raises(PeerError, match=STOP.path):
            await STOP.call(channel, StopRequest(b""), 0.05)
    async with connected(address) as channel:
        with pytest.raises(PeerError, match=STOP.path):
            await STOP.call(channel, StopRequest(b""), 5.0)


async def test_an_unreachable_peer_is_disconnected_but_a_pause_of_this_process_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Messages from the peer still arrive. Only the missing replies to pings show that the peer receives nothing."""
    monkeypatch.setattr(grpc_connection, "PING_S", 0.05)
    async with over_a_relay() as (relay, channel):
        relay.harm = Harm(silent=frozenset({"up"}))
        await asyncio.sleep(0.07)
        time.sleep(0.5)  # noqa: ASYNC251 - this process pauses while a ping has no reply
        relay.harm = NONE
        await asyncio.sleep(0.3)
        assert channel.is_connected
        assert not channel.fell_silent
        relay.harm = Harm(silent=frozenset({"up"}))
        with pytest.raises(PeerError):
            async with asyncio.timeout(2.0):  # shorter than the peer needs to detect the loss
                await STOP.call(channel, StopRequest(b"", ""), 20.0)
        assert not channel.is_connected
        assert channel.fell_silent


async def test_a_call_that_waits_to_write_fails_when_the_peer_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_connection, "PING_S", 0.05)
    async with over_a_relay() as (relay, channel):
        relay.harm = Harm(silent=frozenset({"up"}))
        large, small = (STOP.call(channel, StopRequest(bytes(size), ""), 20.0) for size in (12_000_000, 10))
        async with asyncio.timeout(5.0):
            found = await asyncio.gather(large, small, return_exceptions=True)
        assert [type(error) for error in found] == [PeerError, PeerError]


async def test_a_client_that_reads_nothing_is_disconnected_although_bytes_for_it_are_unsent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_connection, "PING_S", 0.1)
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    async def flood(stream: Any) -> None:
        try:
            await stream.recv_message()
            while True:
                await stream.send_message(NodeUpdate([], NodeStats("b" * 3000)))
                await asyncio.sleep(0)
        finally:
            has_ended.set()

    async def attach(channel: RpcChannel) -> None:
        with suppress(*STREAM_ENDED):
            async with ATTACH.open(channel) as stream:
                await stream.send_message(RouterCommand("router"))
                while await stream.recv_message() is not None:
                    has_begun.set()

    with Relays() as relays:
        async with (
            serving({ATTACH: flood}, answer_s=0.2) as (server, address),
            connected(address.replace("127.0.0.1", "127.0.0.2")) as channel,
        ):
            relay = relays.between("127.0.0.2", int(address.split(":")[1]))
            caller = asyncio.create_task(attach(channel))
            await has_begun.wait()
            relay.harm = PARTITION
            async with asyncio.timeout(20.0):
                await has_ended.wait()
            assert await wait_until(lambda: not server.connections, 5.0), "its socket is closed"
            caller.cancel()


async def test_a_standing_stream_works_both_ways_and_its_end_reaches_the_other_side() -> None:
    ends: list[str] = []

    async def echo(stream: Any) -> None:
        try:
            async for command in stream:
                await stream.send_message(NodeUpdate([], None))
                if command.router == "enough":
                    break
            ends.append("ended")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async with serving({ATTACH: echo}) as (_, address), connected(address) as channel:
        async with ATTACH.open(channel) as stream:
            for _ in range(3):
                await stream.send_message(RouterCommand("router"))
                assert await stream.recv_message() == NodeUpdate()
        assert await wait_until(lambda: ends == ["cancelled"], 5.0), "leaving the block resets the stream"
        async with ATTACH.open(channel) as stream:
            await stream.send_message(RouterCommand("enough"))
            assert await stream.recv_message() == NodeUpdate()
            assert await stream.recv_message() is None
        assert ends == ["cancelled", "ended"]
        async with ATTACH.open(channel) as stream:
            await stream.send_message(RouterCommand("router"))
            assert await stream.recv_message() == NodeUpdate()
            channel.close()
            assert await wait_until(lambda: ends[2:] == ["cancelled"], 5.0), "a connection's end resets its streams"


async def test_a_server_closes_while_clients_are_connected_and_cancels_their_calls() -> None:
    cancelled: list[NodeInfo | None] = []

    async def hold(stream: Any) -> None:
        message = await stream.recv_message()
        await stream.send_message(Ack())
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(message)

    info = NodeInfo("n", "b", "decode", "", "m", "f", 4, 64, 8, 8, 8)
    async with serving({JOIN: hold}) as (server, address), connected(address) as channel, JOIN.open(channel) as stream:
        await stream.send_message(info)
        assert await stream.recv_message() == Ack()
        async with asyncio.timeout(5):
            await server.close()
        assert await wait_until(lambda: cancelled == [info], 5.0)
        again, port = RpcServer({JOIN: hold}), int(address.split(":")[1])
        assert await again.start("127.0.0.1", port) == port, "the port is free again"
        await again.close()

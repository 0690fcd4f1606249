"""Sends handoffs: reserves blocks at decode nodes, pushes rows over the best channel, commits, and reports the outcome.

Each request whose KV is sent has its own task. If rows arrive damaged, they are pushed once more. After any other
failure, the handoff ends, and the router retries the request on another node.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import median

from node.node import Node, RoleAdapter
from node.output_publisher import PrefillProgress
from prefill_node.decode_peers import CorruptBlocksError, DecodePeer, DecodePeers, HandoffTiming, PeerRefusedError
from scheduler.geometry import Geometry, RowPlace
from scheduler.request import Request, cdiv
from scheduler.role import PREFILL
from shared import failpoints
from shared.clock import now_ns
from shared.kv.channel import RESERVATION_ID_BYTES, ChannelError, KVChannel, ReservationRefusedError
from shared.kv.memory import KVMemory
from shared.logs import about
from shared.rpc.messages import (
    Ack,
    CommitRequest,
    PushedNotice,
    ReserveReply,
    ReserveRequest,
    StopRequest,
    SubmitRequest,
    unpack_ids,
)
from shared.rpc.methods import COMMIT, PUSHED, RESERVE, PeerError

log = logging.getLogger("baton.handoff")
# Maximum number of requests that have a reservation in a shared pool, or wait for one, before their first step.
MAX_RESERVED_EARLY = 4
RECENT_PUSHES = 32


class TransferTimeModel:
    """Learns from recent pushes how long a push takes: a constant time, plus a time for each byte.

    The time for each byte is the median of the slopes between all pairs of pushes (Theil-Sen estimator), which a few
    slow pushes hardly change.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_PUSHES)  # bytes, seconds

    def observe(self, num_bytes: int, seconds: float) -> list[float]:
        """Record a push. Return [constant seconds of a push, seconds for each byte].

        If all recent pushes have the same size, the two times cannot be separated, so the constant time is taken as 0.
        """
        self._recent.append((num_bytes, seconds))
        slopes = [(s - t) / (b - a) for (a, t), (b, s) in combinations(self._recent, 2) if a != b]
        per_byte = max(0.0, median(slopes)) if slopes else median(s / b for b, s in self._recent)
        return [max(0.0, median(s - per_byte * b for b, s in self._recent)), per_byte]


@dataclass(slots=True)
class OutgoingHandoff:
    """A request whose KV is sent, and the state of its handoff.

    Each row is pushed once, in the order of `Geometry.landing_order`, except that one push may be repeated. After
    `cancel`, the push or call in progress is completed, and the next call is a stop.
    """

    submit: SubmitRequest
    request: Request
    num_prompt: int
    geometry: Geometry
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_computed: int = 0  # prompt tokens that have KV
    first_token: int | None = None
    reservation_id: bytes | None = None
    num_held: int = 0  # number of leading blocks of the prompt that are in the prefix cache of the decode node
    order: list[RowPlace] = field(default_factory=list)  # the rows to push
    targets: list[int] = field(default_factory=list)  # the reserved rows of the decode node, in the same order
    num_pushed: int = 0  # number of rows that were pushed
    channel: KVChannel | None = None  # set after the grant, like `descriptor`; neither changes later
    descriptor: bytes = b""
    checksums: bytes = b""  # checksums of pushed rows; the peer has not received these checksums yet
    reason: str = ""  # why the handoff was cancelled
    committed: bool = False
    is_running: bool = False  # the task has been started
    is_admitted: bool = False  # the request's first step has begun
    is_silent: bool = False  # whether to omit the report, because the request was aborted or finished on this node

    def grant(self, num_held: int, targets: list[int]) -> None:
        """Record which blocks the decode node already has, and which rows it has reserved. Raises ValueError if
        the blocks or rows do not fit the prompt."""
        num_blocks = cdiv(self.num_prompt, self.geometry.block_tokens)
        if not 0 <= num_held <= num_blocks:
            raise ValueError(f"the grant names {num_held} cached blocks, but the prompt has {num_blocks} blocks")
        self.num_held, self.targets = num_held, targets
        if self.request.borrows_blocks:
            return
        self.order = self.geometry.landing_order(self.num_prompt, num_held)
        if len(targets) != len(self.order):
            raise ValueError(f"the grant has {len(targets)} rows, but the prompt needs {len(self.order)}")

    def sources(self, count: int) -> list[int]:
        """Return the next `count` rows to push, or fewer if the request has ended on this node."""
        tables, states = self.request.tables, self.request.states
        rows = []
        for group, block, row in self.order[self.num_pushed :][:count]:
            if group == len(self.geometry.attention):
                table, at = states[0] if states else [], row
            else:
                table, at = tables[group], block * self.geometry.attention[group].rows + row
            if at < len(table) and table[at]:
                rows.append(table[at])
        return rows

    def cancel(self, reason: str) -> None:
        self.reason = self.reason or reason or "unknown error"
        self.changed.set()

    async def wait(self) -> None:
        """Wait until the request has made progress or the handoff is cancelled."""
        await self.changed.wait()
        self.changed.clear()

    def next_targets(self) -> list[int]:
        """Return the peer's reserved rows that are to be pushed now: their content is complete on this node, and has
        not been pushed yet."""
        if self.request.borrows_blocks:  # no rows are copied; an empty push checks that the pool's owner is alive
            ready = len(self.targets) * self.num_computed // self.num_prompt
        else:
            ready = self.geometry.num_final(self.num_prompt, self.num_held, self.num_computed)
        return self.targets[self.num_pushed : ready]


class HandoffSender(RoleAdapter):
    """The role adapter of a prefill node.

    Runs on the event loop. The node calls the `on_...` methods. Each handoff has a task, which reserves blocks, pushes
    each block once it is complete, and commits. If the handoff fails, its request fails with `retry` set. When the
    handoff is committed, the request ends on this node, and its blocks stay in the prefix cache. If a reservation is
    not committed, the sender sends a stop, and repeats the stop until the decode node acknowledges it.
    """

    role = PREFILL

    def __init__(
        self,
        node: Node,
        memory: KVMemory,
        channels: Sequence[KVChannel],
        reserve_timeout_s: float,
        timing: HandoffTiming | None = None,
    ) -> None:
        super().__init__(node, memory, channels, reserve_timeout_s)
        self._timing = timing or HandoffTiming()
        self.peers = DecodePeers(self._info.incarnation_id, node.counters, channels, self._timing)
        self._outgoing: dict[str, OutgoingHandoff] = {}
        self._transfer_time = TransferTimeModel()
        self._early = asyncio.Semaphore(MAX_RESERVED_EARLY)

    @property
    def is_idle(self) -> bool:
        return not self._outgoing and self.peers.is_idle

    def start(self) -> None:
        self.peers.start()

    async def close(self) -> None:
        await super().close()
        await self.peers.close()

    # ---- from the node ------------------------------------------------------------------------------------------

    def on_submit(self, submit: SubmitRequest, request: Request) -> None:
        # Do not use len(request.tokens): the engine already has the request, and may have appended a token.
        num_prompt = len(unpack_ids(submit.tokens))
        outgoing = self._outgoing[request.id] = OutgoingHandoff(submit, request, num_prompt, self._geometry)
        if request.borrows_blocks:
            self._start(outgoing)  # the prompt is computed in the decode node's blocks

    def on_admitted(self, request: Request) -> None:
        """Begin the handoff at the request's first step, so that blocks are reserved while the first chunk is
        computed."""
        outgoing = self._outgoing.get(request.id)
        if outgoing is not None:
            outgoing.is_admitted = True
            outgoing.changed.set()
            if not outgoing.is_running:
                self._start(outgoing)

    def on_progress(self, progress: PrefillProgress) -> None:
        outgoing = self._outgoing.get(progress.request.id)
        if outgoing is None:
            return
        outgoing.num_computed = max(outgoing.num_computed, min(progress.num_computed, outgoing.num_prompt))
        if progress.finish is not None:  # the request ended at its first token: nothing is left to generate
            outgoing.is_silent = True
            outgoing.cancel(f"finished: {progress.finish}")
        elif progress.first_token is not None:
            outgoing.first_token = progress.first_token
        outgoing.changed.set()

    def on_abort(self, request_id: str) -> bool:
        outgoing = self._outgoing.get(request_id)
        if outgoing is not None:
            outgoing.is_silent = True
            outgoing.cancel("aborted")
            if not outgoing.is_running:
                del self._outgoing[request_id]
        # This node may now reuse the blocks. A push in progress may then send wrong data, but no commit follows it.
        return False

    # ---- one handoff --------------------------------------------------------------------------------------------

    def _start(self, outgoing: OutgoingHandoff) -> None:
        outgoing.is_running = True
        self._tasks.start(self._run(outgoing))

    async def _run(self, outgoing: OutgoingHandoff) -> None:
        request_id = outgoing.request.id
        about(request_id, outgoing.submit.traceparent)
        peer = None
        try:
            peer = self.peers.at(outgoing.submit.decode_node)
            if outgoing.request.borrows_blocks:
                async with self._early:
                    await self._reserve(peer, outgoing)
                    while not (outgoing.is_admitted or outgoing.reason):
                        await outgoing.wait()
            else:
                await self._reserve(peer, outgoing)
            await self._send(peer, outgoing)
        except Exception as error:
            log.exception("handoff of %s raised an exception", request_id)
            outgoing.cancel(type(error).__name__)
        finally:
            try:
                if peer is not None and outgoing.reservation_id is not None and outgoing.reason:
                    await self._stop(peer, outgoing, outgoing.reservation_id)
            finally:
                del self._outgoing[request_id]
                if peer is not None and outgoing.reservation_id is not None:
                    peer.reservations.pop(outgoing.reservation_id, None)
                self._report(outgoing)

    async def _reserve(self, peer: DecodePeer, outgoing: OutgoingHandoff) -> None:
        if outgoing.reason:  # the handoff was cancelled before this task ran
            return
        peer.num_waiting += 1
        try:
            peer.check_breaker()
            async with peer.reserving:
                reply = await self._call_reserve(peer, outgoing)
            if reply.error:
                raise PeerRefusedError(f"{peer.address} refused: {reply.error}")
            outgoing.reservation_id = reply.reservation_id
            held, targets = unpack_ids(reply.held), unpack_ids(reply.targets)
            peer.reservations[reply.reservation_id] = outgoing.cancel
            if reply.reservation_id in peer.void:
                raise ValueError(f"{peer.address} gave up the reservation before its reply arrived")
            outgoing.grant(reply.num_held, targets)
            self._check_grant(outgoing, reply, held, targets)
            outgoing.channel = self.peers.choose_channel(peer, reply.descriptors)
            outgoing.descriptor = reply.descriptors[outgoing.channel.name]
            if outgoing.request.borrows_blocks and not outgoing.reason:
                request = outgoing.request
                borrowed = self._geometry.borrow(reply.num_held, held, targets)
                request.tables, request.states, request.snapshot = borrowed
                request.num_computed = reply.num_held * self._info.block_tokens
                self._requests.enqueue(request)
        except (PeerError, ChannelError, ValueError) as error:
            outgoing.cancel(str(error))
        finally:
            peer.num_waiting -= 1

    async def _call_reserve(self, peer: DecodePeer, outgoing: OutgoingHandoff) -> ReserveReply:
        media = [replace(one, pixels=b"") for one in outgoing.submit.media]  # the peer does not encode images
        request = ReserveRequest(
            replace(outgoing.submit, media=media), self._info.incarnation_id, self._info.fingerprint
        )
        began_ns = now_ns()
        try:
            reply = await RESERVE.call(peer.rpc, request, self._reserve_timeout_s + self._timing.call_s)
        except PeerError as error:
            peer.call_failed()
            # The lost reply may have granted a reservation. This node will not write under it, so stop the reservation.
            self.peers.retry_stop(peer, StopRequest(b"", str(error), outgoing.request.id))
            raise
        if not reply.error:
            self._record(outgoing, "reserving", began_ns, peer)
        return reply

    def _check_grant(self, outgoing: OutgoingHandoff, reply: ReserveReply, held: list[int], targets: list[int]) -> None:
        """Raise ValueError if the reply's grant is invalid. In a shared pool, no channel would check the rows later."""
        rows = held + targets
        if len(reply.reservation_id) != RESERVATION_ID_BYTES or len(set(rows)) < len(rows):
            raise ValueError("the grant names a row twice, or its reservation id is malformed")
        if outgoing.request.borrows_blocks:
            due = self._geometry.lent_rows(outgoing.num_prompt, reply.num_held)
            if (len(held), len(targets)) != due or not 0 < min(rows) <= max(rows) < self._memory.num_rows:
                raise ValueError(f"{len(held)} and {len(targets)} rows were granted: must be {due} rows of the pool")

    async def _send(self, peer: DecodePeer, outgoing: OutgoingHandoff) -> None:
        """Push each block once it is complete, then commit. Return without a commit if the handoff fails or is
        cancelled."""
        is_repeated, first, request_id = False, outgoing.num_pushed, outgoing.request.id
        while not (outgoing.reason or outgoing.committed):
            try:
                if targets := outgoing.next_targets():
                    first = outgoing.num_pushed
                    failpoints.reach("prefill.before_push", request_id)
                    await self._push(peer, outgoing, targets)
                    failpoints.reach("prefill.after_push", request_id)
                    outgoing.num_pushed = first + len(targets)
                elif outgoing.num_pushed == len(outgoing.targets) and outgoing.first_token is not None:
                    failpoints.reach("prefill.before_commit", request_id)
                    await self._commit(peer, outgoing, outgoing.first_token)
                    failpoints.reach("prefill.after_commit", request_id)
                    outgoing.committed = True
                else:
                    await outgoing.wait()
            except CorruptBlocksError as error:
                if is_repeated:
                    outgoing.cancel(str(error))
                is_repeated, outgoing.checksums, outgoing.num_pushed = True, b"", first  # push the last blocks again
            except (PeerError, ChannelError) as error:
                if not (outgoing.reason or isinstance(error, PeerRefusedError | ReservationRefusedError)):
                    peer.call_failed()
                outgoing.cancel(str(error))

    async def _push(self, peer: DecodePeer, outgoing: OutgoingHandoff, targets: list[int]) -> None:
        channel, descriptor, reservation_id = outgoing.channel, outgoing.descriptor, outgoing.reservation_id
        assert channel is not None
        assert reservation_id is not None
        if outgoing.request.borrows_blocks:
            await channel.push(descriptor, reservation_id, (), ())
            return
        source = outgoing.sources(len(targets))
        if len(source) < len(targets):  # the engine has ended the request, and `cancel` is about to be called
            while not outgoing.reason:
                await outgoing.wait()
            return
        began_ns = now_ns()
        try:
            await channel.push(descriptor, reservation_id, source, targets)
        except ReservationRefusedError:
            raise  # the channel works, so it is not dropped
        except ChannelError:
            peer.drop_channel(channel, descriptor)
            raise
        num_bytes = len(source) * self._info.block_bytes
        moved = {"count": len(source), "bytes": num_bytes, "channel": channel.name}
        self._record(outgoing, "transfer", began_ns, peer, **moved)
        self._counters.transfer = self._transfer_time.observe(num_bytes, (now_ns() - began_ns) / 1e9)
        outgoing.checksums += await asyncio.to_thread(self._memory.checksums, source)
        if outgoing.num_pushed + len(targets) < len(outgoing.targets):
            notice = PushedNotice(reservation_id, outgoing.checksums)
            outgoing.checksums = b""
            _check(await PUSHED.call(peer.rpc, notice, self._timing.call_s))
        self._counters.blocks_moved += len(source)
        self._counters.bytes_moved += num_bytes

    async def _commit(self, peer: DecodePeer, outgoing: OutgoingHandoff, first_token: int) -> None:
        assert outgoing.reservation_id is not None
        commit = CommitRequest(outgoing.reservation_id, first_token, outgoing.checksums)
        if outgoing.request.borrows_blocks and outgoing.request.states:
            first_state = outgoing.targets[-2 * self._geometry.state_rows]
            commit.current_state = int(outgoing.request.states[0][0] != first_state)
        began_ns = now_ns()
        _check(await COMMIT.call(peer.rpc, commit, self._timing.call_s))
        peer.failed_at.clear()
        self._record(outgoing, "committed", began_ns, peer)

    async def _stop(self, peer: DecodePeer, outgoing: OutgoingHandoff, reservation_id: bytes) -> None:
        if outgoing.request.borrows_blocks:
            await self._requests.release(outgoing.request)  # waits until no step can write into the blocks
        await self.peers.stop(peer, StopRequest(reservation_id, outgoing.reason))

    def _record(self, outgoing: OutgoingHandoff, kind: str, began_ns: int, peer: DecodePeer, **fields: object) -> None:
        """Record an event that lasted from `began_ns` until now."""
        at_ns = now_ns()
        fields |= {"duration_us": (at_ns - began_ns) // 1000, "peer": peer.address}
        self._recorder.event(outgoing.request.id, kind, at_ns, **fields)

    def _report(self, outgoing: OutgoingHandoff) -> None:
        request = outgoing.request
        if outgoing.is_silent:
            return
        if outgoing.committed:
            self._counters.handoffs += 1
            self._requests.finish(request.id, "handed_off")
            self._engine.post(lambda scheduler: scheduler.abort(request))  # the blocks stay in the prefix cache
        else:
            self._counters.handoffs_failed += 1
            log.warning("handoff of %s failed: %s", request.id, outgoing.reason)
            self._requests.fail(request.id, f"handoff: {outgoing.reason}", retry=True)


def _check(answer: Ack) -> None:
    if answer.error:
        raise (CorruptBlocksError if answer.again else PeerRefusedError)(answer.error)

"""Mutations, each of which breaks the system in one place. If the simulation misses a mutation, the simulation has a
gap.

`MUTATIONS[name]` is a pair: a seed that detects the mutation, and a function that returns a context manager. The
context manager applies the mutation.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import engine.speculation
import router.nodes.connection
import scheduler.scheduler
from decode_node.receiver import HandoffReceiver
from decode_node.reservations import Reservation, ReservationPhase, ReservationTable
from node.active_requests import ActiveRequests
from node.router_sessions import RouterSessions
from prefill_node.decode_peers import DecodePeers
from prefill_node.sender import OutgoingHandoff
from router.dispatch.attempt import Attempt, AttemptFailed
from router.dispatch.dispatcher import WAIT_UNDER_WAY_S, Dispatcher
from router.nodes.connection import NodeConnection
from router.nodes.pool import NodePool
from scheduler.blocks import BlockPool
from scheduler.geometry import Geometry, Group
from scheduler.prefix import extend_hashes
from scheduler.request import Request, cdiv
from scheduler.scheduler import Scheduler
from shared.kv.memory import CHECKSUM_BYTES
from tests.simulation.channel import SimChannel

Broken = Callable[[], AbstractContextManager[Any]]


def _in_place_of(owner: Any, name: str, stand_in: Any) -> Broken:
    return partial(mock.patch.object, owner, name, stand_in)


def _around(owner: Any, name: str, wrapper: Callable[..., Any]) -> Broken:
    """Replace a method, so that a call runs `wrapper(original, *arguments)` instead of `original(*arguments)`."""
    original = getattr(owner, name)

    def broken(*given: Any, **more: Any) -> Any:
        return wrapper(original, *given, **more)

    return _in_place_of(owner, name, broken)


def _quarantine_skipped(self: ReservationTable, request_id: str) -> Reservation | None:
    reservation = self.of(request_id)
    if reservation is None or reservation.phase is ReservationPhase.QUARANTINED:
        return None
    return self.close(reservation)


async def _not_compared(self: HandoffReceiver, reservation: Any, checksums: bytes) -> str:
    num_checked = reservation.num_checked + len(checksums) // CHECKSUM_BYTES
    reservation.num_checked = min(len(reservation.rows), num_checked)
    return ""


def _positions_ignored(original: Any, self: Attempt, link: NodeConnection, delta: Any) -> None:
    original(self, link, replace(delta, position=len(self.sample.tokens)))


def _half_blocks(original: Any, self: OutgoingHandoff) -> Any:
    exact = self.num_computed
    size = self.geometry.block_tokens
    self.num_computed = min(size * cdiv(exact, size), self.num_prompt)
    try:
        return original(self)
    finally:
        self.num_computed = exact


def _shifted(original: Any, self: OutgoingHandoff) -> Any:
    targets = original(self)
    return targets[1:] + targets[:1]


def _miscounted(original: Any, self: NodeConnection, submit: Any, listener: Any) -> None:
    submit.num_prompt = len(submit.tokens) // 4
    original(self, submit, listener)


def _some_lost(original: Any, self: RouterSessions, router: str, *deltas: Any) -> bool:
    return original(self, router, *(delta for delta in deltas if delta.position != 3))


def _orphans_kept(self: ActiveRequests, router: str) -> None:
    for request_id in [key for key, entry in self._entries.items() if entry.router == router]:
        self.finish(request_id, "forgotten")  # the scheduler still runs the request


def _block_too_far(original: Any, self: Scheduler, request: Request, *given: Any) -> None:
    original(self, request, *given)
    if request.epoch and request.num_computed + self.block_tokens < len(request.tokens):
        request.num_computed += self.block_tokens
        request.num_scheduled = request.num_computed


def _freed_under_a_step(original: Any, self: Scheduler, request: Request) -> None:
    before, request.num_in_flight = request.num_in_flight, 0
    try:
        original(self, request)
    finally:
        request.num_in_flight = before


def _any_epoch(original: Any, self: Scheduler, step: Any, *given: Any) -> Any:
    for slice_ in step.slices:
        slice_.epoch = slice_.request.epoch
    return original(self, step, *given)


def _blocks_swapped(original: Any, self: Scheduler, request: Request, *given: Any) -> None:
    original(self, request, *given)
    if request.tables[0]:
        request.tables[0][0], request.tables[0][-1] = request.tables[0][-1], request.tables[0][0]


async def _not_waited_for(original: Any, self: Dispatcher, find: Callable[[], Any], wait_s: float) -> Any:
    if wait_s < WAIT_UNDER_WAY_S:  # the request is new
        return await original(self, find, wait_s)
    if (found := find()) is None:
        raise AttemptFailed("no node is left", "", is_gone=True)
    return found


def _avoided_for_good(role: str, original: Any, self: NodePool, *given: Any) -> Any:
    _, _, _, avoid, *_ = given
    prefill, decode = self.routable()
    is_only = {"prefill": not decode, "decode": not prefill}[role]
    return None if is_only and all(link.info.id in avoid for link in prefill + decode) else original(self, *given)


def _both(*broken: Broken) -> Broken:
    @contextmanager
    def apply() -> Iterator[None]:
        with ExitStack() as stack:
            for one in broken:
                stack.enter_context(one())
            yield

    return apply


def _one_block_kept(original: Any, self: BlockPool, blocks: list[int]) -> None:
    original(self, blocks[1:])


def _without_salt(hashes: list[bytes], tokens: Any, size: int, _: bytes, *media: Any) -> None:
    extend_hashes(hashes, tokens, size, b"", *media)


def _one_block_less(original: Any, self: Geometry, group: Group, position: int) -> int:
    return int(original(self, group, position)) + (group.kind == "window" and position >= group.size)


def _older_state(original: Any, self: OutgoingHandoff, count: int) -> Any:
    kept, self.request.states = self.request.states, self.request.states[::-1]
    try:
        return original(self, count)
    finally:
        self.request.states = kept


def _rejected_kept(original: Any, self: Scheduler, step: Any, index: int, tokens: Any) -> Any:
    output, slice_ = original(self, step, index, tokens), step.slices[index]
    if slice_.drafts and output.finish is None and slice_.epoch == slice_.request.epoch:
        for end in range(slice_.request.num_computed + 1, min(slice_.end, len(slice_.request.tokens)) + 1):
            self._advance(slice_.request, end)
    return output


def _all_accepted(slice_: Any, rows: list[Any]) -> Any:
    return replace(rows[-1], tokens=[*slice_.drafts, *rows[-1].tokens])


def _saved_later(original: Any, self: Scheduler, *given: Any) -> Any:
    use = original(self, *given)
    return replace(use, save_at=use.save_at - 1) if use.save_at - given[1].start > 1 else use


async def _nothing(*_: Any) -> None:
    return None


async def _acknowledged(*_: Any) -> bool:
    return True


# If a seed no longer detects its mutation after a change to the simulation, `make mutations` finds another seed.
MUTATIONS: dict[str, tuple[int, Broken]] = {
    "reservations are not revoked": (8, _in_place_of(SimChannel, "revoke", lambda *_: None)),
    "a release is forgotten": (0, _around(BlockPool, "release", _one_block_kept)),
    "leases are ignored": (33, _in_place_of(ReservationTable, "expired", lambda *_: [])),
    "a fenced writer is admitted": (89, _in_place_of(HandoffReceiver, "_can_write", lambda self, writer: False)),
    "quarantine is skipped": (16, _in_place_of(ReservationTable, "abort", _quarantine_skipped)),
    "checksums are not compared": (8, _in_place_of(HandoffReceiver, "_check", _not_compared)),
    "prefixes without salt": (1, _in_place_of(scheduler.scheduler, "extend_hashes", _without_salt)),
    "positions are ignored": (24, _around(Attempt, "on_delta", _positions_ignored)),
    "a delta is lost": (0, _around(RouterSessions, "send", _some_lost)),
    "incomplete blocks are pushed": (27, _around(OutgoingHandoff, "next_targets", _half_blocks)),
    "rows go to wrong blocks, unchecked": (
        0,
        _both(
            _in_place_of(HandoffReceiver, "_check", _not_compared),
            _around(OutgoingHandoff, "next_targets", _shifted),
        ),
    ),
    "received blocks are swapped": (0, _around(Scheduler, "kv_received", _blocks_swapped)),
    "generated tokens count as prompt": (4, _around(NodeConnection, "submit", _miscounted)),
    "a node failure is not reported": (4, _in_place_of(Attempt, "on_node_lost", lambda self, link: None)),
    "waiting for a node counts as an attempt": (9, _around(Dispatcher, "_wait_for", _not_waited_for)),
    "avoided prefill nodes stay avoided": (29, _around(NodePool, "choose", partial(_avoided_for_good, "prefill"))),
    "avoided decode nodes stay avoided": (39, _around(NodePool, "choose", partial(_avoided_for_good, "decode"))),
    "lost nodes are not reconnected": (9, _in_place_of(router.nodes.connection, "REDIAL_S", (1000.0,))),
    "requests of a lost router are kept": (16, _in_place_of(ActiveRequests, "abort_router", _orphans_kept)),
    "cancelled reservations are not released": (1, _in_place_of(DecodePeers, "_acknowledged", _acknowledged)),
    "a lost stop is not repaired": (
        1, _both(_in_place_of(DecodePeers, "stop", _nothing), _in_place_of(ReservationTable, "quarantined", lambda *_: []))
    ),
    "a cancelled request may still reserve": (5, _in_place_of(HandoffReceiver, "_remember_cancelled", lambda *_: None)),
    "a preempted request resumes at a later position": (25, _around(Scheduler, "_hold", _block_too_far)),
    "blocks are freed during a step": (2, _around(Scheduler, "_free", _freed_under_a_step)),
    "epochs are not compared": (25, _around(Scheduler, "update", _any_epoch)),
    "rows are released too early": (6, _around(Geometry, "first_block", _one_block_less)),
    "the older state is sent": (13, _around(OutgoingHandoff, "sources", _older_state)),
    "rejected guesses keep their place": (1, _around(Scheduler, "_finish_slice", _rejected_kept)),
    "guesses are not compared": (1, _in_place_of(engine.speculation, "_joined", _all_accepted)),
    "states are saved too early": (13, _around(Scheduler, "_state_use", _saved_later)),
}  # fmt: skip

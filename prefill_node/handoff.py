"""The state machine of a handoff on the prefill node: reserve → push each finished chunk → commit. It does no I/O.

Its driver (`sender.py`) reports events to it, and performs the actions that `next_action` returns one at a time.
"""

from dataclasses import dataclass
from enum import Enum

from scheduler.request import cdiv


class HandoffPhase(Enum):
    RESERVING = "reserving"  # the decode node reserves blocks
    PUSHING = "pushing"  # blocks are reserved; each is pushed once it is complete
    COMMITTING = "committing"  # all blocks are pushed; the decode node checks them, and may request the last ones again
    STOPPING = "stopping"  # the handoff failed; report to the decode node that this node writes no more
    DONE = "done"


LEGAL: dict[HandoffPhase, frozenset[HandoffPhase]] = {
    HandoffPhase.RESERVING: frozenset({HandoffPhase.PUSHING, HandoffPhase.STOPPING}),
    HandoffPhase.PUSHING: frozenset({HandoffPhase.COMMITTING, HandoffPhase.STOPPING}),
    HandoffPhase.COMMITTING: frozenset({HandoffPhase.DONE, HandoffPhase.PUSHING, HandoffPhase.STOPPING}),
    HandoffPhase.STOPPING: frozenset({HandoffPhase.DONE}),
    HandoffPhase.DONE: frozenset(),
}


@dataclass(frozen=True, slots=True)
class PushAction:
    """Push logical blocks [first, last) of the prompt into `targets`, in this order."""

    first: int
    last: int
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CommitAction:
    first_token: int


@dataclass(frozen=True, slots=True)
class StopAction:
    reason: str


Action = PushAction | CommitAction | StopAction


class Handoff:
    """The state of one handoff. Blocks are counted as logical blocks of the prompt.

    Belongs to the task of one `OutgoingHandoff`, on the event loop; `computed`, `sampled` and `cancel` may be called
    while an action is in progress. Blocks are pushed once and in order, except that the last push may be repeated once.
    After `cancel` or a failure, the action in progress ends, and the next action is a stop.
    """

    def __init__(self, num_prompt: int, block_tokens: int) -> None:
        self.phase = HandoffPhase.RESERVING
        self.num_blocks = cdiv(num_prompt, block_tokens)
        self.reservation_id: bytes | None = None
        self.num_held = 0
        self.num_pushed = 0  # logical blocks that the decode node has, including cached ones
        self.committed = False
        self._num_prompt = num_prompt
        self._block_tokens = block_tokens
        self._num_computed = 0
        self._first_token: int | None = None
        self._targets: tuple[int, ...] = ()
        self.reason = ""  # why it was cancelled
        self.is_repeated = False  # damaged rows were pushed again
        self._first_of_last = 0  # first logical block of the last push
        self._current: Action | None = None

    def granted(self, reservation_id: bytes, num_held: int, targets: tuple[int, ...]) -> None:
        """Record that the decode node has the first `num_held` blocks and reserved `targets` for the others."""
        self.reservation_id = reservation_id
        if num_held < 0 or num_held + len(targets) != self.num_blocks:
            self.cancel(f"{num_held} held and {len(targets)} reserved blocks are not the prompt's {self.num_blocks}")
        if self.phase is HandoffPhase.RESERVING:
            self.num_held = self.num_pushed = num_held
            self._targets = targets
            self._move_to(HandoffPhase.PUSHING)

    def computed(self, num_tokens: int) -> None:
        """Record that the KV of the first `num_tokens` prompt tokens is computed. A lower number has no effect."""
        self._num_computed = max(self._num_computed, min(num_tokens, self._num_prompt))

    def sampled(self, first_token: int) -> None:
        self._first_token = first_token

    def done(self) -> None:
        """Complete the action in progress, which succeeded."""
        action, self._current = self._current, None
        match action:
            case PushAction():
                self.num_pushed, self._first_of_last = action.last, action.first
            case CommitAction():
                self.committed = True
                if self.phase is HandoffPhase.COMMITTING:
                    self._move_to(HandoffPhase.DONE)
            case StopAction():
                self._move_to(HandoffPhase.DONE)

    def repeat(self, reason: str) -> None:
        """Push the rows of the last push again, because the decode node found them damaged. Fail the second time."""
        if self.is_repeated:
            self.failed(reason)
            return
        self.is_repeated, action, self._current = True, self._current, None
        if isinstance(action, CommitAction):
            self.num_pushed = self._first_of_last
        if self.phase is HandoffPhase.COMMITTING:
            self._move_to(HandoffPhase.PUSHING)

    def failed(self, reason: str) -> None:
        """Stop the handoff, because a reservation, push or commit failed."""
        assert not isinstance(self._current, StopAction), "a stop is done even if the peer did not answer"
        self._current = None
        self.cancel(reason)

    def cancel(self, reason: str) -> None:
        """Stop the handoff in any phase. An action in progress ends first."""
        if self.phase not in {HandoffPhase.STOPPING, HandoffPhase.DONE}:
            self.reason = reason
            self._move_to(HandoffPhase.STOPPING)

    def next_action(self) -> Action | None:
        """Return the action to perform until `done` or `failed`, or None to wait for an event."""
        if self._current is not None:
            return None
        self._current = self._action()
        return self._current

    def _action(self) -> Action | None:
        if self.phase is HandoffPhase.STOPPING:
            return StopAction(self.reason)
        if self.phase is not HandoffPhase.PUSHING:
            return None
        is_computed = self._num_computed == self._num_prompt
        ready = self.num_blocks if is_computed else self._num_computed // self._block_tokens
        if ready > self.num_pushed:
            first = self.num_pushed
            return PushAction(first, ready, self._targets[first - self.num_held : ready - self.num_held])
        if is_computed and self._first_token is not None:
            self._move_to(HandoffPhase.COMMITTING)
            return CommitAction(self._first_token)
        return None

    def _move_to(self, phase: HandoffPhase) -> None:
        assert phase in LEGAL[self.phase], f"handoff: {self.phase} -> {phase} is not a legal transition"
        self.phase = phase

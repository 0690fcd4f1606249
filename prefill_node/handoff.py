"""The prefill node's side of one handoff: reserve → push each finished chunk → commit. A state machine without I/O.

Its driver (`courier.py`) feeds it what happened and does what `next_action` says, one action at a time.
"""

from dataclasses import dataclass
from enum import Enum

from scheduler.request import cdiv


class HandoffPhase(Enum):
    ASKING = "asking"  # the decode node was asked for room
    MOVING = "moving"  # room is there; blocks are pushed as they become whole
    COMMITTING = "committing"  # every block is there; the decode node checks them, and may want the last ones again
    STOPPING = "stopping"  # given up; the decode node has to hear that no more is written
    DONE = "done"


LEGAL: dict[HandoffPhase, frozenset[HandoffPhase]] = {
    HandoffPhase.ASKING: frozenset({HandoffPhase.MOVING, HandoffPhase.STOPPING}),
    HandoffPhase.MOVING: frozenset({HandoffPhase.COMMITTING, HandoffPhase.STOPPING}),
    HandoffPhase.COMMITTING: frozenset({HandoffPhase.DONE, HandoffPhase.MOVING, HandoffPhase.STOPPING}),
    HandoffPhase.STOPPING: frozenset({HandoffPhase.DONE}),
    HandoffPhase.DONE: frozenset(),
}


@dataclass(frozen=True, slots=True)
class PushAction:
    """Logical blocks [first, last) of the prompt, into the target blocks of the same places."""

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
    def __init__(self, num_prompt: int, block_tokens: int) -> None:
        self.phase = HandoffPhase.ASKING
        self.num_blocks = cdiv(num_prompt, block_tokens)
        self.reservation_id: bytes | None = None
        self.num_held = 0
        self.num_pushed = 0  # logical blocks that are at the decode node, held ones included
        self.committed = False
        self._num_prompt = num_prompt
        self._block_tokens = block_tokens
        self._num_computed = 0
        self._first_token: int | None = None
        self._targets: tuple[int, ...] = ()
        self.reason = ""  # why it was given up
        self.is_repeated = False  # rows came damaged, and are pushed again
        self._first_of_last = 0  # logical block at which the last push began
        self._doing: Action | None = None

    # ---- what happened ------------------------------------------------------------------------------------------

    def granted(self, ticket: bytes, num_held: int, targets: tuple[int, ...]) -> None:
        """The decode node holds the first `num_held` blocks and reserved `targets` for the others."""
        self.reservation_id = ticket
        if num_held < 0 or num_held + len(targets) != self.num_blocks:
            self.cancel(f"{num_held} held and {len(targets)} reserved blocks are not the prompt's {self.num_blocks}")
        if self.phase is HandoffPhase.ASKING:
            self.num_held = self.num_pushed = num_held
            self._targets = targets
            self._move_to(HandoffPhase.MOVING)

    def computed(self, num_tokens: int) -> None:
        """KV of the first `num_tokens` prompt tokens is there; never goes back, as what was pushed stays pushed."""
        self._num_computed = max(self._num_computed, min(num_tokens, self._num_prompt))

    def sampled(self, first_token: int) -> None:
        self._first_token = first_token

    def done(self) -> None:
        """The action under way succeeded."""
        action, self._doing = self._doing, None
        match action:
            case PushAction():
                self.num_pushed, self._first_of_last = action.last, action.first
            case CommitAction():
                self.committed = True
                if self.phase is HandoffPhase.COMMITTING:
                    self._move_to(HandoffPhase.DONE)
            case StopAction():
                self._move_to(HandoffPhase.DONE)
            case None:
                raise AssertionError("no action was under way")

    def repeat(self, reason: str) -> None:
        """The push or commit under way found that the rows of the last push came damaged: they are pushed once more,
        and given up with the handoff when that does not help."""
        if self.is_repeated:
            self.failed(reason)
            return
        self.is_repeated, action, self._doing = True, self._doing, None
        if isinstance(action, CommitAction):
            self.num_pushed = self._first_of_last
        if self.phase is HandoffPhase.COMMITTING:
            self._move_to(HandoffPhase.MOVING)

    def failed(self, reason: str) -> None:
        """The asking, or the push or commit under way, failed: nothing of it goes on."""
        assert not isinstance(self._doing, StopAction), "a stop that nobody hears is over all the same"
        self._doing = None
        self.cancel(reason)

    def cancel(self, reason: str) -> None:
        """From any phase, also in the middle of an action, which is waited for before the peer hears of it."""
        if self.phase in {HandoffPhase.STOPPING, HandoffPhase.DONE}:
            return
        self.reason = reason
        self._move_to(HandoffPhase.STOPPING)

    # ---- what to do ---------------------------------------------------------------------------------------------

    def next_action(self) -> Action | None:
        """What the driver does now, until `done` or `failed`; None: wait for something to happen."""
        if self._doing is None:
            self._doing = self._action()
            return self._doing
        return None

    def _action(self) -> Action | None:
        if self.phase is HandoffPhase.STOPPING:
            return StopAction(self.reason)
        if self.phase is not HandoffPhase.MOVING:
            return None
        is_whole = self._num_computed == self._num_prompt
        ready = self.num_blocks if is_whole else self._num_computed // self._block_tokens
        if ready > self.num_pushed:
            first = self.num_pushed
            return PushAction(first, ready, self._targets[first - self.num_held : ready - self.num_held])
        if is_whole and self._first_token is not None:
            self._move_to(HandoffPhase.COMMITTING)
            return CommitAction(self._first_token)
        return None

    def _move_to(self, phase: HandoffPhase) -> None:
        assert phase in LEGAL[self.phase], f"handoff: {self.phase} -> {phase} is not a legal transition"
        self.phase = phase

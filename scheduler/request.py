"""A request as the scheduler sees it: a sequence of tokens, and cursors that count the tokens with KV.

A request has no separate states for prefill and decode, and none of its fields depends on the time or the device.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from scheduler.cost import StepWork
from scheduler.draft import DraftHistory
from scheduler.prefix import MediaSpan


class RequestState(Enum):
    """The state of a request on this node."""

    WAITING = "waiting"  # holds no blocks and waits for admission
    RECEIVING_KV = "receiving_kv"  # its blocks are reserved and a peer is writing them
    RUNNING = "running"  # holds blocks and is being computed
    SENDING_KV = "sending_kv"  # its prompt is computed; it keeps its blocks until a peer has their content
    DONE = "done"  # holds no blocks


LEGAL: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.RECEIVING_KV, RequestState.DONE}),
    RequestState.RECEIVING_KV: frozenset({RequestState.RUNNING, RequestState.DONE}),
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.SENDING_KV, RequestState.DONE}),
    RequestState.SENDING_KV: frozenset({RequestState.DONE}),
    RequestState.DONE: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate.

    `tokens` holds the prompt and the tokens generated so far. The first `num_prompt` tokens are the user's prompt. A
    resumed request already has generated tokens when it arrives. Positions [0, num_computed) have KV. Positions
    [num_computed, num_scheduled) are being computed by steps that `Scheduler.update` has not processed yet.

    The node creates a request and adds it to the scheduler. From then on, the scheduler owns the request, and only the
    engine's thread changes it. `move_to` allows only the transitions in `LEGAL`.
    """

    id: str
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    min_tokens: int = 0
    stop_tokens: frozenset[int] = frozenset()
    salt: bytes = b""  # only requests with the same salt share cached blocks
    adapter: str = ""  # digest of a LoRA adapter, for the runner; requests with different adapters have different salts
    priority: int = 0  # requests with smaller values run first
    receive_kv: bool = False  # a peer computes the prompt and sends its KV to this node
    send_kv: bool = False  # the request ends on this node at its first token, and its KV is sent to a peer
    shared_pool: bool = False  # the prefill node writes the prompt's KV directly into the decode node's blocks
    needs_prompt_logprobs: bool = False  # every prompt position needs an output, so no cached prefix is used
    speculates: bool = True  # whether a scheduler with speculative decoding may guess tokens for this request
    sampling: Any = None  # a SamplingParams for the runner and the node; the scheduler does not read it
    matcher: Any = None  # a TokenMatcher for the runner, if the answer must match a grammar
    prompt_ids: Any = None  # the prompt's distinct tokens for penalties; set and read by the runner
    media: tuple[MediaSpan, ...] = ()  # images of the prompt, in order
    images: Any = None  # the `PromptImage` of each span, for the runner; None if the runner computes no image tokens

    arrival: int = -1  # order of arrival on this node
    state: RequestState = RequestState.WAITING
    # Block tables, one for each attention group: see `Scheduler`.
    tables: list[list[int]] = field(default_factory=lambda: [[]])
    released: list[int] = field(default_factory=list)  # for each group, how many leading blocks were released
    reserved: list[int] = field(default_factory=list)  # rows that a peer writes, in the order of transfer
    states: list[list[int]] = field(default_factory=list)  # rows of two or three states, the current state first
    # Number of tokens that have KV but are not in the current recurrent state, because a guess after them was wrong.
    state_lag: int = 0
    snapshot: list[int] = field(default_factory=list)  # rows of the cached state from which the request starts
    junction: int = 0  # where to save a state: the end of the cached KV if no state was found there, otherwise 0
    latest_save: Any = None  # the name of the state that a decode saved last
    hashes: list[bytes] = field(default_factory=list)  # the block hashes of `tokens` that were computed so far
    num_computed: int = 0
    num_scheduled: int = 0
    num_sampling: int = 0  # tokens that steps in flight will sample
    num_in_flight: int = 0  # steps in flight that contain a slice of this request
    num_cached: int = 0  # tokens found in the prefix cache when the request was first admitted
    epoch: int = 0  # number of preemptions; slices scheduled before the last preemption do not advance the request
    drafts: DraftHistory = field(default_factory=DraftHistory)
    finish: str | None = None

    @property
    def borrows_blocks(self) -> bool:
        """Whether this node computes the request in blocks of another node's pool."""
        return self.shared_pool and self.send_kv

    @property
    def rows(self) -> list[int]:
        """All rows that the request holds."""
        held = [*self.tables, *self.states, self.snapshot]
        return [row for rows in held for row in rows if row]

    @property
    def num_tokens(self) -> int:
        """The length of the sequence after all steps in flight have sampled their tokens."""
        return len(self.tokens) + self.num_sampling

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def remaining_tokens(self) -> int:
        """The number of tokens that the request may still generate."""
        return max(0, self.max_tokens - (self.num_tokens - self.num_prompt))

    def move_to(self, state: RequestState) -> None:
        assert state in LEGAL[self.state], f"request {self.id}: {self.state} -> {state} is not a legal transition"
        self.state = state

    def finish_reason(self) -> str | None:
        """Return "stop" or "length" if the last token ends the request, otherwise None."""
        num_generated = self.num_generated
        # With a grammar, a stop token always ends the request, because the grammar may have allowed no other token.
        may_stop = num_generated >= self.min_tokens or self.matcher is not None
        if may_stop and self.tokens[-1] in self.stop_tokens:
            return "stop"
        return "length" if num_generated >= self.max_tokens else None


@dataclass(frozen=True, slots=True)
class StateUse:
    """The rows of the recurrent states that a slice uses. A slice never writes rows that it reads.

    `read` is None at the start of a sequence, where the state is zero. If `save` is not empty, the slice also writes
    the state after the first `save_at` tokens of the sequence to the rows `save`.
    """

    read: tuple[int, ...] | None
    write: tuple[int, ...]
    save_at: int = 0
    save: tuple[int, ...] = ()


@dataclass(slots=True)
class Slice:
    """Tokens [start, start + count) of one request in one step. If `samples` is true, the next token is sampled.

    If there are `drafts`, the slice ends with the request's last token and these guesses, and a token is sampled after
    each of them.
    """

    request: Request
    start: int
    count: int
    samples: bool
    epoch: int
    state: StateUse | None = None  # None if the model has no recurrent states
    drafts: tuple[int, ...] = ()
    row: list[int] | None = None  # a list with guesses, which the slice reads instead of the request's tokens
    num_stored: int = 0  # number of leading tokens that are computed again; their KV is already stored
    continues: bool = False  # recurrent layers merge the slice with the previous slice of the batch

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def tokens(self) -> list[int]:
        return self.request.tokens if self.row is None else self.row

    @property
    def is_decode(self) -> bool:
        """Whether all tokens of the slice have KV, except the last token of the sequence and the guesses after it."""
        return self.samples and self.count == self.num_stored + 1 + len(self.drafts)


@dataclass(slots=True)
class Step:
    """One forward pass over slices.

    `receiving` lists the requests that were admitted with the step and whose KV a peer sends. `budget` is the number of
    tokens that the step was allowed, and `reason` explains it (see `SloBudget`). `predicted_s` is the predicted
    duration in seconds, or 0 without a step-time model. In a simulation, `decodes` may list requests that decode in the
    step but have no slice.
    """

    number: int
    slices: list[Slice]
    receiving: list[Request]
    num_preempted: int = 0
    num_accepted: int = 0  # number of guessed tokens that were right; set by `Scheduler.update`
    work: StepWork = field(default_factory=StepWork)
    budget: int = 0
    reason: str = ""
    predicted_s: float = 0.0
    decodes: list[Request] = field(default_factory=list)
    drafting_s: float = 0.0  # seconds that the drafter took


def cdiv(a: int, b: int) -> int:
    return -(-a // b)

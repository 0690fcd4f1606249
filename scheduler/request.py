"""A request: a row of tokens, and cursors of how many of them have KV. It knows no phase, no clock and no device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from scheduler.cost import StepWork


class RequestState(Enum):
    """Where a request stands on this node."""

    WAITING = "waiting"  # holds no blocks; wants to be admitted
    RECEIVING_KV = "landing"  # its blocks are reserved, a peer is writing them
    RUNNING = "running"  # holds blocks; its cursor moves
    SENDING_KV = "leaving"  # its prompt is computed here; its blocks are held until a peer has them
    DONE = "done"  # holds nothing


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

    `tokens` is the prompt and what was generated so far; `num_prompt` of them were the user's prompt (a resumed
    request arrives with more tokens than that). Positions [0, num_computed) have KV; positions
    [num_computed, num_scheduled) are being computed by steps that were decided and not yet told of by `update`.
    """

    id: str
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    min_tokens: int = 0
    stop_tokens: frozenset[int] = frozenset()
    salt: bytes = b""  # requests share cached blocks only within one salt
    priority: int = 0  # smaller runs first
    receive_kv: bool = False  # the prompt's KV comes from a peer
    send_kv: bool = False  # ends here at its first token, and is handed to a peer
    shared_pool: bool = False  # one node computes its prompt in another one's blocks
    needs_prompt_logprobs: bool = False  # logits of all prompt positions are wanted, so no position may be skipped
    sampling: Any = None  # for the runner and the node; never read here

    arrival: int = -1  # order of arrival on this node
    state: RequestState = RequestState.WAITING
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of the full blocks of `tokens`, as far as computed
    num_computed: int = 0
    num_scheduled: int = 0
    num_sampling: int = 0  # tokens that steps in flight will append
    num_in_flight: int = 0  # steps in flight that hold a slice of this request
    num_cached: int = 0  # tokens found in the prefix cache at first admission
    epoch: int = 0  # counts preemptions: a slice of an older epoch moves no cursor
    finish: str | None = None

    @property
    def borrows_blocks(self) -> bool:
        """Its blocks, and the KV that they hold already, are another node's: given with it, and never this pool's."""
        return self.shared_pool and self.send_kv

    @property
    def num_tokens(self) -> int:
        """Length of the row once the steps in flight have told their tokens."""
        return len(self.tokens) + self.num_sampling

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def remaining_tokens(self) -> int:
        """How many more tokens this request may still generate."""
        return max(0, self.max_tokens - (self.num_tokens - self.num_prompt))

    def move_to(self, state: RequestState) -> None:
        assert state in LEGAL[self.state], f"request {self.id}: {self.state} -> {state} is not a legal transition"
        self.state = state

    def finish_reason(self) -> str | None:
        """Why the row ends at its last token, or None when it goes on."""
        num_generated = self.num_generated
        if num_generated >= self.min_tokens and self.tokens[-1] in self.stop_tokens:
            return "stop"
        return "length" if num_generated >= self.max_tokens else None


@dataclass(slots=True)
class Slice:
    """Tokens [start, start + count) of one request in one step; `samples` says that a token follows the last."""

    request: Request
    start: int
    count: int
    samples: bool
    epoch: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_decode(self) -> bool:
        """It computes the last token of its row and nothing else."""
        return self.samples and self.count == 1


@dataclass(slots=True)
class Step:
    """One forward pass over slices, and the landings that were given room beside it.

    `budget` tokens were allowed for `reason` (see scheduler.budget); `predicted_s` is 0 where no model predicted it.
    """

    number: int
    slices: list[Slice]
    receiving: list[Request]
    num_preempted: int = 0
    work: StepWork = field(default_factory=StepWork)
    budget: int = 0
    reason: str = ""
    predicted_s: float = 0.0


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def tokens_of(request: Request, piece: Slice) -> Sequence[int]:
    return request.tokens[piece.start : piece.end]

"""Drive a scheduler without a device. KV is a dictionary of slots, and the next token is a hash of the slots read.

A missing or outdated slot, or a slot of another request, changes the tokens, so correct tokens prove that the block
accounting is correct. Each row of a recurrent state holds the list of the tokens that the state depends on.
"""

import hashlib
import random
from collections import deque
from typing import NamedTuple

from hypothesis import strategies as st

from scheduler.budget import SloBudget
from scheduler.drafters import Speculation, TextDrafter
from scheduler.geometry import Geometry, Group
from scheduler.request import Request, RequestState, Slice, StateUse, Step
from scheduler.scheduler import Scheduler, StepLimits, StepOutput

VOCABULARY = 50
RECEIVING_ITERATIONS = 3
SENDING_ITERATIONS = 2


def next_token(prefix: list[int], salt: bytes = b"") -> int:
    digest = hashlib.blake2b(repr(prefix).encode(), key=salt, digest_size=4).digest()
    return 3 + int.from_bytes(digest) % (VOCABULARY - 3)


def expected(prompt: list[int], max_tokens: int, salt: bytes = b"") -> list[int]:
    row = list(prompt)
    for _ in range(max_tokens):
        row.append(next_token(row, salt))
    return row[len(prompt) :]


class Guesses(TextDrafter):
    """A drafter whose guesses are right with a probability of 0.8. The guesses ignore salts, so they are
    wrong for requests with a salt."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def propose(self, request: Request, limit: int) -> list[int]:
        row = list(request.tokens)
        for _ in range(self._rng.randrange(limit + 1)):
            row.append(next_token(row) if self._rng.random() < 0.8 else self._rng.randrange(3, VOCABULARY))
        return row[len(request.tokens) :]


class Copied(NamedTuple):
    """A slice, and the block tables that its request had when the step was scheduled. A device reads these tables."""

    piece: Slice
    tables: list[list[int]]


class Device:
    """A simulated device. For each row and offset, it keeps the (salt, token) that was stored there last. For each row
    of a state, it keeps the salt, the index of the row in the state, and the tokens."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.slots: dict[tuple[int, int], tuple[bytes, int]] = {}
        self.states: dict[int, tuple[bytes, int, list[int]]] = {}

    def run(self, copies: list[Copied]) -> list[list[int]]:
        return [self._slice(copied.piece, copied.tables) for copied in copies]

    def store(self, tables: list[list[int]], position: int, salt: bytes, token: int) -> None:
        block, offset = divmod(position, self.geometry.block_tokens)
        for group, table in zip(self.geometry.attention, tables, strict=True):
            for row in table[block * group.rows : (block + 1) * group.rows]:
                if row:  # a peer does not send rows that no later query sees
                    self.slots[row, offset] = salt, token

    def _slice(self, piece: Slice, tables: list[list[int]]) -> list[int]:
        """Run a slice. Return the sampled tokens: the drafts before the first wrong draft, and one more token."""
        request, size = piece.request, self.geometry.block_tokens
        row = [*request.tokens[: piece.end - len(piece.drafts)], *piece.drafts]
        for position in range(piece.start, piece.end):
            for group, table in zip(self.geometry.attention, tables, strict=True):
                first = group.first_seen(position) // size
                needed = table[first * group.rows : (position // size + 1) * group.rows]
                assert all(needed), "a query sees a block that was released"
            if position >= piece.start + piece.num_stored:
                self.store(tables, position, request.salt, row[position])
        if piece.state is not None:
            self._recur(piece, piece.state, row)
        drawn: list[int] = []
        for end in range(piece.end - len(piece.drafts), piece.end + piece.samples):
            drawn.append(self._drawn(piece, tables, row[:end]))
            if row[end : end + 1] != drawn[-1:]:
                break
        return drawn

    def _drawn(self, piece: Slice, tables: list[list[int]], prefix: list[int]) -> int:
        request, size, end = piece.request, self.geometry.block_tokens, len(prefix)
        for group, table in zip(self.geometry.attention, tables, strict=True):
            for position in range(group.first_seen(end - 1), end):
                for row in range(group.rows):
                    read = self.slots[table[position // size * group.rows + row], position % size]
                    assert read[0] == request.salt, "a request read another tenant's KV"
                    if read[1] != prefix[position]:
                        prefix[position] = read[1]
        return next_token(prefix, request.salt)

    def _recur(self, piece: Slice, use: StateUse, tokens: list[int]) -> None:
        request = piece.request
        assert not set(use.read or ()) & {*use.write, *use.save}
        assert (use.read is None) == (piece.start == 0)
        for index, row in enumerate(use.read or ()):
            assert self.states[row] == (request.salt, index, request.tokens[: piece.start]), "a wrong state was read"
        for rows, end in ((use.write, piece.end), (use.save, use.save_at)):
            for index, row in enumerate(rows):
                self.states[row] = request.salt, index, tokens[:end]


class Driver:
    """A scheduling loop with up to `depth` steps in flight. KV arrives RECEIVING_ITERATIONS iterations after its blocks
    were allocated. A request that sends its KV releases its blocks SENDING_ITERATIONS iterations after the step that
    sampled its token."""

    def __init__(self, scheduler: Scheduler, depth: int = 1) -> None:
        self.scheduler = scheduler
        self.device = Device(scheduler.geometry)
        self.depth = depth
        self.in_flight: deque[tuple[Step, list[Copied]]] = deque()
        self.steps: list[Step] = []
        self.receiving: deque[tuple[int, Request]] = deque()
        self.sending: deque[tuple[int, Request]] = deque()
        self.iterations = 0
        self.idle = 0

    def iterate(self) -> list[StepOutput]:
        """Schedule one step. Complete the oldest step if `depth` steps are in flight or no step was scheduled."""
        self.iterations += 1
        while self.receiving and self.receiving[0][0] <= self.iterations:
            self.receive(self.receiving.popleft()[1])
        while self.sending and self.sending[0][0] <= self.iterations:
            if (gone := self.sending.popleft()[1]).state is RequestState.SENDING_KV:
                self.scheduler.release(gone)
        step = self.scheduler.schedule()
        self.receiving += [(self.iterations + RECEIVING_ITERATIONS, received) for received in step.receiving]
        if step.slices:
            self.steps.append(step)
            self.in_flight.append(
                (step, [Copied(piece, list(map(list, piece.request.tables))) for piece in step.slices])
            )
            self.check(step)
        events: list[StepOutput] = []
        if self.in_flight and (len(self.in_flight) >= self.depth or not step.slices):
            events = self.complete()
        sending = [event.request for event in events if event.request.state is RequestState.SENDING_KV]
        self.sending += [(self.iterations + SENDING_ITERATIONS, request) for request in sending]
        self.idle = 0 if step.slices or events or self.receiving or self.sending else self.idle + 1
        return events

    def receive(self, received: Request) -> None:
        """Store the KV that the request's peer computed, and report the first token that the peer sampled."""
        if received.state is not RequestState.RECEIVING_KV:
            return
        for position in range(len(received.tokens)):
            if position >= received.num_computed or len(received.tables) > 1:
                self.device.store(received.tables, position, received.salt, received.tokens[position])
        for index, row in enumerate(received.states[0] if received.states else ()):
            self.device.states[row] = received.salt, index, list(received.tokens)
        self.scheduler.kv_received(received, next_token(received.tokens, received.salt))

    def complete(self) -> list[StepOutput]:
        step, copies = self.in_flight.popleft()
        # The step runs only now, so that it reads the tokens that earlier steps sampled, as on a device.
        return self.scheduler.update(step, self.device.run(copies))

    def check(self, step: Step) -> None:
        limits = self.scheduler.limits
        seen: set[str] = set()
        before = [copied.piece for other, copies in self.in_flight if other is not step for copied in copies]
        verifying = {(piece.request.id, piece.epoch) for piece in before if piece.drafts}
        assert verifying.isdisjoint((piece.request.id, piece.epoch) for piece in step.slices)
        for piece in step.slices:
            assert piece.count > 0
            assert piece.request.id not in seen, "a step has one slice per request"
            seen.add(piece.request.id)
            for group, table in zip(self.scheduler.geometry.attention, piece.request.tables, strict=True):
                assert len(table) // group.rows * self.scheduler.block_tokens >= piece.end
        if self.scheduler.policy.chunked:
            assert step.work.tokens <= self.scheduler.budget.ceiling
            assert step.work.tokens <= max(step.budget, step.work.num_decodes + 1)
        assert len(step.slices) <= limits.max_num_seqs
        decodes = [piece for piece in step.slices if piece.is_decode]
        num_tokens = sum(piece.count for piece in step.slices)
        assert (step.work.num_decodes, step.work.tokens) == (len(decodes), num_tokens)
        draft_tokens = sum(len(piece.drafts) for piece in decodes)
        assert step.work.draft_tokens == draft_tokens
        ends = [end for piece in decodes for end in range(piece.start + 1, piece.end + 1)]
        assert step.work.decode_context == sum(ends)

    def recount(self) -> None:
        """Check the ledger against a count of all requests' blocks. No step may be in flight."""
        requests = self.scheduler.requests.values()
        reserved = {row for request in requests for row in request.reserved}
        held = {row for request in requests for row in request.rows} - reserved
        ledger = self.scheduler.ledger()
        assert ledger.balances
        assert (ledger.owned, ledger.reserved) == (len(held), len(reserved))
        assert 0 not in held

    def finish(self, limit: int = 20_000) -> None:
        while self.scheduler.has_work or self.in_flight or self.receiving or self.sending:
            self.iterate()
            assert self.idle < 3, "the requests make no progress"
            limit -= 1
            assert limit, "the requests do not end"


def request(name: str, prompt: list[int], max_tokens: int, **fields: object) -> Request:
    return Request(name, list(prompt), len(prompt), max_tokens, **fields)


FULL, WINDOW, STATE = Group("full"), Group("window", 2, 5), Group("state", 3)
GROUPS = st.sampled_from(
    [
        (FULL,),
        (FULL,),
        (Group("full", 2), WINDOW),
        (Group("window", 1, 7), Group("window", 1, 3)),
        (FULL, Group("window", 1, 6)),
        (FULL, STATE),
        (Group("full", 2), WINDOW, STATE),
    ]
)


@st.composite
def traffic(draw: st.DrawFn) -> tuple[Scheduler, list[tuple[int, Request]], int]:
    """Draw a scheduler, requests with their arrival iterations, and the driver's depth. The requests may receive or
    send KV, may be resumed, and may need prompt logprobs."""
    block_tokens = draw(st.sampled_from([1, 2, 4, 16]))
    limits = StepLimits(
        max_num_batched_tokens=draw(st.integers(1, 40)),
        max_num_seqs=draw(st.integers(1, 8)),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3, 8])),
        max_num_partial_prefills=draw(st.integers(1, 3)),
        tile_tokens=draw(st.sampled_from([1, 1, 4])),
    )
    budget = draw(st.sampled_from([None, SloBudget(10.0, 40, floor=1, first=3), SloBudget(0.5, 12, floor=2)]))
    seed = draw(st.integers(0, 2**32))
    rng = random.Random(seed)
    longest = 60
    groups = draw(GROUPS)
    smallest = Geometry(block_tokens, groups).rows_for(longest, longest)
    num_rows = 1 + draw(st.integers(smallest, 4 * smallest))
    stems = [[rng.randrange(3, 50) for _ in range(24)] for _ in range(2)]
    arrivals = []
    for index in range(draw(st.integers(1, 12))):
        prompt = rng.choice(stems)[: rng.randrange(25)] + [rng.randrange(3, 50) for _ in range(rng.randrange(1, 16))]
        way = rng.random()
        arrival = request(
            f"r{index}",
            prompt,
            rng.randrange(2, 20),
            salt=rng.choice([b"", b"tenant"]),
            priority=rng.choice([0, 0, 0, 1]),
            receive_kv=way < 0.25,
            send_kv=way > 0.85,
            needs_prompt_logprobs=rng.random() < 0.1,
        )
        if not arrival.receive_kv and rng.random() < 0.2:
            arrival.tokens += expected(prompt, rng.randrange(1, arrival.max_tokens), arrival.salt)
        arrivals.append((rng.randrange(20), arrival))
    speculation = Speculation(Guesses(seed), draw(st.integers(1, 6))) if draw(st.booleans()) else None
    scheduler = Scheduler(
        limits, num_rows, block_tokens, budget=budget, groups=groups, state_interval=16, speculation=speculation
    )
    return scheduler, arrivals, draw(st.sampled_from([1, 1, 2]))

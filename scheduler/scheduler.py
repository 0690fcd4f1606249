"""The scheduler: decides which tokens of which requests the next step computes, and in which blocks.

Each request has a cursor, which counts its tokens with KV. A step advances the cursors of requests within one token
budget. Prefill, chunking, decode, resumption after preemption and prefix hits are all handled in this way: they differ
only in the number of tokens between the cursor and the end of the sequence.
"""

import heapq
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from scheduler.blocks import BlockPool, Ledger
from scheduler.budget import Budget
from scheduler.cost import CostModel
from scheduler.draft import EXPLORE_STEPS, DraftCandidate, DraftLimits, choose_counts
from scheduler.drafters import Speculation
from scheduler.geometry import UNIFORM, Geometry, Group
from scheduler.policy import STALL_FREE, Policy
from scheduler.prefix import extend_hashes
from scheduler.request import Request, RequestState, Slice, StateUse, Step, cdiv


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits on a step, named as in vLLM."""

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    long_prefill_token_threshold: int = 0  # maximum number of tokens of a chunk; 0: limited only by the budget
    max_num_partial_prefills: int = 1  # number of prompts that a step may leave unfinished
    tile_tokens: int = 1  # a chunk ends at a multiple of this number, unless the chunk would then be empty


MAX_ENDED = 64  # the waiting queue may contain this many ended requests, plus one for each request that still waits
AUDIT_STEPS = 64  # steps between two checks of the ledger against all requests; a cheaper check follows every step


class StepOutput(NamedTuple):
    """The result of one slice of a step.

    `tokens` are the sampled tokens: at most one, unless guesses were right. `finish` is set when the request has ended.
    `fault` is the exception that ended the request, if any.
    """

    request: Request
    slice_index: int
    tokens: list[int]
    finish: str | None
    fault: Exception | None = None


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the node started. Cache queries and hits are counted in tokens."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    preemptions: int = 0
    num_drafts: int = 0  # slices that verified guesses
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)  # entry i: number of slices whose guess i was right


BY_PRIORITY = attrgetter("priority", "arrival")
# A request is admitted only if blocks remain free for part of its answer and of the answers of running requests. The
# part is this share of the tokens that may still come, or of GROWTH_CAP_TOKENS if that is less. Many answers are short.
# If no blocks are left, requests are preempted. SGLang does the same, and calls the share the new-token ratio.
GROWTH_SHARE = 0.3
GROWTH_CAP_TOKENS = 4096


class Scheduler:
    """Decides each step, and owns the requests on the node, their blocks and the block ledger.

    The driver (the engine's thread, or a simulator) calls all methods from one thread; nothing here blocks, reads a
    clock or does I/O. `schedule` returns a step, and `update` must process the steps in the same order. `schedule` may
    be called again before `update`, so a driver may decide step N+1 while the device runs step N.

    Guarantees: No step exceeds its budget or limits, except for a prompt or image that may not be split. Each slice has
    blocks for its tokens. Waiting requests are admitted in order of priority, then arrival. If a request fails in
    `update`, only this request ends, with finish "error". Rows are not reused while a step in flight or a peer may
    write to them. After an error in the block ledger, the scheduler continues, and the driver reports `ledger_error`.

    `Request.tables` has one table for each attention group of the geometry. Row r of block b is at index b * rows + r.
    If no later query sees a block, its rows are released and their entries become 0, the dummy row.

    If the model has recurrent states, a slice reads the state from one set of rows and writes the new state to another
    set, so that the slice can be run again. A slice with guesses also saves the state before the guesses to a third
    set. If a guess was wrong, the third set becomes the current state, and the next slice again computes the guesses
    that were right. Saved states ("snapshots") have names, as blocks do. A request with a cached prefix starts from a
    snapshot.
    """

    def __init__(
        self,
        limits: StepLimits,
        num_rows: int,
        block_tokens: int,
        policy: Policy = STALL_FREE,
        budget: Budget | None = None,
        groups: tuple[Group, ...] = UNIFORM,
        state_interval: int = 4096,
        speculation: Speculation | None = None,
    ) -> None:
        """Create a scheduler for a pool of `num_rows` rows.

        If `budget` is None, every step may have up to `limits.max_num_batched_tokens` tokens. While a prompt is
        computed, states are saved at multiples of `state_interval` tokens (if it is not 0): see `_save_at`.
        """
        self.limits = limits
        self.policy = policy
        self.speculation = speculation
        self.budget = budget or Budget(limits.max_num_batched_tokens)
        self.cost: CostModel | None = None  # step-time model, set by the driver between two steps
        self.geometry = Geometry(block_tokens, groups)
        self.block_tokens = block_tokens
        self.pool = BlockPool(num_rows)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # sorted by priority, then arrival
        self.num_receiving = 0
        self.counters = SchedulerCounters()
        self.ledger_error = ""  # the first error found in the block ledger; never cleared
        self._waiting: list[tuple[int, int, Request]] = []  # a heap; requests that are no longer WAITING are skipped
        self.num_waiting = 0
        self._arrivals = 0
        self._steps = 0
        self._parked: deque[tuple[int, list[int]]] = deque()  # (step, freed rows that this step still uses)
        # Rows to which a slice in flight saves its state, by the slice's id.
        self._saves: dict[int, tuple[int, ...]] = {}
        self._growth_counted = (-1, 0)  # the step in which growth was last counted, and the count
        self._state_interval = state_interval
        self._undrafted = 0  # successive steps without a verified guess
        # If more requests ran than fit into a step, the last of them would never be computed.
        self._max_running = min(limits.max_num_seqs, self.budget.ceiling)

    # ---- commands -------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it can never fit into the KV cache, or if its id is in use."""
        if request.id in self.requests:
            raise ValueError(f"request {request.id} already exists on this node")
        if not request.borrows_blocks:
            self._check_fits(request)
        request.arrival = self._arrivals
        self._arrivals += 1
        self._clear(request)
        extend_hashes(request.hashes, request.tokens, self.block_tokens, request.salt, request.media)
        self.requests[request.id] = request
        self._wait(request)

    def cached_tokens(self, request: Request) -> int:
        """Return how many of a request's tokens are in the prefix cache now. The request need not have been added."""
        extend_hashes(request.hashes, request.tokens, self.block_tokens, request.salt, request.media)
        return self._cached_prefix(request)[0] * self.block_tokens

    def kv_received(self, request: Request, token: int, current_state: int = 0) -> None:
        """Continue a request after a peer has written the KV of its prompt and sampled `token`.

        `current_state` is the index of the reserved recurrent state that the peer wrote last. Do nothing if the request
        was aborted in the meantime.
        """
        if request.state is not RequestState.RECEIVING_KV:
            return
        if current_state:
            request.states.reverse()
        self.pool.settle(request.reserved)
        request.reserved = []
        self._advance(request, len(request.tokens))
        request.tokens.append(token)
        self.num_receiving -= 1
        request.receive_kv = False  # if it is preempted later, it computes its prompt here
        request.move_to(RequestState.RUNNING)
        insort(self.running, request, key=BY_PRIORITY)

    def release(self, request: Request) -> None:
        """End a request whose KV a peer has received. Its blocks remain in the prefix cache."""
        assert request.state is RequestState.SENDING_KV
        self._end(request)

    def abort(self, request: Request, writer_stopped: bool = True) -> list[int]:
        """End a request in any state. Do nothing if the request is unknown or has ended.

        If a peer may still write to the request's blocks (`writer_stopped` is false), quarantine and return these
        blocks. The caller must pass them to `pool.clear` when the peer has stopped.
        """
        if self.requests.get(request.id) is not request:
            return []
        if request.state is not RequestState.RECEIVING_KV:
            self._end(request)
            return []
        reserved = request.reserved
        self.pool.give_up(reserved, writer_stopped)
        given_up = set(reserved)
        request.tables = [[0 if row in given_up else row for row in table] for table in request.tables]
        request.states = [[row for row in rows if row not in given_up] for rows in request.states]
        request.reserved = []
        self.num_receiving -= 1
        self._end(request)
        return [] if writer_stopped else reserved

    # ---- views ----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    def ledger(self) -> Ledger:
        return self.pool.ledger()

    def audit(self) -> str:
        """Compare the ledger with the blocks of all requests. Return the first error found so far, or ""."""
        self.ledger_error = self.ledger_error or self.pool.audit(self._held())
        return self.ledger_error

    def _held(self) -> list[list[int]]:
        """Return the rows of each request, the freed rows that a step in flight still uses, and the rows to which a
        step in flight saves states."""
        rows = [request.rows for request in self.requests.values() if not request.borrows_blocks]
        return rows + [parked for _, parked in self._parked] + [list(saved) for saved in self._saves.values()]

    # ---- deciding -------------------------------------------------------------------------------------------

    def schedule(self, gathers: bool = False) -> Step:
        """Decide the next step. The step has no slices if no request can run now.

        Simulators set `gathers`: decodes may then be in `Step.decodes` instead of slices, which is faster. The caller
        must ensure that no step is in flight and that each of these decodes samples token 0.
        """
        step = Step(self._steps, [], [])
        self.budget.begin(self.cost, self.num_receiving > 0 or any(map(self._decodes, self.running)))
        others = self._gather_decodes(step) if gathers else None
        if not self.policy.prompts_first and others is None:
            self._schedule_decodes(step)
        self._schedule_prompts(step, self.running if others is None else others)
        if self.policy.prompts_first and (self.policy.mixed or not step.slices):
            self._schedule_decodes(step)
        if self.speculation is not None:
            self._add_drafts(step, self.speculation)
        step.budget, step.reason = self.budget.end(step.work)
        if self.cost is not None:
            step.predicted_s = self.cost.seconds(step.work) + step.drafting_s
        if step.slices or step.decodes:
            self._steps += 1
        return step

    def update(
        self, step: Step, tokens: Sequence[Sequence[int]], failed: Sequence[bool] | None = None
    ) -> list[StepOutput]:
        """Process the results of a step and return one output for each slice whose request has not ended.

        `tokens[i]` are the tokens that slice i sampled: the guesses before its first wrong guess, and one more token.
        If `failed[i]` is true, or if processing slice i raises an exception, the slice's request ends with finish
        "error". Steps must be passed in the order in which `schedule` returned them.
        """
        outputs = self._finish_gathered(step.decodes) if step.decodes else []
        for index, slice_ in enumerate(step.slices):
            request, fault = slice_.request, None
            request.num_in_flight -= 1
            request.num_sampling -= slice_.samples
            is_good = failed is None or not failed[index]
            has_ended = request.state is RequestState.DONE  # the driver may then have omitted the slice
            if id(slice_) in self._saves:
                self._finish_save(slice_, is_good and not has_ended and slice_.epoch == request.epoch)
            if has_ended:
                continue
            if is_good:
                try:
                    outputs.append(self._finish_slice(step, index, tokens[index] if slice_.samples else ()))
                    continue
                except Exception as error:  # noqa: BLE001 - the driver logs it
                    fault = error
            request.finish = "error"
            self._end(request)
            outputs.append(StepOutput(request, index, [], "error", fault))
        while self._parked and self._parked[0][0] <= step.number:
            self.pool.release(self._parked.popleft()[1])
        self.counters.steps += 1
        self._check_ledger()
        return outputs

    def _finish_slice(self, step: Step, index: int, tokens: Sequence[int]) -> StepOutput:
        slice_ = step.slices[index]
        request, is_current = slice_.request, slice_.epoch == slice_.request.epoch
        end = slice_.end - len(slice_.drafts)
        if slice_.drafts:
            self._count_drafts(step, slice_, len(tokens) - 1)
            if is_current:
                request.num_scheduled = end
                if slice_.state is not None and len(tokens) <= len(slice_.drafts):
                    request.states[0], request.states[2] = request.states[2], request.states[0]
                    request.state_lag = len(tokens) - 1
        if tokens:
            request.drafts.compare(tokens)
        if is_current:
            self._advance(request, end)
        for number, token in enumerate(tokens, 1):
            if self._append(request, token) is not None:
                return StepOutput(request, index, list(tokens[:number]), request.finish)
            if is_current and number < len(tokens):
                self._advance(request, end + number)
        return StepOutput(request, index, list(tokens), None)

    def _count_drafts(self, step: Step, slice_: Slice, num_accepted: int) -> None:
        counters = self.counters
        counters.num_drafts += 1
        counters.draft_tokens += len(slice_.drafts)
        counters.accepted_tokens += num_accepted
        step.num_accepted += num_accepted
        per_pos = counters.accepted_per_pos
        per_pos += [0] * (num_accepted - len(per_pos))
        for place in range(num_accepted):
            per_pos[place] += 1

    def _check_ledger(self) -> None:
        """Record the first error in the ledger. The node keeps serving; the driver reports the error."""
        is_due = self.counters.steps % AUDIT_STEPS == 0
        self.ledger_error = self.ledger_error or self.pool.ledger_error(sum(map(len, self._held())) if is_due else None)

    # ---- decodes --------------------------------------------------------------------------------------------

    def _schedule_decodes(self, step: Step) -> None:
        left = self.budget.ceiling - step.work.tokens
        for request in tuple(self.running):
            if left <= request.state_lag:
                break
            # In an earlier iteration of the loop, another request may have preempted this request.
            if not self._decodes(request) or request.state is not RequestState.RUNNING:
                continue
            if self._make_room(request, 1, step) == 1:
                left -= 1 + request.state_lag
                self._take_slice(step, request, 1)

    @staticmethod
    def _decodes(request: Request) -> bool:
        """Return whether the request's next slice is a decode.

        The slice is a decode if only the request's last token is not scheduled yet, and the request continues after the
        steps in flight.
        """
        if request.num_tokens - request.num_scheduled != 1:
            return False
        return request.num_sampling == 0 or not (request.send_kv or request.remaining_tokens == 0)

    # ---- drafts ---------------------------------------------------------------------------------------------

    def _add_drafts(self, step: Step, speculation: Speculation) -> None:
        """Add guessed tokens to decodes of the step, as far as the budget and the free blocks allow.

        A request gets no guesses while a step in flight has yet to sample its last token. While a step verifies a
        request's guesses, no other step contains this request.
        """
        slices, candidates = list[Slice](), list[DraftCandidate]()
        for slice_ in step.slices:
            request = slice_.request
            if not slice_.is_decode or slice_.end > len(request.tokens) or request.send_kv or not request.speculates:
                continue
            limit = min(speculation.num_tokens, request.remaining_tokens)
            if not limit or not self._can_return(slice_):  # if `limit` is 0, the request ends with this step
                continue
            slices.append(slice_)
            found = speculation.drafter.find(request, limit)
            candidates.append(DraftCandidate(request.drafts.acceptance, found, slice_.end))
        explores, limits = self._undrafted >= EXPLORE_STEPS, DraftLimits(self.budget.ceiling, self.budget.longest_s())
        counts = choose_counts(candidates, step.work, self.cost, limits, speculation.drafter.pass_s, explores)
        counts = [self._allot_drafts(slice_, count) for slice_, count in zip(slices, counts, strict=True)]
        self._undrafted = 0 if any(counts) else self._undrafted + any(one.limit for one in candidates)
        requests = [slice_.request for slice_ in slices]
        guesses, step.drafting_s = speculation.drafter.draft(requests, counts) if requests else ([], 0.0)
        for slice_, guess in zip(slices, guesses, strict=True):
            slice_.drafts = tuple(guess)
            if guess and slice_.state is not None:
                before = slice_.end
                slice_.state = replace(slice_.state, save_at=before, save=tuple(slice_.request.states[2]))
            slice_.count += len(guess)
            slice_.request.num_scheduled += len(guess)
            for context in range(slice_.end - len(guess) + 1, slice_.end + 1):
                step.work.add_draft(context)

    def _can_return(self, slice_: Slice) -> bool:
        """Return whether the request can return to its state before the guesses, in case a guess is wrong. Take rows to
        save that state if necessary."""
        request, rows = slice_.request, self.geometry.state_rows
        if slice_.state is None or len(request.states) > 2:
            return id(slice_) not in self._saves
        if slice_.state.save or self.pool.available < rows + self._growth_of_running():
            return False
        request.states.append(self.pool.take(rows))
        return True

    def _allot_drafts(self, slice_: Slice, count: int) -> int:
        """Allocate blocks for up to `count` guessed tokens, but leave the blocks that running requests will need soon.
        Return the number of guessed tokens that have blocks."""
        request, missing = slice_.request, self._missing(slice_.request, count)
        if missing and missing + self._growth_of_running() > self.pool.available:
            count = self._num_blocks(request) * self.block_tokens - slice_.end
        self._allot(request, count)
        return count

    # ---- many decodes at once, for simulators -----------------------------------------------------------------

    def _gather_decodes(self, step: Step) -> list[Request] | None:
        """Add all decodes to `step.decodes`, and return the other running requests.

        Return None and change nothing if scheduling with slices might give another result. This is the case:

        - with speculation, several groups of layers, or a policy that is not `mixed` or schedules prompts first
        - if a running request is in a step in flight, sends its KV, or has only its last prompt token left to compute
        - if there are too few free blocks
        """
        if self.speculation or not self.policy.mixed or self.policy.prompts_first or not self.geometry.is_uniform:
            return None
        size, context, missing = self.block_tokens, 0, 0
        decodes, others, growing = list[Request](), list[Request](), list[Request]()
        for request in self.running:
            start, behind = request.num_scheduled, len(request.tokens) - request.num_scheduled
            if request.num_in_flight or request.send_kv or (behind == 1 and not request.num_generated):
                return None
            if behind == 1:
                decodes.append(request)
                context += start + 1
                if start == len(request.tables[0]) * size:
                    growing.append(request)
            else:
                others.append(request)
                missing += self._missing(request, behind)
        if len(growing) + missing > self.pool.available:
            return None
        for request in growing:
            self._take_blocks(request, 1)
        for request in decodes:
            request.num_scheduled += 1
            request.num_sampling = 1
        step.decodes, step.work.num_decodes, step.work.decode_context = decodes, len(decodes), context
        return others

    def _finish_gathered(self, decodes: Sequence[Request], count: int = 1, token: int = 0) -> list[StepOutput]:
        """Append the token of the last of `count` steps to all `decodes`. Return the outputs of requests that end."""
        size, ended = self.block_tokens, list[StepOutput]()
        self.counters.generated_tokens += count * len(decodes)
        for request in decodes:
            end, request.num_sampling = request.num_scheduled, 0
            if end % size:
                request.num_computed = end
            else:
                self._advance(request, end)
            request.tokens.append(token)
            if len(request.tokens) - request.num_prompt >= request.max_tokens:
                request.finish = "length"
                self._end(request)
                ended.append(StepOutput(request, -1, [token], "length"))
        return ended

    def num_decode_only(self, most: int) -> int:
        """Return how many of the next steps, at most `most`, do nothing but decode each running request once.

        This assumes that no command arrives. The result is 0 with speculation or several groups of layers, or if a
        running request has not generated a token yet.
        """
        if not self.running or self.speculation or not self.geometry.is_uniform or not self._is_closed():
            return 0
        for request in self.running:
            if request.send_kv or request.num_in_flight or not request.num_generated or not self._decodes(request):
                return 0
            most = min(most, request.max_tokens + request.num_prompt - len(request.tokens))
        enough = len(self.running) * (1 + most // self.block_tokens) * self.geometry.block_rows
        if enough <= self.pool.available:
            return most
        while most and sum(self._missing(request, most) for request in self.running) > self.pool.available:
            most //= 2
        return most

    def _is_closed(self) -> bool:
        """Return whether no waiting request can be admitted while the running requests only decode."""
        waiting = self._next_waiting()
        if waiting is None or self.policy.together or len(self.running) + self.num_receiving >= self._max_running:
            return True
        return not (self.policy.mixed or self.policy.prompts_first or waiting.receive_kv)

    def skip_decodes(self, count: int, token: int = 0) -> list[StepOutput]:
        """Apply the effect of `count` steps, in each of which every running request decodes once and samples `token`.

        Return the outputs of the requests that the last step ends. `count` must be at most the result of
        `num_decode_only`, and `token` must not be a stop token of a running request.
        """
        running, size = tuple(self.running), self.block_tokens
        events: list[tuple[int, bool, int, int]] = []  # (step, whether a block becomes full, index, position)
        for index, request in enumerate(running):
            start = request.num_scheduled
            request.tokens += [token] * (count - 1)
            request.num_scheduled += count
            room = len(request.tables[0]) * size - start
            if room < count:
                events += [(step, False, index, 0) for step in range(room + 1, count + 1, size)]
            if size - start % size < count:
                events += [(step, True, index, start + step) for step in range(size - start % size, count, size)]
        for _, is_full, index, position in sorted(events):  # take and hash blocks in the order of these steps
            if is_full:
                self._advance(running[index], position)
            else:
                self._take_blocks(running[index], 1)
        self._steps += count
        self.counters.steps += count
        ended = self._finish_gathered(running, count, token)
        self._check_ledger()
        return ended

    # ---- prompts --------------------------------------------------------------------------------------------

    def _schedule_prompts(self, step: Step, running: Sequence[Request]) -> None:
        may_compute = self.policy.mixed or not step.slices
        partial = 0
        for request in tuple(running) if may_compute else ():
            behind = request.num_tokens - request.num_scheduled
            if behind <= 1 or request.state is not RequestState.RUNNING:
                continue
            count = self._make_room(request, self._chunk(request, request.num_scheduled, step), step)
            count = _between_images(request, request.num_scheduled, count)
            if count:
                self._take_slice(step, request, count)
            partial += count < behind
        if not self.policy.together or not (self.running or self.num_receiving):
            self._admit(step, partial, may_compute)

    def _admit(self, step: Step, partial: int, may_compute: bool) -> None:
        """Admit waiting requests in order, and stop at the first that has to wait.

        `partial` is the number of prompts that the step leaves unfinished so far. If `may_compute` is false, only
        requests that receive their KV are admitted, because they compute nothing.
        """
        growth = None
        while (request := self._next_waiting()) is not None:
            if len(self.running) + self.num_receiving >= self._max_running or request.num_in_flight:
                break
            num_held, held = self._cached_prefix(request)
            start = request.num_computed if request.borrows_blocks else num_held * self.block_tokens
            count = self._chunk(request, start, step) if may_compute and not request.receive_kv else 0
            is_partial = count < request.num_tokens - start
            if not (request.receive_kv or self._may_start(count, is_partial, partial)):
                break
            growth = sum(map(self._growth, self.running)) if growth is None else growth
            shared = [row for rows in held for row in rows if row]
            needed = self._rows_needed(request, num_held) + self.pool.count_unowned(shared)
            own_growth = self._answer_rows(request)
            alone = not self.running and not self.num_receiving
            if not request.borrows_blocks and needed + (0 if alone else growth + own_growth) > self.pool.available:
                break
            heapq.heappop(self._waiting)
            self.num_waiting -= 1
            available = self.pool.available
            self._hold(request, num_held, held)
            if request.receive_kv:
                self._reserve(request, step)
            else:
                request.move_to(RequestState.RUNNING)
                insort(self.running, request, key=BY_PRIORITY)
                self._allot(request, count)
                partial += is_partial
            growth += own_growth + needed - (available - self.pool.available)
            if count:  # comes last, because `growth` must not include rows that `_take_slice` takes for a snapshot
                self._take_slice(step, request, count)

    def _may_start(self, count: int, is_partial: bool, num_partial: int) -> bool:
        """Return whether to admit a prompt of which the step can compute `count` tokens."""
        if self.policy.together:
            return True  # admit all requests of a batch together, even those that only a later step computes
        may_stay_partial = self.policy.fills or num_partial < self.limits.max_num_partial_prefills
        return count > 0 and (may_stay_partial or not is_partial)

    def _next_waiting(self) -> Request | None:
        while self._waiting and self._waiting[0][2].state is not RequestState.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][2] if self._waiting else None

    def _chunk(self, request: Request, start: int, step: Step) -> int:
        """Return how many tokens of a prompt this step may compute, beginning at `start`."""
        count = self._chunk_in_budget(request, start, step)
        # Like a prompt that may not be chunked, the first image of a step may exceed the budget.
        return _between_images(request, start, count, may_extend=step.work.num_prefills == 0)

    def _chunk_in_budget(self, request: Request, start: int, step: Step) -> int:
        behind, num_prompts = request.num_tokens - start, step.work.num_prefills
        if self.policy.max_prompts is not None and num_prompts >= self.policy.max_prompts:
            return 0
        room = self.budget.room(step.work, start)
        if not self.policy.chunked:
            return behind if behind <= room or num_prompts == 0 else 0
        count = min(behind, room)
        if self.policy.fills:
            return count
        if self.limits.long_prefill_token_threshold:
            count = min(count, self.limits.long_prefill_token_threshold)
        if count < behind:
            aligned = count - (start + count) % self.limits.tile_tokens
            count = aligned if aligned > 0 else count
        return count

    def _cached_prefix(self, request: Request) -> tuple[int, list[list[int]]]:
        """Return the number of cached blocks from which the request can start, and the rows of this cached prefix.

        The rows are one list for each attention group's table, then a list for the snapshot (empty without states).
        The last token is always computed, to get its logits. A request that receives KV uses only blocks of "full"
        groups; the peer sends the rest of the prompt's KV.
        """
        geometry, states = self.geometry, len(self.geometry.attention)
        none: list[list[int]] = [[] for _ in range(states + 1)]
        if request.needs_prompt_logprobs or request.borrows_blocks:
            return 0, none
        receives = request.receive_kv and not request.shared_pool
        useful = len(request.tokens) if receives else len(request.tokens) - 1
        names = request.hashes[: useful // self.block_tokens]
        if geometry.is_uniform:
            found = self.pool.match(names)
            return len(found), [found, []]
        longest = len(names)
        full = [index for index, group in enumerate(geometry.attention) if group.kind == "full"]
        for index in full:
            rows = self.pool.match((index, name) for name in names[:longest])
            longest = len(rows) // geometry.attention[index].rows
        if receives:
            return (longest, self._prefix_rows(request, longest, only_full=True)) if full else (0, none)
        for blocks in range(longest, 0, -1):
            if geometry.state_rows and self.pool.find((states, names[blocks - 1])) is None:
                continue
            rows_found = self._prefix_rows(request, blocks)
            # When the request starts, it holds the rows of the prefix and rows for its other tokens. If the pool has
            # too few rows for both, try a shorter prefix. Otherwise, the request could never start.
            num_rows = self._rows_needed(request, blocks) + sum(bool(row) for rows in rows_found for row in rows)
            if rows_found and num_rows <= self.pool.total:
                request.junction = longest * self.block_tokens if blocks < longest else 0
                return blocks, rows_found
        request.junction = longest * self.block_tokens
        return 0, none

    def _prefix_rows(self, request: Request, blocks: int, only_full: bool = False) -> list[list[int]]:
        """Return the cached rows of the request's first `blocks` blocks. Blocks that no later query sees get row 0.
        Return [] if any other block is not cached."""
        found: list[list[int]] = []
        for index, group in enumerate(self.geometry.attention):
            hidden = self.geometry.first_block(group, blocks * self.block_tokens)
            if only_full and group.kind != "full":
                hidden = blocks
            rows = self.pool.match((index, name) for name in request.hashes[hidden:blocks])
            if len(rows) < (blocks - hidden) * group.rows:
                return []
            found.append([0] * (hidden * group.rows) + rows)
        has_state = self.geometry.state_rows and blocks and not only_full
        snapshot = self.pool.find((len(found), request.hashes[blocks - 1])) if has_state else None
        return [*found, list(snapshot or ())]

    def _hold(self, request: Request, num_held: int, held: list[list[int]]) -> None:
        if not request.borrows_blocks:
            for rows in held:
                self.pool.share(row for row in rows if row)
            request.tables = held[:-1]
            request.snapshot = held[-1]
            request.num_computed = num_held * self.block_tokens
            request.released = [
                self.geometry.first_block(group, request.num_computed) for group in self.geometry.attention
            ]
        request.num_scheduled = request.num_computed
        if request.epoch == 0:
            request.num_cached = request.num_computed
            self.counters.cache_queries += len(request.tokens)
            self.counters.cache_hits += request.num_computed

    def _reserve(self, request: Request, step: Step) -> None:
        """Reserve the rows that the peer will write, and allocate the further rows that the request needs."""
        geometry, held, num_prompt = self.geometry, request.num_computed // self.block_tokens, len(request.tokens)
        if request.shared_pool:  # the peer computes the prompt here, so the request needs all rows of a running request
            self._allot(request, num_prompt - request.num_computed)
            tables = zip(request.tables, geometry.attention, strict=True)
            order = [row for table, group in tables for row in table[held * group.rows :]]
            order += [row for rows in request.states for row in rows]
            self.pool.lend(order)
            request.reserved = order
        else:
            places = geometry.landing_order(num_prompt, held)
            request.reserved = self.pool.reserve(len(places))
            blocks = cdiv(num_prompt, self.block_tokens)
            for table, group in zip(request.tables, geometry.attention, strict=True):
                table.extend([0] * (blocks * group.rows - len(table)))
            states = [0] * geometry.state_rows
            for place, row in zip(places, request.reserved, strict=True):
                if place.group < len(geometry.attention):
                    group = geometry.attention[place.group]
                    request.tables[place.group][place.block * group.rows + place.row] = row
                else:
                    states[place.row] = row
            if states:
                request.states = [states, self.pool.take(geometry.state_rows)]
        self.num_receiving += 1
        request.move_to(RequestState.RECEIVING_KV)
        step.receiving.append(request)

    # ---- blocks ---------------------------------------------------------------------------------------------

    def _make_room(self, request: Request, count: int, step: Step) -> int:
        """Allocate blocks for up to `count` more tokens. If blocks are missing, preempt later requests.

        Return for how many tokens there are blocks now. If the result is 0, the request waits or was itself preempted.
        """
        if request.num_scheduled + count <= self._num_blocks(request) * self.block_tokens:  # true for most decodes
            return count
        while self._missing(request, count) > self.pool.available:
            if self._give_up_third_state():
                continue
            victim = self._victim(request, step)
            if victim is None:
                break
            self._preempt(victim, step)
            if victim is request or victim.num_in_flight:  # the victim's rows become free when its step ends
                return 0
        if self.policy.chunked:
            new = self.pool.available // self.geometry.block_rows if self.geometry.block_rows else count
            room = (self._num_blocks(request) + new) * self.block_tokens - request.num_scheduled
            count = min(count, room)
        elif self._missing(request, count) > self.pool.available:
            return 0
        self._allot(request, count)
        return count

    def _give_up_third_state(self) -> bool:
        """Release the third state of a running request that is in no step in flight. Return False if there is none."""
        spare = (one for one in self.running if len(one.states) > 2 and not one.num_in_flight)
        if self.speculation is None or (request := next(spare, None)) is None:
            return False
        self.pool.release(request.states.pop())
        return True

    def _num_blocks(self, request: Request) -> int:
        """Return how many blocks the request's tables cover."""
        return len(request.tables[0]) // self.geometry.attention[0].rows

    def _missing_blocks(self, request: Request, count: int) -> int:
        return max(0, cdiv(request.num_scheduled + count, self.block_tokens) - self._num_blocks(request))

    def _missing(self, request: Request, count: int) -> int:
        """Return how many rows to allocate before `count` more tokens can be computed."""
        return self._missing_blocks(request, count) * self.geometry.block_rows

    def _rows_needed(self, request: Request, num_held: int) -> int:
        """Return how many rows a waiting request needs for its tokens in addition to its `num_held` cached blocks."""
        if request.receive_kv:
            if request.shared_pool:
                return self.geometry.lent_rows(len(request.tokens), num_held)[1]
            return len(self.geometry.landing_order(len(request.tokens), num_held)) + self.geometry.state_rows
        blocks = cdiv(request.num_tokens, self.block_tokens) - num_held
        return self.geometry.rows_of(blocks, self._largest_chunk(request)) + 2 * self.geometry.state_rows

    def _largest_chunk(self, request: Request) -> int:
        return self.budget.ceiling if self.policy.chunked else max(1, request.num_tokens)

    def _growth(self, request: Request) -> int:
        """Return how many more rows a running request needs for the rest of its prompt and for part of its answer."""
        rest = max(0, cdiv(request.num_tokens, self.block_tokens) - self._num_blocks(request))
        if self.geometry.is_uniform:
            return rest + self._answer_rows(request)
        return self.geometry.rows_of(rest, self._largest_chunk(request)) + self._answer_rows(request)

    def _answer_rows(self, request: Request) -> int:
        """Return how many rows to keep free for the tokens that a request may still generate on this node."""
        tokens = 0 if request.send_kv else GROWTH_SHARE * min(request.remaining_tokens, GROWTH_CAP_TOKENS)
        blocks = cdiv(int(tokens), self.block_tokens)
        return blocks if self.geometry.is_uniform else self.geometry.rows_of(blocks, 1)

    def _victim(self, request: Request, step: Step) -> Request | None:
        """Return the request to preempt so that `request` gets blocks, or None if `request` has to wait.

        The victim is the last request after `request` in `running` that is not in this step and sends no KV, since a
        transfer would read its blocks. If all requests after `request` are in this step, `request` waits for them.
        Otherwise, `request` is the victim, unless it sends its KV or is the only running request.
        """
        taken = {id(slice_.request) for slice_ in step.slices}
        later = self.running[self.running.index(request) + 1 :]
        free = [candidate for candidate in later if id(candidate) not in taken]
        if preemptible := [candidate for candidate in free if not candidate.send_kv]:
            return preemptible[-1]
        may_wait = request.send_kv or len(self.running) == 1 or (later and not free)
        return None if may_wait else request

    def _allot(self, request: Request, count: int) -> None:
        if self.geometry.state_rows and not request.states:
            rows = self.pool.take(2 * self.geometry.state_rows)
            request.states = [rows[: self.geometry.state_rows], rows[self.geometry.state_rows :]]
        self._take_blocks(request, self._missing_blocks(request, count))

    def _take_blocks(self, request: Request, blocks: int) -> None:
        for table, group in zip(request.tables, self.geometry.attention, strict=True):
            table.extend(self.pool.take(blocks * group.rows))

    def _preempt(self, request: Request, step: Step) -> None:
        self.running.remove(request)
        self._free(request)
        request.num_computed = request.num_scheduled = 0
        request.epoch += 1
        request.move_to(RequestState.WAITING)
        self._wait(request)
        self.counters.preemptions += 1
        step.num_preempted += 1

    def _wait(self, request: Request) -> None:
        if len(self._waiting) > MAX_ENDED + 2 * self.num_waiting:
            self._waiting = [entry for entry in self._waiting if entry[2].state is RequestState.WAITING]
            heapq.heapify(self._waiting)
        heapq.heappush(self._waiting, (request.priority, request.arrival, request))
        self.num_waiting += 1

    def _free(self, request: Request) -> None:
        if request.borrows_blocks:
            return
        if request.num_in_flight:
            self._parked.append((self._steps - 1, request.rows))
        else:
            self.pool.release(request.rows)
        self._clear(request)

    def _clear(self, request: Request) -> None:
        if not request.borrows_blocks:
            request.tables = [[] for _ in self.geometry.attention]
            request.released = [0] * len(request.tables)
            request.states, request.snapshot = [], []
            request.state_lag = 0

    # ---- cursors --------------------------------------------------------------------------------------------

    def _take_slice(self, step: Step, request: Request, count: int) -> None:
        lag, request.state_lag = request.state_lag, 0
        start, count = request.num_scheduled - lag, count + lag
        samples = start + count == request.num_tokens
        slice_ = Slice(request, start, count, samples, request.epoch, num_stored=lag)
        if self.geometry.state_rows:
            slice_.state = self._state_use(request, slice_)
        step.slices.append(slice_)
        request.num_scheduled += count - lag
        request.num_in_flight += 1
        request.num_sampling += samples
        if slice_.is_decode:
            step.work.add_decode(slice_.end, lag)
        else:
            step.work.add_chunk(start, count)
            self.counters.prompt_tokens += count

    def _state_use(self, request: Request, slice_: Slice) -> StateUse:
        """Swap the request's two states, and decide whether the slice also saves its state."""
        read: tuple[int, ...] | None = None
        if slice_.start:
            is_first = request.snapshot and not request.num_in_flight
            read = tuple(request.snapshot if is_first else request.states[0])
        request.states[:2] = reversed(request.states[:2])
        save_at = self._save_at(request, slice_)
        save: tuple[int, ...] = ()
        may_save = save_at > 0 and not request.borrows_blocks
        if may_save and self.pool.available >= self.geometry.state_rows + self._growth_of_running():
            save = self._saves[id(slice_)] = tuple(self.pool.take(self.geometry.state_rows))
        return StateUse(read, tuple(request.states[0]), save_at if save else 0, save)

    def _growth_of_running(self) -> int:
        """Return how many more rows all running requests need (see `_growth`). The number is computed once per step.

        A state is saved only if the rows for running requests remain available. If a saved state took a row that a
        request needs to decode, that request would preempt another request, which would be admitted and preempted
        repeatedly.
        """
        if self._growth_counted[0] != self._steps:
            self._growth_counted = self._steps, sum(map(self._growth, self.running))
        return self._growth_counted[1]

    def _save_at(self, request: Request, slice_: Slice) -> int:
        """Return the position in the slice at which to save the state, or 0 to save no state.

        While a prompt is computed, states are saved at multiples of the interval and at `Geometry.fork_point`. If no
        state was found at the end of the cached KV, a state is saved there too. Each decode that completes a block
        saves a state.
        """
        if slice_.is_decode:
            return 0 if slice_.end % self.block_tokens else slice_.end
        last = self.geometry.fork_point(request.num_tokens)
        interval = cdiv(self._state_interval, self.block_tokens) * self.block_tokens
        regular = slice_.end // interval * interval if interval else 0
        return next((at for at in (request.junction, last, regular) if slice_.start < at <= slice_.end), 0)

    def _finish_save(self, slice_: Slice, is_good: bool) -> None:
        """Release the rows of the state that the slice saved. If `is_good`, name the state, so that it can be found."""
        request, use = slice_.request, slice_.state
        rows = self._saves.pop(id(slice_))
        if is_good and use is not None:
            extend_hashes(request.hashes, request.tokens, self.block_tokens, request.salt, request.media)
            name = (len(self.geometry.attention), request.hashes[use.save_at // self.block_tokens - 1])
            self.pool.remember(rows, name)
            if slice_.is_decode:
                if request.latest_save is not None:
                    self.pool.forget(request.latest_save)
                request.latest_save = name
        self.pool.release(rows)

    def _advance(self, request: Request, end: int) -> None:
        """Record that positions [0, end) have KV, name blocks that are now complete, and release blocks that no later
        query sees."""
        first = request.num_computed // self.block_tokens
        request.num_computed = end
        request.num_scheduled = max(request.num_scheduled, end)
        snapshot, request.snapshot = request.snapshot, []
        if request.borrows_blocks:
            return
        self.pool.release(snapshot)
        full = end // self.block_tokens
        if full > first:
            extend_hashes(request.hashes, request.tokens, self.block_tokens, request.salt, request.media)
            self._name_blocks(request, first, full)
        if not self.geometry.is_uniform:
            keep = self.geometry.fork_point(len(request.tokens)) if request.send_kv else end  # blocks to send are kept
            self._release_unseen(request, min(end - request.state_lag, keep))

    def _name_blocks(self, request: Request, first: int, end: int) -> None:
        for index, (table, group) in enumerate(zip(request.tables, self.geometry.attention, strict=True)):
            for block in range(first, end):
                rows = table[block * group.rows : (block + 1) * group.rows]
                if rows[0]:
                    name = request.hashes[block]
                    self.pool.remember(rows, name if self.geometry.is_uniform else (index, name))

    def _release_unseen(self, request: Request, position: int) -> None:
        """Release the blocks that no query at `position` or later sees."""
        for index, (table, group) in enumerate(zip(request.tables, self.geometry.attention, strict=True)):
            first, seen = request.released[index], self.geometry.first_block(group, position)
            if seen > first:
                unseen = slice(first * group.rows, seen * group.rows)
                self.pool.release([row for row in table[unseen] if row])
                table[unseen] = [0] * (unseen.stop - unseen.start)
                request.released[index] = seen

    def _append(self, request: Request, token: int) -> str | None:
        request.tokens.append(token)
        self.counters.generated_tokens += 1
        request.finish = request.finish_reason()
        if request.finish is not None:
            self._end(request)
        elif request.send_kv:
            assert request.state is RequestState.RUNNING, "a request that sends its KV must not be preempted"
            self.running.remove(request)
            request.move_to(RequestState.SENDING_KV)
        return request.finish

    def _end(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        elif request.state is RequestState.WAITING:
            self.num_waiting -= 1
        self._free(request)
        request.move_to(RequestState.DONE)
        del self.requests[request.id]

    def _check_fits(self, request: Request) -> None:
        tokens = len(request.tokens) if request.send_kv else len(request.tokens) + request.remaining_tokens
        needed = self.geometry.rows_for(tokens, min(tokens, self._largest_chunk(request)))
        if request.receive_kv and request.shared_pool:
            needed = max(needed, self.geometry.lent_rows(len(request.tokens), 0)[1])
        if needed > self.pool.total:
            what = f"blocks of {self.block_tokens} tokens" if self.geometry.is_uniform else "rows"
            raise ValueError(
                f"{tokens} tokens need {needed} {what}, "
                f"and the KV cache has {self.pool.total}: shorten the request or increase --kv-cache-memory"
            )


def _between_images(request: Request, start: int, count: int, *, may_extend: bool = False) -> int:
    """Return `count`, changed so that the chunk does not end inside an image whose tokens attend to each other.

    If a chunk begins at such an image but is too short for it, the result is 0, or with `may_extend`, the number of
    tokens up to the end of the image.
    """
    for span in request.media:
        if span.is_atomic and span.start < start + count < span.end:
            if span.start > start:
                return span.start - start
            return span.end - start if may_extend else 0
    return count

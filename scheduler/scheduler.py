"""The scheduler: decides which tokens of which requests the next step computes, and in which blocks.

Each request has a cursor, which counts its tokens with KV. A step advances the cursors of requests within one token
budget. Prefill, chunking, decode, resumption after preemption and prefix hits are all handled in this way: they differ
only in the number of tokens between the cursor and the end of the row.
"""

import heapq
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from scheduler.blocks import BlockPool, Ledger
from scheduler.budget import Budget
from scheduler.cost import CostModel
from scheduler.policy import STALL_FREE, Policy
from scheduler.prefix import extend_hashes
from scheduler.request import Request, RequestState, Slice, Step, cdiv


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits on a step, named as in vLLM."""

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    long_prefill_token_threshold: int = 0  # largest chunk of a prompt; 0: limited only by the budget
    max_num_partial_prefills: int = 1  # number of prompts that a step may leave unfinished
    tile_tokens: int = 1  # a chunk ends on a multiple of this, unless it would then be empty


AUDIT_STEPS = 64  # steps between two checks of the ledger against all requests; every step makes a cheaper check


class StepOutput(NamedTuple):
    """The result of one slice of a step.

    `token` is the sampled token, if any. `finish` is set when the request has ended. `fault` is the exception that
    ended it, if any.
    """

    request: Request
    slice_index: int
    token: int | None
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


BY_PRIORITY = attrgetter("priority", "arrival")
# When a request is admitted, blocks are kept free for this share of the tokens that running requests may still
# generate. Most requests stop early, and preemption handles the rest. This is SGLang's new-token ratio, with its cap.
GROWTH_SHARE = 0.3
GROWTH_CAP_TOKENS = 4096


class Scheduler:
    """Decides each step, and owns the requests on the node, their blocks and the block ledger.

    The driver (the engine's thread, or a simulator) calls all methods from one thread; nothing here blocks, reads a
    clock or does I/O. `schedule` returns a step, and `update` must process the steps in the same order. `schedule` may
    be called again before `update`, so a driver may decide step N+1 while the device runs step N.

    Guarantees: No step exceeds its budget or limits, except for a prompt that may not be chunked. Every slice has
    blocks for its tokens. Waiting requests are admitted in order of priority, then arrival. If a request fails in
    `update`, only this request ends, with finish "error". Blocks are not reused while a step in flight or a peer may
    write to them. After an error in the block ledger, the scheduler continues; the driver reports `ledger_error`.
    """

    def __init__(
        self,
        limits: StepLimits,
        num_blocks: int,
        block_tokens: int,
        policy: Policy = STALL_FREE,
        budget: Budget | None = None,
    ) -> None:
        """If `budget` is None, every step may have up to `limits.max_num_batched_tokens` tokens."""
        self.limits = limits
        self.policy = policy
        self.budget = budget or Budget(limits.max_num_batched_tokens)
        self.cost: CostModel | None = None  # step-time model, set by the driver between two steps
        self.block_tokens = block_tokens
        self.pool = BlockPool(num_blocks)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # by priority, then arrival
        self.num_receiving = 0
        self.counters = SchedulerCounters()
        self.ledger_error = ""  # the first error found in the block ledger; never cleared
        self._waiting: list[tuple[int, int, Request]] = []  # a heap; requests no longer WAITING are skipped
        self.num_waiting = 0
        self._arrivals = 0
        self._steps = 0
        self._parked: deque[tuple[int, list[int]]] = deque()  # (step, freed blocks that this step still uses)
        # If more requests ran than fit into a step, the last ones would starve.
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
        extend_hashes(request.hashes, request.tokens, self.block_tokens, request.salt)
        self.requests[request.id] = request
        self._wait(request)

    def kv_received(self, request: Request, token: int) -> None:
        """Continue a request after a peer has written the KV of its prompt and sampled `token`.

        Does nothing if the request was aborted in the meantime.
        """
        if request.state is not RequestState.RECEIVING_KV:
            return
        num_held = request.num_computed // self.block_tokens
        self.pool.settle(request.blocks[num_held:])
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

        Return the quarantined blocks. The caller must pass them to `pool.clear` when the peer has stopped.
        """
        if self.requests.get(request.id) is not request:
            return []
        if request.state is not RequestState.RECEIVING_KV:
            self._end(request)
            return []
        num_held = request.num_computed // self.block_tokens
        reserved = request.blocks[num_held:]
        self.pool.give_up(reserved, writer_stopped)
        request.blocks = request.blocks[:num_held]
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
        """Return the blocks of each request, and those that were freed while a step in flight still uses them."""
        rows = [request.blocks for request in self.requests.values() if not request.borrows_blocks]
        return rows + [blocks for _, blocks in self._parked]

    # ---- deciding -------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Decide the next step. The step has no slices if no request can run now."""
        step = Step(self._steps, [], [])
        self.budget.begin(self.cost, self.num_receiving > 0 or any(map(self._decodes, self.running)))
        if not self.policy.prompts_first:
            self._schedule_decodes(step)
        self._schedule_prompts(step)
        if self.policy.prompts_first and (self.policy.mixed or not step.slices):
            self._schedule_decodes(step)
        step.budget, step.reason = self.budget.end(step.work)
        if self.cost is not None:
            step.predicted_s = self.cost.seconds(step.work)
        if step.slices:
            self._steps += 1
        return step

    def update(
        self, step: Step, tokens: Sequence[int | None], failed: Sequence[bool] | None = None
    ) -> list[StepOutput]:
        """Process the results of a step and return one output for each slice whose request has not ended.

        `tokens[i]` is the token that slice i sampled. The request of slice i ends with finish "error" if `failed[i]` is
        true, or if processing the slice raises an exception. Steps must be passed in the order in which `schedule`
        returned them.
        """
        outputs: list[StepOutput] = []
        for index, slice_ in enumerate(step.slices):
            request, fault = slice_.request, None
            request.num_in_flight -= 1
            request.num_sampling -= slice_.samples
            if request.state is RequestState.DONE:
                continue
            if failed is None or not failed[index]:
                try:
                    if slice_.epoch == request.epoch:
                        self._advance(request, slice_.end)
                    token = tokens[index] if slice_.samples else None
                    finish = None if token is None else self._append(request, token)
                    outputs.append(StepOutput(request, index, token, finish))
                    continue
                except Exception as error:  # noqa: BLE001 - the driver logs it
                    fault = error
            request.finish = "error"
            self._end(request)
            outputs.append(StepOutput(request, index, None, "error", fault))
        while self._parked and self._parked[0][0] <= step.number:
            self.pool.release(self._parked.popleft()[1])
        self.counters.steps += 1
        self._check_ledger()
        return outputs

    def _check_ledger(self) -> None:
        """Record the first error in the ledger. The node keeps serving; the driver reports the error."""
        is_due = self.counters.steps % AUDIT_STEPS == 0
        self.ledger_error = self.ledger_error or self.pool.ledger_error(sum(map(len, self._held())) if is_due else None)

    # ---- decodes --------------------------------------------------------------------------------------------

    def _schedule_decodes(self, step: Step) -> None:
        left = self.budget.ceiling - step.work.tokens
        for request in tuple(self.running):
            if left == 0:
                break
            # A previous request may have preempted this one earlier in the loop.
            if not self._decodes(request) or request.state is not RequestState.RUNNING:
                continue
            if self._make_room(request, 1, step) == 1:
                self._take_slice(step, request, 1)
                left -= 1

    @staticmethod
    def _decodes(request: Request) -> bool:
        """Return whether only the last token is not scheduled yet, and the request continues after the steps in
        flight."""
        if request.num_tokens - request.num_scheduled != 1:
            return False
        return request.num_sampling == 0 or not (request.send_kv or request.remaining_tokens == 0)

    # ---- prompts --------------------------------------------------------------------------------------------

    def _schedule_prompts(self, step: Step) -> None:
        may_compute = self.policy.mixed or not step.slices
        partial = 0
        for request in tuple(self.running) if may_compute else ():
            behind = request.num_tokens - request.num_scheduled
            if behind <= 1 or request.state is not RequestState.RUNNING:
                continue
            count = self._make_room(request, self._chunk(request, request.num_scheduled, step), step)
            if count:
                self._take_slice(step, request, count)
            partial += count < behind
        if not self.policy.together or not (self.running or self.num_receiving):
            self._admit(step, partial, may_compute)

    def _admit(self, step: Step, partial: int, may_compute: bool) -> None:
        """Admit waiting requests in order, and stop at the first that has to wait.

        Requests that receive their KV compute nothing, so they are admitted even if the step may not compute prompts.
        """
        growth = None
        while (request := self._next_waiting()) is not None:
            if len(self.running) + self.num_receiving >= self._max_running or request.num_in_flight:
                break
            held = self._cached_prefix(request)
            start = request.num_computed if request.borrows_blocks else len(held) * self.block_tokens
            count = self._chunk(request, start, step) if may_compute and not request.receive_kv else 0
            is_partial = count < request.num_tokens - start
            if not (request.receive_kv or self._may_start(count, is_partial, partial)):
                break
            growth = sum(map(self._growth, self.running)) if growth is None else growth
            needed = cdiv(request.num_tokens, self.block_tokens) - len(held) + self.pool.count_unowned(held)
            own_growth = self._answer_blocks(request)
            alone = not self.running and not self.num_receiving
            if not request.borrows_blocks and needed + (0 if alone else growth + own_growth) > self.pool.available:
                break
            heapq.heappop(self._waiting)
            self.num_waiting -= 1
            available = self.pool.available
            self._hold(request, held)
            if request.receive_kv:
                self._reserve(request, step)
            else:
                request.move_to(RequestState.RUNNING)
                insort(self.running, request, key=BY_PRIORITY)
                self._allot(request, count)
                if count:
                    self._take_slice(step, request, count)
                partial += is_partial
            growth += own_growth + needed - (available - self.pool.available)

    def _may_start(self, count: int, is_partial: bool, num_partial: int) -> bool:
        """Return whether to admit a prompt of which the step can compute `count` tokens."""
        if self.policy.together:
            return True  # it is admitted with its batch, even if a later step computes it
        may_stay_partial = self.policy.fills or num_partial < self.limits.max_num_partial_prefills
        return count > 0 and (may_stay_partial or not is_partial)

    def _next_waiting(self) -> Request | None:
        while self._waiting and self._waiting[0][2].state is not RequestState.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][2] if self._waiting else None

    def _chunk(self, request: Request, start: int, step: Step) -> int:
        """Return how many tokens of a prompt this step may compute, beginning at `start`."""
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

    def _cached_prefix(self, request: Request) -> list[int]:
        """Return the cached blocks of the request's prefix. The last token is always computed, to get its logits."""
        if request.needs_prompt_logprobs or request.borrows_blocks:
            return []
        useful = len(request.tokens) if request.receive_kv and not request.shared_pool else len(request.tokens) - 1
        return self.pool.match(request.hashes[: useful // self.block_tokens])

    def _hold(self, request: Request, held: list[int]) -> None:
        if not request.borrows_blocks:
            self.pool.share(held)
            request.blocks = list(held)
            request.num_computed = len(held) * self.block_tokens
        request.num_scheduled = request.num_computed
        if request.epoch == 0:
            request.num_cached = request.num_computed
            self.counters.cache_queries += len(request.tokens)
            self.counters.cache_hits += request.num_computed

    def _reserve(self, request: Request, step: Step) -> None:
        missing = cdiv(len(request.tokens), self.block_tokens) - len(request.blocks)
        request.blocks += self.pool.reserve(missing)
        self.num_receiving += 1
        request.move_to(RequestState.RECEIVING_KV)
        step.receiving.append(request)

    # ---- blocks ---------------------------------------------------------------------------------------------

    def _make_room(self, request: Request, count: int, step: Step) -> int:
        """Allocate blocks for `count` more tokens, preempting later requests if necessary.

        Return how many of the tokens now have blocks: 0 means that the request has to wait or was itself preempted.
        """
        if request.num_scheduled + count <= len(request.blocks) * self.block_tokens:  # true for most decodes
            return count
        while self._missing(request, count) > self.pool.available:
            victim = self._victim(request, step)
            if victim is None:
                break
            self._preempt(victim, step)
            if victim is request or victim.num_in_flight:  # the victim's blocks become free when its step ends
                return 0
        if self.policy.chunked:
            room = (len(request.blocks) + self.pool.available) * self.block_tokens - request.num_scheduled
            count = min(count, room)
        elif self._missing(request, count) > self.pool.available:
            return 0
        self._allot(request, count)
        return count

    def _missing(self, request: Request, count: int) -> int:
        """Return how many blocks to allocate before `count` more tokens can be computed."""
        return max(0, cdiv(request.num_scheduled + count, self.block_tokens) - len(request.blocks))

    def _growth(self, request: Request) -> int:
        """Return how many blocks a running request still needs for its whole prompt and for part of its answer."""
        rest = cdiv(request.num_tokens, self.block_tokens) - len(request.blocks)
        return rest + self._answer_blocks(request)

    def _answer_blocks(self, request: Request) -> int:
        """Return how many blocks to keep free for the tokens that a request may still generate on this node."""
        tokens = 0 if request.send_kv else GROWTH_SHARE * min(request.remaining_tokens, GROWTH_CAP_TOKENS)
        return cdiv(int(tokens), self.block_tokens)

    def _victim(self, request: Request, step: Step) -> Request | None:
        """Return the request to preempt so that `request` gets blocks, or None if `request` has to wait.

        The victim is the last running request that is not in this step yet, possibly `request` itself. A request that
        sends its KV is never preempted, because a transfer reads its blocks. If all later requests are in this step,
        `request` waits for them.
        """
        taken = {id(slice_.request) for slice_ in step.slices}
        later = self.running[self.running.index(request) + 1 :]
        free = [candidate for candidate in later if id(candidate) not in taken]
        if preemptible := [candidate for candidate in free if not candidate.send_kv]:
            return preemptible[-1]
        may_wait = request.send_kv or len(self.running) == 1 or (later and not free)
        return None if may_wait else request

    def _allot(self, request: Request, count: int) -> None:
        request.blocks += self.pool.take(self._missing(request, count))

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
        heapq.heappush(self._waiting, (request.priority, request.arrival, request))
        self.num_waiting += 1

    def _free(self, request: Request) -> None:
        if request.borrows_blocks:
            return
        if request.num_in_flight:
            self._parked.append((self._steps - 1, request.blocks))
        else:
            self.pool.release(request.blocks)
        request.blocks = []

    # ---- cursors --------------------------------------------------------------------------------------------

    def _take_slice(self, step: Step, request: Request, count: int) -> None:
        start = request.num_scheduled
        samples = start + count == request.num_tokens
        slice_ = Slice(request, start, count, samples, request.epoch)
        step.slices.append(slice_)
        request.num_scheduled += count
        request.num_in_flight += 1
        request.num_sampling += samples
        if slice_.is_decode:
            step.work.add_decode(start + 1)
        else:
            step.work.add_chunk(start, count)
            self.counters.prompt_tokens += count

    def _advance(self, request: Request, end: int) -> None:
        """Record that positions [0, end) have KV, and register the hashes of blocks that are now complete."""
        first = request.num_computed // self.block_tokens
        request.num_computed = end
        request.num_scheduled = max(request.num_scheduled, end)
        full = end // self.block_tokens
        if full > first and not request.borrows_blocks:
            extend_hashes(request.hashes, request.tokens, self.block_tokens, request.salt)
            for index in range(first, full):
                self.pool.remember(request.blocks[index], request.hashes[index])

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
        needed = cdiv(tokens, self.block_tokens)
        if needed > self.pool.total:
            raise ValueError(
                f"{tokens} tokens need {needed} blocks of {self.block_tokens} tokens, "
                f"and the KV cache has {self.pool.total}: shorten the request or increase --kv-cache-memory"
            )

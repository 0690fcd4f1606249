"""Guesses tokens with a small model that has the vocabulary of the served model (the target).

The draft model draws with the target's noise (`engine.counter_rng`), as in "Coupling without communication and
drafter-invariant speculative decoding" (Daliri, Musco and Suresh, 2024). Both models therefore draw the same token with
a high probability, even at high temperatures.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from engine.runner import Runner
from engine.timed_drafter import KEPT_REQUESTS, TimedDrafter
from scheduler.request import Request, RequestState, Slice, Step

CATCH_UP = 256  # maximum number of text tokens that a draft model computes in a step, in addition to the guesses


@dataclass(slots=True)
class DraftedRequest:
    """A request and its mirror: the request as the draft model computes it. The mirror's tokens are the request's
    tokens and the guesses, and its `num_computed` is the number of tokens with KV in the draft model's pool."""

    request: Request
    mirror: Request
    epoch: int
    num_known: int = 0  # number of the request's tokens at the last call of `find`
    num_named: int = 0  # number of the mirror's blocks whose hashes are recorded in `DraftModel._names`


@dataclass
class DraftModel(TimedDrafter):
    """A draft model. It runs on the engine's thread.

    The draft model's KV is in a separate pool, with one row per block. This row has the same number as the block's
    first row in the target's pool. Rows are therefore not allocated separately: the draft model's KV lives as long as
    the target's KV, and is reused with the target's cached prefixes. The draft model's KV is not sent in a handoff. The
    node that receives a request computes this KV from the text, at most `CATCH_UP` tokens in a step, and guesses no
    tokens while more than `CATCH_UP` tokens are missing."""

    runner: Runner  # runs the draft model over its own pool
    block_tokens: int
    block_rows: int  # number of rows that a block has in the target's first group
    _drafted: dict[str, DraftedRequest] = field(default_factory=dict)
    _names: dict[int, bytes] = field(default_factory=dict)  # row -> hash of the block whose KV is in the row

    def warm_up(self) -> None:
        self.runner.warm_up()

    def find(self, request: Request, limit: int) -> int:
        if self.has_failed:
            return 0
        mirror = self._synchronized(request)
        return limit if len(mirror.tokens) - mirror.num_computed <= CATCH_UP else 0

    def guess(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Sequence[int]]:
        mirrors = [self._drafted[request.id].mirror for request in requests]
        for request, mirror in zip(requests, mirrors, strict=True):
            table = mirror.tables[0]
            table += request.tables[0][len(table) * self.block_rows :: self.block_rows]
        behind, left = list[Slice](), CATCH_UP
        for mirror, count in zip(mirrors, counts, strict=True):
            missing = min(left, len(mirror.tokens) - 1 - mirror.num_computed)
            if missing > 0 and not count:
                behind.append(Slice(mirror, mirror.num_computed, missing, False, 0))
                left -= missing
        for depth in range(max(counts, default=0)):
            slices = [_next(mirror) for mirror, count in zip(mirrors, counts, strict=True) if count > depth]
            slices = [slice_ for slice_ in slices if slice_.request.finish is None]
            self._pass(slices + behind)
            behind = []
        if behind:
            self._pass(behind)
        for request in requests:
            self._remember(self._drafted[request.id])
        return [self._drafted[request.id].mirror.tokens[len(request.tokens) :] for request in requests]

    def _pass(self, slices: list[Slice]) -> None:
        for slice_ in slices:
            first, last = slice_.start // self.block_tokens, (slice_.end - 1) // self.block_tokens
            for row in slice_.request.tables[0][first : last + 1]:
                self._names.pop(row, None)
        is_usual = all(slice_.samples and slice_.count <= 2 for slice_ in slices)
        with self.timed() if is_usual else nullcontext():
            outputs = self.runner.run(Step(0, slices, []))
        for slice_, output in zip(slices, outputs, strict=True):
            slice_.request.num_computed = slice_.end
            slice_.request.tokens += output.tokens
            if output.error:
                slice_.request.finish = "error"  # ends only the mirror's guesses, and not the request

    def _synchronized(self, request: Request) -> Request:
        """Update the request's mirror to the request's current tokens, and return the mirror."""
        drafted = self._drafted.get(request.id)
        if drafted is None or drafted.request is not request or drafted.epoch != request.epoch:
            drafted = self._drafted[request.id] = self._begin(request)
        mirror, tokens, agreed = drafted.mirror, request.tokens, drafted.num_known
        while agreed < min(len(tokens), len(mirror.tokens)) and tokens[agreed] == mirror.tokens[agreed]:
            agreed += 1
        mirror.tokens[agreed:] = tokens[agreed:]
        mirror.num_computed = min(mirror.num_computed, agreed, len(tokens) - 1)
        mirror.finish = None
        drafted.num_known = len(tokens)
        return mirror

    def _begin(self, request: Request) -> DraftedRequest:
        if len(self._drafted) > KEPT_REQUESTS:
            live = {name: one for name, one in self._drafted.items() if one.request.state is not RequestState.DONE}
            self._drafted = live
        mirror = Request(request.id, [], request.num_prompt, request.max_tokens, request.min_tokens)
        mirror.stop_tokens = request.stop_tokens
        mirror.sampling = replace(request.sampling, logprobs=None, prompt_logprobs=None)
        table = request.tables[0][:: self.block_rows]
        names = list(zip(table, request.hashes, strict=False))
        same = next((at for at, (row, name) in enumerate(names) if self._names.get(row) != name), len(names))
        mirror.num_computed = same * self.block_tokens
        mirror.tokens = request.tokens[: mirror.num_computed]
        return DraftedRequest(request, mirror, request.epoch, num_named=same)

    def _remember(self, drafted: DraftedRequest) -> None:
        """Record the hash of each block of the request's tokens for which the draft model has computed the KV."""
        request, mirror = drafted.request, drafted.mirror
        known = min(mirror.num_computed, drafted.num_known) // self.block_tokens
        for block in range(drafted.num_named, min(known, len(request.hashes))):
            self._names[mirror.tables[0][block]] = request.hashes[block]
            drafted.num_named = block + 1


def _next(mirror: Request) -> Slice:
    """Return the slice of a step that computes the missing KV of the tokens, and draws the next token."""
    return Slice(mirror, mirror.num_computed, len(mirror.tokens) - mirror.num_computed, True, 0)

"""Guesses tokens with a draft head, which reads the model's hidden states."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from engine.attention import AttentionBackend, plan_tables
from engine.batch import Batch, BlockRows, build
from engine.kernels import Kernels
from engine.kv_pool import KVPool
from engine.models.draft_head import HeadDecoder
from engine.models.kv_places import KVPlaces
from engine.sampling import SamplingRow, sample
from engine.timed_drafter import KEPT_REQUESTS, TimedDrafter
from scheduler.request import Request, RequestState, Slice, Step
from shared.rpc.messages import SamplingParams


def head_places(places: KVPlaces) -> KVPlaces:
    """Return the places of a draft head's KV in the rows of the model's pool. The head is the pool's last layer."""
    return replace(places, tables=places.tables[-1:], places=places.places[-1:])


@dataclass(slots=True)
class KeptFeatures:
    """The features (inputs of the head) at the last positions of a request. `rows` maps each position to its features,
    with the positions of the latest step at the end."""

    request: Request
    epoch: int
    rows: dict[int, Tensor] = field(default_factory=dict)


class DraftHead(TimedDrafter):
    """A draft head. Its KV is in the model's pool, and it runs on the engine's thread.

    The head's KV of position i derives from token i and the model's hidden state at position i - 1. The head's KV is
    stored in the same step and in the same rows as the model's KV. It is therefore reused with a cached prefix, and is
    sent in a handoff. The head does not see position 0, because no hidden state precedes that position.

    If the prefix of a slice was cached or received, the hidden state before the slice is not known. The slice then
    begins one token earlier, and the KV of this additional token is not stored again. Models with recurrent states do
    not need the additional token, because each state also contains the features of the last token that it covers.
    """

    def __init__(
        self, model: HeadDecoder, pool: KVPool, kernels: Kernels, attention: AttentionBackend, num_tokens: int
    ) -> None:
        """`pool` is a view of the model's pool in which the head is the only layer. `num_tokens` is the maximum number
        of tokens that are guessed for a request in one step."""
        self.model = model
        self._num_kept = num_tokens + 2  # how many positions' features are kept: enough for a step with guesses
        self._pool, self._kernels, self._attention = pool, kernels, attention
        self._block_rows = BlockRows(pool.places)
        self._kept: dict[str, KeptFeatures] = {}

    def warm_up(self) -> None:
        """Guess a token for a request whose KV is in the dummy block."""
        request = Request("warm-up", [0] * 4, 4, 1, sampling=SamplingParams(seed=0))
        slice_ = self._block_rows.use_dummy(Slice(request, 3, 1, True, 0), self._pool.layout.block_tokens)
        features = torch.zeros(1, self.model.config.hidden_size)
        self._pass([slice_], features)

    # ---- before and after the model's steps -------------------------------------------------------------------

    def extended(self, step: Step) -> Step:
        """Return the step with some slices extended. If the hidden state of the token before a slice is not known, the
        slice also includes this token."""
        slices, ends = list[Slice](), dict[str, int]()
        for slice_ in step.slices:
            request, before = slice_.request, slice_.start - 1
            is_known = before < 0 or ends.get(request.id) == slice_.start or before in self._rows(request)
            is_known = is_known or self._pool.places.state_rows > 0
            # Do not extend a slice that returns prompt logprobs: its output would have an entry for the added row.
            has_entries = request.needs_prompt_logprobs and before < request.num_prompt - 1
            if is_known or has_entries or request.sampling.pooling:
                slices.append(slice_)
            else:
                slices.append(replace(slice_, start=before, count=slice_.count + 1, num_stored=1))
            ends[request.id] = slice_.end
        return replace(step, slices=slices)

    def observe(self, slices: Sequence[Slice], normed: Tensor, states: Mapping[int, Tensor]) -> None:
        """Store the head's KV for the slices of a step. `normed` and `states` have a row for each token of the slices
        (see `HeadDecoder.features`)."""
        if not self.has_failed:
            with self.guarded():
                self._observe(slices, self.model.features(normed, states))

    def _observe(self, slices: Sequence[Slice], features: Tensor) -> None:
        ends = list(accumulate(slice_.count for slice_ in slices))
        last = features[[end - 1 for end in ends]]
        previous = features.roll(1, 0)
        pairs, chosen = list[Slice](), list[int]()
        for slice_, feature, end in zip(slices, last, ends, strict=True):
            rows, first = self._rows(slice_.request), slice_.start + slice_.num_stored
            if first == slice_.start:
                before = rows.get(first - 1)
                previous[end - slice_.count] = self._stored(slice_, feature) if before is None else before
            if first < slice_.end:
                count = slice_.end - first
                pairs.append(Slice(slice_.request, first, count, False, slice_.epoch, row=slice_.row))
                chosen += range(end - count, end)
            rows.pop(slice_.end - 1, None)
            rows[slice_.end - 1] = feature
            while len(rows) > self._num_kept:
                del rows[next(iter(rows))]
        self._store(slices, features, ends)
        if pairs:
            batch = self._batch(pairs)
            self.model.store(batch, previous[chosen], self._kernels.begin(batch))

    def _stored(self, slice_: Slice, like: Tensor) -> Tensor:
        """Return the features in the state that the slice reads, or zeros if the slice reads no state."""
        if slice_.state is None or not slice_.state.read:
            return torch.zeros_like(like)
        return self._unit(slice_.state.read)

    def _store(self, slices: Sequence[Slice], features: Tensor, ends: Sequence[int]) -> None:
        """In each state that the slices write or save, store the features of the last token that the state covers."""
        first: Slice | None = None  # the first of adjacent slices that share a state
        for slice_, end in zip(slices, ends, strict=True):
            first = slice_ if not slice_.continues else first
            if first is None or first.state is None:
                continue
            self._unit(first.state.write).copy_(features[end - 1])
            if first.state.save and slice_.start < first.state.save_at <= slice_.end:
                self._unit(first.state.save).copy_(features[end - slice_.end + first.state.save_at - 1])

    def _unit(self, state: Sequence[int]) -> Tensor:
        """Return a view of the features in the state whose rows are `state`."""
        row, offset = self._pool.places.units[-1]
        start = state[row] * (self._pool.layout.block_bytes // 4) + offset
        return self._pool.floats[start : start + self.model.config.hidden_size]

    def _rows(self, request: Request) -> dict[int, Tensor]:
        """Return the features of the request's last positions."""
        kept = self._kept.get(request.id)
        if kept is None or kept.request is not request or kept.epoch != request.epoch:
            if len(self._kept) > KEPT_REQUESTS:
                live = self._kept.items()
                self._kept = {name: one for name, one in live if one.request.state is not RequestState.DONE}
            kept = self._kept[request.id] = KeptFeatures(request, request.epoch)
        return kept.rows

    # ---- guesses ----------------------------------------------------------------------------------------------

    def find(self, request: Request, limit: int) -> int:
        return 0 if self.has_failed or len(request.tokens) - 2 not in self._rows(request) else limit

    def guess(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Sequence[int]]:
        texts = [list(request.tokens) if count else [] for request, count in zip(requests, counts, strict=True)]
        active = [index for index, count in enumerate(counts) if count]
        features = [self._rows(requests[index])[len(texts[index]) - 2] for index in active]
        for depth in range(max(counts, default=0)):
            slices = [
                Slice(requests[index], len(texts[index]) - 1, 1, True, requests[index].epoch, row=texts[index])
                for index in active
            ]
            with self.timed():
                following, tokens = self._pass(slices, torch.stack(features))
            drawn = [(index, row) for index, row, token in zip(active, following, tokens, strict=True)
                     if token is not None]  # fmt: skip
            for index, token in zip(active, tokens, strict=True):
                texts[index] += [] if token is None else [token]
            active = [index for index, _ in drawn if counts[index] > depth + 1]
            features = [row for index, row in drawn if counts[index] > depth + 1]
            if not active:
                break
        return [text[len(request.tokens) :] for request, text in zip(requests, texts, strict=True)]

    def _pass(self, slices: Sequence[Slice], features: Tensor) -> tuple[Tensor, list[int | None]]:
        """Guess a token per slice (None: the draw failed). Return the features for the next pass, and the tokens."""
        batch = self._batch(slices)
        attention = plan_tables(self._attention, self._pool, batch)
        following, logits = self.model.guess(batch, features, self._kernels.begin(batch), attention)
        return following, [draw.token for draw in sample(logits, [_row_of(slice_) for slice_ in slices])]

    def _batch(self, slices: Sequence[Slice]) -> Batch:
        batch = build(slices, self._pool.layout.block_tokens, torch.device("cpu"), rows=self._block_rows)
        batch.first_key = 1
        return batch


def _row_of(slice_: Slice) -> SamplingRow:
    """Return the inputs for drawing a guess. The draw uses the request's noise, but ignores the request's grammar."""
    request, sampling = slice_.request, replace(slice_.request.sampling, logprobs=None, prompt_logprobs=None)
    kinds = request.stop_tokens, request.min_tokens
    return SamplingRow(sampling, slice_.tokens, request.num_prompt, slice_.end, *kinds)

"""Computes vectors instead of tokens, for embeddings and scores.

A request whose `SamplingParams.pooling` is set ends when its prompt has been computed. `pooling` selects its vector:
- "last": the normed hidden state of the last token
- "mean": the mean of all tokens' normed hidden states
- "logits": the logit of each of `allowed_tokens` as the next token
The router does normalization and other arithmetic on vectors.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.batch import Batch
from scheduler.request import Request, RequestState, Slice
from shared.rpc.messages import unpack_ids

KEPT_SUMS = 64  # if sums of more requests than this are kept, the sums of ended requests are dropped


class Pooler:
    """Computes the vectors of the pooled requests in a runner's steps. For "mean", it keeps the sum of the hidden
    states over the chunks of the prompt that have been computed."""

    def __init__(self) -> None:
        # request id -> the request, and a map from n to the sum over the request's first n tokens
        self._sums: dict[str, tuple[Request, dict[int, Tensor]]] = {}

    def vectors(
        self, slices: Sequence[Slice], batch: Batch, logits: Tensor, hidden: Tensor
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the index and the vector, float32 [size], of each slice that ends the prompt of a pooled request.

        `logits` belong to the sampling slices, float32 [S, vocab_size]. `hidden` has the hidden states of
        `Batch.logit_rows`. The hidden states of the slices that sample a token come first.
        """
        sampled, first = {index: row for row, index in enumerate(batch.sampled)}, len(batch.sampled)
        scored: dict[int, Tensor] = {}
        for index, count in batch.scored:
            scored[index] = hidden[first : first + count]
            first += count
        for index, slice_ in enumerate(slices):
            kind, row = slice_.request.sampling.pooling, sampled.get(index)
            if kind == "mean":
                parts = [scored[index]] if index in scored else []
                parts += [hidden[row : row + 1]] if row is not None else []
                total = self._add(slice_, torch.cat(parts).float().sum(0))
                if row is not None:
                    yield index, total / slice_.end
            elif kind == "last" and row is not None:
                yield index, hidden[row].float()
            elif kind == "logits" and row is not None:
                yield index, logits[row, unpack_ids(slice_.request.sampling.allowed_tokens)]

    def _add(self, slice_: Slice, part: Tensor) -> Tensor:
        """Return the sum over all tokens up to the slice's end. The previous sum is kept, because a step may run
        twice."""
        kept, sums = self._sums.get(slice_.request.id, (None, {}))
        sums = sums if kept is slice_.request else {}
        start = slice_.start
        total = part + sums[start] if start else part
        before = {start: sums[start]} if start else {}
        self._sums[slice_.request.id] = (slice_.request, before | {slice_.end: total})
        if len(self._sums) > KEPT_SUMS:
            self._sums = {name: each for name, each in self._sums.items() if each[0].state is not RequestState.DONE}
        return total

"""Verifies guessed tokens by drawing: a guess is right if it is the token that the model draws at its position.

A draw depends only on logits, seed and position. Tokens, logprobs and the ends of requests are therefore the same as
without guesses, at any temperature. (Rejection sampling would preserve only the distribution of tokens.)

A runner computes a slice with k guesses as k + 1 slices: the tokens before the guesses, and one slice per guess. These
slices read their tokens from a list that contains the guesses (`Slice.row`). Attention at a position also reads the KV
that the same step stored at earlier positions. Recurrent layers compute the k + 1 slices as one slice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.runner import SliceOutput
from scheduler.request import Slice, Step


def expanded(step: Step) -> Step:
    """Return the step in the form that a runner computes. A slice with guesses becomes a slice of the tokens before the
    guesses, followed by a slice of one token for each guess."""
    if not step.work.draft_tokens:
        return step
    slices = [row for slice_ in step.slices for row in _rows(slice_)]
    return Step(step.number, slices, [], work=step.work, predicted_s=step.predicted_s)


def _rows(slice_: Slice) -> Iterator[Slice]:
    if not slice_.drafts:
        yield slice_
        return
    row, certain = [*slice_.request.tokens, *slice_.drafts], slice_.count - len(slice_.drafts)
    yield replace(slice_, count=certain, drafts=(), row=row)
    for start in range(slice_.start + certain, slice_.end):
        yield Slice(slice_.request, start, 1, True, slice_.epoch, row=row, continues=True)


def verified(slices: Sequence[Slice], outputs: Sequence[SliceOutput]) -> list[SliceOutput]:
    """Return an output for each slice, from the outputs of the expanded step.

    The tokens of a slice are its right guesses, followed by the token that was drawn at the next position. If the draw
    after a right guess failed, the error is ignored, because the next step computes that position again.
    """
    rows = iter(outputs)
    return [_joined(slice_, [next(rows) for _ in range(1 + len(slice_.drafts))]) for slice_ in slices]


def _joined(slice_: Slice, rows: list[SliceOutput]) -> SliceOutput:
    joined = rows[0]
    for guessed, before, row in zip(slice_.drafts, rows, rows[1:], strict=False):
        if before.tokens != [guessed] or row.error:
            break
        joined = SliceOutput(joined.tokens + row.tokens, joined.logprobs + row.logprobs, joined.prompt_logprobs)
    return joined

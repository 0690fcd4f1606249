"""The cost of a step: numbers that describe the step's work, and a model that predicts how long a device takes."""

from dataclasses import astuple, dataclass
from typing import Self


@dataclass(slots=True)
class StepWork:
    """The work of a step: the numbers that determine how long the step takes.

    A slice that computes only the last token of its sequence is a decode; any other slice is a prompt chunk, even if
    the request was resumed. A pair is one query token that attends to one key token.
    """

    num_prefills: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    num_decodes: int = 0
    decode_context: int = 0  # sum of the context lengths that the decodes and drafts read
    draft_tokens: int = 0  # guessed tokens that decodes verify; each of them costs as much as a decode
    # Tokens that decodes compute again because the recurrent state does not include them. Each costs as much as a
    # decode.
    repeated_tokens: int = 0

    @property
    def decode_tokens(self) -> int:
        return self.num_decodes + self.draft_tokens + self.repeated_tokens

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    def add_decode(self, context: int, repeated: int = 0) -> None:
        """Add a decode that, before its own token, computes the previous `repeated` tokens again."""
        self.num_decodes += 1
        self.repeated_tokens += repeated
        self.decode_context += sum(range(context - repeated, context + 1))

    def add_draft(self, context: int) -> None:
        self.draft_tokens += 1
        self.decode_context += context

    def add_chunk(self, start: int, count: int) -> None:
        self.num_prefills += 1
        self.prefill_tokens += count
        self.prefill_pairs += pairs_of(start, count)


def pairs_of(start: int, count: int) -> int:
    """Return the number of query-key pairs of positions [start, start + count) under causal attention."""
    return count * start + count * (count + 1) // 2


MAX_COEFFICIENT = 1e6  # largest accepted coefficient: larger than on any device, and small enough to avoid overflow


@dataclass(frozen=True, slots=True)
class CostModel:
    """A linear model of the seconds that a step takes, with non-negative coefficients:

    overhead + per_token · max(knee_tokens, tokens) + per_pair · pairs + per_context · decode context
    + per_decode · (decodes + drafts + repeated tokens)

    In a step with fewer than `knee_tokens` tokens (the knee of the roofline), reading the weights takes longer than
    computing with them, so the matrix products take the same time for any such number of tokens. `knee_tokens` is 0 if
    the device has no knee. Nearly all steps (see `engine.step_time_fit.QUANTILE`) last at most (1 + margin) times the
    prediction.
    """

    overhead: float = 0.0
    per_token: float = 0.0
    knee_tokens: float = 0.0
    per_pair: float = 0.0
    per_context: float = 0.0
    per_decode: float = 0.0
    margin: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """Return the predicted duration of a step."""
        return (
            self.overhead
            + self.per_token * max(self.knee_tokens, work.tokens)
            + self.per_pair * work.prefill_pairs
            + self.per_context * work.decode_context
            + self.per_decode * work.decode_tokens
        )

    def decode_seconds(self, tokens: int, context: int) -> float:
        """Return the predicted seconds that a decode or draft with this context adds to a step of `tokens` tokens."""
        more = max(self.knee_tokens, tokens + 1) - max(self.knee_tokens, tokens)
        return self.per_token * more + self.per_context * context + self.per_decode

    def packed(self) -> list[float]:
        """Return the fields in order, to be sent in a message."""
        return list(astuple(self))

    @classmethod
    def unpacked(cls, numbers: list[float]) -> Self | None:
        """Return the model whose `packed` form is `numbers`, or None if the length or a number is invalid."""
        is_valid = all(0 <= number <= MAX_COEFFICIENT for number in numbers)
        return cls(*numbers) if is_valid and len(numbers) == len(cls.__dataclass_fields__) else None

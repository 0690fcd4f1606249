"""What a step costs: its work in a few numbers, and a model of how long a device takes for that work."""

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from scheduler.request import Slice, Step


@dataclass(slots=True)
class StepWork:
    """What a step asks of a device, in the terms its duration depends on.

    A slice that only computes the last token of its row is a decode; every other is a chunk of a prompt (also where
    the row is a resumed one). A pair is one query token that attends to one key token.
    """

    num_prefills: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    num_decodes: int = 0
    decode_context: int = 0  # tokens whose KV the decodes read

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.num_decodes

    def add(self, piece: "Slice") -> None:
        if piece.is_decode:
            self.add_decode(piece.end)
        else:
            self.add_chunk(piece.start, piece.count)

    def add_decode(self, context: int) -> None:
        self.num_decodes += 1
        self.decode_context += context

    def add_chunk(self, start: int, count: int) -> None:
        self.num_prefills += 1
        self.prefill_tokens += count
        self.prefill_pairs += pairs_of(start, count)


def pairs_of(start: int, count: int) -> int:
    """Query-key pairs of positions [start, start + count) under causal attention."""
    return count * start + count * (count + 1) // 2


def work_of(step: "Step") -> StepWork:
    work = StepWork()
    for piece in step.slices:
        work.add(piece)
    return work


MOST = 1e6  # of any coefficient: beyond all devices, and small enough for sums of products


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step, all coefficients non-negative:

    overhead + per_token · max(knee_tokens, tokens) + per_pair · pairs + per_context · decode context
    + per_decode · decodes

    `knee_tokens` is the batch below which matrix products take as long as reading the weights does (the roofline's
    knee; 0 where a device has none to see). `margin`: a share of the steps given by the fit's quantile lasts at most
    (1 + margin) times what is predicted.
    """

    overhead: float = 0.0
    per_token: float = 0.0
    knee_tokens: float = 0.0
    per_pair: float = 0.0
    per_context: float = 0.0
    per_decode: float = 0.0
    margin: float = 0.0

    def seconds(self, work: StepWork) -> float:
        return (
            self.overhead
            + self.per_token * max(self.knee_tokens, work.tokens)
            + self.per_pair * work.prefill_pairs
            + self.per_context * work.decode_context
            + self.per_decode * work.num_decodes
        )

    def packed(self) -> list[float]:
        """In field order, for a message."""
        return list(astuple(self))

    @classmethod
    def unpacked(cls, numbers: list[float]) -> Self | None:
        """Inverse of `packed`; None for a row that is no model: of another length, or with what no device has."""
        is_model = len(numbers) == len(cls.__dataclass_fields__) and all(0 <= number <= MOST for number in numbers)
        return cls(*numbers) if is_model else None

"""The inputs and the result of a draw, shared by all implementations of the draw."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.counter_rng import key_of
from shared.limits import GREEDY_BELOW
from shared.rpc.messages import Logprobs, SamplingParams

BROKEN, NOTHING_ALLOWED = -1, -2  # returned instead of a token: see NUMERICAL and NO_TOKEN
NUMERICAL = "numerical"  # a logit of the row is not finite
NO_TOKEN = "no_token"  # every token is banned
WORDS = 5  # of 8 bytes: a row as `parameters_of` packs it


@dataclass(slots=True)
class SamplingRow:
    """What a draw depends on in addition to its logits. Tokens from `position` on are not read."""

    sampling: SamplingParams
    tokens: Sequence[int]  # prompt and generated tokens
    num_prompt: int
    position: int  # index in `tokens` of the token to draw
    stop_tokens: frozenset[int] = frozenset()
    min_tokens: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature < GREEDY_BELOW

    @property
    def forbids_stop(self) -> bool:
        return self.position - self.num_prompt < self.min_tokens and bool(self.stop_tokens)

    @property
    def is_penalized(self) -> bool:
        return is_penalized(self.sampling)


def is_penalized(sampling: SamplingParams) -> bool:
    """Return whether a draw depends on the tokens before it."""
    return sampling.repetition_penalty != 1.0 or bool(sampling.presence_penalty or sampling.frequency_penalty)


@dataclass(slots=True)
class DrawResult:
    """The result of a draw. `error` is empty, NUMERICAL or NO_TOKEN."""

    token: int | None = None
    logprobs: Logprobs | None = None
    error: str = ""


def parameters_of(rows: Sequence[SamplingRow]) -> NDArray[np.int64]:
    """Return the rows packed for a compiled draw, int64 [R, WORDS].

    A row holds temperature, top_p and min_p as the bits of float64, then top_k and the noise's key (0 if greedy).
    """
    packed = np.empty((len(rows), WORDS), np.int64)
    packed[:, :3].view(np.float64)[:] = [(r.sampling.temperature, r.sampling.top_p, r.sampling.min_p) for r in rows]
    packed[:, 3:] = [(r.sampling.top_k, 0 if r.is_greedy else key_of(r.sampling.seed, r.position)) for r in rows]
    return packed

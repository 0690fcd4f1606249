"""Samples the next tokens of many rows at once. A draw depends only on its row's logits, parameters and position.

The meaning and order of the parameters are vLLM's: min_tokens, bad words and bias, penalties, allowed tokens,
temperature, min_p, top_k, top_p. A draw adds Gumbel noise from a counter-based generator (`engine.counter_rng`) to the
scores, and takes the token with the highest sum. The token therefore does not depend on the batch, on chunking, or on
the node.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.counter_rng import BROKEN, NOTHING_ALLOWED, WORDS, gumbel, key_of
from engine.cpu import why_not_compiled
from engine.token_masks import TokenMasks, TokenMatcher
from shared.limits import GREEDY_BELOW
from shared.rpc.messages import Logprobs, SamplingParams, unpack_ids

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
CANDIDATES = 256  # number of highest scores that are tried first; if top_p or top_k needs more, the whole row is sorted
NUMERICAL = "numerical"  # a logit of the row is not finite
NO_TOKEN = "no_token"  # every token is banned, or the row's grammar has failed
START_TOKENS = 4  # the reasoning begins within the first START_TOKENS tokens of an answer: whitespace may precede it
FORCED_TOKENS = 16  # the end is tried at this many positions: a grammar forbids it inside a character of several tokens


@dataclass(slots=True)
class SamplingRow:
    """The inputs of a draw other than its logits. Of `tokens`, only those before `position` are read.

    For a row with a repetition penalty, `prompt_ids` has the distinct tokens of the prompt in ascending order. If
    `prompt_ids` is None, each draw computes it again, which takes time for a long prompt.
    """

    sampling: SamplingParams
    tokens: Sequence[int]  # prompt and generated tokens
    num_prompt: int
    position: int  # index in `tokens` of the token to draw
    stop_tokens: frozenset[int] = frozenset()
    min_tokens: int = 0
    matcher: TokenMatcher | None = None
    prompt_ids: IntArray | None = None

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature < GREEDY_BELOW

    @property
    def forbids_stop(self) -> bool:
        """Whether to ban the stop tokens. False with a grammar, because the grammar's mask contains this ban."""
        too_early = self.position - self.num_prompt < self.min_tokens
        return too_early and bool(self.stop_tokens) and self.matcher is None

    @property
    def forced_token(self) -> int | None:
        """The token that ends the reasoning, if the budget for the reasoning is used up, and None otherwise. The result
        depends only on the tokens before `position`."""
        thinking, begin = self.sampling.thinking, self.num_prompt
        if thinking is None or not may_end_reasoning(self.sampling, self.num_prompt, self.position):
            return None
        head = self.tokens[begin : min(self.position, begin + START_TOKENS)]
        if 0 <= thinking.begin < begin or thinking.start not in head:
            begin = thinking.begin
        else:
            begin += head.index(thinking.start) + 1
        due = max(self.num_prompt, begin + thinking.num_tokens)
        ends = unpack_ids(thinking.ends)
        is_due = begin >= 0 and due <= self.position < due + FORCED_TOKENS
        return ends[0] if is_due and set(ends).isdisjoint(self.tokens[begin : self.position]) else None


def depends_on_tokens(sampling: SamplingParams) -> bool:
    """Return whether the sampling parameters make a draw depend on earlier tokens."""
    return is_penalized(sampling) or bool(sampling.bad_words)


def may_end_reasoning(sampling: SamplingParams, num_prompt: int, position: int) -> bool:
    """Return whether the end of the reasoning may be forced at `position`. If this is possible, the earlier tokens
    decide whether the end is forced."""
    if (thinking := sampling.thinking) is None:
        return False
    first = max(num_prompt, (num_prompt if thinking.begin < 0 else thinking.begin) + thinking.num_tokens)
    return first <= position < first + START_TOKENS + FORCED_TOKENS


def is_penalized(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or bool(sampling.presence_penalty or sampling.frequency_penalty)


def distinct_prompt_ids(sampling: SamplingParams, prompt: Sequence[int]) -> IntArray:
    """Return the prompt's distinct tokens in ascending order, or an empty array if the penalties ignore the prompt."""
    return np.unique(np.array(prompt if sampling.repetition_penalty != 1.0 else (), np.int64))


@dataclass(slots=True)
class DrawResult:
    """The result of a draw. `error` is empty, NUMERICAL or NO_TOKEN."""

    token: int | None = None
    logprobs: Logprobs | None = None
    error: str = ""


def parameters_of(rows: Sequence[SamplingRow]) -> NDArray[np.int64]:
    """Pack the parameters of the rows for a compiled draw, int64 [R, WORDS].

    A row has five words: the float64 bits of temperature, top_p and min_p; top_k; and the noise's key (0 if greedy).
    """
    packed = np.empty((len(rows), WORDS), np.int64)
    packed[:, :3].view(np.float64)[:] = [(r.sampling.temperature, r.sampling.top_p, r.sampling.min_p) for r in rows]
    packed[:, 3:] = [(r.sampling.top_k, 0 if r.is_greedy else key_of(r.sampling.seed, r.position)) for r in rows]
    return packed


def sample(logits: Tensor, rows: Sequence[SamplingRow], masks: TokenMasks | None = None) -> list[DrawResult]:
    """Return one draw per row of `logits`, float32 [R, vocab]. Does not change `logits`. An error affects only its row.

    `masks` has the masks of the rows that have a grammar.
    """
    if not rows:
        return []
    compiled = compiled_draw() if logits.device.type == "cpu" else None
    if compiled is not None:
        tokens = compiled(logits, adjust(logits, rows), torch.from_numpy(parameters_of(rows)), masks)
    else:
        tokens = draw(logits, adjust(logits, rows, masks), rows)
    draws = [_draw_of(token) for token in tokens]
    _describe(logits, rows, draws)
    return draws


def draw(logits: Tensor, adjusted: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Return a token, `BROKEN` or `NOTHING_ALLOWED` for each row. Faster implementations must return the same tokens.

    If a logit of a row is not finite, the row is BROKEN. For a greedy row, the first of the likeliest tokens is drawn.
    For other rows, the adjusted logits are divided by the temperature (float32), and `restrict` filters the results.
    In float64, noise is added to each token's score: `engine.counter_rng.gumbel` with the key `key_of(seed, position)`.
    The token with the largest sum is drawn.
    """
    finite = logits.sum(dim=1).isfinite()
    best, chosen = adjusted.max(dim=1)
    drawing = [index for index, row in enumerate(rows) if not row.is_greedy]
    if drawing:
        at = torch.tensor(drawing, device=logits.device)
        chosen[at] = _draw(adjusted[at], [rows[index] for index in drawing])
    # Copy the results of all rows from the device in one transfer.
    chosen = torch.where(best == -math.inf, NOTHING_ALLOWED, chosen)
    tokens: list[int] = torch.where(finite, chosen, BROKEN).tolist()
    return tokens


@cache
def compiled_draw() -> Callable[[Tensor, Tensor, Tensor, TokenMasks | None], list[int]] | None:
    """Return the compiled draw function for CPUs, or None if this machine cannot compile it."""
    if why_not_compiled():
        return None
    from engine.cpu.draw import draw as compiled

    return compiled


def _draw_of(token: int) -> DrawResult:
    return DrawResult(token) if token >= 0 else DrawResult(error=NUMERICAL if token == BROKEN else NO_TOKEN)


def _describe(logits: Tensor, rows: Sequence[SamplingRow], draws: list[DrawResult]) -> None:
    wanted = [
        (index, draw.token, row.sampling.logprobs)
        for index, (row, draw) in enumerate(zip(rows, draws, strict=True))
        if row.sampling.logprobs is not None and draw.token is not None
    ]
    if wanted:
        indices, tokens, num_top = zip(*wanted, strict=True)
        at = torch.tensor(indices, device=logits.device)
        for index, entry in zip(indices, describe(logits[at], tokens, num_top), strict=True):
            draws[index].logprobs = entry


# ---- bias and penalties ----------------------------------------------------------------------------------------


def adjust(logits: Tensor, rows: Sequence[SamplingRow], masks: TokenMasks | None = None) -> Tensor:
    """Return a copy of `logits` with bans, biases, penalties and masks applied, or `logits` if no row needs them."""
    shifts = [
        (index, token, amount)
        for index, row in enumerate(rows)
        if row.sampling.logit_bias or row.sampling.bad_words or row.forbids_stop
        for token, amount in _shifts(row).items()
        if 0 <= token < logits.shape[1]  # stop tokens outside the vocabulary cannot be drawn anyway
    ]
    penalized = [(index, row) for index, row in enumerate(rows) if is_penalized(row.sampling)]
    limited = [(index, row.sampling.allowed_tokens) for index, row in enumerate(rows) if row.sampling.allowed_tokens]
    forced = [(index, token) for index, row in enumerate(rows) if (token := row.forced_token) is not None]
    if not shifts and not penalized and not limited and not forced and masks is None:
        return logits
    adjusted = logits.clone()
    if shifts:
        at, banned, amounts = (torch.tensor(column, device=logits.device) for column in zip(*shifts, strict=True))
        adjusted[at, banned] += amounts.to(adjusted.dtype)
    if penalized:
        _penalize(adjusted, penalized)
    for index, packed in limited:
        ids = torch.tensor(unpack_ids(packed), device=logits.device)
        kept = adjusted[index, ids]
        adjusted[index] = -math.inf
        adjusted[index, ids] = kept
    for index, token in forced:
        if rows[index].matcher is None:  # otherwise, the grammar's mask forces the token
            adjusted[index] = -math.inf
        adjusted[index, token] = 0.0
    if masks is not None:
        masks.apply_(adjusted)
    return adjusted


def _shifts(row: SamplingRow) -> dict[int, float]:
    banned = dict.fromkeys(row.stop_tokens, -math.inf) if row.forbids_stop else {}
    banned |= dict.fromkeys(_ends_of_bad_words(row), -math.inf)
    return {**row.sampling.logit_bias, **banned}


def _ends_of_bad_words(row: SamplingRow) -> Iterator[int]:
    """Yield the last token of each bad word whose earlier tokens have just been generated, as in vLLM."""
    for packed in row.sampling.bad_words:
        *others, last = unpack_ids(packed)
        start = row.position - len(others)
        if start >= row.num_prompt and list(row.tokens[start : row.position]) == others:
            yield last


def _penalize(logits: Tensor, rows: list[tuple[int, SamplingRow]]) -> None:
    """Apply penalties in place. Presence and frequency penalties ignore the prompt. The repetition penalty does not."""
    columns: list[tuple[IntArray, IntArray, FloatArray, FloatArray]] = []
    for index, row in rows:
        sampling, prompt = row.sampling, row.prompt_ids
        if prompt is None:
            prompt = distinct_prompt_ids(sampling, row.tokens[: row.num_prompt])
        own, counts = np.unique(np.array(row.tokens[row.num_prompt : row.position], np.int64), return_counts=True)
        where = np.searchsorted(prompt, own)
        repeats = np.take(np.append(prompt, -1), where) == own  # generated tokens that the prompt contains
        seen = np.concatenate((prompt, own[~repeats]))
        where[~repeats] = np.arange(len(prompt), len(seen))
        minus = np.zeros(len(seen))
        minus[where] = sampling.frequency_penalty * counts + sampling.presence_penalty
        columns.append((np.full(len(seen), index), seen, np.full(len(seen), sampling.repetition_penalty), minus))
    at, tokens, repetition, less = (
        torch.from_numpy(np.concatenate(column)).to(logits.device) for column in zip(*columns, strict=True)
    )
    values = logits[at, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition) - less
    logits[at, tokens] = values.to(logits.dtype)


# ---- the draw --------------------------------------------------------------------------------------------------


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw a token for each row from the tokens that min_p, top_k and top_p keep, at the row's temperature. Return
    int64 [R]."""
    device, sampling = logits.device, [row.sampling for row in rows]
    scores = logits / torch.tensor([one.temperature for one in sampling], device=device)[:, None]
    filtered = [index for index, one in enumerate(sampling) if one.min_p > 0 or one.top_k > 0 or one.top_p < 1]
    if filtered:
        at = torch.tensor(filtered, device=device)
        scores[at] = restrict(scores[at], [sampling[index] for index in filtered])
    keys = torch.tensor([[key_of(row.sampling.seed, row.position)] for row in rows], device=device)
    return (scores.double() + gumbel(keys, torch.arange(scores.shape[1], device=device))).argmax(dim=1)


def restrict(scores: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Set to -inf the scores of tokens that min_p, top_k or top_p exclude. Ties with the lowest kept score are kept."""
    device, vocab = scores.device, scores.shape[1]
    min_p = torch.tensor([one.min_p for one in sampling], device=device)[:, None]
    scores = scores.masked_fill(scores < scores.amax(dim=1, keepdim=True) + min_p.log(), -math.inf)
    counts = [min(one.top_k, vocab) if one.top_k > 0 else vocab for one in sampling]
    top_k = torch.tensor(counts, device=device)[:, None]
    # A top_p of 1.0 must keep all tokens, even if rounding makes the total probability of fewer tokens 1.
    masses = [one.top_p if one.top_p < 1 else math.inf for one in sampling]
    top_p = torch.tensor(masses, device=device, dtype=torch.float64)[:, None]
    limited = ((top_k < vocab) | (top_p < 1))[:, 0].nonzero()[:, 0]
    if len(limited):
        least = _least_kept(scores[limited], top_k[limited], top_p[limited])
        scores[limited] = scores[limited].masked_fill(scores[limited] < least, -math.inf)
    return scores


def _least_kept(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the lowest score that top_k and top_p keep, [R, 1]. A score is kept if it is one of the `top_k` highest,
    and if all likelier tokens together have a probability below `top_p`."""
    width = min(CANDIDATES, scores.shape[1])
    least, reached = _least_of(scores.topk(width, dim=1).values, scores, top_k, top_p)
    beyond = (~reached).nonzero()[:, 0]
    if len(beyond):
        whole = scores[beyond].sort(dim=1, descending=True).values
        least[beyond] = _least_of(whole, scores[beyond], top_k[beyond], top_p[beyond])[0]
    return least


def _least_of(ranked: Tensor, scores: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `_least_kept` from `ranked`, the highest scores of each row. Also return, for each row, whether these
    scores are sufficient."""
    width = ranked.shape[1]
    within = torch.arange(width, device=ranked.device) < top_k
    kept = ranked.double().masked_fill(~within, -math.inf)
    few = top_k <= width
    total = torch.where(few, kept.logsumexp(dim=1, keepdim=True), scores.double().logsumexp(dim=1, keepdim=True))
    share = (kept - total).exp()
    before = share.cumsum(dim=1) - share
    inside = within & (before < top_p)
    inside[:, 0] = True
    least = ranked.masked_fill(~inside, math.inf).amin(dim=1, keepdim=True)
    # If `few` is false, the total includes all tokens. This is correct for top_p only if top_k keeps all tokens.
    return least, (few | (~inside[:, -1:] & (top_k == scores.shape[1])))[:, 0] | (width == scores.shape[1])


# ---- log-probabilities ------------------------------------------------------------------------------------------


def describe(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[Logprobs]:
    """Return an entry per row r of `logits` [R, vocab]: logprobs of tokens[r] and of the num_top[r] likeliest tokens.

    The logprobs are computed from the raw logits, before penalties and temperature, as in vLLM. The rank of
    tokens[r] is the number of tokens that are at least as likely, so the most likely token has rank 1.
    """
    if not tokens:
        return []
    logprobs = logits.log_softmax(dim=-1)
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    values = logprobs.gather(1, chosen)
    ranks = (logprobs >= values).sum(dim=1).tolist()
    top = logprobs.topk(min(max(num_top), logits.shape[1]), dim=1)
    top_tokens, top_values = top.indices.tolist(), top.values.tolist()
    return [
        Logprobs(token, value, rank, ids[:count], best[:count])
        for token, value, rank, count, ids, best in zip(
            tokens, values[:, 0].tolist(), ranks, num_top, top_tokens, top_values, strict=True
        )
    ]

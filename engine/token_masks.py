"""Masks of the tokens that the grammars of requests allow. A thread computes them during the forward pass.

A mask depends only on the grammar and the tokens that were generated so far. It is therefore the same in any batch, and
also after a preemption, a handoff or a retry. Before a mask is computed, the request's matcher gets the generated
tokens that it has not seen yet.
"""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from time import monotonic, thread_time
from typing import Protocol

import numpy as np
import torch
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray
from torch import Tensor

from shared.grammar import GrammarTokenizer, one_line

log = logging.getLogger("baton.engine")
IntArray = NDArray[np.int32]
WORD_BITS = 32
# On average, a row's matcher may use ROW_S of processor time to read the new tokens and to fill a mask. If the rows of
# a grammar together exceed this time by MAX_EXCESS_S, the grammar's requests fail, because they delay other requests.
# The excess falls by FORGIVEN_S per second. Later requests with this grammar may therefore succeed.
ROW_S, MAX_EXCESS_S, FORGIVEN_S = 0.002, 2.0, 0.02
LEXER_IS_FULL = "lexer error: too many"  # part of the errors of llguidance for too many states, or too many new ones
AT_ONCE = 32  # number of tokens to read between two masks, because llguidance limits the new states between two masks
# For each value of a byte of a mask, the limits (inf or -inf) on the logits of the byte's 8 tokens, float32 [256, 8].
LIMITS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
LIMITS = LIMITS.astype(np.float32)


class TokenMatcher:
    """The state of one request's grammar after some generated tokens. One thread at a time may use it."""

    def __init__(self, tokenizer: GrammarTokenizer, grammar: str) -> None:
        """Compile the grammar. Raises ValueError if it does not compile."""
        self.grammar, self._tokenizer = grammar, tokenizer
        self.restart()
        self.num_words, self.end_token = tokenizer.num_words, tokenizer.end_token

    def restart(self) -> None:
        """Return to the state before the first token. If the lexer that the matcher shared with other requests has
        reached its limit of states, use a new lexer."""
        self.matcher: LLMatcher = self._tokenizer.matcher(self.grammar)
        self._seen: list[int] = []

    def advance(self, generated: Sequence[int]) -> bool:
        """Move, forward or back, to the state after `generated`. Return False if the grammar forbids one of the tokens.

        In that case, the matcher stays in the state before the forbidden token. Because the matcher can go back,
        speculative decoding can advance it by guessed tokens.
        """
        seen, same = self._seen, len(self._seen)
        if list(generated[:same]) != seen:
            pairs = zip(seen, generated, strict=False)
            same = next((at for at, pair in enumerate(pairs) if pair[0] != pair[1]), len(generated))
            self.matcher.rollback(len(seen) - same)
            del seen[same:]
        for begin in range(same, len(generated), AT_ONCE):
            if begin > same:
                self.matcher.compute_bitmask()
            new = list(generated[begin : begin + AT_ONCE])
            count = self.matcher.try_consume_tokens(new)
            seen += new[:count]
            if count < len(new):
                return False
        return True

    def fill(self, words: IntArray, index: int, generated: Sequence[int]) -> bool:
        """Set the bits of the tokens that may follow `generated` in row `index` of `words`. Return False, without
        changing the row, if the grammar forbids one of the tokens in `generated`."""
        for number in range(3):  # the lexer of the first new copy may also be almost full
            if number:
                self.restart()
            if is_allowed := self.advance(generated):
                fill_next_token_bitmask(self.matcher, words, index)
            else:
                self.matcher.compute_bitmask()  # a full lexer forbids all tokens, and reports the error only here
            if LEXER_IS_FULL not in self.matcher.get_error():
                break
        return is_allowed


class MaskedRow(Protocol):
    """The fields of `engine.sampling.SamplingRow` that a mask depends on."""

    tokens: Sequence[int]
    num_prompt: int
    position: int
    stop_tokens: frozenset[int]
    min_tokens: int
    matcher: TokenMatcher | None

    @property
    def forced_token(self) -> int | None: ...


@dataclass(slots=True)
class TokenMasks:
    """The masks of some rows of logits. Bit b of word w of `words` is set if the row's token 32 w + b is allowed."""

    rows: list[int]
    words: IntArray  # [len(rows), W]

    def apply_(self, logits: Tensor) -> None:
        """Set the logits of forbidden tokens to -inf, in place. `logits` is float32 [R, vocab]."""
        limits = _limits(self.words, logits.device)
        width = min(limits.shape[1], logits.shape[1])
        at = slice(None) if len(self.rows) == len(logits) else torch.tensor(self.rows, device=logits.device)
        logits[at, :width] = torch.minimum(logits[at, :width], limits[:, :width])
        logits[at, width:] = -torch.inf  # the tokenizer does not have these tokens


def _limits(words: IntArray, device: torch.device) -> Tensor:
    """Return inf for each bit of `words` [R, W] that is set, and -inf for the others, float32 [R, 32 W]."""
    octets = words.view(np.uint8)
    return torch.from_numpy(LIMITS).to(device)[torch.from_numpy(octets).to(device).int()].flatten(1)


class MaskFiller:
    """Computes the masks of a step's rows on a separate thread. A runner owns it and calls it from one thread.

    If `num_threads` is at least 2, this number of additional threads fills the masks. The default is a quarter of the
    cores, because the other cores run the pass.
    """

    def __init__(self, num_threads: int = len(os.sched_getaffinity(0)) // 4) -> None:
        self._num_threads = num_threads
        self._excess_s: dict[str, float] = {}  # grammar -> sum of its rows' time above ROW_S; only slow grammars
        self._filled_at = monotonic()

    def start(self, rows: Sequence[MaskedRow]) -> Callable[[], TokenMasks | None]:
        """Begin to compute the masks of rows with a grammar. Return a function that waits for the masks and returns
        them. The function returns None if no row has a grammar.

        Rows of one request must be in order of their positions. A row whose grammar has failed allows no token.
        """
        masked = [index for index, row in enumerate(rows) if row.matcher is not None]
        if not masked:
            return lambda: None
        return self._thread.submit(self._fill, masked, [rows[index] for index in masked]).result

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "masks")

    @cached_property
    def _threads(self) -> ThreadPoolExecutor | None:
        return ThreadPoolExecutor(self._num_threads, "masks") if self._num_threads > 1 else None

    def _fill(self, indices: list[int], rows: list[MaskedRow]) -> TokenMasks:
        matchers = [row.matcher for row in rows if row.matcher is not None]
        before, self._filled_at = self._filled_at, monotonic()
        less_s = FORGIVEN_S * (self._filled_at - before)
        self._excess_s = {name: each - less_s for name, each in self._excess_s.items() if each > less_s}
        words = np.zeros((len(rows), matchers[0].num_words), np.int32)
        left = list(range(len(rows)))
        while left:  # one row of each request at a time; a request has several rows only in speculative decoding
            now = list({id(matchers[index]): index for index in reversed(left)}.values())
            self._fill_some(words, [(index, rows[index], matchers[index]) for index in now])
            left = [index for index in left if index not in now]
        return TokenMasks(indices, words)

    def _fill_some(self, words: IntArray, some: list[tuple[int, MaskedRow, TokenMatcher]]) -> None:
        if self._threads is None:
            self._fill_part(words, some)
        else:
            parts = (some[at :: self._num_threads] for at in range(self._num_threads))
            list(self._threads.map(partial(self._fill_part, words), parts))

    def _fill_part(self, words: IntArray, part: list[tuple[int, MaskedRow, TokenMatcher]]) -> None:
        for index, row, matcher in part:
            if self._excess_s.get(matcher.grammar, 0.0) > MAX_EXCESS_S:
                continue  # the mask allows no token
            began_s = thread_time()
            is_allowed = matcher.fill(words, index, row.tokens[row.num_prompt : row.position])
            excess_s = self._excess_s.get(matcher.grammar, 0.0) + thread_time() - began_s - ROW_S
            self._excess_s[matcher.grammar] = max(0.0, excess_s)
            if excess_s > MAX_EXCESS_S:
                log.warning("the masks of a grammar take too much processor time: requests with this grammar fail")
            if is_allowed and matcher.matcher.is_error():
                log.warning("a grammar failed at token %d: %s", row.position, one_line(matcher.matcher.get_error()))
                words[index] = 0
            elif is_allowed:
                _allow_end(words[index], row, matcher)
                _force(words[index], row.forced_token)


def _allow_end(mask: IntArray, row: MaskedRow, matcher: TokenMatcher) -> None:
    """Allow the row's stop tokens if the text so far is complete, and forbid them otherwise.

    If fewer than `min_tokens` tokens were generated, a complete text may end only if the grammar allows no other token.
    """
    bits = mask.view(np.uint32)
    stops = [token for token in row.stop_tokens if token < len(bits) * WORD_BITS]
    for token in (matcher.end_token, *stops):
        bits[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)
    is_due = row.position - row.num_prompt >= row.min_tokens or not bits.any()
    if is_due and matcher.matcher.is_accepting():
        for token in stops:
            bits[token // WORD_BITS] |= np.uint32(1 << token % WORD_BITS)


def _force(mask: IntArray, token: int | None) -> None:
    """Allow only `token`, unless the mask forbids it."""
    bits = mask.view(np.uint32)
    if token is not None and token < len(bits) * WORD_BITS and bits[token // WORD_BITS] >> token % WORD_BITS & 1:
        bits[:] = 0
        bits[token // WORD_BITS] = 1 << token % WORD_BITS

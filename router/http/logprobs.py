"""The API's three formats of logprobs: parallel lists for completions, a list of objects for chat completions, and
vLLM's prompt logprobs."""

import codecs
from collections.abc import Sequence
from typing import Any

from router.text.tokenizer import Tokenizer
from shared.rpc.messages import Logprobs

FLOOR = -9999.0  # the same as in vLLM; JSON has no -Infinity


def _finite(logprob: float) -> float:
    return max(FLOOR, logprob)  # with the arguments in this order, NaN also becomes FLOOR


class CompletionLogprobs:
    """Formats logprobs for completions. It counts the text's characters for the offsets, so each sample has its own."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, skipped: frozenset[int], num_stripped: int) -> None:
        """Tokens in `skipped` add no text. The first `num_stripped` leading spaces are not part of the text."""
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._skipped = skipped
        self._offset = 0
        self._num_stripped = num_stripped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def table(self, entries: Sequence[Logprobs], unscored: int | None = None) -> dict[str, Any]:
        """Return the four lists for the next tokens. `unscored` is a prompt's first token, which has no logprob."""
        offsets: list[int] = []
        names: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        if unscored is not None:
            offsets.append(self._place(unscored))
            names.append(self._tokenizer.token_text(unscored))
            logprobs.append(None)
            tops.append(None)
        for entry in entries:
            offsets.append(self._place(entry.token))
            names.append(self._tokenizer.token_text(entry.token))
            logprobs.append(_finite(entry.logprob))
            tops.append(self._top(entry))
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": names, "top_logprobs": tops}

    def _place(self, token: int) -> int:
        """Return the offset at which the token's text begins, and advance past the text. All tokens that share a
        character have the offset of that character."""
        at = self._offset
        if token not in self._skipped:
            text = self._decoder.decode(self._tokenizer.vocabulary.bytes_of(token))
            while self._num_stripped and text:
                self._num_stripped = self._num_stripped - 1 if text[0] == " " else 0
                text = text[1:] if text[0] == " " else text
            self._offset += len(text)
        return at

    def _top(self, entry: Logprobs) -> dict[str, float]:
        """Return the logprobs of the most likely tokens and of the sampled token."""
        top = {self._tokenizer.token_text(entry.token): _finite(entry.logprob)}
        for token, logprob in _alternatives(entry, self._num_top):
            top.setdefault(self._tokenizer.token_text(token), _finite(logprob))
        return top


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[Logprobs], num_top: int) -> dict[str, Any]:
    """Format logprobs for chat completions. From `bytes`, clients can assemble characters split across tokens."""
    content = []
    for entry in entries:
        top = [_chat_token(tokenizer, token, logprob) for token, logprob in _alternatives(entry, num_top)]
        content.append(_chat_token(tokenizer, entry.token, entry.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[Logprobs], num_top: int) -> list[dict[str, Any] | None]:
    """Format a prompt's logprobs as vLLM does: for each token, a map from token id to entry. The map has the prompt's
    token and the most likely ones. The first token has no logprobs."""
    rows: list[dict[str, Any] | None] = [None]
    for entry in entries:
        row = {str(entry.token): _prompt_token(tokenizer, entry.token, entry.logprob, entry.rank)}
        for place, (token, logprob) in enumerate(_alternatives(entry, num_top)):
            row.setdefault(str(token), _prompt_token(tokenizer, token, logprob, place + 1))
        rows.append(row)
    return rows


def _alternatives(entry: Logprobs, num_top: int) -> list[tuple[int, float]]:
    return list(zip(entry.top_tokens[:num_top], entry.top_logprobs[:num_top], strict=True))


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.vocabulary.bytes_of(token)
    return {"token": tokenizer.token_text(token), "logprob": _finite(logprob), "bytes": list(data)}


def _prompt_token(tokenizer: Tokenizer, token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token)}

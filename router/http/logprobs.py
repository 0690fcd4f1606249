"""Logprobs as the API writes them: completions' parallel lists, chat's list of objects, vLLM's prompt logprobs."""

import codecs
from collections.abc import Sequence
from typing import Any

from router.text.tokenizer import Tokenizer
from shared.rpc.messages import Logprobs

FLOOR = -9999.0  # JSON has no -Infinity; vLLM's floor


def _finite(logprob: float) -> float:
    return max(FLOOR, logprob)  # in this order a NaN becomes the floor too


class CompletionLogprobs:
    """Completions' form. Offsets count characters of the text, so one object follows one sample from its start."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, skipped: frozenset[int], num_stripped: int) -> None:
        """`skipped` tokens have no text; the text is without its first `num_stripped` spaces."""
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._skipped = skipped
        self._offset = 0
        self._num_stripped = num_stripped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def table(self, entries: Sequence[Logprobs], unscored: int | None = None) -> dict[str, Any]:
        """The next tokens' four lists; `unscored` is a prompt's first token, which nothing predicts."""
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
        """Where this token's text begins; moves on to where it ends. Half characters begin where the whole does."""
        at = self._offset
        if token not in self._skipped:
            text = self._decoder.decode(self._tokenizer.vocabulary.bytes_of(token))
            while self._num_stripped and text:
                self._num_stripped = self._num_stripped - 1 if text[0] == " " else 0
                text = text[1:] if text[0] == " " else text
            self._offset += len(text)
        return at

    def _top(self, entry: Logprobs) -> dict[str, float]:
        """The most likely tokens, and the drawn one whether or not it is among them."""
        top = {self._tokenizer.token_text(entry.token): _finite(entry.logprob)}
        for token, logprob in _alternatives(entry, self._num_top):
            top.setdefault(self._tokenizer.token_text(token), _finite(logprob))
        return top


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[Logprobs], num_top: int) -> dict[str, Any]:
    """Chat completions' form; `bytes` lets a client put together characters that tokens share."""
    content = []
    for entry in entries:
        top = [_chat_token(tokenizer, token, logprob) for token, logprob in _alternatives(entry, num_top)]
        content.append(_chat_token(tokenizer, entry.token, entry.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[Logprobs], num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's form: per prompt token its own entry and the most likely ones by id; the first token has none."""
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

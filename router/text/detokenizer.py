"""Incremental detokenization, and the search for stop strings.

A detokenizer converts one sequence of tokens to text. It returns a piece of text as soon as no later token can change
this piece. It processes the bytes of each new token once, so that the cost of a token does not grow with the length of
the sequence. The concatenation of the returned pieces equals the tokenizer's own decoding of the whole sequence.

`tokenizers.decoders.DecodeStream` does not give these guarantees. While the text ends with U+FFFD, `DecodeStream` holds
the text back and decodes all of it again for each token. For 4,000 bytes of 0xFF, it returns no text and takes 740 us
for each token. One invalid byte changes the text of a whole run of byte tokens. If a part of this text was already
returned, `DecodeStream` raises "Invalid prefix".
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import tokenizers

from shared.errors import ConfigError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A run of byte tokens is decoded when the run ends, because one invalid byte changes the text of the whole run. If the
# run reaches HELD_BYTES bytes, its complete characters are returned early. A later invalid byte then changes only the
# rest of the run.
HELD_BYTES = 64
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return a map from GPT-2's printable characters to bytes (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


class TokenVocabulary:
    """The text or bytes that each token id stands for. The vocabulary reads the tokenizer's decoder once, and caches
    each token on first use. It belongs to one Tokenizer, and is thread-safe."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        written = json.loads(tokenizer.to_str())
        self.size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special = frozenset(
            number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._replacements: list[tuple[str, str]] = []
        self.byte_level = False
        self.strip_start = 0  # number of leading spaces that decoding removes from the start of a text
        self._read_decoder(written["decoder"] or {"type": None})
        self.max_token_bytes = _max_token_bytes(written)
        self.piece = cache(self._read_piece)
        self.bytes_of = cache(self._read_bytes)

    def _read_decoder(self, decoder: dict[str, Any]) -> None:
        """Read a byte-level or byte-fallback decoder. Raises ConfigError for any other decoder."""
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            self.byte_level = True
            return
        if [kind for kind in kinds if kind not in ("Replace", "Strip")] != ["ByteFallback", "Fuse"]:
            raise ConfigError(f"tokenizer.json: decoder {kinds} is not supported; byte-level or byte-fallback BPE is")
        for place, step in enumerate(steps):
            if step["type"] == "Replace" and "String" in step["pattern"] and place < kinds.index("Fuse"):
                self._replacements.append((step["pattern"]["String"], step["content"]))
            elif step["type"] == "Strip" and step["content"] == " " and not step["stop"] and place == len(steps) - 1:
                self.strip_start = step["start"]
            elif step["type"] in ("Replace", "Strip"):
                raise ConfigError(f"tokenizer.json: decoder step {step} is not supported")

    def _read_piece(self, token: int) -> str | int | None:
        """Return the text of a token, or the byte of a byte-fallback token. Return None for an unknown id."""
        text: str | None = self._tokenizer.id_to_token(token)
        if text is None or self.byte_level:
            return text
        for pattern, content in self._replacements:
            text = text.replace(pattern, content)
        byte = BYTE_TOKEN.fullmatch(text)
        return int(byte[1], 16) if byte else text

    def _read_bytes(self, token: int) -> bytes:
        """Return the bytes that the token adds to the UTF-8 text. They may be only a part of a character."""
        piece = self.piece(token)
        if piece is None or isinstance(piece, int):
            return b"" if piece is None else bytes([piece])
        if self.byte_level and all(character in BYTE_ALPHABET for character in piece):
            return bytes(BYTE_ALPHABET[character] for character in piece)
        return piece.encode()


def _max_token_bytes(written: dict[str, Any]) -> int:
    """Return the maximum number of bytes of text that one token can stand for, or 0 if there is no bound.

    There is no bound if the tokenizer drops text or rewrites it (except by NFC), or if a token absorbs adjacent spaces.
    `written` is the content of tokenizer.json.
    """
    cutter, model, added = written["pre_tokenizer"] or {}, written["model"], written["added_tokens"]
    # In the worst case (U+1FBE U+0308 U+0301), NFC shrinks 7 bytes of text to 2.
    shrinks = {None: 1, "NFC": 4}.get((written["normalizer"] or {"type": None})["type"])
    steps = cutter.get("pretokenizers", [cutter])
    keeps_all = all(
        step.get("type") == "ByteLevel" or (step.get("type") == "Split" and step["behavior"] != "Removed")
        for step in steps
    ) and any(step.get("type") == "ByteLevel" for step in steps)
    knows_all = model.get("type") == "BPE" and BYTE_ALPHABET.keys() <= model["vocab"].keys()
    if shrinks is None or not keeps_all or not knows_all or any(token["lstrip"] or token["rstrip"] for token in added):
        return 0
    return shrinks * max([*map(len, model["vocab"]), *(len(token["content"].encode()) for token in added)])


class ByteLevelDetokenizer:
    """A detokenizer for byte-level BPE (GPT-2, Llama 3, Qwen), where the bytes of all tokens form one UTF-8 text.

    `push` and `finish` return the text that no later token can change.
    """

    def __init__(self, vocabulary: TokenVocabulary, skipped: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Iterable[int]) -> str:
        bytes_of = self._vocabulary.bytes_of
        return self._decoder.decode(b"".join([bytes_of(t) for t in tokens if t not in self._skipped]))

    def num_before(self, token: int) -> int:
        """Return the number of characters between the end of the returned text and the start of the text of `token`,
        which is the next token. The text of a token that continues a character starts where that character starts."""
        if token in self._skipped or not (data := self._vocabulary.bytes_of(token)):
            return 0
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.setstate(self._decoder.getstate())
        return len(decoder.decode(data[:1])) + bool(decoder.getstate()[0]) - 1

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteFallbackDetokenizer:
    """A detokenizer for SentencePiece-like BPE (Llama 2, Mistral, Gemma), which has text tokens and byte tokens.

    If a run of byte tokens is not valid UTF-8, each byte of the run becomes one U+FFFD, even in parts of the run that
    are valid. The tokenizer's own decoding does the same.
    """

    def __init__(self, vocabulary: TokenVocabulary, skipped: frozenset[int], *, at_start: bool) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._strip = vocabulary.strip_start if at_start else 0
        self._run = bytearray()
        self._spoilt = False  # a U+FFFD was already returned for this run

    def push(self, tokens: Iterable[int]) -> str:
        out: list[str] = []
        for token in tokens:
            if token in self._skipped:
                continue
            piece = self._vocabulary.piece(token)
            if isinstance(piece, int):
                self._run.append(piece)
                if len(self._run) >= HELD_BYTES:
                    out.append(self._whole_characters())
            elif piece is not None:
                out += (self._end_of_run(), piece)
        return self._stripped("".join(out))

    def num_before(self, token: int) -> int:
        """Return the number that `ByteLevelDetokenizer.num_before` describes. For a byte token, assume that later bytes
        make the run valid."""
        piece = None if token in self._skipped else self._vocabulary.piece(token)
        if not isinstance(piece, int) or self._spoilt:
            return 0 if piece is None else len(self._text_of_run())
        try:
            text, used = codecs.utf_8_decode(self._run + bytes([piece]), "strict", False)
            return len(text) + (used <= len(self._run)) - 1
        except UnicodeDecodeError:
            return len(self._run)

    def finish(self) -> str:
        return self._stripped(self._end_of_run())

    def _text_of_run(self) -> str:
        try:
            return REPLACEMENT * len(self._run) if self._spoilt else self._run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(self._run)

    def _end_of_run(self) -> str:
        text = self._text_of_run()
        self._run, self._spoilt = bytearray(), False
        return text

    def _whole_characters(self) -> str:
        try:
            text, used = ("", 0) if self._spoilt else codecs.utf_8_decode(self._run, "strict", False)
        except UnicodeDecodeError:
            text, used = "", 0
        if not used:
            self._spoilt = True
            text, used = REPLACEMENT * len(self._run), len(self._run)
        del self._run[:used]
        return text

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            num_spaces = min(self._strip, len(text) - len(text.lstrip(" ")))
            self._strip = self._strip - num_spaces if num_spaces == len(text) else 0
            text = text[num_spaces:]
        return text


Detokenizer = ByteLevelDetokenizer | ByteFallbackDetokenizer


def len_begun(text: str, markers: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of the text that is the beginning of a marker."""
    if not any(marker[0] in text for marker in markers):  # the usual case, which should be fast
        return 0
    for start in range(max(0, len(text) + 1 - max(map(len, markers))), len(text)):
        tail = text[start:]
        if any(marker.startswith(tail) and marker != tail for marker in markers):
            return len(tail)
    return 0


class StopStrings:
    """Searches a text that arrives in pieces for stop strings.

    The match is the stop string that ends first; if several end at the same position, it is the longest of them. The
    result does not depend on how the text is split into pieces. The end of the text is held back if it may be the
    beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is not held back. A match sets `matched`; after a match, no more text may be pushed."""
        assert self.matched is None, "text was pushed after the stop string"
        if not self._stops:
            return text
        text = self._held + text
        ends = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if ends:
            end, start, self.matched = min(ends)
            self._held = ""
            return text[: end if self._include else start]
        cut = len(text) - len_begun(text, self._stops)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """End the text, and return the part that was held back."""
        held, self._held = self._held, ""
        return held

"""Text to token ids and back: encoding, decoding as tokens arrive, and stop strings. No HTTP and no requests here.

A decoder never takes back what it gave. It works on each token's own bytes, so that a step costs what its tokens
cost, however long the row is; the concatenation of its pieces is the tokenizer's own decoding of the whole row.
"""

import codecs
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from router.text.chat_template import ChatTemplate, Message, special_tokens
from router.text.model_files import read_object
from router.text.regex_safety import check_patterns
from shared.errors import ConfigError, RequestError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A run of byte tokens is decided only where it ends (one bad byte spoils all of it). A stream does not wait for
# more than this many bytes: then whole characters are given out, though what follows may spoil the rest.
HELD_BYTES = 64
MAX_TOKENIZER_BYTES, MAX_CONFIG_BYTES = 128 << 20, 16 << 20  # some models' are 35 MB and 1.2 MB
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


class Detokenizer(Protocol):
    """Text of one row of tokens, given out as soon as no later token can change it."""

    def push(self, tokens: Iterable[int]) -> str: ...

    def finish(self) -> str:
        """The rest, with half characters replaced as the tokenizer would; the row is over."""


class TokenVocabulary:
    """What each token id stands for: bytes of the text, and for byte-fallback tokens that it is a lone byte."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        written = json.loads(tokenizer.to_str())
        self.size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special = frozenset(
            number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._replacements: list[tuple[str, str]] = []
        self.byte_level = False
        self.strip_start = 0  # how many leading spaces a whole text loses
        self._read_decoder(written["decoder"])
        self.most_bytes = _most_bytes(written)
        self._bytes: dict[int, bytes] = {}
        self._pieces: dict[int, str | int | None] = {}

    def _read_decoder(self, decoder: dict[str, Any] | None) -> None:
        """Takes over the two families of decoders that language models use, and refuses any other by name."""
        decoder = decoder or {"type": None}
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            self.byte_level = True
            return
        if [kind for kind in kinds if kind not in ("Replace", "Strip")] != ["ByteFallback", "Fuse"]:
            raise ConfigError(f"tokenizer.json: decoder {kinds} is not supported (byte-level or byte-fallback BPE is)")
        for place, step in enumerate(steps):
            if step["type"] == "Replace" and "String" in step["pattern"] and place < kinds.index("Fuse"):
                self._replacements.append((step["pattern"]["String"], step["content"]))
            elif step["type"] == "Strip" and step["content"] == " " and not step["stop"] and place == len(steps) - 1:
                self.strip_start = step["start"]
            elif step["type"] in ("Replace", "Strip"):
                raise ConfigError(f"tokenizer.json: decoder step {step} is not supported")

    def piece(self, token: int) -> str | int | None:
        """Text of a token, or its byte if it is a byte-fallback token; None for an id that means nothing."""
        if token not in self._pieces:
            self._pieces[token] = self._read_piece(self._tokenizer.id_to_token(token))
        return self._pieces[token]

    def _read_piece(self, text: str | None) -> str | int | None:
        if text is None or self.byte_level:
            return text
        for pattern, content in self._replacements:
            text = text.replace(pattern, content)
        byte = BYTE_TOKEN.fullmatch(text)
        return int(byte[1], 16) if byte else text

    def bytes_of(self, token: int) -> bytes:
        """The token's share of the text's UTF-8; may be part of a character."""
        if token not in self._bytes:
            piece = self.piece(token)
            if piece is None or isinstance(piece, int):
                self._bytes[token] = b"" if piece is None else bytes([piece])
            elif self.byte_level and all(character in BYTE_ALPHABET for character in piece):
                self._bytes[token] = bytes(BYTE_ALPHABET[character] for character in piece)
            else:
                self._bytes[token] = piece.encode()
        return self._bytes[token]


def _most_bytes(written: dict[str, Any]) -> int:
    """Of a text's UTF-8 that one token can stand for; 0 where that may be any number: where text is dropped or
    rewritten before it is cut, or a token takes the spaces beside it too. `written`: tokenizer.json."""
    cutter, model, added = written["pre_tokenizer"] or {}, written["model"], written["added_tokens"]
    # NFC makes 2 bytes of 7 at most: of U+1FBE U+0308 U+0301.
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
    """For byte-level BPE (GPT-2, Llama 3, Qwen): all tokens' bytes are one UTF-8 text."""

    def __init__(self, vocabulary: TokenVocabulary, skipped: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Iterable[int]) -> str:
        bytes_of = self._vocabulary.bytes_of
        return self._decoder.decode(b"".join([bytes_of(t) for t in tokens if t not in self._skipped]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteFallbackDetokenizer:
    """For SentencePiece-like BPE (Llama 2, Mistral, Gemma): text tokens, and runs of byte tokens between them.

    A run that is not UTF-8 becomes one U+FFFD a byte, valid parts included; that is how the tokenizer decodes.
    """

    def __init__(self, vocabulary: TokenVocabulary, skipped: frozenset[int], *, at_start: bool) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._strip = vocabulary.strip_start if at_start else 0
        self._run = bytearray()
        self._spoilt = False  # this run gave out a replacement already

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

    def finish(self) -> str:
        return self._stripped(self._end_of_run())

    def _end_of_run(self) -> str:
        run, spoilt = bytes(self._run), self._spoilt
        self._run.clear()
        self._spoilt = False
        try:
            return REPLACEMENT * len(run) if spoilt else run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

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
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            self._strip -= 1
            text = text[1:]
        return text


class StopStrings:
    """Ends a text where it first comes to end with one of `stops`, cutting the longest that ends there.

    That is the answer for the text read character by character, so it does not depend on how the text arrives.
    Held back is the shortest tail that could still become a stop string.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is final. After a match (`matched` is set) nothing more may be pushed."""
        assert self.matched is None, "text after the stop string"
        if not self._stops:
            return text
        text = self._held + text
        ends = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if ends:
            end, start, self.matched = min(ends)
            self._held = ""
            return text[: end if self._include else start]
        cut = len(text) - self._partial(text)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held back; the text is over."""
        held, self._held = self._held, ""
        return held

    def _partial(self, text: str) -> int:
        """Length of the longest tail of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while at >= 0 and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1)
            if at >= 0:
                longest = max(longest, len(text) - at)
        return longest


class Tokenizer:
    """A model's own tokenizer and chat template."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, config: dict[str, Any], template: ChatTemplate | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._as_text = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self._as_text.encode_special_tokens = True
        self._template = template
        self.vocabulary = TokenVocabulary(tokenizer)
        self._front, self._back = _missing_affixes(tokenizer, config)

    @classmethod
    def load(cls, directory: Path, vocab_size: int = 0) -> "Tokenizer":
        """From tokenizer.json, tokenizer_config.json and chat_template.jinja; `vocab_size`: the model's, 0 for unknown.

        Raises ConfigError naming the file, also for tokens that the model has no embedding of.
        """
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{file} does not exist (only tokenizers in tokenizer.json form are supported)")
        if file.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ConfigError(f"{file} is over {MAX_TOKENIZER_BYTES} bytes: not a tokenizer")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
            check_patterns(tokenizer)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{file}: {str(error)[:300]}") from error
        last = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)
        if vocab_size and last >= vocab_size:  # what was added later is refused by request: some models do without
            raise ConfigError(f"{file}: token id {last} is beyond the vocab_size {vocab_size} of config.json")
        config_file = directory / "tokenizer_config.json"
        config = read_object(config_file, MAX_CONFIG_BYTES) if config_file.is_file() else {}
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        return cls(tokenizer, config, ChatTemplate.load(directory, config, special))

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    def least_tokens(self, text: str) -> int:
        """No more than `encode` gives, told at once; 0 where only encoding tells."""
        most = self.vocabulary.most_bytes
        return len(text.encode(errors="replace")) // most if most else 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; names of special tokens in it become those tokens, as everywhere in this field.

        Takes about a second for a megabyte, during which other threads run.
        """
        # Only the batch call lets other threads run, and without offsets it is faster.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if not add_special_tokens:
            return ids
        front, back = self._front, self._back
        if front is not None and ids[:1] != [front]:
            ids = [front, *ids]
        if back is not None and ids[-1:] != [back]:
            ids = [*ids, back]
        return ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Ids of a conversation in the model's own template. Raises Rejected if the template refuses it.

        A special token's name inside a message is text, never that token: the template marks where such names
        came from a message, and the tokens found there are put back as the ids of their spelling. Tokens cut
        the text where they stand, so nothing else of the encoding changes.
        """
        if self._template is None:
            raise RequestError("This model has no chat template; use /v1/completions.", "messages")
        text, spelt = self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        if not spelt:
            return self.encode(text, add_special_tokens)
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = []
        spelling: dict[str, list[int]] = {}
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            place = bisect_left(spelt, start)
            if token in self.vocabulary.special and place < len(spelt) and spelt[place] < end:
                name = text[start:end]
                if name not in spelling:
                    spelling[name] = self._as_text.encode(name, add_special_tokens=False).ids
                ids += spelling[name]
            else:
                ids.append(token)
        return ids

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole row."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(tokens) + detokenizer.finish()

    def detokenizer(self, prompt: Iterable[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """For a row that follows `prompt`: a text that goes on keeps the space before its first word."""
        skipped = self.vocabulary.special if skip_special_tokens else frozenset()
        if self.vocabulary.byte_level:
            return ByteLevelDetokenizer(self.vocabulary, skipped)
        at_start = all(token in skipped or self.vocabulary.piece(token) in (None, "") for token in prompt)
        return ByteFallbackDetokenizer(self.vocabulary, skipped, at_start=at_start)

    def token_text(self, token: int) -> str:
        """A token by itself, as OpenAI's logprobs name it: part of a character is `bytes:\\xf0\\x9f`."""
        data = self.vocabulary.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_name(self, token: int) -> str:
        """A token as the vocabulary spells it."""
        return self._tokenizer.id_to_token(token) or ""


def _missing_affixes(tokenizer: tokenizers.Tokenizer, config: dict[str, Any]) -> tuple[int | None, int | None]:
    """The beginning and ending tokens that the config asks for and tokenizer.json does not add by itself."""
    bare = tokenizer.encode("").ids
    names = special_tokens(config)
    front = tokenizer.token_to_id(names.get("bos_token", "")) if config.get("add_bos_token") else None
    back = tokenizer.token_to_id(names.get("eos_token", "")) if config.get("add_eos_token") else None
    return None if front in bare else front, None if back in bare else back

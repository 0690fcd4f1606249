"""A model's tokenizer. It encodes text, with or without the chat template, and decodes token ids."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from router.text.chat_template import Argument, ChatTemplate, Message, special_tokens
from router.text.detokenizer import ByteFallbackDetokenizer, ByteLevelDetokenizer, Detokenizer, TokenVocabulary
from router.text.regex_safety import check_patterns
from router.text.tool_syntax import AnswerSyntax, find_syntax
from shared.errors import ConfigError, RequestError
from shared.model_files import read_object

MAX_TOKENIZER_BYTES, MAX_CONFIG_BYTES = 128 << 20, 16 << 20  # some models have files of 35 MB and 1.2 MB


class Tokenizer:
    """A model's own tokenizer and chat template.

    A tokenizer does not change after its construction, so the event loop and worker threads can share it. `encode` and
    `encode_chat` are slow for long texts, so callers run them on a worker thread. Detokenizers are not shared.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        config: dict[str, Any],
        template: ChatTemplate | None = None,
        syntax: AnswerSyntax | None = None,
    ) -> None:
        """`syntax` describes how the model writes tool calls and reasoning; by default, it is derived from the
        template."""
        self.syntax = syntax or find_syntax(None if template is None else template.source)
        self._tokenizer = tokenizer
        self._as_text = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self._as_text.encode_special_tokens = True
        self._template = template
        self.vocabulary = TokenVocabulary(tokenizer)
        # Maps the names of special tokens to their ids. A grammar refers to these tokens by id, and a text in a grammar
        # never matches them. llguidance treats each added token <name> as special, even if the tokenizer does not.
        self.special_ids = {
            each.content: token
            for token, each in tokenizer.get_added_tokens_decoder().items()
            if each.special or (each.content.startswith("<") and each.content.endswith(">"))
        }
        self._front, self._back = _missing_affixes(tokenizer, config)
        markers = list(self.syntax.markers())
        self._markers = frozenset(
            token for name, token in self.special_ids.items() if any(name in marker for marker in markers)
        )

    @classmethod
    def load(
        cls, directory: Path, vocab_size: int = 0, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> "Tokenizer":
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja.

        `vocab_size` is the size of the model's vocabulary, or 0 if it is unknown. `tool_parser` and `reasoning_parser`
        are passed to `find_syntax`. Raises ConfigError if a file or the name of a parser is invalid, or if the model
        has no embedding for some of the tokens. The error names the file or the flag.
        """
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{file} does not exist (only tokenizers in the format of tokenizer.json are supported)")
        if file.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ConfigError(f"{file} is larger than {MAX_TOKENIZER_BYTES} bytes, so it is not a tokenizer")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
            check_patterns(tokenizer)
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"{file}: {str(error)[:300]}") from error
        last = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)
        if vocab_size and last >= vocab_size:  # added tokens may have higher ids; requests with them are rejected
            raise ConfigError(f"{file}: token id {last} is beyond the vocab_size {vocab_size} of config.json")
        config_file = directory / "tokenizer_config.json"
        config = read_object(config_file, MAX_CONFIG_BYTES) if config_file.is_file() else {}
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        template = ChatTemplate.load(directory, config, special)
        syntax = find_syntax(None if template is None else template.source, tool_parser, reasoning_parser)
        return cls(tokenizer, config, template, syntax)

    def least_tokens(self, text: str) -> int:
        """Return a lower bound for the number of tokens that `encode` would return."""
        max_bytes = self.vocabulary.max_token_bytes
        return len(text.encode(errors="replace")) // max_bytes if max_bytes else 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`. As in other servers, the name of a special token in the text is encoded as that
        token. The call takes about a second per megabyte, and other threads can run during this time."""
        # Only batch calls release the interpreter lock. `encode_batch_fast` omits offsets, which saves time.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if not add_special_tokens:
            return ids
        front = [] if self._front is None or ids[:1] == [self._front] else [self._front]
        back = [] if self._back is None or ids[-1:] == [self._back] else [self._back]
        return front + ids + back

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Argument] | None = None,
        add_special_tokens: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        image_markers: tuple[int, int, int] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation in the model's template. Raises RequestError if the template refuses it.

        If the conversation has images, `image_markers` is the value of `ImageRules.markers`.

        If a message contains the name of a special token, the name is encoded as plain text. `ChatTemplate.render`
        returns the offsets of such names. A special token at one of these offsets is replaced by the ids of its name as
        plain text. The ids of the other text do not change, because the tokenizer first splits the text at special
        tokens.
        """
        if self._template is None:
            raise RequestError("This model has no chat template; use /v1/completions.", "messages")
        text, name_offsets = self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            arguments=arguments,
            tools=tools,
            write_calls=None if self.syntax.tools is None else self.syntax.tools.written,
        )
        if image_markers is not None and len(set(image_markers)) > 1:
            text, name_offsets = self._mark_images(text, name_offsets, image_markers)
        if not name_offsets:
            return self.encode(text, add_special_tokens)
        # Only batch calls release the interpreter lock.
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            place = bisect_left(name_offsets, start)
            if token in self.vocabulary.special and place < len(name_offsets) and name_offsets[place] < end:
                ids += self._as_text.encode(text[start:end], add_special_tokens=False).ids
            else:
                ids.append(token)
        return ids

    def _mark_images(self, text: str, offsets: list[int], markers: tuple[int, int, int]) -> tuple[str, list[int]]:
        """After each image's begin marker in `text`, insert an image token and the end marker. Put blank lines before
        and after these three, as Gemma 3's processor does. Return the new text, and `offsets` adjusted to it."""
        start, token, end = map(self.token_name, markers)
        whole, names = f"\n\n{start}{token}{end}\n\n", set(offsets)
        places = [found.start() for found in re.finditer(re.escape(start), text) if found.start() not in names]
        begins = [0, *(place + len(start) for place in places)]  # where the texts between the markers begin
        parts = [text[begin:place] for begin, place in zip(begins, [*places, None], strict=True)]
        longer = len(whole) - len(start)
        return whole.join(parts), [offset + longer * bisect_left(places, offset) for offset in offsets]

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence of tokens."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(tokens) + detokenizer.finish()

    def detokenizer(
        self, prompt: Iterable[int] = (), *, skip_special_tokens: bool = True, keep_markers: bool = False
    ) -> Detokenizer:
        """Return a detokenizer for the tokens after `prompt`. It keeps a leading space if the prompt has any text.
        With `keep_markers`, it also keeps the special tokens that are markers of the model's syntax."""
        skipped = self.vocabulary.special if skip_special_tokens else frozenset()
        skipped -= self._markers if keep_markers else frozenset()
        if self.vocabulary.byte_level:
            return ByteLevelDetokenizer(self.vocabulary, skipped)
        at_start = all(token in skipped or self.vocabulary.piece(token) in (None, "") for token in prompt)
        return ByteFallbackDetokenizer(self.vocabulary, skipped, at_start=at_start)

    def token_text(self, token: int) -> str:
        """Return a token's text as in OpenAI's logprobs, such as `bytes:\\xf0\\x9f` for a part of a character."""
        data = self.vocabulary.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_id(self, name: str) -> int | None:
        """Return the id of the token with this spelling, or None if the vocabulary has no such token."""
        return self._tokenizer.token_to_id(name)

    def token_name(self, token: int) -> str:
        """Return the spelling of a token in the vocabulary."""
        return self._tokenizer.id_to_token(token) or ""


def _missing_affixes(tokenizer: tokenizers.Tokenizer, config: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the tokens to add before and after a text. A token is None if the config does not require it, or if
    tokenizer.json itself adds it."""
    bare = tokenizer.encode("").ids
    names = special_tokens(config)
    front = tokenizer.token_to_id(names.get("bos_token", "")) if config.get("add_bos_token") else None
    back = tokenizer.token_to_id(names.get("eos_token", "")) if config.get("add_eos_token") else None
    return None if front in bare else front, None if back in bare else back

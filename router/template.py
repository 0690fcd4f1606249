"""A model's chat template: messages in, one prompt text out, in Jinja's sandbox. Clients bring no template."""

import json
import re
import secrets
import time
from collections.abc import Sequence
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import ConfigError, Rejected

MAX_CHARACTERS = 8 << 20  # of a rendered prompt; far beyond any context, far below what hurts
RENDER_S = 2.0  # checked whenever the template writes something


# One turn of a conversation: `role`, `content` and, where given, `name`.
Message = dict[str, str]


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like of a tokenizer_config.json, which writes a token as text or as an object."""
    found = {}
    for key in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[key] = text
    return found


def _source(directory: Path, config: dict[str, Any]) -> str | None:
    """The template's text: the file of its own, else tokenizer_config.json's, of several the one named default."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template if isinstance(template, str) else None


def _refuse(message: object) -> NoReturn:
    raise Rejected(f"The chat template refuses this conversation: {str(message)[:200]}", "messages")


def _to_json(value: object, indent: int | None = None) -> str:
    """Jinja's own filter escapes HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """A compiled template. The sandbox keeps it from the machine; size and time bound what it may write.

    A loop that writes nothing is not bounded, so rendering belongs on a worker thread.
    """

    def __init__(self, source: str, tokens: dict[str, str], special: Sequence[str]) -> None:
        """`tokens` are bos_token and so on; `special` are all names that the tokenizer takes for control tokens."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error
        self._tokens = tokens
        names = sorted((re.escape(name) for name in special if name), key=len, reverse=True)
        self._special = re.compile("|".join(names)) if names else None

    @classmethod
    def load(cls, directory: Path, config: dict[str, Any]) -> "ChatTemplate | None":
        """None when the model has no template. Raises ConfigError when it has one that does not compile."""
        source = _source(directory, config)
        if source is None:
            return None
        added = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens") or []
        return cls(source, special_tokens(config), [token["content"] for token in added if token["special"]])

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, continue_final_message: bool
    ) -> tuple[str, list[int]]:
        """The prompt, and the places in it where a message spells a special token. Raises Rejected."""
        mark = f"\ue000{secrets.token_hex(8)}\ue001"  # no client can guess it, so none can forge or remove it
        marked = [self._marked(message, mark) for message in messages]
        text = self._write(messages=marked, add_generation_prompt=add_generation_prompt)
        if continue_final_message:
            text = _up_to_the_end_of(marked[-1]["content"], text)
        parts = text.split(mark)
        return "".join(parts), list(accumulate(len(part) for part in parts[:-1]))

    def _marked(self, message: Message, mark: str) -> Message:
        special = self._special
        if special is None:
            return message
        return {key: special.sub(lambda found: mark + found[0], text) for key, text in message.items()}

    def _write(self, **values: object) -> str:
        deadline = time.monotonic() + RENDER_S
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(**self._tokens, **values, tools=None, documents=None):
                parts.append(part)
                size += len(part)
                if size > MAX_CHARACTERS or time.monotonic() > deadline:
                    _refuse("it makes too much of it")
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise Rejected("The chat template cannot render this conversation.", "messages") from error
        return "".join(parts)


def _up_to_the_end_of(content: str, text: str) -> str:
    """`text` without what the template writes after the last message, so that the answer goes on with it."""
    at = text.rfind(content.strip())
    if at < 0:
        raise Rejected("The chat template changes the final message; it cannot be continued.", "messages")
    return text[: at + len(content.strip())]

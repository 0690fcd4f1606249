"""A model's chat template: messages in, one prompt text out, in a process of its own. Clients bring no template."""

import contextlib
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from router.text import renderer
from shared.errors import ConfigError, RequestError

MAX_SOURCE_BYTES = 1 << 20
PATIENCE_S = renderer.RENDER_S + 8.0  # on a busy machine; the renderer's own alarm comes first

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
        if file.stat().st_size > MAX_SOURCE_BYTES:
            raise ConfigError(f"{file} is over {MAX_SOURCE_BYTES} bytes: not a chat template")
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _refuse(message: str) -> NoReturn:
    raise RequestError(f"The chat template refuses this conversation: {message}", "messages")


class Renderer:
    """The process of `router.text.renderer` with one template in it; begun anew after a template that did not end.

    Thread-safe: conversations wait for each other, each for at most RENDER_S.
    """

    def __init__(self, source: str) -> None:
        """Raises ConfigError when the template does not compile."""
        self._source = source
        self._lock = threading.Lock()
        self._begin()

    def render(self, values: dict[str, object]) -> str:
        """Raises Rejected when the template refuses, fails, or takes too long or too much."""
        with self._lock:
            if self._process.poll() is not None:
                self._begin()
            answer = self._ask(values)
        if answer is None:
            _refuse("it takes too long or too much memory")
        if "refused" in answer:
            _refuse(answer["refused"])
        if "failed" in answer:
            raise RequestError("The chat template cannot render this conversation.", "messages")
        return answer["text"]

    def _begin(self) -> None:
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(PATIENCE_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", renderer.__file__], stdin=theirs.fileno(), stdout=subprocess.DEVNULL
            )
        self.close = weakref.finalize(self, _end, self._process, self._connection)
        answer = self._ask(self._source)
        if answer is None or "failed" in answer:
            reason = answer["failed"] if answer else "it takes too long or too much memory"
            raise ConfigError(f"the model's chat template does not compile: {reason}")

    def _ask(self, question: object) -> dict[str, str] | None:
        """None: the process has ended, or was ended, instead of answering."""
        try:
            renderer.send(self._connection, question)
            answer: dict[str, str] = renderer.receive(self._connection)
            return answer
        except (OSError, EOFError):
            self.close()
            return None


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)
    process.wait()


class ChatTemplate:
    """A compiled template. Rendering waits for another process, so it belongs on a worker thread."""

    def __init__(self, source: str, tokens: dict[str, str], special: Sequence[str]) -> None:
        """`tokens` are bos_token and so on; `special` are all names that the tokenizer takes for control tokens."""
        self._renderer = Renderer(source)
        self._tokens = tokens
        names = sorted((re.escape(name) for name in special if name), key=len, reverse=True)
        self._special = re.compile("|".join(names)) if names else None

    @classmethod
    def load(cls, directory: Path, config: dict[str, Any], special: Sequence[str]) -> "ChatTemplate | None":
        """None when the model has no template; `special` as above. Raises ConfigError when it does not compile."""
        source = _source(directory, config)
        if source is None:
            return None
        return cls(source, special_tokens(config), special)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, continue_final_message: bool
    ) -> tuple[str, list[int]]:
        """The prompt, and the places in it where a message spells a special token. Raises Rejected."""
        mark = f"\ue000{secrets.token_hex(8)}\ue001"  # no client can guess it, so none can forge or remove it
        marked = [self._marked(message, mark) for message in messages]
        given = {"messages": marked, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        text = self._renderer.render(self._tokens | given)
        if continue_final_message:
            text = _up_to_the_end_of(marked[-1]["content"], text)
        parts = text.split(mark)
        return "".join(parts), list(accumulate(len(part) for part in parts[:-1]))

    def _marked(self, message: Message, mark: str) -> Message:
        special = self._special
        if special is None:
            return message
        return {key: special.sub(lambda found: mark + found[0], text) for key, text in message.items()}


def _up_to_the_end_of(content: str, text: str) -> str:
    """`text` without what the template writes after the last message, so that the answer goes on with it."""
    at = text.rfind(content.strip())
    if at < 0:
        raise RequestError("The chat template changes the final message; it cannot be continued.", "messages")
    return text[: at + len(content.strip())]

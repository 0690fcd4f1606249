"""A model's chat template, rendered in a child process. Clients cannot supply a template.

A template is a program that comes with the model. Jinja's sandbox denies the template access to the file system, but
does not limit its time or memory, and Python cannot stop a thread. Therefore this module also runs as a child process
(`python -m router.text.chat_template`), whose CPU time and memory are limited. The child reads the template from its
first line of input, and the variables of one conversation from each later line. Because the child is a separate
process, a long conversation does not hold the router's interpreter lock either.
"""

import contextlib
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.text.child_process import ChildProcess, limit_process, questions, reply
from shared.errors import ConfigError, RequestError

MAX_SOURCE_BYTES = 1 << 20
MEMORY_BYTES = 512 << 20  # limit of the child's address space; an interpreter with Jinja takes 50 MiB
MAX_CHARACTERS = 8 << 20  # limit of a rendered prompt; no model's context has room for more
RENDER_S = 2  # CPU time limit for one conversation, after which the child is killed
TOO_MUCH = "it takes too long or too much memory"

# One message of a conversation: `role`, `content` and further fields, with JSON values.
Message = dict[str, Any]
Argument = bool | int | float | str | None


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens in a tokenizer_config.json, as a map from names such as `bos_token` to texts. In the
    file, a token is a string or an object."""
    found = {}
    for key in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[key] = text
    return found


def longest_of(names: Iterable[str]) -> str:
    """Return a regular expression that matches the longest name that begins at a position, or "" if `names` is empty.

    The expression contains the common beginning of several names only once, so few alternatives are tried at each
    position. With a plain list of 1,000 names, the search in a megabyte of text would take seconds, and no other thread
    could run during this time."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(name[0], []).append(name)
    parts: list[str] = []
    for group in groups.values():
        first, last = group[0], group[-1]
        begin = next(first[:size] for size in range(len(first), 0, -1) if last.startswith(first[:size]))
        rest = longest_of(name[len(begin) :] for name in group if name != begin)
        parts.append(re.escape(begin) + (f"(?:{rest}){'?' if begin in group else ''}" if rest else ""))
    return "|".join(parts)


def _source(directory: Path, config: dict[str, Any]) -> str | None:
    """Return the text of chat_template.jinja or, without it, the default template in tokenizer_config.json. If `config`
    also has a template for requests with tools, return one template that contains both."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        if file.stat().st_size > MAX_SOURCE_BYTES:
            raise ConfigError(f"{file} is larger than {MAX_SOURCE_BYTES} bytes, so it is not a chat template")
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template, for_tools = named.get("default"), named.get("tool_use")
        if isinstance(template, str) and isinstance(for_tools, str):  # Jinja ignores one newline at the end of each
            first, second = for_tools.removesuffix("\n"), template.removesuffix("\n")
            template = f"{{% if tools +%}}{first}{{%+ else +%}}{second}{{%+ endif %}}"
    return template if isinstance(template, str) else None


class ChatTemplate:
    """A model's chat template, which a child process compiles and renders.

    The router's tokenizer owns the template, and the template owns the child process. `render` blocks, so callers run
    it on a worker thread. It is thread-safe: conversations are rendered one at a time, each within RENDER_S.
    """

    def __init__(self, source: str, tokens: dict[str, str], special: Sequence[str]) -> None:
        """`tokens` maps names such as bos_token to the texts of tokens; `special` has the texts of all special tokens.

        Raises ConfigError when the template does not compile.
        """
        self.source = source
        # Phi-4-mini's template does not read the variable `tools`, but reads JSON from `tools` of the system message.
        self._reads_message = "message['tools']" in source and not re.search(r"(?<!['\"\w.])tools\b", source)
        # The first templates of DeepSeek R1 and its distilled models show a message's content or its calls, not both.
        self._splits_calls = "message['role'] == 'assistant' and message['content'] is not none" in source
        self._has_developer = "'developer'" in source or '"developer"' in source
        self._tokens = tokens
        self._special = re.compile(longest_of({name for name in special if name}) or "(?!)")  # "(?!)" matches nothing
        self._lock = threading.Lock()
        self._child = ChildProcess("router.text.chat_template", source)
        reasons = self._child.start()
        if reasons != {}:
            reason = TOO_MUCH if reasons is None else reasons["failed"]
            raise ConfigError(f"the model's chat template does not compile: {reason}")

    @classmethod
    def load(cls, directory: Path, config: dict[str, Any], special: Sequence[str]) -> "ChatTemplate | None":
        """Return the model's template, or None if there is none. Raises ConfigError when it does not compile."""
        source = _source(directory, config)
        return None if source is None else cls(source, special_tokens(config), special)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        arguments: Mapping[str, Argument] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        write_calls: Callable[[list[Any]], str] | None = None,
    ) -> tuple[str, list[int]]:
        """Return the prompt, and the offsets in it at which the client's text contains the name of a special token.

        `arguments` are the client's variables for the template, such as `enable_thinking`. `tools` are definitions of
        functions. If the template does not show earlier calls, each message's calls are appended to its content, as the
        text that `write_calls` returns.

        Raises RequestError when the template refuses the conversation, fails, or exceeds its time or memory.
        """
        mark = f"\ue000{secrets.token_hex(8)}\ue001"  # random, so that no client can forge or remove it
        messages = self._with_known_roles(messages)
        if tools and self._reads_message:
            has_system = messages[0]["role"] == "system"
            first = messages[0] if has_system else {"role": "system", "content": ""}
            listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
            messages = [first | {"tools": listed}, *messages[has_system:]]
        marked = [self._marked(message, mark) for message in messages]
        end, space = f"\ue002{secrets.token_hex(8)}\ue003", ""
        if continue_final_message:
            if not isinstance(content := marked[-1]["content"], str):
                raise RequestError("A final message with images cannot be continued.", "continue_final_message")
            space = content[len(content.rstrip()) :]  # templates may remove this space
            marked[-1]["content"] = content.rstrip() + end + space
        if write_calls is not None and "tool_calls" not in self.source:
            for message in marked:
                if message.get("tool_calls") and isinstance(message["content"], str):
                    message["content"] += write_calls([call["function"] for call in message["tool_calls"]])
        if self._splits_calls:
            marked = [part for message in marked for part in _without_content(message)]
        own = {key: self._marked(value, mark) for key, value in (arguments or {}).items()}
        given = {"messages": marked, "add_generation_prompt": add_generation_prompt, "documents": None}
        given["tools"] = [self._marked(tool, mark) for tool in tools] or None
        with self._lock:
            answer = self._child.ask(self._tokens | own | given) or {"refused": TOO_MUCH}
        if "refused" in answer:
            raise RequestError(f"The chat template refuses this conversation: {answer['refused']}", "messages")
        if "failed" in answer:
            raise RequestError("The chat template cannot render this conversation.", "messages")
        text = answer["text"]
        if continue_final_message:  # remove the text that the template adds after the message
            text, found, after = text.rpartition(end)
            if not found:
                raise RequestError("The chat template omits the final message; it cannot be continued.", "messages")
            text = text.replace(end, "") + (space if after.startswith(space) else "")
        parts = text.split(mark)
        return "".join(parts), list(accumulate(len(part) for part in parts[:-1]))

    def _with_known_roles(self, messages: Sequence[Message]) -> Sequence[Message]:
        """If there are messages of the developer, and the template does not have this role, join these messages and
        those of the system to one system message at the beginning, as vLLM does. Most templates omit other roles."""
        if self._has_developer or all(message["role"] != "developer" for message in messages):
            return messages
        texts: list[str] = []
        others: list[Message] = []
        for message in messages:
            if message["role"] in ("system", "developer") and isinstance(message["content"], str):
                texts.append(message["content"])
            else:
                others.append(message)
        return [{"role": "system", "content": "\n\n".join(texts)}, *others]

    def _marked(self, value: Any, mark: str) -> Any:
        """Return a JSON value, with `mark` inserted before each special token in the value's strings."""
        if isinstance(value, str):
            return self._special.sub(lambda found: mark + found[0], value)
        if isinstance(value, dict):
            return {self._marked(key, mark): self._marked(each, mark) for key, each in value.items()}
        return [self._marked(each, mark) for each in value] if isinstance(value, list) else value


def _without_content(message: Message) -> list[Message]:
    """Divide a message so that no part has both calls and content. The content of a part with calls is None."""
    if not message.get("tool_calls"):
        return [message]
    said = {key: value for key, value in message.items() if key != "tool_calls"}
    return [said] * bool(message["content"]) + [message | {"content": None}]


# The rest of this module runs in the child process.


class CallArguments(dict[str, Any]):
    """The arguments of an earlier call. Most templates expect an object, but those of DeepSeek and Apertus concatenate
    the arguments with strings. Concatenation converts the arguments to JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, after: str) -> str:
        return str(self) + after

    def __radd__(self, before: str) -> str:
        return before + str(self)


class GenerationBlock(Extension):
    """Accepts `{% generation %}`, with which templates mark the assistant's tokens for training."""

    tags = {"generation"}  # noqa: RUF012 - as in Jinja

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateRefusedError(Exception):
    """The template called `raise_exception`."""


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusedError(str(message)[:200])


def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own filter escapes HTML
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(str(form)),
    }
    return environment.from_string(source)


def _render(template: jinja2.Template, values: dict[str, Any]) -> dict[str, str]:
    """Return {"text": ...}, {"refused": the template's message}, or {"failed": the exception}."""
    try:
        for call in [call for message in values["messages"] for call in message.get("tool_calls", ())]:
            call["function"]["arguments"] = CallArguments(call["function"]["arguments"])
        parts: list[str] = []
        size = 0
        for part in template.generate(**values):
            parts.append(part)
            size += len(part)
            if size > MAX_CHARACTERS:
                return {"refused": "the prompt is too long"}
        return {"text": "".join(parts)}
    except TemplateRefusedError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"refused": "it takes too much memory"}
    except Exception as error:  # noqa: BLE001 - the template can raise anything
        return {"failed": f"{type(error).__name__}: {error}"[:200]}


def main() -> None:
    """Render conversations from standard input until it ends."""
    limit_process(MEMORY_BYTES)
    lines = questions(RENDER_S)
    try:
        template = _compile(next(lines))
    except (jinja2.TemplateError, ArithmeticError, RecursionError, MemoryError) as error:
        reply({"failed": str(error)[:200] or type(error).__name__})
        return
    reply({})
    for values in lines:
        reply(_render(template, values))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()

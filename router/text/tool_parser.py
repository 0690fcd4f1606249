"""Divides an answer into content, reasoning and tool calls while its text arrives.

The result does not depend on how the text is divided into pieces. If a call breaks the syntax before the function's
name is complete, the text of the call becomes content, so no text is lost. Whitespace next to reasoning and calls is
dropped.

The parser consists of generators, called readers. A reader yields when it needs more text. Its code can therefore be
written as if the whole text were available."""

import ast
import hashlib
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NoReturn

from router.text.detokenizer import len_begun
from router.text.tool_syntax import HARMONY_BODY, HARMONY_ENDS, HARMONY_HEADS, AnswerSyntax, ToolSyntax, XmlTags

MAX_REFERENCES = 8  # maximum length of a chain of references between schemas
MAX_HEADER = 256  # maximum length of a call's text before the arguments; longer text is not a call
# The text of a malformed call is searched again for calls, up to this number of characters in an answer.
MAX_SEARCHED_AGAIN = 1 << 20
NAME = re.compile(r"[\w.-]{1,128}")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
BARE_KEY = re.compile(r'([{,]\s*)([^\s{}\[\],:"]+)\s*:')
# Maps Python's names of literals, which some models write, to JSON's names
LITERALS = {"True": "true", "False": "false", "None": "null"}
# Maps the types of JSON schemas to Python types
KINDS: dict[str, type | tuple[type, ...]] = {"string": str, "integer": int, "number": (int, float), "boolean": bool}
KINDS |= {"array": list, "object": dict, "null": type(None)}
KIMI_ID, MISTRAL_ID = re.compile(r"functions\.[\w.-]+:([0-9]{1,6})"), re.compile("[A-Za-z0-9]{9}")
CONSTANTS = {"true": True, "false": False, "null": None}  # JSON's constants, which some models write in Python calls
PYTHON_ERRORS = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)  # raised by parsing bad Python text
PYTHON_STRING = re.compile(r"""'(?:\\.|[^'\\])*(?:'|\\?\Z)|"(?:\\.|[^"\\])*(?:"|\\?\Z)""", re.DOTALL)
Step = Generator[None, None, None]  # a reader: yields to wait for more text; raises SyntaxBrokenError on a syntax error


@dataclass(slots=True)
class AnswerPart:
    """A part of an answer: a piece of content or reasoning, the name of a called function, or a piece of the call's
    arguments. The name comes before the arguments, which are JSON. `call` is the number of the call in the answer.
    The output processor sets `number`, the number of the call in the conversation."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call: int = -1
    number: int = -1


def joined(parts: Sequence[AnswerPart]) -> list[AnswerPart]:
    """Join adjacent pieces of content, of reasoning, and of the arguments of one call."""
    found: list[AnswerPart] = []
    for part in parts:
        if found and (part.kind, part.call) == (found[-1].kind, found[-1].call) and part.kind != "call":
            found[-1].text += part.text
        else:
            found.append(part)
    return found


class SyntaxBrokenError(Exception):
    """The text does not continue as the syntax requires."""


@cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)) or "(?!)")


@cache
def _structure(quotes: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join([r"[\[\](){}]", *map(re.escape, quotes)]))


@cache
def _string_end(quote: str) -> re.Pattern[str]:
    return re.compile(re.escape(quote) if len(quote) > 1 else rf"\\.|{quote}", re.DOTALL)


class AnswerParser:
    """Parses one answer. Pass its text to `push`, and call `finish` at its end. Both methods return the new parts.

    The output processor of one choice owns the parser, and calls it on the event loop. Each character is processed a
    bounded number of times.
    """

    def __init__(
        self,
        syntax: AnswerSyntax,
        tools: Mapping[str, Mapping[str, Any]] | None,
        *,
        prompt_end: str = "",
        max_calls: int = 0,
    ) -> None:
        """`tools` maps the names of the functions to the schemas of their parameters. If it is None, the text is not
        searched for calls. `prompt_end` is the end of the prompt's text, where the reasoning may begin. The first
        `max_calls` calls are returned, and later calls are dropped; 0 means no limit."""
        self._syntax = syntax
        self._schemas = tools or {}
        self._tools = syntax.tools if tools is not None else None
        self._prompt_end = prompt_end.rstrip()
        self._max_calls = max_calls
        self._num_calls = 0
        self._text = ""
        self._at = 0  # the text before this position is consumed
        self._kept: int | None = None  # start of the call whose name is not complete yet, or None
        self._num_searched_again = 0  # number of characters of malformed calls
        self._is_last = False
        self._parts: list[AnswerPart] = []
        self._kind: Literal["content", "reasoning"] = "content"
        self._space = ""  # whitespace that is dropped if a call or the end of the reasoning follows
        self._strips = False  # drop whitespace until other text arrives
        self._has_content = False
        self._reader = self._answer()
        next(self._reader)

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._kind == "reasoning"

    def push(self, text: str) -> list[AnswerPart]:
        start = self._at if self._kept is None else self._kept
        self._text = self._text[start:] + text
        self._at -= start
        self._kept = None if self._kept is None else 0
        return self._resume()

    def finish(self) -> list[AnswerPart]:
        """End the answer. Return the text that was held back."""
        self._is_last = True
        return self._resume()

    def _resume(self) -> list[AnswerPart]:
        next(self._reader, None)
        parts, self._parts = self._parts, []
        return parts

    # ---- output --------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        """Add text to the content or to the reasoning. Whitespace at its end is held back."""
        text = self._space + text
        text = text.lstrip() if self._strips else text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._strips = False
            self._has_content |= self._kind == "content"
            self._parts.append(AnswerPart(self._kind, kept))

    def _switch(self, kind: Literal["content", "reasoning"]) -> None:
        self._kind, self._space, self._strips = kind, "", True

    def _call(self, name: str) -> None:
        """Begin a call whose name is complete. Such a call never becomes content, even if it is malformed."""
        self._kept = None
        self._switch("content")
        self._num_calls += 1
        self._add(name, "call")

    def _add(self, text: str, kind: Literal["call", "arguments"] = "arguments") -> None:
        if text and not 0 < self._max_calls < self._num_calls:
            self._parts.append(AnswerPart(kind, text, self._num_calls - 1))

    # ---- input ---------------------------------------------------------------------------------------------------

    @property
    def _rest(self) -> str:
        return self._text[self._at :]

    def _need(self) -> Step:
        """Wait for more text. Raises SyntaxBrokenError at the end of the answer."""
        if self._is_last:
            raise SyntaxBrokenError
        yield

    def _until(self, markers: tuple[str, ...], emit: Callable[[str], None]) -> Generator[None, None, str]:
        """Consume the text before the first marker and pass it to `emit` as it arrives. Return the marker, which is not
        consumed, or "" at the end of the answer."""
        while True:
            rest = self._rest
            if found := _any_of(markers).search(rest):
                emit(rest[: found.start()])
                self._at += found.start()
                return found[0]
            cut = len(rest) - (0 if self._is_last else len_begun(rest, markers))
            emit(rest[:cut])
            self._at += cut
            if self._is_last:
                return ""
            yield

    def _find(self, markers: tuple[str, ...], limit: int = 0) -> Generator[None, None, str]:
        """Consume the text before the first marker, and return it. The marker is not consumed. Raises SyntaxBrokenError
        if there is no marker, or if the text is longer than `limit` (0 means no limit)."""
        scanned, longest = 0, max(map(len, markers))
        while True:
            rest = self._rest
            found = _any_of(markers).search(rest, scanned)
            size = found.start() if found else len(rest) - longest + 1
            if 0 < limit < size:
                raise SyntaxBrokenError
            if found:
                self._at += size
                return rest[:size]
            scanned = max(0, size)
            yield from self._need()

    def _peek(self) -> Generator[None, None, str]:
        while not self._rest:
            yield from self._need()
        return self._text[self._at]

    def _next_of(self, markers: Sequence[str]) -> Generator[None, None, str]:
        """Return the marker with which the rest of the text begins, or "" if it begins with none of the markers."""
        while True:
            rest = self._rest
            if found := next((marker for marker in markers if rest.startswith(marker)), ""):
                return found
            if self._is_last or not any(marker.startswith(rest) for marker in markers):
                return ""
            yield

    def _skip(self, markers: Sequence[str] = ()) -> Step:
        """Consume whitespace and markers."""
        while True:
            rest = self._rest
            self._at += len(rest) - len(rest.lstrip())
            if found := (yield from self._next_of(markers)):
                self._at += len(found)
            elif self._is_last or self._rest[:1].strip():
                return
            elif not self._rest:
                yield

    def _expect(self, text: str) -> Step:
        if (yield from self._next_of((text,))) != text:
            raise SyntaxBrokenError
        self._at += len(text)

    def _value(
        self, quotes: tuple[str, ...] = ('"',), emit: Callable[[str], None] | None = None
    ) -> Generator[None, None, str]:
        """Consume a string, a bracketed value or a scalar, and return it. Raises SyntaxBrokenError if the answer ends
        inside the value.

        If `emit` is given, pass a bracketed value to `emit` as it arrives, instead of returning it. The answer may then
        end inside the value."""
        if not (yield from self._peek()).startswith(("{", "[", *(quote[0] for quote in quotes))):
            return (yield from self._find((",", "}", "]", ";", "\n", " "), MAX_HEADER))
        depth, quote, size, pieces = 0, "", 0, list[str]()
        hold = max(1, max(map(len, quotes)) - 1)  # this many characters at the end may begin a quote or an escape
        while True:
            rest = self._rest
            while found := (_string_end(quote) if quote else _structure(quotes)).search(rest, size):
                size, token = found.end(), found[0]
                if quote:
                    quote = "" if token == quote else quote
                elif token in quotes:
                    quote = token
                else:
                    depth += 1 if token in "{[(" else -1
                if not depth and not quote:
                    break
            else:
                size = len(rest) if self._is_last else max(size, len(rest) - hold)
            (emit or pieces.append)(rest[:size])
            self._at, size = self._at + size, 0
            if found:
                return "".join(pieces)
            if self._is_last and emit is not None:
                return ""
            yield from self._need()

    # ---- the answer ----------------------------------------------------------------------------------------------

    def _answer(self) -> Step:
        yield
        yield from self._harmony() if self._syntax.is_harmony else self._plain()
        if self._space and not self._strips and self._kind == "content":
            self._parts.append(AnswerPart("content", self._space))

    def _plain(self) -> Step:
        reasoning, tools = self._syntax.reasoning, self._tools
        markers: tuple[str, ...] = ()
        if reasoning is not None:
            markers += (reasoning.start,)
            if self._prompt_end.endswith(reasoning.start) or (
                reasoning.is_implicit and not self._prompt_end.endswith(reasoning.end)
            ):
                yield from self._skip((reasoning.start,))
                yield from self._reasoning(reasoning.end)
        if tools is not None:
            markers += tools.starts()
        while True:
            if tools is not None and tools.bare and not self._has_content and (yield from self._begins_bare(tools)):
                yield from self._calls(tools)
                continue
            marker = yield from self._until(markers, self._say)
            if not marker:
                return
            if reasoning is not None and marker == reasoning.start:
                self._at += len(marker)
                if self._has_content:  # after other content, the marker is ordinary text
                    self._say(marker)
                else:
                    yield from self._reasoning(reasoning.end)
            else:
                assert tools is not None
                yield from self._calls(tools)

    def _reasoning(self, end: str) -> Step:
        self._switch("reasoning")
        calls = self._tools.opens if self._tools is not None and self._tools.ends_reasoning else ()
        if marker := (yield from self._until((end, *calls), self._say)):
            self._at += len(marker) if marker == end else 0
            self._switch("content")

    def _begins_bare(self, tools: ToolSyntax) -> Generator[None, None, bool]:
        while not self._rest.strip() and not self._is_last:
            yield
        return self._rest.lstrip().startswith(tuple(tools.bare))

    def _harmony(self) -> Step:
        while True:
            # An answer may begin in the middle of a header, because the prompt ends with the role.
            is_head = not self._has_content and (yield from self._next_of((" to=",)))
            if not is_head and not (yield from self._until(HARMONY_HEADS, self._say)):
                return
            header: list[str] = []
            if not (yield from self._until((HARMONY_BODY,), header.append)):
                self._say("".join(header))
                return
            self._at += len(HARMONY_BODY)
            channel = CHANNEL.search("".join(header))
            recipient = RECIPIENT.search("".join(header))
            if recipient is not None and self._tools is not None:
                self._call(recipient[1])
                emit: Callable[[str], None] = self._add
            else:
                thinks = channel is not None and channel[1] == "analysis" and self._syntax.reasoning is not None
                self._switch("reasoning" if thinks else "content")
                emit = self._say
            marker = yield from self._until(HARMONY_ENDS, emit)
            self._at += len(marker) if marker != "<|start|>" else 0
            if marker:
                self._switch("content")

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _calls(self, tools: ToolSyntax) -> Step:
        """Read consecutive calls. Text that is not a call becomes content."""
        readers = {"json": self._json, "named": self._named, "xml": self._xml, "python": self._python}
        again = (tools.tags.name[0],) if tools.tags and tools.tags.name[0] else tuple(tools.bare)
        while True:
            self._kept = self._at
            try:
                yield from self._skip(tools.opens)
                yield from readers[tools.kind](tools)
                self._kept = None
                yield from self._skip(tools.closes)
                if not again or not (yield from self._next_of(again)):
                    return
            except SyntaxBrokenError:
                self._give_up_call()
                return

    def _give_up_call(self) -> None:
        """Add the beginning of a malformed call to the content, unless the call's name is complete."""
        if self._kept is None:
            return
        end = len(self._text) if self._is_last else self._at
        self._num_searched_again += end - self._kept
        if self._num_searched_again <= MAX_SEARCHED_AGAIN:
            end = self._kept + 1  # release only one character, so that the same marker is not found again
        start, self._at, self._kept = self._kept, end, None
        self._say(self._text[start:end])

    def _json(self, tools: ToolSyntax) -> Step:
        if (yield from self._peek()) != "[":
            yield from self._json_object(tools)
            return
        self._at += 1
        is_first = True
        while True:
            yield from self._skip((",",))
            if (yield from self._peek()) == "]":
                if is_first and tools.bare:  # an empty list is an ordinary answer
                    raise SyntaxBrokenError
                self._at += 1
                return
            self._kept = self._kept if is_first else self._at
            yield from self._json_object(tools)
            is_first = False

    def _json_object(self, tools: ToolSyntax) -> Step:
        yield from self._expect("{")
        name, arguments, has_begun = "", "{}", False
        while True:
            yield from self._skip((",",))
            if (yield from self._peek()) == "}":
                self._at += 1
                break
            key = _loads((yield from self._value()))
            yield from self._skip()
            yield from self._expect(":")
            yield from self._skip()
            if not tools.name_key:
                name, key = key, "arguments"
            if key in ("arguments", "parameters") and name:
                self._begin(tools, name)
                has_begun = True
                yield from self._arguments()
                continue
            value = yield from self._value()
            if key == tools.name_key:
                name = _loads(value)
            elif key in ("arguments", "parameters"):
                arguments = _as_object(value)
        if not has_begun:
            self._begin(tools, name)
            self._add(arguments)

    def _begin(self, tools: ToolSyntax, name: Any) -> None:
        """Begin a call if `name` can be the name of a tool. If the syntax allows calls without a marker, `name` must be
        the name of a given tool. Raises SyntaxBrokenError for any other name."""
        if not isinstance(name, str) or not NAME.fullmatch(name) or (tools.bare and name not in self._schemas):
            raise SyntaxBrokenError
        self._call(name)

    def _arguments(self) -> Step:
        if (yield from self._peek()) == "{":
            yield from self._value(emit=self._add)
        else:
            self._add(_as_object((yield from self._value())))

    def _named(self, tools: ToolSyntax) -> Step:
        if (yield from self._peek()) in "[{" and tools.id_form == "mistral":  # as in models before Mistral Small 3.2
            yield from self._json(tools)
            return
        header = yield from self._find(("{", *tools.closes[-2:]), MAX_HEADER)
        match = re.fullmatch(tools.header, header)
        if match is None:
            raise SyntaxBrokenError
        if (yield from self._peek()) != "{":
            self._begin(tools, match[1])
            self._add("{}")
        elif tools.quotes == ('"',):
            self._begin(tools, match[1])
            yield from self._value(emit=self._add)
        else:
            arguments = _from_gemma((yield from self._value(tools.quotes)), tools.quotes[0])
            self._begin(tools, match[1])
            self._add(arguments)

    def _xml(self, tools: ToolSyntax) -> Step:
        tags = tools.tags
        assert tags is not None
        yield from self._expect(tags.name[0])
        name = yield from self._find((tags.name[1], tags.key[0], tags.end), MAX_HEADER)
        self._begin(tools, name.strip())
        yield from self._skip((tags.name[1],) if tags.name[1].strip() else ())
        schema = self._schemas.get(name.strip(), {})
        before = "{"
        while (yield from self._next_of((tags.key[0],))):
            before = yield from self._xml_parameter(tags, schema, before)
            yield from self._skip()
        if not (yield from self._next_of((tags.end,))) and self._is_last:  # the answer ends inside the call
            self._at = len(self._text)
            return
        self._add("{}" if before == "{" else "}")
        yield from self._skip((tags.end,))

    def _xml_parameter(self, tags: XmlTags, schema: Mapping[str, Any], before: str) -> Generator[None, None, str]:
        self._at += len(tags.key[0])
        key = (yield from self._find((tags.key[1],))).strip()
        self._at += len(tags.key[1])
        if tags.value[0]:
            yield from self._skip()
            yield from self._expect(tags.value[0])
        before += f"{dump(key)}: "
        try:
            value = yield from self._find((tags.value[1],))
        except SyntaxBrokenError:  # the answer ends inside the value
            self._add(before + dump(self._rest.removeprefix(tags.padding))[:-1])
            self._at = len(self._text)
            raise
        self._at += len(tags.value[1])
        value = value.removeprefix(tags.padding).removesuffix(tags.padding)
        self._add(before + _typed(value, types_of((schema.get("properties") or {}).get(key), schema)))
        return ", "

    def _python(self, tools: ToolSyntax) -> Step:
        if (yield from self._peek()) == "[":
            name = yield from self._find(("(",), MAX_HEADER)
            self._at -= len(name)
            if tools.bare and name[1:].strip() not in self._schemas:
                raise SyntaxBrokenError
            text = yield from self._value(('"', "'"))
        else:
            text = yield from self._find(tools.closes)
        calls = _python_calls(text)
        for name, arguments in calls:
            self._begin(tools, name)
            self._add(arguments)
        if not calls:
            raise SyntaxBrokenError


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise SyntaxBrokenError from None


def dump(value: object) -> str:
    """Return a value as JSON. Raises ValueError for numbers that JSON cannot express, such as infinity (1e999)."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _as_object(text: str) -> str:
    """Return a call's arguments as the text of a JSON object. Some models write the object inside a string, or write
    null if there are no arguments."""
    value = _loads(text)
    return "{}" if value is None else value if isinstance(value, str) and value.startswith("{") else text


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _typed(text: str, types: set[str]) -> str:
    """Convert a parameter's value from plain text to JSON. `types` are its possible JSON types; see `types_of`. If the
    value cannot be a string, a list or an object may also be in Python's syntax."""
    if types == {"string"}:
        return dump(text)
    is_nested = types & {"array", "object"} and "string" not in types
    try:
        value = json.loads(LITERALS.get(text.strip(), text), parse_constant=_no_constant)
        dump(value)
    except (ValueError, RecursionError):
        try:
            (value,) = map(_literal, _python(text)) if is_nested else (text,)
            dump(value)
        except PYTHON_ERRORS:
            return dump(text)
    is_allowed = not types or any(isinstance(value, KINDS[kind]) for kind in types)
    return dump(value if is_allowed and not (types and isinstance(value, bool) and "boolean" not in types) else text)


def resolved(schema: object, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return `schema` or, if it is a reference, the schema in `root` to which it refers. Return an empty schema if
    that schema does not exist."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for part in reference[2:].split("/"):
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return dict(schema) if isinstance(schema, Mapping) else {}


def _listed(value: object) -> list[Any]:
    """Return the value of a keyword as a list. Clients' schemas are not checked, so the value may be anything."""
    return value if isinstance(value, list) else [value] if isinstance(value, str) else []


def types_of(schema: object, root: Mapping[str, Any] = {}) -> set[str]:
    """Return the JSON types that a schema allows, or an empty set if it does not restrict them. References are resolved
    in `root`."""
    found, open_, seen = set[str](), [schema], set[object]()
    while open_:
        entry = open_.pop()
        if isinstance(entry, Mapping) and isinstance(reference := entry.get("$ref"), str):
            if reference in seen:
                continue
            seen.add(reference)
        entry = resolved(entry, root)
        kinds, first, second, every, values = (
            _listed(entry.get(name)) for name in ("type", "anyOf", "oneOf", "allOf", "enum")
        )
        if types := {kind for kind in kinds if isinstance(kind, str) and kind in KINDS}:
            found |= types
        elif alternatives := first + second + (every if len(every) == 1 else []):
            open_ += alternatives
        elif values and all(isinstance(value, str) for value in values):
            found.add("string")
        else:
            return set()
    return found


def _from_gemma(text: str, quote: str) -> str:
    """Convert an object from Gemma's notation to JSON. Gemma writes keys without quotes, and strings between special
    tokens (`quote`)."""
    pieces = text.split(quote)
    pieces = [dump(piece) if place % 2 else BARE_KEY.sub(r'\1"\2":', piece) for place, piece in enumerate(pieces)]
    value = _loads("".join(pieces))
    try:
        return dump(value)
    except ValueError:
        raise SyntaxBrokenError from None


def _python_calls(text: str) -> list[tuple[str, str]]:
    """Return the name and the arguments of each call. `text` is a Python list of calls, or has one call in each
    line."""
    try:
        calls = [call for node in _python(text) for call in (node.elts if isinstance(node, ast.List) else [node])]
        found = []
        for call in calls:
            if not isinstance(call, ast.Call) or call.args:
                raise SyntaxBrokenError
            arguments = {word.arg: _literal(word.value) for word in call.keywords}
            found.append((ast.unparse(call.func), dump(arguments)))
    except PYTHON_ERRORS:
        raise SyntaxBrokenError from None
    return found


def _python(text: str) -> list[ast.expr]:
    """Return the expressions in the text. Unlike in Python, a string may contain newlines."""
    text = PYTHON_STRING.sub(lambda string: re.sub(r"\\.|\n", _escaped, string[0], flags=re.DOTALL), text.strip())
    return [node.value for node in ast.parse(text).body if isinstance(node, ast.Expr)]


def _escaped(found: re.Match[str]) -> str:
    return r"\n" if found[0] == "\n" else found[0]


def _literal(node: ast.expr) -> Any:
    return ast.literal_eval(JsonConstants().visit(node))


class JsonConstants(ast.NodeTransformer):
    """Replaces JSON's names true, false and null by Python's constants. Some models use these names in Python's
    syntax."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(CONSTANTS[node.id]) if node.id in CONSTANTS else node


def call_id(form: str, request_id: str, choice: int, number: int, name: str) -> str:
    """Return the id of a call in the form that the model's template expects. `number` is the number of the call in the
    conversation. A failover does not change the id."""
    if form == "kimi":
        return f"functions.{name}:{number}"
    digest = hashlib.sha256(f"{request_id}.{choice}.{number}".encode()).hexdigest()
    return digest[:9] if form == "mistral" else f"call_{digest[:24]}"


def template_id(form: str, given: str, number: int, name: str) -> str:
    """Return the id of an earlier call for the template: the client's id (`given`) if it has the right form, or a new
    id. Mistral's templates refuse other forms, and Kimi's templates show the id in place of the function's name."""
    if form == "kimi" and not KIMI_ID.fullmatch(given):
        return call_id(form, "", 0, number, name)
    if form == "mistral" and not MISTRAL_ID.fullmatch(given):
        return hashlib.sha256(given.encode()).hexdigest()[:9]
    return given


def next_number(ids: Sequence[str]) -> int:
    """Return the sequence number for the next call in a conversation. `ids` are the ids of its calls so far. The number
    is higher than that of every id in Kimi's form, even if the client has omitted earlier messages."""
    return max([len(ids), *(int(found[1]) + 1 for each in ids if (found := KIMI_ID.fullmatch(each)))])

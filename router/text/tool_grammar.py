"""The grammar of an answer whose tool calls are enforced, because `tool_choice` requires a call or a tool is strict.

The grammar is in llguidance's dialect of Lark. Its calls have the syntax of the model's family, so the parser of that
family can read them. If that syntax cannot express all values exactly, the calls have the form of Llama 3, which is
plain JSON. In this case, calls cannot be mixed with text."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.text.answer_grammar import lark_of
from router.text.tokenizer import Tokenizer
from router.text.tool_parser import resolved, types_of
from router.text.tool_syntax import TOOLS, AnswerSyntax, ToolSyntax, XmlTags
from shared.grammar import lark_grammar, with_json_options

TEXT = r"/(.|\n)*/"
ANY_TEXT = f"TEXT: {TEXT}"
# Keywords of JSON schemas that do not restrict a string, or that `_element` enforces.
ANNOTATIONS = {"type", "description", "title", "default", "examples", "enum", "anyOf", "oneOf", "deprecated"}
MAX_CHARACTERS = 1 << 20  # maximum size of the rules for parameters, which may repeat the definitions of a schema


class ToolGrammarError(Exception):
    """A schema cannot be enforced in the syntax of the model. `reason` completes a sentence that begins with "The
    parameters"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class EnforcedTool:
    """A function, and the schema that the arguments of its calls must match."""

    name: str
    schema: Mapping[str, Any]
    is_strict: bool


def enforced_syntax(syntax: AnswerSyntax) -> ToolSyntax:
    """Return the syntax in which required calls are written."""
    tools = syntax.tools
    return TOOLS["llama3_json"] if tools is None or tools.form is None else tools


def required_calls(tokenizer: Tokenizer, tools: Sequence[EnforcedTool], *, is_single: bool) -> str:
    """Return the grammar of one or more calls, without other text."""
    rules = _Rules(tokenizer, enforced_syntax(tokenizer.syntax), tools)
    return lark_grammar("\n".join([f"start: {rules.text(rules.lead)} {rules.calls(is_single)}", *rules.lines()]))


def optional_calls(tokenizer: Tokenizer, tools: Sequence[EnforcedTool], *, is_single: bool) -> str:
    """Return the grammar of a text that may be followed by calls. Raises ToolGrammarError if the model's syntax does
    not allow such a grammar."""
    syntax = tokenizer.syntax.tools
    if syntax is None or syntax.form is None:
        raise ToolGrammarError("cannot be enforced in this model's syntax unless a call is required")
    rules = _Rules(tokenizer, syntax, tools)
    lead, calls = rules.text(rules.lead), rules.calls(is_single)
    if tokenizer.syntax.is_harmony:
        final, said = rules.text("<|channel|>final<|message|>"), rules.text("<|channel|>commentary<|message|>")
        again = rules.text("<|end|><|start|>assistant")
        start = f"start: {final} TEXT | ({said} TEXT {again})? {lead} {calls}\n{ANY_TEXT}"
    elif syntax.bare:  # calls are an object or a list of objects
        start = f"start: OTHER | {calls}\nOTHER: /([ \\n]*([^ \\n\\[\\{{]|\\[[ \\n,]*[^ \\n,\\{{])(.|\\n)*)?/"
    elif rules.lead in tokenizer.special_ids:  # a special token is never part of a text
        start = f"start: TEXT ({lead} {calls})?\n{ANY_TEXT}"
    else:
        start = f"start: OTHER | said {calls}\nsaid[lazy]: TEXT {lead}\n{ANY_TEXT}\nOTHER: {_without(rules.lead)}"
    return lark_grammar("\n".join([start, *rules.lines()]))


class _Rules:
    """Builds the grammar rules for calls of `tools`. `lead` is the marker with which the first call begins, or "" if
    the syntax has no such marker."""

    def __init__(self, tokenizer: Tokenizer, syntax: ToolSyntax, tools: Sequence[EnforcedTool]) -> None:
        assert syntax.form is not None
        self.form = syntax.form
        begins = self.form.begin or self.form.before_name
        self.lead = next((marker for marker in syntax.starts() if begins.startswith(marker)), "")
        self._tokenizer = tokenizer
        self._syntax = syntax
        self._tools = tools
        self._values: list[str] = []
        self._size = 0  # number of characters in `_values`

    def text(self, text: str) -> str:
        return lark_of(text, self._tokenizer)

    def calls(self, is_single: bool) -> str:
        """Return the grammar of the calls that follow `lead`."""
        form = self.form
        first = self.text(form.begin.removeprefix(self.lead)) if form.begin else ""
        again = self.text(form.separator + ("" if form.begin else self.lead))
        more = "" if is_single or self._tokenizer.syntax.is_harmony else f"({again} call)*"
        return f"{first} call {more} {self.text(form.end)}"

    def lines(self) -> Iterable[str]:
        """Yield the grammar rules for one call and its values."""
        form = self.form
        before = form.before_name if form.begin else form.before_name.removeprefix(self.lead)
        yield "call: " + " | ".join(f"call_{number}" for number in range(len(self._tools)))
        for number, tool in enumerate(self._tools):
            opening, end = self.text(before + tool.name + form.after_name), self.text(form.after)
            yield f"call_{number}: {opening} {self._arguments(tool)} {end}"
        yield from self._values

    def _value(self, definition: str, name: str = "value", attribute: str = "") -> str:
        """Add a rule or a terminal, and return its name."""
        name = f"{name}_{len(self._values)}"
        self._values.append(f"{name}{attribute}: {definition}")
        self._size += len(self._values[-1])
        return name

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self._value(f"%json {json.dumps(with_json_options(dict(schema)))}")

    def _arguments(self, tool: EnforcedTool) -> str:
        tags = self._syntax.tags
        if tags is None:
            return self._json(tool.schema)
        num_before = len(self._values)
        try:
            return self._parameters(tags, tool)
        except ToolGrammarError as error:
            if tool.is_strict:
                raise ToolGrammarError(f"of `{tool.name}` {error.reason}") from None
        self._size -= sum(map(len, self._values[num_before:]))
        del self._values[num_before:]
        name = self._value(r"/[\w.-]{1,64}/", "NAME")
        return f"({self.text(tags.key[0])} {name} {self.text(_before_value(tags))} {self._any_text(tags)})*"

    # ---- parameters as elements ----------------------------------------------------------------------------------

    def _parameters(self, tags: XmlTags, tool: EnforcedTool) -> str:
        """Return the grammar of a call's parameters, in the order of the schema."""
        properties, needed = tool.schema.get("properties") or {}, set(tool.schema.get("required") or ())
        if unknown := needed - properties.keys():
            raise ToolGrammarError(f"require the property `{min(unknown)}`, which they do not define")
        found = []
        for name, schema in properties.items():
            before = self.text(tags.key[0] + name + _before_value(tags))
            part = f"{before} {self._element(tags, schema, tool.schema)}"
            found.append(part if name in needed else f"({part})?")
        return " ".join(found)

    def _any_text(self, tags: XmlTags) -> str:
        """Return a rule for a text and the closing tag that ends it."""
        end, line = self.text(tags.value[1]), self.text("\n")
        if tags.value[1] in self._tokenizer.special_ids:  # a special token is never part of a text
            return f"{self._value(TEXT, 'TEXT')} {end} {line}"
        return f"{self._value(f'{TEXT} {end}', 'text', '[lazy]')} {line}"

    def _element(self, tags: XmlTags, schema: Any, root: Mapping[str, Any]) -> str:
        """Return a rule that matches a parameter's value and the closing tag after it. Strings are written without
        quotes. Other values are written as JSON."""
        after = self.text(f"{tags.padding}{tags.value[1]}\n")
        schema = resolved(schema, root)
        types = types_of(schema, root)
        if types and "string" not in types:
            definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
            value = self._json({**definitions, **schema})
            if self._size > MAX_CHARACTERS:
                raise ToolGrammarError("are too large for this model's syntax, which repeats `$defs` for each property")
            return f"{value} {after}"
        others = [resolved(entry, root) for entry in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ()))]
        entries = [schema] if "enum" in schema or not others else others
        lists = [entry.get("enum", [None] if entry.get("type") == "null" else None) for entry in entries]
        open_ = [types_of(entry, root) for entry, values in zip(entries, lists, strict=True) if values is None]
        allows_any = not open_ or any(not types or "string" in types for types in open_)
        for entry in (schema, *others):
            if unknown := entry.keys() - ANNOTATIONS | (set() if allows_any else entry.keys() & {"enum"}):
                text = f"have the keyword `{min(unknown)}` in a string's schema"
                raise ToolGrammarError(f"{text}, which this model's syntax cannot enforce")
        if not open_:
            choices = [choice for values in lists for choice in values or ()]
            words = [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
            return "(" + " | ".join(self.text(word) or '""' for word in words) + f") {after}"
        return self._any_text(tags)


def _before_value(tags: XmlTags) -> str:
    """Return the text between the name of a parameter and its value."""
    return tags.key[1] + (f"\n{tags.value[0]}" if tags.value[0] else "") + tags.padding


def _without(marker: str) -> str:
    """Return a terminal that matches all texts without the marker."""
    escaped = re.sub(r"[.+*?()|\[\]{}^$/\\]", r"\\\g<0>", marker)
    return f"/(.|\\n)*/ & ~/(.|\\n)*{escaped}(.|\\n)*/"

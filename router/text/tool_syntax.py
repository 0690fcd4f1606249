"""Describes how each model family writes reasoning and tool calls in its answers.

`router/text/tool_parser.py` uses these descriptions to parse answers. The syntaxes have the names that vLLM's options
`--tool-call-parser` and `--reasoning-parser` use. The syntax of a model is derived from its chat template, which
contains the markers of the model's family. Within a syntax, no marker may be the beginning of another marker, because
the parser accepts a marker as soon as it is complete.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """The markers around the reasoning, which precedes the content. If `is_implicit` is set, an answer begins with
    reasoning even without the start marker, unless the prompt ends with the end marker."""

    start: str
    end: str
    # A model has this syntax if its chat template contains all of these texts. A syntax without texts is used only if
    # `--reasoning-parser` (for a ToolSyntax: `--tool-call-parser`) names it.
    found_by: tuple[str, ...] = ()
    is_implicit: bool = False


@dataclass(frozen=True, slots=True)
class XmlTags:
    """The tags of a call whose parameters are XML elements. Each pair has the texts before and after a name or a value.
    `padding` is the text that the model adds before and after each value."""

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    padding: str = ""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls are written when a grammar enforces them. Two calls are written as `begin` CALL `separator` CALL `end`,
    where each CALL is `before_name` NAME `after_name` ARGUMENTS `after`."""

    begin: str
    before_name: str
    after_name: str
    after: str
    separator: str
    end: str


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How a model family writes tool calls. `kind` defines what follows a marker in `opens`:

    - json: an object with the name and the arguments, or a list of such objects
    - named: a text that matches `header`, whose group is the name, and then the arguments as an object
    - xml: the name and the parameters between `tags`
    - python: calls in Python's syntax, with keyword arguments
    - harmony: the whole answer is a sequence of messages, each with a channel and a recipient (gpt-oss)
    """

    kind: Literal["json", "named", "xml", "python", "harmony"]
    found_by: tuple[str, ...] = ()  # as in ReasoningSyntax
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()  # markers and separators that may follow a call
    bare: str = ""  # an answer that begins with one of these characters is parsed as calls, even without a marker
    header: str = ""
    name_key: str = "name"  # the key of the name in an object; "" if the name itself is the key of the arguments
    quotes: tuple[str, ...] = ('"',)  # quotes of strings in the arguments
    tags: XmlTags | None = None
    form: CallForm | None = None  # None if the syntax cannot express all values exactly
    id_form: Literal["", "mistral", "kimi"] = ""  # the form of call ids that the chat template expects
    ends_reasoning: bool = False  # a call also ends the reasoning, without the reasoning's end marker

    def starts(self) -> tuple[str, ...]:
        """Return the texts that begin a call in the middle of an answer."""
        return self.opens + ((self.tags.name[0],) if self.tags is not None and self.tags.name[0] else ())

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return calls as the model writes them, or "" if this is not supported for the syntax. Each call has the keys
        `name` and `arguments`."""
        dump = partial(json.dumps, ensure_ascii=False)
        if self.kind == "python" and self.opens:
            pairs = [(call["name"], call["arguments"].items()) for call in calls]
            texts = [f"{name}({', '.join(f'{key}={dump(value)}' for key, value in items)})" for name, items in pairs]
            return f"{self.opens[0]}[{', '.join(texts)}]{self.closes[0]}"
        if (form := self.form) is None or self.kind not in ("json", "named"):
            return ""
        texts = [f"{form.before_name}{each['name']}{form.after_name}{dump(each['arguments'])}" for each in calls]
        return f"{form.begin}{form.separator.join(text + form.after for text in texts)}{form.end}"


REASONING: dict[str, ReasoningSyntax] = {
    "openai_gptoss": ReasoningSyntax("<|channel|>analysis", "<|end|>", ("<|channel|>", "<|message|>")),
    "gemma4": ReasoningSyntax("<|channel>thought", "<channel|>", ("<|channel>",)),
    "mistral": ReasoningSyntax("[THINK]", "[/THINK]", ("[THINK]",)),
    "seed_oss": ReasoningSyntax("<seed:think>", "</seed:think>", ("<seed:think>",)),
    "granite": ReasoningSyntax("Here is my thought process:", "Here is my response:", ("Here is my thought process:",)),
    "cohere_command3": ReasoningSyntax("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_THINKING|>",)),
    "qwen3": ReasoningSyntax("<think>", "</think>", ("<think>",)),
    "deepseek_r1": ReasoningSyntax("<think>", "</think>", is_implicit=True),
}
REASONING |= dict.fromkeys(("deepseek_v3", "glm45", "kimi_k2", "nemotron_v3", "olmo3"), REASONING["qwen3"])
REASONING |= dict.fromkeys(("minimax_m2", "step3"), REASONING["deepseek_r1"])

QWEN_TAGS = XmlTags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", "\n")
SEED_TAGS = replace(QWEN_TAGS, padding="")
GLM_TAGS = XmlTags(("", "\n"), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "</tool_call>")
MINIMAX_TAGS = XmlTags(('<invoke name="', '">'), ('<parameter name="', '">'), ("", "</parameter>"), "</invoke>")
DEEPSEEK_OPENS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
DEEPSEEK_CLOSES = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
MISTRAL_HEADER = r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*"
JSON_CALL = ('{"name": "', '", "arguments": ', "}")
COHERE_CALL = ('{"tool_call_id": "0", "tool_name": "', '", "parameters": ', "}")


def _listed(begin: str, end: str, call: tuple[str, str, str], name_key: str = "name") -> ToolSyntax:
    """Return the syntax of a list of calls between two markers. `call` has the texts before the name,
    between the name and the arguments, and after the arguments of a call."""
    form = CallForm(begin + "[", *call, ", ", "]" + end)
    return ToolSyntax("json", (begin,), (begin,), (end,), name_key=name_key, form=form)


TOOLS: dict[str, ToolSyntax] = {  # a template may match several entries, of which the first is used
    "openai": ToolSyntax(
        "harmony",
        ("<|channel|>", "<|message|>"),
        form=CallForm("", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", "", ""),
    ),
    "kimi_k2": ToolSyntax(
        "named",
        ("<|tool_call_begin|>",),
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        header=r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*",
        form=CallForm(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>functions.",
            ":0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "",
            "<|tool_calls_section_end|>",
        ),
        id_form="kimi",
        ends_reasoning=True,
    ),
    "deepseek_v3": ToolSyntax(
        "named",
        ("<｜tool▁calls▁begin｜>", "```json"),
        DEEPSEEK_OPENS,
        ("```", *DEEPSEEK_CLOSES),
        header=r"\s*function<｜tool▁sep｜>([\w.-]+)\s*(?:```json)?\s*",
        form=CallForm(
            DEEPSEEK_OPENS[0],
            DEEPSEEK_OPENS[1] + "function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```" + DEEPSEEK_CLOSES[0],
            "\n",
            DEEPSEEK_CLOSES[1],
        ),
    ),
    "deepseek_v31": ToolSyntax(
        "named",
        ("<｜tool▁calls▁begin｜>",),
        DEEPSEEK_OPENS,
        DEEPSEEK_CLOSES,
        header=r"\s*([\w.-]+)<｜tool▁sep｜>\s*",
        form=CallForm(
            DEEPSEEK_OPENS[0], DEEPSEEK_OPENS[1], "<｜tool▁sep｜>", DEEPSEEK_CLOSES[0], "", DEEPSEEK_CLOSES[1]
        ),
    ),
    "minimax_m2": ToolSyntax(
        "xml",
        ("<minimax:tool_call>",),
        ("<minimax:tool_call>",),
        ("</minimax:tool_call>",),
        tags=MINIMAX_TAGS,
        form=CallForm("<minimax:tool_call>\n", '<invoke name="', '">\n', "</invoke>\n", "", "</minimax:tool_call>"),
    ),
    "glm45": ToolSyntax(
        "xml",
        ("<arg_key>",),
        ("<tool_call>",),
        tags=GLM_TAGS,
        form=CallForm("", "<tool_call>", "\n", "</tool_call>", "\n", ""),
    ),
    "seed_oss": ToolSyntax(
        "xml",
        ("<seed:tool_call>",),
        ("<seed:tool_call>",),
        ("</seed:tool_call>",),
        tags=SEED_TAGS,
        form=CallForm("", "<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>", "\n", ""),
    ),
    "qwen3_coder": ToolSyntax(
        "xml",
        ("<function=",),
        ("<tool_call>",),
        ("</tool_call>",),
        tags=QWEN_TAGS,
        form=CallForm("", "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "\n", ""),
    ),
    "gemma4": ToolSyntax(
        "named",
        ("<|tool_call>",),
        ("<|tool_call>",),
        ("<tool_call|>",),
        header=r"\s*call:([\w.-]+)\s*",
        quotes=('<|"|>',),
    ),
    "functiongemma": ToolSyntax(
        "named",
        ("<start_function_call>",),
        ("<start_function_call>",),
        ("<end_function_call>",),
        header=r"\s*call:([\w.-]+)\s*",
        quotes=("<escape>",),
    ),
    "mistral_args": ToolSyntax(
        "named",
        ("[TOOL_CALLS]", "[ARGS]"),
        ("[TOOL_CALLS]",),
        header=MISTRAL_HEADER,
        form=CallForm("", "[TOOL_CALLS]", "[ARGS]", "", "", ""),
        id_form="mistral",
    ),
    "mistral": ToolSyntax(
        "named",
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]",),
        header=MISTRAL_HEADER,
        form=CallForm("[TOOL_CALLS] [", *JSON_CALL, ", ", "]"),
        id_form="mistral",
    ),
    "cohere_command3": _listed("<|START_ACTION|>", "<|END_ACTION|>", COHERE_CALL, "tool_name"),
    "apertus": _listed("<|tools_prefix|>", "<|tools_suffix|>", ('{"', '": ', "}"), ""),
    "nemotron_json": _listed("<TOOLCALL>", "</TOOLCALL>", JSON_CALL),
    "jamba": _listed("<tool_calls>", "</tool_calls>", JSON_CALL),
    "granite": ToolSyntax(
        "json",
        ("<|tool_call|>",),
        ("<|tool_call|>", "<tool_call>"),  # Granite 3.1 writes the second marker
        ("<|end_of_tool_call|>", "</tool_call>"),
        form=CallForm("<|tool_call|>[", *JSON_CALL, ", ", "]"),
    ),
    "phi4_mini_json": ToolSyntax(
        "json",
        ("<|tool|>",),
        ("functools", "<|tool_call|>"),
        ("<|/tool_call|>",),
        form=CallForm("functools[", *JSON_CALL, ", ", "]"),
    ),
    "hermes": ToolSyntax(
        "json",
        ("<tool_call>",),
        ("<tool_call>",),
        ("</tool_call>",),
        form=CallForm("", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", ""),
    ),
    "olmo3": ToolSyntax("python", ("<function_calls>",), ("<function_calls>",), ("</function_calls>",)),
    "lfm2": ToolSyntax("python", ("List of tools: ",), ("<|tool_call_start|>",), ("<|tool_call_end|>",)),
    "llama4_pythonic": ToolSyntax("python", ("<|python_start|>",), ("<|python_start|>",), ("<|python_end|>",), "["),
    "llama3_json": ToolSyntax(
        "json",
        ('{"name": function name',),
        ("<|python_tag|>",),
        (";", ","),
        "{[",
        form=CallForm("", '{"name": "', '", "parameters": ', "}", "; ", ""),
    ),
    "pythonic": ToolSyntax("python", bare="["),
}
TOOLS |= {"glm47": TOOLS["glm45"], "qwen3_xml": TOOLS["qwen3_coder"], "granite4": TOOLS["hermes"]}
TOOLS |= {"hunyuan_a13b": TOOLS["jamba"], "llama4_json": TOOLS["llama3_json"]}


# Markers of gpt-oss's "harmony" format: <|start|>assistant<|channel|>final<|message|>text<|end|>
HARMONY_HEADS, HARMONY_BODY = ("<|start|>", "<|channel|>"), "<|message|>"
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """How a model writes its answers. None means that the syntax is unknown or that its parser is switched off."""

    reasoning: ReasoningSyntax | None = None
    tools: ToolSyntax | None = None
    takes_tools: bool = False  # the chat template has a place for the definitions of tools

    @property
    def id_form(self) -> str:
        """The form of the ids of calls; see `ToolSyntax`."""
        return "" if self.tools is None else self.tools.id_form

    @property
    def is_harmony(self) -> bool:
        return self.reasoning is REASONING["openai_gptoss"] or self.tools is TOOLS["openai"]

    def markers(self) -> Iterator[str]:
        """Yield all texts that the parser needs to see, even if they are special tokens."""
        if self.is_harmony:
            yield from (*HARMONY_HEADS, HARMONY_BODY, *HARMONY_ENDS, "<|constrain|>")
        elif self.reasoning is not None:
            yield from (self.reasoning.start, self.reasoning.end)
        if self.tools is not None:
            yield from (*self.tools.opens, *self.tools.closes, *self.tools.quotes, self.tools.header.replace("\\", ""))
            tags = self.tools.tags
            yield from (*tags.name, *tags.key, *tags.value, tags.end) if tags is not None else ()


Syntax = TypeVar("Syntax", ReasoningSyntax, ToolSyntax)


def find_syntax(template: str | None, tool_parser: str = "auto", reasoning_parser: str = "auto") -> AnswerSyntax:
    """Return the syntax of a model's answers. "auto" finds it from the chat template, "none" switches a parser off, and
    any other name selects an entry of REASONING or TOOLS. Raises ConfigError for an unknown name."""
    source = template or ""
    reasoning = _choose("--reasoning-parser", reasoning_parser, REASONING, source)
    tools = _choose("--tool-call-parser", tool_parser, TOOLS, source)
    return AnswerSyntax(reasoning, tools, takes_tools="tools" in source)


def _choose(flag: str, name: str, table: Mapping[str, Syntax], template: str) -> Syntax | None:
    if name == "auto":
        entries = (entry for entry in table.values() if entry.found_by)
        return next((entry for entry in entries if all(text in template for text in entry.found_by)), None)
    if name != "none" and name not in table:
        raise ConfigError(f"{flag} {name}: must be auto, none, {', '.join(sorted(table))}")
    return table.get(name)

import json
import random
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.tool_parser import AnswerParser, AnswerPart, call_id, types_of
from router.text.tool_syntax import REASONING, TOOLS, AnswerSyntax, find_syntax
from shared.errors import ConfigError
from tests.router import recorded_answers
from tests.router.recorded_answers import ANSWERS, CUT_OFF, Recorded


def parts_of(recorded: Recorded, pieces: list[str], max_calls: int = 0) -> list[AnswerPart]:
    """Parse the pieces, and join adjacent parts that have the same kind and call."""
    syntax = AnswerSyntax(REASONING.get(recorded.reasoning), TOOLS[recorded.parser])
    parser = AnswerParser(syntax, recorded_answers.TOOLS, prompt_end=recorded.prompt_end, max_calls=max_calls)
    joined: list[AnswerPart] = []
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.finish():
        if joined and (joined[-1].kind, joined[-1].call) == (part.kind, part.call) and part.kind != "call":
            joined[-1].text += part.text
        else:
            joined.append(part)
    return joined


def of_kind(parts: list[AnswerPart], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def calls_of(parts: list[AnswerPart]) -> list[tuple[str, str]]:
    names = {part.call: part.text for part in parts if part.kind == "call"}
    return [
        (name, "".join(p.text for p in parts if p.kind == "arguments" and p.call == call))
        for call, name in names.items()
    ]


@pytest.mark.parametrize("recorded", ANSWERS, ids=str)
def test_an_answer_is_divided_into_its_parts(recorded):
    parts = parts_of(recorded, [recorded.text])
    assert of_kind(parts, "content") == recorded.content
    assert of_kind(parts, "reasoning") == recorded.thoughts
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(parts)] == recorded.calls


def test_every_syntax_has_a_recorded_answer():
    covered = [TOOLS[recorded.parser] for recorded in ANSWERS if recorded.calls]
    assert all(syntax in covered for syntax in TOOLS.values())
    reasoned = [REASONING[recorded.reasoning] for recorded in ANSWERS if recorded.thoughts]
    assert all(syntax in reasoned for syntax in REASONING.values())


@pytest.mark.parametrize("recorded", ANSWERS, ids=str)
def test_any_cut_of_an_answer_gives_the_same_parts(recorded):
    text, chance = recorded.text, random.Random(7)
    whole = parts_of(recorded, [text])
    for cut in range(len(text) + 1):
        assert parts_of(recorded, [text[:cut], text[cut:]]) == whole
    assert parts_of(recorded, list(text)) == whole
    for _ in range(1000):
        cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randint(1, 12)))
        assert parts_of(recorded, [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]) == whole


@given(parser=st.sampled_from(sorted(TOOLS)), reasoning=st.sampled_from(["none", *sorted(REASONING)]), data=st.data())
def test_any_text_is_parsed_alike_in_any_pieces(parser, reasoning, data):
    syntax = AnswerSyntax(REASONING.get(reasoning), TOOLS[parser])
    words = [
        *filter(None, syntax.markers()),
        "get_weather",
        '{"name": "ping", "arguments": {',
        "}",
        '"',
        "\\",
        "[",
        "(",
        " ",
        "\n",
        "a",
    ]
    pieces = data.draw(st.lists(st.sampled_from(words), max_size=12))
    recorded = Recorded(parser, "", reasoning=reasoning)
    whole = parts_of(recorded, ["".join(pieces)])
    assert parts_of(recorded, pieces) == whole
    assert parts_of(recorded, list("".join(pieces))) == whole


@pytest.mark.parametrize(("parser", "text", "arguments"), CUT_OFF)
def test_an_answer_that_ends_inside_a_call_keeps_the_arguments_so_far(parser, text, arguments):
    for pieces in ([text], list(text)):
        assert calls_of(parts_of(Recorded(parser, text), pieces)) == [("get_weather", arguments)]


def test_arguments_are_passed_on_as_they_come():
    recorded = next(each for each in ANSWERS if each.parser == "hermes" and each.calls)
    syntax = AnswerSyntax(None, TOOLS["hermes"])
    parser = AnswerParser(syntax, recorded_answers.TOOLS)
    start = recorded.text.index("Paris")
    parser.push(recorded.text[:start])
    assert "".join(part.text for part in parser.push("Paris")) == "Pari"  # the last character may begin an escape


def test_text_without_markers_is_not_held_back():
    parser = AnswerParser(AnswerSyntax(REASONING["qwen3"], TOOLS["hermes"]), recorded_answers.TOOLS)
    assert [[part.text for part in parser.push(piece)] for piece in ("a", " b<", "c <to", "x")] == [
        ["a"],
        [" b"],
        ["<c"],
        [" <tox"],
    ]


@pytest.mark.parametrize("end", ["", "]}" * 4000 + "x"])
def test_malformed_calls_inside_each_other_take_little_time(end):
    text = '<tool_call>{"arguments": [{"a": ' * 4000 + end
    parser, began = AnswerParser(AnswerSyntax(tools=TOOLS["hermes"]), {}), time.process_time()
    parts = [part for at in range(0, len(text), 4) for part in parser.push(text[at : at + 4])] + parser.finish()
    assert time.process_time() - began < 3
    assert of_kind(parts, "content").rstrip() == text.rstrip()


def test_an_unfinished_string_in_python_takes_little_time():
    text, began = '<function_calls>ping(a="' + '\\"' * 100_000 + "</function_calls>", time.process_time()
    parser = AnswerParser(AnswerSyntax(tools=TOOLS["olmo3"]), recorded_answers.TOOLS)
    assert of_kind(parser.push(text) + parser.finish(), "content") == text
    assert time.process_time() - began < 3


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("qwen3_coder", "<tool_call>\n<function=ping>\n<parameter=x>\n1e999\n</parameter>\n</function>\n</tool_call>",
         [("ping", '{"x": "1e999"}')]),
        ("pythonic", "[ping(x=1e999)]", []),
        ("gemma4", "<|tool_call>call:ping{x:1e999}<tool_call|>", []),
    ],
)  # fmt: skip
def test_arguments_are_json_although_a_number_is_infinite(parser, text, calls):
    answer = AnswerParser(AnswerSyntax(tools=TOOLS[parser]), {"ping": {"properties": {"x": {}}}})
    parts = answer.push(text) + answer.finish()
    assert calls_of(parts) == calls
    assert calls or of_kind(parts, "content") == text


def test_calls_beyond_the_maximum_are_dropped():
    recorded = next(each for each in ANSWERS if len(each.calls) == 2)
    assert [name for name, _ in calls_of(parts_of(recorded, [recorded.text], max_calls=1))] == [recorded.calls[0][0]]


@pytest.mark.parametrize(
    "schema", [{"type": None}, {"type": [{}]}, {"enum": 5}, {"anyOf": 5}, {"oneOf": {}}, {"enum": []}]
)
def test_a_schema_with_invalid_keywords_restricts_nothing(schema):
    assert types_of(schema) == set()


def test_without_tools_calls_are_content():
    text = '<think>a</think><tool_call>{"name": "ping", "arguments": {}}</tool_call>'
    parser = AnswerParser(AnswerSyntax(REASONING["qwen3"], TOOLS["hermes"]), None)
    parts = parser.push(text) + parser.finish()
    assert (of_kind(parts, "reasoning"), of_kind(parts, "content")) == ("a", text.removeprefix("<think>a</think>"))


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"$ref": "#/$defs/digit"}, {"type": "null"}]}, "1", "1"),
        ({"allOf": [{"$ref": "#/$defs/digit"}]}, "1", "1"),
        ({"anyOf": [{}, {"type": "null"}]}, "[1]", [1]),
        ({"anyOf": [{"$ref": "#/$defs/list"}, {"type": "integer"}]}, "[[1], 2]", [[1], 2]),
        ({"$ref": "#/$defs/missing"}, "1", 1),
    ],
)
@pytest.mark.parametrize("parser", ["qwen3_coder", "glm45", "minimax_m2"])
def test_a_parameter_has_a_type_of_its_schema_although_references_lead_to_it(parser, schema, text, value):
    place, digit = {"type": "object", "properties": {}}, {"type": "string", "enum": ["1", "2"]}
    rows = {"anyOf": [{"type": "array"}, {"$ref": "#/$defs/list"}]}
    root = {"properties": {"a": schema}, "$defs": {"place": place, "digit": digit, "list": rows}}
    tags = TOOLS[parser].tags
    written = f"{''.join(tags.name)}{tags.key[0]}a{tags.key[1]}{tags.value[0]}{tags.padding}{text}{tags.padding}{tags.value[1]}"
    answer = AnswerParser(AnswerSyntax(tools=TOOLS[parser]), {"f": root})
    parts = answer.push(TOOLS[parser].opens[0] + written.replace(tags.name[1], "f" + tags.name[1], 1) + tags.end)
    assert [(name, json.loads(given)) for name, given in calls_of(parts + answer.finish())] == [("f", {"a": value})]


def test_no_marker_begins_another():
    for tools in TOOLS.values():
        for reasoning in REASONING.values():
            markers = {*tools.opens, *tools.closes, *(tools.tags.name[:1] if tools.tags else ()), reasoning.start} - {
                ""
            }
            assert not [(a, b) for a in markers for b in markers if a != b and b.startswith(a)]


# Excerpts of each family's chat template.
TEMPLATES = {
    "{%- if tools %}<tools>{{ tool | tojson }}</tools> <tool_call>\n{\"name\": <function-name>} <think>\n\n</think>": ("hermes", "qwen3"),
    "{%- if tools %}<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>": ("qwen3_coder", None),
    "{%- if tools %}<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> <think></think>": ("glm45", "qwen3"),
    "{%- if tools %}Respond in the format {\"name\": function name, \"parameters\": ...} <|python_tag|>": ("llama3_json", None),
    "{{ '[AVAILABLE_TOOLS]' + tools | tojson }}[TOOL_CALLS][ARGS][THINK]": ("mistral_args", "mistral"),
    "{{ '[AVAILABLE_TOOLS]' + tools | tojson }}[TOOL_CALLS]": ("mistral", None),
    "{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>\\n```json\\n": ("deepseek_v3", None),
    "{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜></think><think>": ("deepseek_v31", "qwen3"),
    "{{ tools }}<|start|>assistant<|channel|>analysis<|message|>": ("openai", "openai_gptoss"),
    "{{ tools }}<|tool_calls_section_begin|><|tool_call_begin|>": ("kimi_k2", None),
    "{{ tools }}<minimax:tool_call><invoke name=<think>": ("minimax_m2", "qwen3"),
    "{{ tools }}<|tool_call>call:<|channel>thought": ("gemma4", "gemma4"),
    "{{ tools }}<start_function_call>call:": ("functiongemma", None),
    "{{ tools }}<|tool_call|> Here is my thought process: ": ("granite", "granite"),
    "{{ tools }}<|tool|>": ("phi4_mini_json", None),
    "{{ tools }}<|START_THINKING|><|START_ACTION|>[": ("cohere_command3", "cohere_command3"),
    "{{ tools }}{%- set tool_calls_token = '<|tools_prefix|>' -%}": ("apertus", None),
    "{{ tools }}<TOOLCALL>[{\"name\": \"tool_name1\" <think></think>": ("nemotron_json", "qwen3"),
    "{{ tools }}as a list of json objects within <tool_call></tool_call> XML tags <tool_calls>[": ("jamba", None),
    "{{ tools }}<function_calls>": ("olmo3", None),
    "{{ tools }}<seed:tool_call>\n<function=example_function_name>\n<parameter=a>value</parameter> <seed:think>": ("seed_oss", "seed_oss"),
    "{{ 'List of tools: [' + tools }}": ("lfm2", None),
    "{{ tools }}<|python_start|>": ("llama4_pythonic", None),
    "{{ messages }}": (None, None),
}  # fmt: skip


@pytest.mark.parametrize(("template", "names"), TEMPLATES.items(), ids=lambda value: str(value)[:40])
def test_the_syntax_is_found_from_the_template(template, names):
    found = find_syntax(template)
    assert found.tools == TOOLS.get(names[0])
    assert found.reasoning == REASONING.get(names[1])
    assert found.takes_tools == ("tools" in template)


def test_a_named_parser_replaces_the_one_of_the_template():
    template = next(iter(TEMPLATES))
    assert find_syntax(template, "pythonic", "none") == AnswerSyntax(None, TOOLS["pythonic"], takes_tools=True)
    assert find_syntax(None) == AnswerSyntax()
    for flags in (("qwen", "auto"), ("auto", "qwen")):
        with pytest.raises(ConfigError, match=r"must be auto, none, (apertus|cohere)"):
            find_syntax(template, *flags)


def test_call_ids_have_the_form_of_the_template_and_do_not_change():
    assert call_id("", "chat-1", 0, 1, "f") == call_id("", "chat-1", 0, 1, "f") != call_id("", "chat-1", 0, 2, "f")
    assert len(call_id("mistral", "chat-1", 0, 1, "f")) == 9
    assert call_id("kimi", "chat-1", 0, 1, "f") == "functions.f:1"

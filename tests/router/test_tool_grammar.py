"""Test that required calls and strict tools are enforced: in every text that the grammar allows, the parser finds only
valid calls."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from router.dispatch.requests import ModelCard
from router.http.bodies import ChatBody, parse_body
from router.http.parsing import build_requests
from router.http.tools import answer_parser
from router.text.chat_template import ChatTemplate
from router.text.grammar_check import GrammarChecker
from router.text.tokenizer import Tokenizer
from router.text.tool_syntax import TOOLS, find_syntax
from shared.errors import RequestError
from shared.grammar import GrammarTokenizer
from tests.router.conftest import CHATML, byte_level_tokenizer

MODEL = ModelCard("m", max_model_len=4000, vocab_size=400, eos_ids=frozenset({2}))
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"$ref": "#/$defs/unit"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
    "$defs": {"unit": {"type": "string", "enum": ["c", "f"]}},
}
PING = {"type": "object", "properties": {}, "additionalProperties": False}
WEATHER = {"city": 'Rome "x" </a>', "unit": "c", "days": 2}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}
FREE = {"type": "function", "function": {"name": "ping", "parameters": PING}}
GRAMMARS = GrammarChecker()  # shared, because each checker starts a process
# Pairs: the name of a family, and whether its markers are special tokens.
FAMILIES = [(name, is_special) for name in TOOLS for is_special in (False, True)]


class Model:
    """A tokenizer with the tool syntax of a model family, and a GrammarTokenizer that matches its grammars."""

    def __init__(self, directory: Path, family: str, is_special: bool) -> None:
        library = byte_level_tokenizer()
        syntax = find_syntax("tools", family, "none")
        markers = [name for name in set(syntax.markers()) if name.startswith(("<", "[")) and name.endswith((">", "]"))]
        if is_special or family == "openai":
            library.add_special_tokens(sorted(markers))
        library.save(str(directory / "tokenizer.json"))
        special = [token.content for token in library.get_added_tokens_decoder().values()]
        template = ChatTemplate(CHATML + "{# tools #}", {}, special)
        self.tokenizer = Tokenizer(library, {}, template, syntax)
        self.matching = GrammarTokenizer(directory, library.get_vocab_size())

    async def start(self, **fields: Any) -> tuple[Any, Any]:
        """Return the parsed body of a request, and the grammar for its answer."""
        raw = json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": [TOOL, FREE]} | fields)
        body = parse_body(ChatBody, raw.encode(), ["m"])
        (request,) = await build_requests(body, MODEL, self.tokenizer, "id", grammars=GRAMMARS)
        return body, request.grammar

    def accepts(self, grammar: str, text: str) -> bool:
        matcher, tokens = self.matching.matcher(grammar), self.tokenizer.encode(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())

    def write(self, grammar: str, chance: random.Random, limit: int = 400) -> str | None:
        """Return a random text that the grammar allows, or None if the text does not end within `limit` tokens."""
        matcher, tokens = self.matching.matcher(grammar), list[int]()
        ends = [self.tokenizer.encode(text) for text in ("\n</parameter>", "</parameter>", "</arg_value>")]
        while len(tokens) < limit:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = [int(token) for token in np.flatnonzero(bits)]
            end = self.matching.end_token
            if end in allowed and (len(allowed) == 1 or chance.random() < 0.3):
                return self.tokenizer.decode(tokens, skip_special_tokens=False)
            allowed = [token for token in allowed if token != end]
            closing = [token for token in allowed if self.tokenizer.token_text(token)[:1] in '"}]<,:\n']
            token = chance.choice(closing if closing and chance.random() < len(tokens) / 100 else allowed)
            row = next((row for row in ends if matcher.validate_tokens(row) == len(row)), [token])
            row = row if chance.random() < len(tokens) / 100 else [token]
            assert matcher.consume_tokens(row)
            tokens += row
        return None

    def calls(self, body: ChatBody, text: str) -> tuple[str, list[tuple[str, Any]]]:
        """Parse an answer. Return its content and its calls."""
        parser = answer_parser(body, self.tokenizer, self.tokenizer.encode("x"))
        parts = parser.push(text) + parser.finish()
        names = {part.call: part.text for part in parts if part.kind == "call"}
        given = {call: "".join(p.text for p in parts if p.kind == "arguments" and p.call == call) for call in names}
        content = "".join(part.text for part in parts if part.kind == "content")
        return content, [(name, json.loads(given[call])) for call, name in names.items()]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda each: f"{each[0]}{' special' * each[1]}")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"), *request.param)


VALID = {"get_weather": jsonschema_rs.validator_for(SCHEMA), "ping": jsonschema_rs.validator_for(PING)}


async def test_random_texts_of_required_calls_are_valid_calls(model):
    body, grammar = await model.start(tool_choice="required")
    chance, finished = random.Random(5), 0
    for _ in range(40):
        if finished < 5 and (text := model.write(grammar, chance)) is not None:
            content, calls = model.calls(body, text)
            assert calls, text
            assert not content.strip(), text
            assert all(VALID[name].is_valid(given) for name, given in calls), text
            finished += 1
    assert finished >= 3


async def test_a_named_function_is_called_once(model):
    choice = {"type": "function", "function": {"name": "ping"}}
    body, grammar = await model.start(tool_choice=choice)
    texts = {text for seed in range(6) if (text := model.write(grammar, random.Random(seed))) is not None}
    assert texts
    assert all(model.calls(body, text) == ("", [("ping", {})]) for text in texts)


WRITTEN = {  # start and end of a call, in each family whose calls can be enforced even with tool_choice "auto"
    "hermes": ('<tool_call>\n{"name": "get_weather", "arguments": ', "}\n</tool_call>"),
    "llama3_json": ('{"name": "get_weather", "parameters": ', "}"),
    "mistral": ('[TOOL_CALLS] [{"name": "get_weather", "arguments": ', "}]"),
    "mistral_args": ("[TOOL_CALLS]get_weather[ARGS]", ""),
    "granite": ('<|tool_call|>[{"name": "get_weather", "arguments": ', "}]"),
    "phi4_mini_json": ('functools[{"name": "get_weather", "arguments": ', "}]"),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
}


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize("is_special", [False, True])
async def test_strict_tools_are_enforced_if_the_model_calls_them(tmp_path, family, is_special):
    model = Model(tmp_path, family, is_special)
    _, grammar = await model.start()
    before, after = WRITTEN[family]
    good = before + json.dumps(WEATHER) + after
    said = "" if family == "llama3_json" else "Let me see.\n"
    for text in ("", "Hello < there, [no] {call}.", good, said + good):
        assert model.accepts(grammar, text), text
    for given in ({"city": "x"}, WEATHER | {"days": 12}, WEATHER | {"more": 1}, WEATHER | {"unit": "k"}):
        assert not model.accepts(grammar, before + json.dumps(given) + after), given
    assert not model.accepts(grammar, good.replace("get_weather", "other"))


async def test_without_a_marker_a_list_of_calls_is_not_a_text(tmp_path):
    model = Model(tmp_path, "llama3_json", is_special=False)
    body, grammar = await model.start()
    for text in ("[1, 2]", "[link](x)", " [] {}"):
        assert model.accepts(grammar, text), text
        assert model.calls(body, text)[1] == []
    for text in ('[{"name": "get_weather", "parameters": {}}]', '\n[ \n,{"name": "ping", "parameters": {}}]', " {}"):
        assert not model.accepts(grammar, text), text


QWEN = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\n{city}\n</parameter>\n<parameter=unit>\n{unit}\n</parameter>\n"
    "<parameter=days>\n{days}\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n<arg_key>unit</arg_key>\n"
    "<arg_value>{unit}</arg_value>\n<arg_key>days</arg_key>\n<arg_value>{days}</arg_value>\n</tool_call>"
)


@pytest.mark.parametrize(("family", "form"), [("qwen3_coder", QWEN), ("glm45", GLM)])
async def test_strict_tools_are_enforced_in_elements(tmp_path, family, form):
    model = Model(tmp_path, family, is_special=False)
    body, grammar = await model.start()
    text = "So:\n" + form.format(**WEATHER)
    assert model.accepts(grammar, text)
    assert model.calls(body, text) == ("So:", [("get_weather", WEATHER)])
    assert model.accepts(grammar, "No <tool")
    for given in (WEATHER | {"days": "many"}, WEATHER | {"unit": "k"}, WEATHER | {"days": 0}):
        assert not model.accepts(grammar, form.format(**given)), given
    pattern = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^a+$"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": pattern, "strict": True}}
    with pytest.raises(RequestError, match="`f` have the keyword `pattern` in a string's schema"):
        await model.start(tools=[tool])
    free = {"type": "function", "function": {"name": "f", "parameters": pattern}}
    _, grammar = await model.start(tools=[free], tool_choice="required")
    text = form.format(**WEATHER).replace("get_weather", "f")
    assert model.accepts(grammar, text), "a schema that cannot be enforced does not restrict a tool that is not strict"


@pytest.mark.parametrize("definition", [True, False], ids=["reference", "inline"])
async def test_an_optional_value_of_a_list_is_enforced_in_elements(tmp_path, definition):
    unit = {"type": "string", "enum": ["c", "f"]}
    anyone = {"anyOf": [{"$ref": "#/$defs/unit"} if definition else unit, {"type": "null"}]}
    schema = {"type": "object", "properties": {"unit": anyone}, "required": ["unit"], "$defs": {"unit": unit}}
    function = {"name": "f", "parameters": schema, "strict": True}
    model = Model(tmp_path, "qwen3_coder", is_special=False)
    body, grammar = await model.start(tools=[{"type": "function", "function": function}])
    form = "<tool_call>\n<function=f>\n<parameter=unit>\n{}\n</parameter>\n</function>\n</tool_call>"
    for text, value in (("c", "c"), ("null", None)):
        assert model.accepts(grammar, form.format(text))
        assert model.calls(body, form.format(text))[1] == [("f", {"unit": value})]
    assert not model.accepts(grammar, form.format("k"))
    anyone["anyOf"][1]["type"] = "integer"
    with pytest.raises(RequestError, match="`f` have the keyword `enum`"):
        await model.start(tools=[{"type": "function", "function": function}])


async def test_gpt_oss_reasons_and_then_calls(tmp_path):
    model = Model(tmp_path, "openai", is_special=True)
    syntax = find_syntax("tools", "openai", "openai_gptoss")
    model.tokenizer.syntax = syntax
    call = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + json.dumps(WEATHER)
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>Hello."
    body, grammar = await model.start()
    for text in (call, thought + call, final, thought + final):
        assert model.accepts(grammar, text), text
    assert model.calls(body, thought + call) == ("", [("get_weather", WEATHER)])
    assert not model.accepts(grammar, call.replace('"c"', '"k"'))
    _, grammar = await model.start(tool_choice="required")
    assert model.accepts(grammar, thought + call)
    assert not model.accepts(grammar, thought + final)


@pytest.mark.parametrize(
    ("family", "fields", "param", "says"),
    [
        ("pythonic", {}, "tools", "in this model's syntax"),
        ("gemma4", {}, "tools", "in this model's syntax"),
        (
            "hermes",
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "strict": True, "parameters": {"properties": {"a": {"not": {}}}}},
                    }
                ]
            },
            "tools[0].function.parameters",
            "cannot be enforced",
        ),
        ("hermes", {"tools": [], "tool_choice": "required"}, "tool_choice", "there are no `tools`"),
        (
            "hermes",
            {"tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "`g`, which is not",
        ),
    ],
)
async def test_what_cannot_be_enforced_is_refused(tmp_path, family, fields, param, says):
    with pytest.raises(RequestError, match=says) as raised:
        await Model(tmp_path, family, is_special=False).start(**fields)
    assert raised.value.param == param


@pytest.mark.parametrize("is_strict", [False, True])
async def test_definitions_that_a_syntax_repeats_do_not_make_a_huge_grammar(tmp_path, is_strict):
    properties = {f"a{number}": {"$ref": "#/$defs/n"} for number in range(700)}
    schema = {"type": "object", "$defs": {"n": {"type": "integer"}, "o": {"const": "x" * 40_000}}}
    function = {"name": "f", "parameters": schema | {"properties": properties}, "strict": is_strict}
    model = Model(tmp_path, "qwen3_coder", is_special=False)
    fields = {"tools": [{"type": "function", "function": function}, TOOL], "tool_choice": "required"}
    if is_strict:
        with pytest.raises(RequestError, match="`f` are too large for this model's syntax"):
            await model.start(**fields)
    else:
        assert len((await model.start(**fields))[1]) < 10_000


async def test_without_strict_tools_nothing_is_enforced(tmp_path):
    model = Model(tmp_path, "hermes", is_special=False)
    assert (await model.start(tools=[FREE]))[1] == ""
    assert (await model.start(tool_choice="none"))[1] == ""

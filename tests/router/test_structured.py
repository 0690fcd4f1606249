"""Test the parameters that constrain answers: valid values are accepted, and others are refused with the reason."""

import asyncio
import contextlib
import json
import threading
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from router.dispatch.requests import GenerationRequest, ModelCard
from router.http.bodies import ChatBody, CompletionBody, parse_body
from router.http.parsing import build_requests
from router.text.grammar_check import GrammarChecker
from router.text.tokenizer import Tokenizer
from shared.errors import RequestError

MODEL = ModelCard("m", max_model_len=100, vocab_size=330, eos_ids=frozenset({2}))
BYTES = LLTokenizer("byte")
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
NESTED: dict[str, Any] = {}
for _ in range(32):
    NESTED = {"items": NESTED}
DEEP = '{"items": ' * 600 + "{}" + "}" * 600


@pytest.fixture(scope="module")
def checker() -> GrammarChecker:
    return GrammarChecker()


@pytest.fixture(name="one")
def request_builder(byte_level: Tokenizer, checker: GrammarChecker) -> Any:
    async def one(kind: type = ChatBody, model: ModelCard = MODEL, **fields: Any) -> GenerationRequest:
        required = {"prompt": "x"} if kind is CompletionBody else {"messages": [{"role": "user", "content": "x"}]}
        body = parse_body(kind, json.dumps(required | fields).encode(), "m")
        return (await build_requests(body, model, byte_level, "id", grammars=checker))[0]

    return one


def matches(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def schema(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value, **more}}


AMBIGUOUS = "start: s\ns: /a/ | " + " | ".join(f"r{index}" for index in range(300))
AMBIGUOUS += "".join(f"\nr{index}: s s" for index in range(300))
TAGS = {
    "type": "structural_tag",
    "triggers": ["<fn="],
    "structures": [
        {"begin": "<fn=f>", "schema": POINT, "end": "</fn>"},
        {"begin": "<fn=g>", "schema": {"type": "null"}, "end": "</fn>"},
    ],
}
CALL = '<fn=f>{"x": 1}</fn>'
ACCEPTED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"response_format": {"type": "json_object"}}, ["{}", '{"a": [1, null]}'], ["[]", "1", "", "{} "]),
    ({"response_format": schema(POINT)}, ['{"x":1}', '{"x": 1, "y": 2}'], ["{}", '{"x":1.5}', '{"y":2}']),
    ({"response_format": schema(POINT, strict=False)}, ['{"x":1}'], ["{}"]),
    ({"structured_outputs": {"json": POINT}}, ['{ "x" :\n 1 }', '{"x":' + " " * 8 + "1}"], ['{"x":' + " " * 9 + "1}"]),
    ({"structured_outputs": {"json": json.dumps(POINT)}}, ['{"x":1}'], ["{}"]),
    ({"structured_outputs": {"json": POINT, "disable_any_whitespace": True}}, ['{"x":1}'], ['{"x": 1}']),
    ({"structured_outputs": {"json": POINT, "whitespace_pattern": "[ ]{1,2}"}}, ['{"x":  1}'], ['{"x":\n1}']),
    ({"structured_outputs": {"json": POINT, "disable_additional_properties": True}}, ['{"x":1}'], ['{"x":1,"y":2}']),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
    ({"structured_outputs": {"json": {"required": ["a"], "minProperties": 2}}}, ['{"a":1,"b":2}'], ['{"a":1,"a":2}']),
    (
        {"structured_outputs": {"json": {"minProperties": 3, "allOf": [{"required": ["a"]}, {"required": ["b"]}]}}},
        *(['{"a":1,"b":2,"c":3}'], ['{"a":1,"b":2}', '{"a":1,"b":2,"b":3}']),
    ),
    (
        {"structured_outputs": {"json": {"type": "object", "properties": {"$ref": {}, "$id": {}}}}},
        ['{"$ref":1,"$id":2}'],
        ["[]"],
    ),
    ({"structured_outputs": {"json": {"enum": [{"minProperties": 9}]}}}, ['{"minProperties":9}'], ["{}"]),
    ({"structured_outputs": {"json": {"x-guidance": {"lenient": True}, "type": "null"}}}, ["null"], ["1"]),
    ({"structured_outputs": {"regex": r"[a-c]{2}|/\d"}}, ["ab", "/7"], ["a", "abc", "xab", "/٣"]),
    (
        {"response_format": TAGS},
        ["hi", f"a {CALL}{CALL} b", "<fn=g>null</fn>", "<f"],
        ["<fn=f>{}</fn>", "<fn=h>", "a<fn="],
    ),
    ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, ["hi", CALL], ["<fn=f>1</fn>", CALL[:-2]]),
    ({"structured_outputs": {"choice": ["yes", 'no "😀"', ""]}}, ["yes", 'no "😀"', ""], ["ye", "no"]),
    ({"structured_outputs": {"grammar": 'start: "a" WORD\nWORD: /[b-d]+/'}}, ["abd"], ["a", "ae"]),
    ({"structured_outputs": {"grammar": 'root ::= "a" item*\nitem ::= [0-9] | "x"'}}, ["a", "a1x"], ["b", "ay"]),
]


@pytest.mark.parametrize(("fields", "good", "bad"), ACCEPTED, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
async def test_an_answer_must_match(one: Any, kind: type, fields: Any, good: list[str], bad: list[str]) -> None:
    grammar = (await one(kind, **fields)).grammar
    assert all(matches(grammar, text) for text in good)
    assert not any(matches(grammar, text) for text in bad)


async def test_answers_are_free_without_a_constraint(one: Any) -> None:
    assert (await one()).grammar == ""
    assert (await one(response_format={"type": "text"}, structured_outputs=None)).grammar == ""


SCHEMA = "response_format.json_schema.schema"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": schema({"uniqueItems": True})}, SCHEMA, "keyword `uniqueItems` cannot be enforced"),
    (
        {"response_format": schema({"properties": {"a": {"items": [{"not": {}}]}}})},
        *(SCHEMA, "keyword `not` cannot be enforced (in properties.a.items.0)"),
    ),
    ({"response_format": schema({"items": {"$ref": "#", "$id": "x"}})}, SCHEMA, "`$ref` next to `$id`"),
    ({"response_format": schema({"required": ["a"], "minProperties": 3})}, SCHEMA, "a name may be repeated"),
    ({"response_format": schema({"properties": {"enum": {"minProperties": 3}}})}, SCHEMA, "in properties.enum"),
    ({"response_format": schema({"required": ["a", "a"], "minProperties": 3})}, SCHEMA, "a name may be repeated"),
    ({"response_format": schema({"$ref": "#/default", "default": {"minProperties": 3}})}, SCHEMA, "in default"),
    ({"response_format": schema({"$ref": "#/$defs", "$defs": {"minProperties": 3}})}, SCHEMA, "in $defs"),
    ({"response_format": schema({"type": "thing"})}, SCHEMA, "Invalid type: thing"),
    ({"response_format": schema({"type": "string", "format": "odd"})}, SCHEMA, "Unknown format: odd"),
    ({"response_format": schema({"$ref": "http://169.254.169.254/"})}, SCHEMA, "does not fetch resources"),
    ({"response_format": schema({"minimum": 3, "maximum": 2, "type": "integer"})}, SCHEMA, "Unsatisfiable"),
    ({"response_format": schema({"type": "string", "pattern": "(?=a)"})}, SCHEMA, "look-around"),
    ({"response_format": schema({"items": NESTED})}, SCHEMA, "nested deeper than 32 levels"),
    ({"response_format": schema({"title": "x" * 65_536})}, SCHEMA, "larger than 64 KiB"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "must have `json_schema`"),
    ({"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}}, "response_format", "if, and"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        *("structured_outputs", "not both"),
    ),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "structures: Field required"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format", "Unknown parameter"),
    ({"response_format": {"type": "text", "triggers": ["a"]}}, "response_format", "type: Input should be"),
    ({"response_format": TAGS | {"triggers": ["<x"]}}, "response_format", 'the tag "<fn=f>" does not begin'),
    ({"response_format": TAGS | {"triggers": ["<fn=", "<y"]}}, "response_format", 'the trigger "<y" begins no tag'),
    (
        {"structured_outputs": {"structural_tag": '{"type": "structural_tag", "format": {}}'}},
        *("structured_outputs.structural_tag", "only xgrammar's structural tags"),
    ),
    (
        {"response_format": TAGS | {"structures": [{"begin": "<fn=f>", "schema": {"not": {}}, "end": ""}]}},
        *("response_format", 'keys: ["not"]'),
    ),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of `json`, `regex`"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
    ({"structured_outputs": {"regex": r"(a)\1"}}, "structured_outputs.regex", "backreferences"),
    ({"structured_outputs": {"regex": r"[^\s\S]"}}, "structured_outputs.regex", "no text matches it"),
    ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "must be a JSON object"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "must be a JSON object"),
    ({"structured_outputs": {"choice": ["x" * 40_000] * 2}}, "structured_outputs.choice", "larger than 64 KiB"),
    ({"structured_outputs": {"grammar": "start: foo"}}, "structured_outputs.grammar", 'unknown name: "foo"'),
    ({"structured_outputs": {"grammar": "root ::= foo"}}, "structured_outputs.grammar", "Rule 'foo' not found"),
    ({"structured_outputs": {"grammar": "root ::= " + "(" * 9000}}, "structured_outputs.grammar", "recursion"),
    ({"structured_outputs": {"grammar": 'start[temperature=1]: "a"'}}, "structured_outputs.grammar", "`temperature`"),
    ({"structured_outputs": {"grammar": 'start: %json {"not": {}}'}}, "structured_outputs.grammar", 'keys: ["not"]'),
    (
        {"structured_outputs": {"grammar": 'start: "a" %json {"type": "object", "minProperties": 2}'}},
        *("structured_outputs.grammar", "a name may be repeated"),
    ),
    ({"structured_outputs": {"grammar": "start: start"}}, "structured_outputs.grammar", "no text matches it"),
    ({"structured_outputs": {"grammar": AMBIGUOUS}}, "structured_outputs.grammar", "too big"),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        *("structured_outputs.whitespace_pattern", "only allowed with `json`"),
    ),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "("}}, "structured_outputs.json", "unclosed group"),
    (
        {"structured_outputs": {"json": DEEP, "disable_additional_properties": True}},
        *("structured_outputs.json", "nested deeper than 32 levels"),
    ),
]


@pytest.mark.parametrize(("fields", "param", "says"), REFUSED, ids=lambda value: str(value)[:60])
async def test_a_constraint_that_cannot_be_enforced_is_refused(one: Any, fields: Any, param: str, says: str) -> None:
    with pytest.raises(RequestError) as raised:
        await one(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)
    assert says in raised.value.message
    assert len(raised.value.message) < 450


async def test_metrics_count_the_checks(one: Any, checker: GrammarChecker) -> None:
    def total(result: str) -> float:
        counts, _ = checker.collect()
        return next(sample.value for sample in counts.samples if sample.labels["result"] == result)

    accepted, refused = total("accepted"), total("refused")
    for regex in ("a", "a", "("):
        with contextlib.suppress(RequestError):
            await one(structured_outputs={"regex": regex})
    assert (total("accepted"), total("refused")) == (accepted + 2, refused + 1)


CHAIN = "start: r0\n" + "\n".join(f"r{index}: r{index + 1}" for index in range(4500)) + '\nr4500: "a"'
SLOW = "root ::= r0\n" + "\n".join(f"r{index} ::= r{index + 1}" for index in range(4000)) + '\nr4000 ::= "a"'


@pytest.mark.parametrize("grammar", [CHAIN, SLOW], ids=["a stack overflow", "quadratic time"])
async def test_a_grammar_that_ends_its_compiler_is_refused_and_the_next_is_served(one: Any, grammar: str) -> None:
    with pytest.raises(RequestError, match="it takes too much time or memory to compile"):
        await one(structured_outputs={"grammar": grammar})
    assert (await one(structured_outputs={"regex": "[0-9]{3}"})).grammar


async def test_slow_grammars_do_not_delay_chats_without_grammars(byte_level: Tokenizer) -> None:
    checker, release = GrammarChecker(), threading.Event()
    checker.check = lambda text, is_source=False: release.wait(60) and text  # type: ignore[method-assign]

    def build(**fields: Any) -> Any:
        raw = json.dumps({"messages": [{"role": "user", "content": "x"}]} | fields).encode()
        return build_requests(parse_body(ChatBody, raw, "m"), MODEL, byte_level, "id", grammars=checker)

    slow = [asyncio.create_task(build(structured_outputs={"regex": f"a{{{index}}}"})) for index in range(40)]
    try:
        await asyncio.sleep(0.5)
        async with asyncio.timeout(30):
            assert await build()
    finally:
        release.set()
        assert len(await asyncio.gather(*slow)) == 40


async def test_an_answer_can_end_only_at_a_stop_token(one: Any) -> None:
    regex = {"structured_outputs": {"regex": "a+"}}
    free = await one(CompletionBody, ignore_eos=True)
    assert (free.stop_tokens, free.min_tokens) == (frozenset(), 0)
    bound = await one(CompletionBody, ignore_eos=True, max_tokens=7, **regex)
    assert (bound.stop_tokens, bound.min_tokens) == ({2}, 7), "the answer ends before 7 tokens only if it must"
    no_end = ModelCard("m", max_model_len=100, vocab_size=330, eos_ids=frozenset())
    with pytest.raises(RequestError, match="set `stop_token_ids`"):
        await one(model=no_end, **regex)
    assert (await one(model=no_end, stop_token_ids=[7], **regex)).stop_tokens == {7}

"""Random JSON schemas and regular expressions, and some grammars. Each has a function that checks answers without
llguidance. Answers are short even if each of their tokens is drawn at random."""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import jsonschema_rs

Check = Callable[[str], bool]


@dataclass
class Constraint:
    """The fields of a request that constrain its answer, and a function that checks a finished answer."""

    fields: dict[str, Any]
    check: Check


def schema_constraint(seed: int) -> Constraint:
    schema = _object(Random(seed), 2)
    validator = jsonschema_rs.validator_for(schema)
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return Constraint({"response_format": form}, lambda text: validator.is_valid(json.loads(text)))


def _object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(["id", "name", "Größe", "a b", "x", "is_ok", "items", 'q"'], random.randrange(1, 5))
    properties = {name: _value(random, depth - 1) for name in names}
    required = [name for name in names if random.random() < 0.7]
    found = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if required == names and random.random() < 0.5:
        found |= {"patternProperties": {"^k[0-9]$": {"type": "null"}}, "maxProperties": len(names) + 1}
    return found


def _value(random: Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _integer, _number, _choice, lambda _: {"type": random.choice(["boolean", "null"])}]
    if depth > 0:
        kinds += [
            lambda one: _object(one, depth),
            lambda one: {"type": "array", "items": _value(one, depth - 1), "maxItems": 3, "minItems": one.randrange(2)},
            lambda one: {"prefixItems": [_value(one, 0), _value(one, 0)], "items": False, "type": "array"},
            lambda one: {"anyOf": [_value(one, depth - 1), {"type": "null"}]},
        ]
    return random.choice(kinds)(random)


def _string(random: Random) -> dict[str, Any]:
    longest = random.randrange(1, 12)
    plain = {"type": "string", "minLength": random.randrange(longest), "maxLength": longest}
    formats = [{"type": "string", "format": name} for name in ("time", "ipv4", "uuid")]
    patterns = [{"type": "string", "pattern": pattern} for pattern in (r"^[a-f0-9]{4}$", "^(ab|c)+d$", r"^\d{1,3}%$")]
    return random.choice([plain, plain, *formats, *patterns])


def _integer(random: Random) -> dict[str, Any]:
    low = random.randrange(-500, 500)
    step = {"multipleOf": random.choice([5, 7])} if random.random() < 0.3 else {}
    return {"type": "integer", "minimum": low, "maximum": low + random.randrange(20, 400)} | step


def _number(random: Random) -> dict[str, Any]:
    low = random.choice([-2.5, 0.25, 10])
    return {"type": "number", random.choice(["minimum", "exclusiveMinimum"]): low, "maximum": low + 100.5}


def _choice(random: Random) -> dict[str, Any]:
    values = ["red", "grün", 7, -1.5, None, True, ["a"], {"k": 1}]
    return random.choice([{"enum": random.sample(values, 3)}, {"const": random.choice(values)}])


def regex_constraint(seed: int) -> Constraint:
    pattern = _pattern(Random(seed), 2)
    compiled = re.compile(pattern, re.ASCII)
    return Constraint({"structured_outputs": {"regex": pattern}}, lambda text: bool(compiled.fullmatch(text)))


def _pattern(random: Random, depth: int) -> str:
    atoms = ["a", "bc", "[a-f]", "[^a-y\n ]", r"\.", "[0-9]", "é", "/", '"', "[A-Z_]"]
    parts = []
    for _ in range(random.randrange(1, 4)):
        inner = random.choice(atoms)
        if depth and random.random() < 0.6:
            inner = f"({_pattern(random, depth - 1)}|{_pattern(random, depth - 1)})"
        repeated = inner if len(inner) == 1 or inner[0] in "[(\\" else f"({inner})"
        parts.append(random.choice([inner, f"{repeated}?", f"{repeated}{{1,3}}", f"{repeated}{{2}}", f"{repeated}+"]))
    return "".join(parts)


def _is_balanced(text: str) -> bool:
    while (shorter := re.sub(r"\(\)|\[\]", "", text)) != text:
        text = shorter
    return not text


def _is_python(text: str) -> bool:
    return isinstance(ast.parse(text, mode="eval").body, ast.expr)


def _is_palindrome(text: str) -> bool:
    return text == text[::-1] and set(text) <= set("abc")


GRAMMARS: list[tuple[str, Check]] = [
    ('start: "a" start "b" | "ab"', lambda text: text == "a" * (len(text) // 2) + "b" * (len(text) // 2) != ""),
    ('start: pair*\npair: "(" start ")" | "[" start "]"', _is_balanced),
    ("start: sum\nsum: product | sum /[+-]/ product\nproduct: /[1-9]/ | \"(\" sum \")\" | product \"*\" /[1-9]/", _is_python),
    ('root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [1-9] [0-9]? | "(" expr ")"', _is_python),
    ('start: "a" start "a" | "b" start "b" | "c"', _is_palindrome),
    ('start: row ("\\n" row){1,3}\nrow: /[a-z]{1,4}/ ("," /[a-z]{1,4}/){2}', lambda text: {line.count(",") for line in text.split("\n")} == {2}),
    ('start: %json {"type": "array", "items": {"type": "boolean"}, "maxItems": 4, "x-guidance": {"whitespace_flexible": false}}', lambda text: {*json.loads(text)} <= {True, False}),
    ('root ::= "[" (item ("," item)*)? "]"\nitem ::= [0-9] | root', lambda text: isinstance(json.loads(text), list)),
    ('start: "<" TAG ">" TEXT "</x>"\nTAG: "x"\nTEXT: /[^<>\\n]{0,9}/', lambda text: bool(re.fullmatch("<x>[^<>\n]{0,9}</x>", text))),
    ('%import common.INT\nstart: "v" INT "." INT ("-" ("rc" | "beta"))?', lambda text: bool(re.fullmatch(r"v\d+\.\d+(-(rc|beta))?", text))),
]  # fmt: skip


def grammar_constraint(number: int) -> Constraint:
    text, check = GRAMMARS[number]
    return Constraint({"structured_outputs": {"grammar": text}}, check)


def constraints(share: float) -> list[Constraint]:
    """Return this share of 100 schemas, 30 regular expressions and 10 grammars."""
    makers: list[tuple[Callable[[int], Constraint], int]] = [
        (schema_constraint, 100),
        (regex_constraint, 30),
        (grammar_constraint, len(GRAMMARS)),
    ]
    return [make(number) for make, count in makers for number in range(0, count, round(1 / share))]

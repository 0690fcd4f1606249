"""The parameters that constrain an answer: OpenAI's `response_format` and vLLM's `structured_outputs`.

A constraint is enforced exactly, or refused with the reason. It is never looser than what the client asked for.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from router.http.messages import MAX_DEPTH, StrictModel, depth_of, object_in
from router.http.structural_tags import StructuralTags
from router.text.grammar_check import GrammarChecker, GrammarError
from router.text.tokenizer import Tokenizer
from shared.errors import RequestError
from shared.grammar import choice_grammar, json_grammar, regex_grammar

MAX_BYTES = 64 << 10  # maximum size of a schema, regular expression or grammar
MAX_CHOICES = 1024
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
UNKNOWN_KEYWORDS = re.compile(r'Unimplemented keys: \["([^"]*)"')
DATA = ("const", "default", "enum", "examples")  # keywords whose values are no schemas
NAMING = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")  # objects of named schemas
DECODER = json.JSONDecoder()
OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")

Schema = dict[str, Any]
Text = Annotated[str, Field(min_length=1, max_length=MAX_BYTES)]


@dataclass(frozen=True)
class Constraint:
    """A constraint on an answer. It has not been checked yet.

    `param` is the parameter that an error names. `text` is a grammar, in Lark or GBNF if `is_source` is set, or else in
    llguidance's format. `schema` is the client's JSON schema, if there is one. If `tags` is given, the grammar is made
    from the tags instead of `text`.
    """

    param: str
    text: str
    is_source: bool = False
    schema: Schema | None = None
    tags: StructuralTags | None = None

    def grammar(self, checker: GrammarChecker, tokenizer: Tokenizer) -> str:
        """Return the checked grammar, in llguidance's format. Raises RequestError with the reason if the grammar is
        refused.

        This method blocks, so callers run it on the checker's thread.
        """
        for start in re.finditer(r"%json\s*", self.text if self.is_source else ""):
            with suppress(ValueError, RecursionError):  # if no JSON follows, the checker refuses the grammar
                schema, _ = DECODER.raw_decode(self.text, start.end())
                schema_constraint(schema if isinstance(schema, dict) else {}, self.param)
        try:
            return checker.check(self.text if self.tags is None else self.tags.grammar(tokenizer), self.is_source)
        except GrammarError as error:
            text, where = str(error), ""
            if (found := UNKNOWN_KEYWORDS.search(text)) and self.schema is not None:
                place = next((path for path, each in _objects(self.schema) if found[1] in each), "")
                text, where = f"the keyword `{found[1]}` cannot be enforced", place and f" (in {place})"
            raise RequestError(f"`{self.param}`: {text}{where}.", self.param, "invalid_grammar") from None


SchemaName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class JsonSchema(StrictModel):
    """The schema of an answer. It is enforced whether or not `strict` is set."""

    name: SchemaName
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None

    def constraint(self) -> Constraint | None:
        """Return the constraint, or None if any text is allowed. Raises RequestError if the fields do not fit the
        type."""
        if self.type == "structural_tag" or self.structures is not None or self.triggers is not None:
            return _of_tags(self.model_dump(exclude_none=True), "response_format")
        if (self.type == "json_schema") != (self.json_schema is not None):
            text = "`response_format` must have `json_schema` if, and only if, its type is `json_schema`."
            raise RequestError(text, "response_format")
        if self.json_schema is not None:
            return schema_constraint(self.json_schema.schema_, "response_format.json_schema.schema")
        return schema_constraint({"type": "object"}, "response_format") if self.type == "json_object" else None


class StructuredOutputs(StrictModel):
    """vLLM's `structured_outputs`. Exactly one of the first six fields is set; the others are options for JSON."""

    # The names are those of vLLM. A field with the name `json` would hide a method of the base class, so `json` is only
    # an alias of `json_`.
    json_: Annotated[Schema | Text | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: Text | None = None
    json_object: Literal[True] | None = None
    structural_tag: Text | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: Text | None = None

    def constraint(self) -> Constraint:
        """Return the constraint. Raises RequestError if the fields contradict each other or are too large."""
        given = [name for name in KINDS if getattr(self, "json_" if name == "json" else name) is not None]
        if len(given) != 1:
            names = ", ".join(f"`{name}`" for name in KINDS)
            raise RequestError(f"`structured_outputs` must have exactly one of {names}.", "structured_outputs")
        param = f"structured_outputs.{given[0]}"
        option = next((name for name in OPTIONS if getattr(self, name)), None)
        if option is not None and not given[0].startswith("json"):
            name = f"structured_outputs.{option}"
            raise RequestError(f"`{name}` is only allowed with `json` or `json_object`.", name)
        if self.regex is not None:
            return Constraint(param, regex_grammar(self.regex))
        if self.choice is not None:
            _check_size(sum(map(len, self.choice)), param)
            return Constraint(param, choice_grammar(self.choice))
        if self.grammar is not None:
            return Constraint(param, self.grammar, is_source=True)
        if self.structural_tag is not None:
            return _of_tags(_parsed(self.structural_tag, param), param)
        schema = {"type": "object"} if self.json_ is None else _parsed(self.json_, param)
        if self.disable_additional_properties:
            _check_depth(schema, param)
            schema = _closed(schema)
        options: dict[str, Any] = {}
        if self.disable_any_whitespace:
            options = {"whitespace_flexible": False, "whitespace_pattern": None}
        elif self.whitespace_pattern is not None:
            options = {"whitespace_pattern": self.whitespace_pattern}
        return schema_constraint(schema, param, **options)


def _of_tags(value: dict[str, Any], param: str) -> Constraint:
    if "format" in value:
        text = f"`{param}` has `format`, which only xgrammar's structural tags have; give `structures` and `triggers`."
        raise RequestError(text, param, "unsupported_parameter")
    try:
        tags = StructuralTags.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part)[:64] for part in first["loc"])
        raise RequestError(f"`{param}`: {place}: {first['msg']}.", param, "invalid_value") from None
    tags.check(param)
    for tag in tags.structures:
        schema_constraint(tag.schema_, param)
    return Constraint(param, "", tags=tags)


def schema_constraint(schema: Schema, param: str, **options: Any) -> Constraint:
    """Return the constraint for JSON that matches the schema. Raises RequestError if the schema is too large."""
    _check_depth(schema, param)
    text = json.dumps(schema, ensure_ascii=False)
    _check_size(len(text.encode()), param)
    objects = list(_objects(schema, walks_all='"$ref"' in text))  # a `$ref` may refer to any object, even to data
    if place := next((path for path, each in objects if isinstance(each.get("$ref"), str) and "$id" in each), None):
        text = f"`{param}`: `$ref` next to `$id` cannot be enforced (in {place}): drafts give it different meanings."
        raise RequestError(text, param, "invalid_grammar")
    for path, each in objects:
        least = each.get("minProperties")
        if isinstance(least, int) and least > 1 + len(_required(each)):
            text = f"`{param}`: `minProperties` cannot be enforced{path and f' (in {path})'}: a name may be repeated."
            raise RequestError(f"{text} List the names in `required`.", param, "invalid_grammar")
    return Constraint(param, json_grammar(schema, **options), schema=schema)


def _check_depth(schema: Schema, param: str) -> None:
    if depth_of(schema) > MAX_DEPTH:
        raise RequestError(f"`{param}` is nested deeper than {MAX_DEPTH} levels.", param, "invalid_grammar")


def _check_size(size: int, param: str) -> None:
    if size > MAX_BYTES:
        raise RequestError(f"`{param}` is larger than {MAX_BYTES >> 10} KiB.", param, "invalid_grammar")


def _parsed(given: Schema | str, param: str) -> Schema:
    """Return a JSON object, which may be given as a string. Raises RequestError if the string is not a JSON object."""
    value = given if isinstance(given, dict) else object_in(given)
    if value is None:
        raise RequestError(f"`{param}` must be a JSON object, or a string that contains one.", param)
    return value


def _closed(value: Any) -> Any:
    """Return the schema with `additionalProperties: false` wherever the schema names properties, as in vLLM's
    guidance backend."""
    if isinstance(value, list):
        return [_closed(each) for each in value]
    if not isinstance(value, dict):
        return value
    closes = "additionalProperties" not in value and ("properties" in value or "patternProperties" in value)
    return {key: _closed(each) for key, each in value.items()} | ({"additionalProperties": False} if closes else {})


def _required(schema: Schema) -> set[str]:
    """Return the names of the properties that the schema and its `allOf` require."""
    named, parts = (given if isinstance(given, list) else [] for given in map(schema.get, ("required", "allOf")))
    return set(map(str, named)).union(*(_required(part) for part in parts if isinstance(part, dict)))


def _objects(
    value: Any, path: str = "", *, has_names: bool = False, walks_all: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas in a schema with their paths, such as `properties.tags`. The root's path is "". If `has_names`,
    `value` maps names to schemas. If `walks_all`, yield all other objects too."""
    if isinstance(value, dict) and (walks_all or not has_names):
        yield path, value
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for name, inner in items:
        if isinstance(inner, dict | list) and (walks_all or has_names or name not in DATA):
            names_schemas, inner_path = name in NAMING and not has_names, f"{path}.{name}" if path else str(name)
            yield from _objects(inner, inner_path, has_names=names_schemas, walks_all=walks_all)

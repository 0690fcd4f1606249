"""Chooses how the reasoning and the tool calls of an answer are parsed, and how the tool calls are enforced."""

from dataclasses import replace

from router.http.bodies import ChatBody, GenerateBody
from router.http.messages import NamedChoice, schemas_of
from router.http.structured import schema_constraint
from router.text.answer_grammar import prompt_end
from router.text.grammar_check import GrammarChecker
from router.text.tokenizer import Tokenizer
from router.text.tool_grammar import EnforcedTool, ToolGrammarError, enforced_syntax, optional_calls, required_calls
from router.text.tool_parser import AnswerParser
from router.text.tool_syntax import AnswerSyntax
from shared.errors import RequestError


def requires_call(body: ChatBody) -> bool:
    """Return whether the answer must be a tool call."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedChoice)


def may_call(body: ChatBody) -> bool:
    """Return whether the answer may have tool calls. If the answer must match a constraint, it may have tool calls only
    if the client requires a call."""
    return bool(body.tools) and body.tool_choice != "none" and (requires_call(body) or body.constraint() is None)


def enforces_calls(body: ChatBody) -> bool:
    """Return whether a grammar enforces the calls."""
    return may_call(body) and (requires_call(body) or any(tool.function.strict for tool in body.tools))


def check_tools(body: ChatBody, syntax: AnswerSyntax) -> None:
    """Raise RequestError if the model cannot use the tools of the body."""
    if body.tools and not syntax.takes_tools:
        raise RequestError(
            "The chat template of this model has no place for `tools`.", "tools", "unsupported_parameter"
        )
    if may_call(body) and not requires_call(body) and syntax.tools is None:
        text = "The tool calls of this model have an unknown syntax; start the router with --tool-call-parser."
        raise RequestError(text, "tools", "unsupported_parameter")


def answer_parser(body: GenerateBody, tokenizer: Tokenizer, prompt: list[int]) -> AnswerParser | None:
    """Return the parser of an answer to a chat, or None if the answer is plain text."""
    if not isinstance(body, ChatBody):
        return None
    tools, syntax = (schemas_of(body.tools) if may_call(body) else None), tokenizer.syntax
    if tools is None and syntax.reasoning is None and not syntax.is_harmony:
        return None
    if tools is not None and requires_call(body):
        syntax = replace(syntax, tools=enforced_syntax(syntax))
    end = prompt_end(tokenizer, prompt)
    return AnswerParser(syntax, tools, prompt_end=end, max_calls=1 if is_single(body) else 0)


def is_single(body: ChatBody) -> bool:
    """Return whether the answer may have at most one tool call."""
    return not body.parallel_tool_calls or isinstance(body.tool_choice, NamedChoice)


def call_grammar(body: ChatBody, tokenizer: Tokenizer, checker: GrammarChecker) -> str:
    """Return the grammar that enforces the calls of an answer. It does not cover the reasoning. The function blocks, so
    callers run it on the checker's thread.

    The arguments of a strict tool must match its schema. If this schema cannot be enforced, raise RequestError, which
    names the tool. For other tools, a schema that cannot be enforced is ignored.
    """
    choice, tools = body.tool_choice, []
    for number, tool in enumerate(body.tools):
        function, is_strict = tool.function, bool(tool.function.strict)
        if isinstance(choice, NamedChoice) and choice.function.name != function.name:
            continue
        schema = {"type": "object"} | (function.parameters or {})
        try:
            schema_constraint(schema, f"tools[{number}].function.parameters").grammar(checker, tokenizer)
        except RequestError:
            if is_strict:
                raise
            schema = {"type": "object"}
        tools.append(EnforcedTool(function.name, schema, is_strict))
    write = required_calls if requires_call(body) else optional_calls
    try:
        return write(tokenizer, tools, is_single=is_single(body))
    except ToolGrammarError as error:
        raise RequestError(f"The parameters {error.reason}.", "tools", "invalid_grammar") from None

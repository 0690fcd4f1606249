"""Chooses the parser of an answer: whether it may have tool calls, and whether it begins inside the reasoning."""

from router.http.bodies import ChatBody, GenerateBody
from router.http.messages import schemas_of
from router.text.answer_grammar import prompt_end
from router.text.tokenizer import Tokenizer
from router.text.tool_parser import AnswerParser
from router.text.tool_syntax import AnswerSyntax
from shared.errors import RequestError


def check_tools(body: ChatBody, syntax: AnswerSyntax) -> None:
    """Raise RequestError if the model cannot use the tools of the body."""
    if body.tools and not syntax.takes_tools:
        raise RequestError(
            "The chat template of this model has no place for `tools`.", "tools", "unsupported_parameter"
        )
    if body.tools and body.tool_choice != "none" and syntax.tools is None:
        text = "The tool calls of this model have an unknown syntax; start the router with --tool-call-parser."
        raise RequestError(text, "tools", "unsupported_parameter")


def answer_parser(body: GenerateBody, tokenizer: Tokenizer, prompt: list[int]) -> AnswerParser | None:
    """Return the parser of an answer to a chat, or None if the answer is plain text."""
    if not isinstance(body, ChatBody):
        return None
    may_call = body.tools and body.tool_choice != "none" and body.constraint() is None
    tools = schemas_of(body.tools) if may_call else None
    syntax = tokenizer.syntax
    if tools is None and syntax.reasoning is None and not syntax.is_harmony:
        return None
    end = prompt_end(tokenizer, prompt)
    return AnswerParser(syntax, tools, prompt_end=end, max_calls=0 if body.parallel_tool_calls else 1)

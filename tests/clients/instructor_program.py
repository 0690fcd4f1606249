"""Use instructor, with structured output and with MD_JSON, which parses the model's text."""

import instructor
import openai
from checks import MODEL, URL, end, works
from pydantic import BaseModel, Field


class Answer(BaseModel, extra="forbid"):
    """An answer."""

    number: int = Field(ge=0, le=99)


def ask(mode):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode)
    messages = [{"role": "user", "content": "Give a number"}]
    return client.chat.completions.create(
        model=MODEL, messages=messages, response_model=Answer, max_retries=0, max_tokens=500, seed=1
    )


def reaches_the_model():
    try:
        return ask(instructor.Mode.MD_JSON)
    except Exception as error:
        return "Error code" not in str(error)


works("JSON_SCHEMA", lambda: isinstance(ask(instructor.Mode.JSON_SCHEMA), Answer))
works("TOOLS", lambda: isinstance(ask(instructor.Mode.TOOLS), Answer))
works("TOOLS_STRICT", lambda: isinstance(ask(instructor.Mode.TOOLS_STRICT), Answer))
works("MD_JSON reaches the model, which writes no JSON", reaches_the_model)
end()

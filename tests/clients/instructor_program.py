"""Use instructor. Its modes need structured output, except MD_JSON, which parses what the model wrote."""

import instructor
import openai
from checks import MODEL, URL, end, refused, works
from pydantic import BaseModel


class Answer(BaseModel):
    """An answer."""

    number: int


def ask(mode):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode)
    messages = [{"role": "user", "content": "Give a number"}]
    return client.chat.completions.create(
        model=MODEL, messages=messages, response_model=Answer, max_retries=0, max_tokens=8
    )


def reaches_the_model():
    try:
        return ask(instructor.Mode.MD_JSON)
    except Exception as error:
        return "Error code" not in str(error)


refused("JSON", lambda: ask(instructor.Mode.JSON), "`response_format` is not supported")
refused("TOOLS", lambda: ask(instructor.Mode.TOOLS), "is not supported")
works("MD_JSON reaches the model, which writes no JSON", reaches_the_model)
end()

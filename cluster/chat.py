"""`baton chat`: a chat client for the terminal that uses the OpenAI API. From a pipe, it reads one prompt per line."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from shared.api_client import bearer

# On a busy cluster, an answer may take long to begin.
TIMEOUT = httpx.Timeout(connect=5.0, read=120.0, write=30.0, pool=5.0)
HELP = "/new forgets the conversation, /quit ends; Ctrl-C stops an answer"


class ChatError(Exception):
    """The router rejected the request, failed, or cannot be reached. The message is one line."""


@dataclass(slots=True)
class ChatReply:
    """The answer's text, and the seconds from the request to the first and to the last part of the text."""

    text: str = ""
    num_tokens: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0

    def timing(self) -> str:
        """Return a line with the TTFT and the rate of the tokens after the first."""
        rate = f", {(self.num_tokens - 1) / (self.total_s - self.ttft_s):.1f} tokens/s" if self.num_tokens > 1 else ""
        return f"[{self.num_tokens} tokens, TTFT {1000 * self.ttft_s:.0f} ms{rate}]"


@dataclass(slots=True)
class Conversation:
    """The messages so far. A question whose answer failed or was cancelled is not kept, so that it can be repeated."""

    client: httpx.Client
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def forget(self) -> None:
        self.messages = []

    def ask(self, prompt: str, answer: ChatReply) -> Iterator[str]:
        """Yield the answer's text as it arrives, and record it in `answer`. Raises ChatError."""
        question = {"role": "user", "content": prompt}
        started = time.monotonic()
        try:
            for event in self._events(question):
                text = ((event.get("choices") or [{}])[0].get("delta") or {}).get("content") or ""
                answer.num_tokens = (event.get("usage") or {}).get("completion_tokens", answer.num_tokens)
                if text:
                    answer.total_s = time.monotonic() - started
                    answer.ttft_s = answer.ttft_s or answer.total_s
                    answer.text += text
                    yield text
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ChatError(f"no answer from {self.client.base_url}: {error or type(error).__name__}") from None
        self.messages += [question, {"role": "assistant", "content": answer.text}]

    def _events(self, question: dict[str, str]) -> Iterator[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            "messages": [*system, *self.messages, question],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        body = {name: value for name, value in body.items() if value is not None}
        with self.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                raise ChatError(_reason(reply))
            for line in reply.iter_lines():
                if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                    yield _event(data)


def _event(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise ChatError(f"the router sent what is no event: {data[:80]}")
    if error := event.get("error"):
        raise ChatError(_message(error))
    return event


def _message(error: object) -> str:
    return " ".join(str(error.get("message", error) if isinstance(error, dict) else error).split())


def _reason(reply: httpx.Response) -> str:
    """Return why a request failed: the message, if the error has OpenAI's format, and the status."""
    reply.read()
    try:
        return f"{_message(reply.json()['error'])} (status {reply.status_code})"
    except (ValueError, KeyError, TypeError):
        return f"status {reply.status_code}"


def run_chat(url: str, api_key: str, system: str, max_tokens: int | None, temperature: float | None) -> int:
    """Chat with the model at `url`. Return the exit status of `converse`."""
    # Ignore proxy settings, because the default URL is on this machine.
    with httpx.Client(base_url=url, headers=bearer(api_key), timeout=TIMEOUT, trust_env=False) as client:
        return converse(Conversation(client, system, max_tokens, temperature))


def converse(conversation: Conversation) -> int:
    """Answer the prompts from standard input. Return 1 if a prompt from a pipe got no answer, else 0."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 - adds line editing and a history to `input`

        print(HELP)
    status = 0
    for prompt in _prompts(interactive):
        if prompt == "/new":
            conversation.forget()
        elif not _answered(conversation, prompt) and not interactive:
            status = 1
    return status


def _prompts(interactive: bool) -> Iterator[str]:
    """Yield the prompts until the end of the input or /quit."""
    while True:
        try:
            line = (input("> ") if interactive else input()).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()  # drop the line, as a shell does
            continue
        if line == "/quit":
            return
        if line:
            yield line


def _answered(conversation: Conversation, prompt: str) -> bool:
    answer = ChatReply()
    try:
        for text in conversation.ask(prompt, answer):
            print(text, end="", flush=True)
        print()
    except KeyboardInterrupt:  # the router cancels the request when the connection closes
        print("\n[stopped]", file=sys.stderr)
        return False
    except ChatError as error:
        print(f"{chr(10) if answer.text else ''}baton chat: {error}", file=sys.stderr)
        return False
    print(answer.timing(), file=sys.stderr)
    return True

"""Formats OpenAI's responses, as whole objects or as server-sent events.

The constant part of a choice's events is formatted once, so that an event only costs escaping and concatenating
strings.
"""

import json
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Any

from router.http.bodies import ChatBody, CompletionBody
from router.http.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from router.http.output import OutputProcessor, PromptOutput, RequestOutput, TextDelta
from router.text.tokenizer import Tokenizer
from shared.rpc.messages import Logprobs

DONE = b"data: [DONE]\n\n"


def dump(value: object) -> str:
    """Return compact JSON in ASCII: some clients also split lines at U+2028 and U+0085."""
    return json.dumps(value, separators=(",", ":"))


def event(value: object) -> bytes:
    return f"data: {dump(value)}\n\n".encode()


@dataclass(slots=True)
class ChoiceState:
    """The constant beginning of one choice's events, its logprobs, and the parts collected for a whole response."""

    head: str
    logprobs: CompletionLogprobs | None
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    entries: list[Logprobs] = field(default_factory=list)
    last: TextDelta = field(default_factory=lambda: TextDelta(""))


class ResponseFormatter:
    """Formats one request's output as a completion or a chat completion, streamed or whole. The handler of the request
    creates it on the event loop, and passes each text delta to `events` or to `collect`."""

    def __init__(
        self, output: RequestOutput, body: CompletionBody | ChatBody, tokenizer: Tokenizer, model: str, created: int
    ) -> None:
        self._output = output
        self._tokenizer = tokenizer
        self._body = body
        self._chat = isinstance(body, ChatBody)
        self._echo: list[str] | None = None  # the text of each prompt, if the client wants it echoed
        if isinstance(body, CompletionBody) and body.echo:
            self._echo = [
                prompt if isinstance(prompt, str) else tokenizer.decode(prompt, body.skip_special_tokens)
                for prompt in body.prompt
            ]
        kind = ("chat.completion" if self._chat else "text_completion") + (
            ".chunk" if self._chat and body.stream else ""
        )
        self._whole = {"id": output.id, "object": kind, "created": created, "model": model}
        self._prefix = f"data: {dump(self._whole)[:-1]}"
        self._include_usage = body.include_usage
        self._choices = [self._choice(choice) for choice in output.choices]

    def _choice(self, choice: OutputProcessor) -> ChoiceState:
        text_key = '"delta":{"content":' if self._chat else '"text":'
        head = f'{self._prefix},"choices":[{{"index":{choice.index},{text_key}'
        if self._chat or self._body.num_logprobs is None:
            return ChoiceState(head, None)
        vocabulary = self._tokenizer.vocabulary
        skipped = vocabulary.special if self._body.skip_special_tokens else frozenset()
        starts = self._echo is not None or all(token in skipped for token in choice.prompt.request.prompt)
        stripped = vocabulary.strip_start if starts else 0
        return ChoiceState(head, CompletionLogprobs(self._tokenizer, self._body.num_logprobs, skipped, stripped))

    def _echoed(self, choice: OutputProcessor) -> str:
        return "" if self._echo is None else self._echo[choice.index // self._body.n]

    # Streams

    def events(self, choice: OutputProcessor, delta: TextDelta) -> bytes:
        """Return the events for a text delta. The result is empty if the text is held back and the client requested no
        details about each token."""
        text = self._echoed(choice) + delta.text if delta.is_first else delta.text
        parts: list[str] = []
        if delta.is_first and self._chat:
            parts.append(self._role_event(choice))
        has_details = self._body.num_logprobs is not None or self._body.return_token_ids or self._body.continuous_usage
        ends_apart = self._chat and delta.finish is not None
        if text or (delta.tokens and has_details) or (delta.finish is not None and not ends_apart):
            parts.append(self._text_event(choice, delta, text, "null" if ends_apart else self._finish(delta)))
        if ends_apart:
            tail = f'"logprobs":null,"finish_reason":{self._finish(delta)}}}]{self._usage_so_far()}}}\n\n'
            parts.append(f'{self._prefix},"choices":[{{"index":{choice.index},"delta":{{}},{tail}')
        return "".join(parts).encode("ascii")

    def _role_event(self, choice: OutputProcessor) -> str:
        value = {"index": choice.index, "delta": {"role": "assistant", "content": ""}}
        ids = f',"prompt_token_ids":{dump(choice.prompt.request.prompt)}' if self._body.return_token_ids else ""
        return (
            f'{self._prefix}{ids},"choices":[{dump(value)[:-1]},"logprobs":null,"finish_reason":null}}]'
            f"{self._usage_so_far()}}}\n\n"
        )

    def _text_event(self, choice: OutputProcessor, delta: TextDelta, text: str, finish: str) -> str:
        state = self._choices[choice.index]
        logprobs, extras = "null", ""
        if self._body.num_logprobs is not None and (delta.logprobs or (delta.is_first and self._echo)):
            logprobs = dump(self._logprobs(choice, delta.logprobs, is_first=delta.is_first))
        if self._body.return_token_ids:
            extras = f',"token_ids":{dump(delta.tokens)}'
            if delta.is_first and not self._chat:
                extras += f',"prompt_token_ids":{dump(choice.prompt.request.prompt)}'
        close = "}" if self._chat else ""
        return (
            f'{state.head}{encode_basestring_ascii(text)}{close},"logprobs":{logprobs},"finish_reason":{finish}'
            f"{extras}}}]{self._usage_so_far()}}}\n\n"
        )

    def _finish(self, delta: TextDelta) -> str:
        """Return the finish reason and the stop reason as JSON."""
        if delta.finish is None:
            return "null"
        return f'"{delta.finish}","stop_reason":{dump(self._stop_reason(delta))}'

    def _usage_so_far(self) -> str:
        if not self._include_usage:
            return ""
        return f',"usage":{dump(self.usage()) if self._body.continuous_usage else "null"}'

    def ending(self) -> bytes:
        """Return the event that ends the stream, after the usage if the client requested it."""
        usage = event(self._whole | {"choices": [], "usage": self.usage()}) if self._include_usage else b""
        return usage + DONE

    # Whole answers

    def collect(self, choice: OutputProcessor, delta: TextDelta) -> None:
        state = self._choices[choice.index]
        state.texts.append(delta.text)
        state.tokens += delta.tokens
        state.entries += delta.logprobs
        state.last = delta

    def answer(self) -> dict[str, Any]:
        """Return the whole response, after all deltas are collected."""
        choices = [self._whole_choice(choice) for choice in self._output.choices]
        whole = self._whole | {"choices": choices, "usage": self.usage()}
        if self._chat and self._body.return_token_ids:
            whole["prompt_token_ids"] = self._output.prompts[0].request.prompt
        if self._chat and self._body.prompt_logprobs is not None:
            whole["prompt_logprobs"] = self._prompt_logprobs(self._output.prompts[0])
        return whole

    def _whole_choice(self, choice: OutputProcessor) -> dict[str, Any]:
        state = self._choices[choice.index]
        text = self._echoed(choice) + "".join(state.texts)
        whole: dict[str, Any] = {"index": choice.index}
        whole |= {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}
        wanted = self._body.num_logprobs is not None
        whole["logprobs"] = self._logprobs(choice, state.entries, is_first=True) if wanted else None
        whole |= {"finish_reason": state.last.finish, "stop_reason": self._stop_reason(state.last)}
        if self._body.return_token_ids:
            whole["token_ids"] = state.tokens
            if not self._chat:
                whole["prompt_token_ids"] = choice.prompt.request.prompt
        if not self._chat and self._body.prompt_logprobs is not None:
            whole["prompt_logprobs"] = self._prompt_logprobs(choice.prompt)
        return whole

    # Both

    def usage(self) -> dict[str, Any]:
        """Return the usage so far. A prompt counts once, even if several choices continue it."""
        prompt, generated = self._output.num_prompt_tokens, self._output.num_generated
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": self._output.num_cached},
        }

    def _stop_reason(self, delta: TextDelta) -> str | int | None:
        """Return the stop string or the id from `stop_token_ids` that ended the choice, or None for another reason."""
        reason = delta.stop_reason
        return None if isinstance(reason, int) and reason not in self._body.stop_token_ids else reason

    def _logprobs(self, choice: OutputProcessor, entries: list[Logprobs], *, is_first: bool) -> dict[str, Any]:
        table = self._choices[choice.index].logprobs
        if table is None:
            return chat_logprobs(self._tokenizer, entries, self._body.num_logprobs or 0)
        if is_first and self._echo is not None:
            return table.table([*choice.prompt.logprobs, *entries], choice.prompt.request.prompt[0])
        return table.table(entries)

    def _prompt_logprobs(self, prompt: PromptOutput) -> list[dict[str, Any] | None]:
        return prompt_logprobs(self._tokenizer, prompt.logprobs, self._body.prompt_logprobs or 0)

"""OpenAI's answers as bytes: whole objects, and server-sent events built from a prefix and a suffix.

An event costs an escaped string and a few concatenations; everything that does not change is made once a sample.
"""

import json
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Any

from router.http.bodies import ChatBody, CompletionBody
from router.http.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from router.http.output import OutputProcessor, TextDelta
from router.http.session import PromptState, RequestSession
from router.text.tokenizer import Tokenizer
from shared.rpc.messages import Logprobs

DONE = b"data: [DONE]\n\n"


def dump(value: object) -> str:
    """Compact JSON in ASCII: some clients split lines at U+2028 and U+0085 too."""
    return json.dumps(value, separators=(",", ":"))


def event(value: object) -> bytes:
    return f"data: {dump(value)}\n\n".encode()


@dataclass(slots=True)
class ChoiceState:
    """What is kept of one sample besides the sample: the beginning of its events, its offsets, or its whole text."""

    head: str
    logprobs: CompletionLogprobs | None
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    entries: list[Logprobs] = field(default_factory=list)


class ResponseFormatter:
    """One request's answer in the shape of completions or of chat completions; a stream or one object."""

    def __init__(self, exchange: RequestSession, tokenizer: Tokenizer, model_name: str) -> None:
        self._exchange = exchange
        self._tokenizer = tokenizer
        self._body: CompletionBody | ChatBody = exchange.order.body
        self._chat = isinstance(self._body, ChatBody)
        self._echo = isinstance(self._body, CompletionBody) and self._body.echo
        kind = ("chat.completion" if self._chat else "text_completion") + (
            ".chunk" if self._chat and self._body.stream else ""
        )
        order = exchange.order
        self._whole = {"id": order.id, "object": kind, "created": order.created, "model": model_name}
        self._prefix = f"data: {dump(self._whole)[:-1]}"
        self._body_usage = self._body.include_usage
        self._choices = {
            sample.index: self._choice(prompt, sample) for prompt in exchange.prompts for sample in prompt.samples
        }

    def _choice(self, prompt: PromptState, sample: OutputProcessor) -> ChoiceState:
        text_key = '"delta":{"content":' if self._chat else '"text":'
        head = f'{self._prefix},"choices":[{{"index":{sample.index},{text_key}'
        if self._chat or self._body.num_logprobs is None:
            return ChoiceState(head, None)
        vocabulary = self._tokenizer.vocabulary
        skipped = vocabulary.special if self._body.skip_special_tokens else frozenset()
        starts = self._echo or all(token in skipped for token in prompt.generation.prompt)
        stripped = vocabulary.strip_start if starts else 0
        return ChoiceState(head, CompletionLogprobs(self._tokenizer, self._body.num_logprobs, skipped, stripped))

    # Streams

    def events(self, prompt: PromptState, sample: OutputProcessor, said: TextDelta) -> bytes:
        """The events for what was said; none while its text is held back and nothing else is to be told."""
        text = prompt.text + said.text if said.first and self._echo else said.text
        parts: list[str] = []
        if said.first and self._chat:
            parts.append(self._role_event(prompt, sample))
        told = self._body.num_logprobs is not None or self._body.return_token_ids or self._body.continuous_usage
        ends_apart = self._chat and sample.finish is not None
        if text or (said.tokens and told) or (sample.finish is not None and not ends_apart):
            parts.append(self._text_event(prompt, sample, said, text, "null" if ends_apart else self._finish(sample)))
        if ends_apart:
            tail = f'"logprobs":null,"finish_reason":{self._finish(sample)}}}]{self._usage_so_far()}}}\n\n'
            parts.append(f'{self._prefix},"choices":[{{"index":{sample.index},"delta":{{}},{tail}')
        return "".join(parts).encode("ascii")

    def _role_event(self, prompt: PromptState, sample: OutputProcessor) -> str:
        choice = {"index": sample.index, "delta": {"role": "assistant", "content": ""}}
        ids = f',"prompt_token_ids":{dump(prompt.generation.prompt)}' if self._body.return_token_ids else ""
        return (
            f'{self._prefix}{ids},"choices":[{dump(choice)[:-1]},"logprobs":null,"finish_reason":null}}]'
            f"{self._usage_so_far()}}}\n\n"
        )

    def _text_event(self, prompt: PromptState, sample: OutputProcessor, said: TextDelta, text: str, finish: str) -> str:
        choice = self._choices[sample.index]
        logprobs, extras = "null", ""
        if self._body.num_logprobs is not None and (said.logprobs or (said.first and self._echo)):
            logprobs = dump(self._logprobs(choice, prompt, said.logprobs, first=said.first))
        if self._body.return_token_ids:
            extras = f',"token_ids":{dump(said.tokens)}'
            if said.first and not self._chat:
                extras += f',"prompt_token_ids":{dump(prompt.generation.prompt)}'
        close = "}" if self._chat else ""
        return (
            f'{choice.head}{encode_basestring_ascii(text)}{close},"logprobs":{logprobs},"finish_reason":{finish}'
            f"{extras}}}]{self._usage_so_far()}}}\n\n"
        )

    def _finish(self, sample: OutputProcessor) -> str:
        """The finish reason in JSON, and why it stopped where the stop was the client's."""
        if sample.finish is None:
            return "null"
        return f'"{sample.finish}","stop_reason":{dump(self._stop_reason(sample))}'

    def _usage_so_far(self) -> str:
        if not self._body_usage:
            return ""
        return f',"usage":{dump(self.usage()) if self._body.continuous_usage else "null"}'

    def ending(self) -> bytes:
        """The usage, if it was asked for, and the end of the stream."""
        usage = event(self._whole | {"choices": [], "usage": self.usage()}) if self._body_usage else b""
        return usage + DONE

    # Whole answers

    def collect(self, sample: OutputProcessor, said: TextDelta) -> None:
        choice = self._choices[sample.index]
        choice.texts.append(said.text)
        choice.tokens += said.tokens
        choice.entries += said.logprobs

    def answer(self) -> dict[str, Any]:
        """The whole answer, once everything is collected."""
        choices = [self._whole_choice(prompt, sample) for prompt in self._exchange.prompts for sample in prompt.samples]
        whole = self._whole | {"choices": choices, "usage": self.usage()}
        if self._chat and self._body.return_token_ids:
            whole["prompt_token_ids"] = self._exchange.prompts[0].generation.prompt
        if self._chat and self._body.prompt_logprobs is not None:
            whole["prompt_logprobs"] = self._prompt_logprobs(self._exchange.prompts[0])
        return whole

    def _whole_choice(self, prompt: PromptState, sample: OutputProcessor) -> dict[str, Any]:
        choice = self._choices[sample.index]
        text = (prompt.text if self._echo else "") + "".join(choice.texts)
        whole: dict[str, Any] = {"index": sample.index}
        whole |= {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}
        wanted = self._body.num_logprobs is not None
        whole["logprobs"] = self._logprobs(choice, prompt, choice.entries, first=True) if wanted else None
        whole |= {"finish_reason": sample.finish, "stop_reason": self._stop_reason(sample)}
        if self._body.return_token_ids:
            whole["token_ids"] = choice.tokens
            if not self._chat:
                whole["prompt_token_ids"] = prompt.generation.prompt
        if not self._chat and self._body.prompt_logprobs is not None:
            whole["prompt_logprobs"] = self._prompt_logprobs(prompt)
        return whole

    # Both

    def usage(self) -> dict[str, Any]:
        """Tokens so far. A prompt counts once, however many samples continue it."""
        prompt, generated = self._exchange.num_prompt_tokens, self._exchange.num_generated
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": self._exchange.num_cached},
        }

    def _stop_reason(self, sample: OutputProcessor) -> str | int | None:
        """The stop string or the token of `stop_token_ids`; an end of the model's own has none."""
        reason = sample.stop_reason
        return None if isinstance(reason, int) and reason not in self._body.stop_token_ids else reason

    def _logprobs(
        self, choice: ChoiceState, prompt: PromptState, entries: list[Logprobs], *, first: bool
    ) -> dict[str, Any]:
        if choice.logprobs is None:
            return chat_logprobs(self._tokenizer, entries, self._body.num_logprobs or 0)
        if first and self._echo:
            return choice.logprobs.table([*prompt.prompt_logprobs, *entries], prompt.generation.prompt[0])
        return choice.logprobs.table(entries)

    def _prompt_logprobs(self, prompt: PromptState) -> list[dict[str, Any] | None]:
        return prompt_logprobs(self._tokenizer, prompt.prompt_logprobs, self._body.prompt_logprobs or 0)

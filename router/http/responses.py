"""Formats responses of the OpenAI API, as one object or as server-sent events. There are three formats of logprobs: for
completions, for chats, and vLLM's format for prompts.

Events are built by escaping and concatenating strings, because encoding a JSON object for each token would be slower.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from router.http.bodies import ChatBody, CompletionBody, GenerateBody
from router.http.output import OutputProcessor, PromptOutput, RequestOutput, TextDelta
from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer
from router.text.tool_parser import AnswerPart, call_id
from shared.rpc.messages import Logprobs

DONE = b"data: [DONE]\n\n"
LONG_LIST = 512  # a longer list is encoded 64 items at a time; `choices` is never longer (MAX_PROMPTS)
FLOOR = -9999.0  # replaces lower logprobs, as in vLLM, because JSON has no -Infinity


def dump(value: object) -> str:
    """Return compact JSON in ASCII. Unescaped, U+2028 and U+0085 would end a line in the parsers of some clients."""
    return json.dumps(value, separators=(",", ":"))


def dump_in_parts(value: object, depth: int = 5) -> str:
    """Return the same JSON as `dump`, but encode the items of objects and lists one by one, down to the given depth.
    For a large value, one call of the json module would hold the interpreter lock for seconds."""
    if depth and isinstance(value, dict):
        return "{" + ",".join([f"{dump(key)}:{dump_in_parts(each, depth - 1)}" for key, each in value.items()]) + "}"
    if isinstance(value, list) and len(value) > LONG_LIST:
        return "[" + ",".join([dump(value[at : at + 64])[1:-1] for at in range(0, len(value), 64)]) + "]"
    if depth and isinstance(value, list):
        return "[" + ",".join([dump_in_parts(each, depth - 1) for each in value]) + "]"
    return dump(value)


def event(value: object) -> bytes:
    return f"data: {dump(value)}\n\n".encode()


def typed_events(events: Iterable[dict[str, Any]], write: Callable[[object], str] = dump) -> bytes:
    """Return server-sent events. The `type` of an event is also its name, as in the Responses and Messages APIs."""
    return "".join(f"event: {each['type']}\ndata: {write(each)}\n\n" for each in events).encode()


class ResponseFormatter:
    """Formats one request's output as a completion or a chat completion, with or without streaming. The request's
    handler creates the formatter on the event loop, and passes each text delta to `events` or to `collect`."""

    def __init__(
        self, output: RequestOutput, body: CompletionBody | ChatBody, tokenizer: Tokenizer, model: str, created: int
    ) -> None:
        self._output = output
        self._tokenizer = tokenizer
        self._body = body
        self._name = namer(tokenizer, body)
        self._is_chat = isinstance(body, ChatBody)
        self._echo: list[str] | None = None  # the text of each prompt, if the client wants it echoed
        if isinstance(body, CompletionBody) and body.echo:
            decode = tokenizer.decode
            self._echo = [p if isinstance(p, str) else decode(p, body.skip_special_tokens) for p in body.prompts]
        kind = ("chat.completion" + ".chunk" * body.stream) if self._is_chat else "text_completion"
        self._envelope = {"id": output.id, "object": kind, "created": created, "model": model}
        self._prefix = f"data: {dump(self._envelope)[:-1]}"
        self._has_details = body.num_logprobs is not None or body.return_token_ids or body.continuous_usage
        self._tables = [self._table(choice) for choice in output.choices]
        self._collected: list[list[TextDelta]] = [[] for _ in output.choices]

    def _table(self, choice: OutputProcessor) -> "CompletionLogprobs | None":
        if self._is_chat or self._body.num_logprobs is None:
            return None
        prompt, skip = choice.prompt.request.prompt, self._body.skip_special_tokens
        detokenizer = self._tokenizer.detokenizer(prompt, skip_special_tokens=skip)
        return CompletionLogprobs(self._name, self._body.num_logprobs, detokenizer, len(self._echoed(choice)))

    # Streams

    def events(self, choice: OutputProcessor, delta: TextDelta) -> bytes:
        """Return the events for a text delta. The result may be empty while text is held back. If it includes the
        logprobs of an echoed prompt, callers run this method on a thread, like `encoded_answer`."""
        parts: list[str] = []
        text = self._echoed(choice) + delta.text if delta.is_first else delta.text
        prompt_ids = ""
        if delta.is_first and self._body.return_token_ids:
            prompt_ids = f',"prompt_token_ids":{dump(choice.prompt.request.prompt)}'
        if delta.is_first and self._is_chat:
            parts.append(self._event(choice, '"delta":{"role":"assistant","content":""}', of_request=prompt_ids))
        finish = "null"
        if delta.finish is not None:
            finish = f'"{self._finish(choice, delta)}","stop_reason":{dump(self._stop_reason(delta))}'
        ends_apart = self._is_chat and delta.finish is not None
        contents = self._contents(choice, delta, text)
        if contents or (delta.tokens and self._has_details) or (delta.finish is not None and not ends_apart):
            logprobs, ids = "null", ""
            if self._body.num_logprobs is not None and (delta.logprobs or (delta.is_first and self._echo)):
                write = dump_in_parts if delta.is_first else dump
                logprobs = write(self._logprobs(choice, delta.logprobs, is_first=delta.is_first))
            if self._body.return_token_ids:
                ids = f',"token_ids":{dump(delta.tokens)}' + ("" if self._is_chat else prompt_ids)
            empty = '"delta":{"content":""}' if self._is_chat else '"text":""'
            first, *others = contents or [empty]
            parts.append(self._event(choice, first, logprobs, "null" if ends_apart else finish, ids))
            parts += [self._event(choice, content) for content in others]
        if ends_apart:
            parts.append(self._event(choice, '"delta":{}', finish=finish))
        return "".join(parts).encode("ascii")

    def _contents(self, choice: OutputProcessor, delta: TextDelta, text: str) -> list[str]:
        """Return the contents of the events for a text delta. If the answer is parsed for reasoning and tool calls,
        each part of the text has its own event. Otherwise, there is at most one event."""
        if delta.parts is None:
            escaped = encode_basestring_ascii(text)
            return [f'"delta":{{"content":{escaped}}}' if self._is_chat else f'"text":{escaped}'] if text else []
        return [f'"delta":{dump(self._part(choice, part))}' for part in self._shown(delta.parts)]

    def _part(self, choice: OutputProcessor, part: AnswerPart) -> dict[str, Any]:
        """Return the message delta for a part of the answer."""
        match part.kind:
            case "content":
                return {"content": part.text}
            case "reasoning":
                return {"reasoning_content": part.text, "reasoning": part.text}  # vLLM's older and newer name
            case "call":
                function = {"name": part.text, "arguments": ""}
                call = {"index": part.call, "id": self._call_id(choice, part), "type": "function", "function": function}
                return {"tool_calls": [call]}
            case _:
                return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}

    def _shown(self, parts: Sequence[AnswerPart]) -> Sequence[AnswerPart]:
        is_shown = not isinstance(self._body, ChatBody) or self._body.include_reasoning
        return parts if is_shown else [part for part in parts if part.kind != "reasoning"]

    def _call_id(self, choice: OutputProcessor, part: AnswerPart) -> str:
        return call_id(self._tokenizer.syntax.id_form, self._output.id, choice.index, part.number, part.text)

    def _finish(self, choice: OutputProcessor, delta: TextDelta) -> str | None:
        """Return the reason why a choice ended."""
        return "tool_calls" if choice.has_calls and delta.finish == "stop" else delta.finish

    def _event(
        self,
        choice: OutputProcessor,
        content: str,
        logprobs: str = "null",
        finish: str = "null",
        of_choice: str = "",
        of_request: str = "",
    ) -> str:
        """Return an event for one choice. All text arguments are pieces of JSON. `of_choice` has additional
        fields of the choice, and `of_request` additional fields of the event."""
        usage = ""
        if self._body.stream_options.include_usage:
            usage = f',"usage":{dump(self.usage()) if self._body.continuous_usage else "null"}'
        return (
            f'{self._prefix}{of_request},"choices":[{{"index":{choice.index},{content},"logprobs":{logprobs},'
            f'"finish_reason":{finish}{of_choice}}}]{usage}}}\n\n'
        )

    def ending(self) -> bytes:
        """Return the event that ends the stream. If the client requested the usage, an event with it comes first."""
        if not self._body.stream_options.include_usage:
            return DONE
        return event(self._envelope | {"choices": [], "usage": self.usage()}) + DONE

    # Whole answers

    def collect(self, choice: OutputProcessor, delta: TextDelta) -> None:
        """Keep a text delta until `answer` is called."""
        self._collected[choice.index].append(delta)

    def answer(self) -> dict[str, Any]:
        """Return the whole response. All deltas must have been collected."""
        choices = [self._whole_choice(choice) for choice in self._output.choices]
        of_prompt = self._of_prompt(self._output.prompts[0]) if self._is_chat else {}
        return self._envelope | {"choices": choices, "usage": self.usage()} | of_prompt

    def encoded_answer(self) -> bytes:
        """Return the whole response as JSON. With logprobs of a long prompt, this takes seconds, so callers run it on a
        thread. It never holds the interpreter lock for long."""
        return dump_in_parts(self.answer()).encode()

    def _whole_choice(self, choice: OutputProcessor) -> dict[str, Any]:
        deltas = self._collected[choice.index]
        text = self._echoed(choice) + "".join(delta.text for delta in deltas)
        whole: dict[str, Any] = {"index": choice.index, "logprobs": None}
        if self._is_chat:
            parts = [part for delta in deltas for part in delta.parts or ()]
            message = {"content": text} if deltas[-1].parts is None else self._message(choice, parts)
            whole["message"] = {"role": "assistant", **message, "refusal": None}
        else:
            whole["text"] = text
        if self._body.num_logprobs is not None:
            whole["logprobs"] = self._logprobs(choice, [e for delta in deltas for e in delta.logprobs], is_first=True)
        whole |= {"finish_reason": self._finish(choice, deltas[-1]), "stop_reason": self._stop_reason(deltas[-1])}
        if self._body.return_token_ids:
            whole["token_ids"] = [token for delta in deltas for token in delta.tokens]
        return whole if self._is_chat else whole | self._of_prompt(choice.prompt)

    def _message(self, choice: OutputProcessor, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        """Return the fields of a message with reasoning or tool calls."""
        content, reasoning = ("".join(p.text for p in parts if p.kind == kind) for kind in ("content", "reasoning"))
        message: dict[str, Any] = {"content": content}
        if reasoning and self._shown(parts) is parts:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        calls: list[dict[str, Any]] = []
        for part in parts:
            if part.kind == "call":
                function = {"name": part.text, "arguments": ""}
                calls.append({"id": self._call_id(choice, part), "type": "function", "function": function})
            elif part.kind == "arguments":
                calls[part.call]["function"]["arguments"] += part.text
        return message | ({"content": content or None, "tool_calls": calls} if calls else {})

    def _of_prompt(self, prompt: PromptOutput) -> dict[str, Any]:
        """Return the requested fields that describe a prompt."""
        found: dict[str, Any] = {"prompt_token_ids": prompt.request.prompt} if self._body.return_token_ids else {}
        if self._body.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(self._tokenizer, prompt.logprobs, self._body.prompt_logprobs)
        return found

    # Streams and whole answers

    def usage(self) -> dict[str, Any]:
        """Return the usage so far. A prompt counts once, even if several choices continue it."""
        prompt, generated = self._output.num_prompt_tokens, self._output.num_generated
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": self._output.num_cached},
        }

    def _echoed(self, choice: OutputProcessor) -> str:
        return "" if self._echo is None else self._echo[choice.index // self._body.n]

    def _stop_reason(self, delta: TextDelta) -> str | int | None:
        """Return the stop string or the entry of `stop_token_ids` that ended the choice, or None for any other end."""
        reason = delta.stop_reason
        return None if isinstance(reason, int) and reason not in self._body.stop_token_ids else reason

    def _logprobs(self, choice: OutputProcessor, entries: list[Logprobs], *, is_first: bool) -> dict[str, Any]:
        table = self._tables[choice.index]
        if table is None:
            content = chat_logprobs(self._tokenizer, entries, self._body.num_logprobs or 0, self._name)
            return {"content": content, "refusal": None}
        if is_first and self._echo is not None:
            prompt = choice.prompt
            return table.format([*prompt.logprobs, *entries], prompt.request.prompt[0], self._echo_offsets(choice))
        return table.format(entries)

    def _echo_offsets(self, choice: OutputProcessor) -> list[int]:
        """Return the offset of each token of an echoed prompt. The tokens' text ends where the echo ends, but it may
        begin earlier (with a BOS token) or later (after `truncate_prompt_tokens`)."""
        echo, prompt = self._echoed(choice), choice.prompt.request.prompt
        sent = self._body.prompts[choice.index // self._body.n] if isinstance(self._body, CompletionBody) else None
        skip = self._body.skip_special_tokens and not isinstance(sent, str)
        offsets, _ = text_offsets(self._tokenizer.detokenizer(skip_special_tokens=skip), prompt)
        shift = len(echo) - len(self._tokenizer.decode(prompt, skip))
        return [min(max(0, offset + shift), len(echo)) for offset in offsets]


def text_offsets(detokenizer: Detokenizer, tokens: Iterable[int], start: int = 0) -> tuple[list[int], int]:
    """Return the offset at which the text of each token begins, and the end of the text. All tokens that share a
    character have the offset of that character."""
    offsets = []
    for token in tokens:
        offsets.append(start + detokenizer.num_before(token))
        start += len(detokenizer.push((token,)))
    return offsets, start


class CompletionLogprobs:
    """Formats logprobs for completions. Each sample has its own instance, which counts characters for the offsets."""

    def __init__(self, name: Callable[[int], str], num_top: int, detokenizer: Detokenizer, start: int) -> None:
        """`name` returns the name of a token. `start` is the offset of the first generated token, and `detokenizer` is
        a new detokenizer for the answer."""
        self._name = name
        self._num_top = num_top
        self._detokenizer = detokenizer
        self._offset = start

    def format(
        self, entries: Sequence[Logprobs], unscored: int | None = None, echoed: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Return the API's four lists for the next tokens. If the prompt is echoed, the lists begin with its tokens.
        Then `unscored` is the prompt's first token (it has no logprob), and `echoed` has the prompt tokens' offsets."""
        rows: list[tuple[int, float | None, dict[str, float] | None]]
        rows = [] if unscored is None else [(unscored, None, None)]
        rows += [(entry.token, _finite(entry.logprob), self._top(entry)) for entry in entries]
        generated = [token for token, _, _ in rows[len(echoed) :]]
        offsets, self._offset = text_offsets(self._detokenizer, generated, self._offset)
        return {
            "text_offset": [*echoed, *offsets],
            "token_logprobs": [logprob for _, logprob, _ in rows],
            "tokens": [self._name(token) for token, _, _ in rows],
            "top_logprobs": [top for _, _, top in rows],
        }

    def _top(self, entry: Logprobs) -> dict[str, float]:
        """Return the logprobs of the most likely tokens and of the sampled token."""
        top = {self._name(entry.token): _finite(entry.logprob)}
        for token, logprob in _alternatives(entry, self._num_top):
            top.setdefault(self._name(token), _finite(logprob))
        return top


def namer(tokenizer: Tokenizer, body: GenerateBody) -> Callable[[int], str]:
    """Return a function that returns the name of a token in logprobs."""
    return "token_id:{}".format if body.return_tokens_as_token_ids else tokenizer.token_text


def chat_logprobs(
    tokenizer: Tokenizer, entries: Sequence[Logprobs], num_top: int, name: Callable[[int], str]
) -> list[dict[str, Any]]:
    """Return the logprobs of each token in the format of chat completions and the Responses API. `name` returns the
    name of a token. From `bytes`, clients can assemble characters that span several tokens."""

    def shown(token: int, logprob: float) -> dict[str, Any]:
        data = list(tokenizer.vocabulary.bytes_of(token))
        return {"token": name(token), "logprob": _finite(logprob), "bytes": data}

    return [
        shown(entry.token, entry.logprob) | {"top_logprobs": [shown(*each) for each in _alternatives(entry, num_top)]}
        for entry in entries
    ]


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[Logprobs], num_top: int) -> list[dict[str, Any] | None]:
    """Return a prompt's logprobs in vLLM's format: for each token of the prompt, a map from token ids to entries. Each
    map has the prompt's own token and the most likely tokens. The first token has None instead of a map."""

    def shown(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token)}

    rows: list[dict[str, Any] | None] = [None]
    for entry in entries:
        row = {str(entry.token): shown(entry.token, entry.logprob, entry.rank)}
        for rank, (token, logprob) in enumerate(_alternatives(entry, num_top), 1):
            row.setdefault(str(token), shown(token, logprob, rank))
        rows.append(row)
    return rows


def _finite(logprob: float) -> float:
    return max(FLOOR, logprob)  # with the arguments in this order, NaN also becomes FLOOR


def _alternatives(entry: Logprobs, num_top: int) -> list[tuple[int, float]]:
    return list(zip(entry.top_tokens[:num_top], entry.top_logprobs[:num_top], strict=True))

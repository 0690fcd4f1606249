"""The events of a response in OpenAI's Responses API, and the response object that they build.

The events are a function of the body and of the deltas: processing the same deltas again gives the same events with the
same numbers. A client can therefore resume a stream at any event, on any router.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from router.http.output import TextDelta
from router.http.response_bodies import FunctionTool, ResponsesBody, flat_name
from router.http.responses import chat_logprobs, namer
from router.text.tokenizer import Tokenizer
from router.text.tool_parser import AnswerPart, call_id
from shared.rpc.messages import Logprobs

Event = dict[str, Any]


class ResponseEvents:
    """Builds the events of one response, and keeps the response's state in `response`. Call `start` first, then `add`
    for each delta. Call `fail` if the response ends without a last delta. These methods return the new events."""

    def __init__(
        self, response_id: str, created: int, body: ResponsesBody, model: str, tokenizer: Tokenizer, num_prompt: int
    ) -> None:
        self.is_complete = False
        self._tokenizer = tokenizer
        self._body = body
        # The fields of the functions in namespaces, keyed by their names for the model.
        self._names = {
            flat_name(namespace, tool.name): {"namespace": namespace, "name": tool.name}
            for namespace, tool in body.functions
            if namespace is not None
        }
        self._number = 0
        self._num_prompt = num_prompt
        self._num_generated = self._num_reasoning = 0
        self._item: dict[str, Any] | None = None  # the item that is being extended
        self._pending: list[Logprobs] = []  # logprobs of tokens whose text may be held back
        self.response: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "background": body.background,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata,
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": body.reasoning.model_dump(include={"effort", "summary"}),
            "service_tier": "default",
            "store": bool(body.store),
            "temperature": body.temperature,
            "text": {"format": _format(body), "verbosity": body.text.verbosity or "medium"},
            "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
            "tools": [
                ({"strict": False} if isinstance(tool, FunctionTool) else {}) | tool.model_dump(exclude_none=True)
                for tool in body.tools
            ],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": body.truncation,
            "usage": None,
        }

    def start(self) -> list[Event]:
        if not self._body.background:
            return [self._of_response("response.created"), self._of_response("response.in_progress")]
        self.response["status"] = "queued"
        events = [self._of_response("response.created"), self._of_response("response.queued")]
        self.response["status"] = "in_progress"
        return [*events, self._of_response("response.in_progress")]

    def add(self, delta: TextDelta, cached_tokens: int) -> list[Event]:
        """Return the events for a delta. `cached_tokens` is the number of the prompt's tokens that were cached."""
        events: list[Event] = []
        self._pending += delta.logprobs
        self._num_generated += len(delta.tokens)
        self._num_reasoning += delta.num_reasoning
        for part in delta.all_parts():
            events += self._part(part)
        if delta.finish is not None:
            if not self.response["output"]:
                events += self._open("message", AnswerPart("content", ""))
            is_cut = delta.finish == "length"
            events += self._close("incomplete" if is_cut else "completed")
            self._count(cached_tokens)
            if is_cut:
                self.response["incomplete_details"] = {"reason": "max_output_tokens"}
            events.append(self._end("incomplete" if is_cut else "completed"))
        return events

    def fail(self, status: str, message: str) -> list[Event]:
        """End the response with the status "failed" or "cancelled"."""
        events = self._close("incomplete")
        self._count(0)
        if status == "failed":
            self.response["error"] = {"code": "server_error", "message": message}
        return [*events, self._end(status)]

    # ---- the response --------------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _of_response(self, kind: str) -> Event:
        return self._event(kind, response=self.response | {"output": list(self.response["output"])})

    def _end(self, status: str) -> Event:
        self.response["status"] = status
        self.is_complete = True
        return self._of_response(f"response.{status}")

    def _count(self, cached_tokens: int) -> None:
        self.response["usage"] = {
            "input_tokens": self._num_prompt,
            "input_tokens_details": {"cached_tokens": cached_tokens},
            "output_tokens": self._num_generated,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": self._num_prompt + self._num_generated,
        }

    # ---- items ---------------------------------------------------------------------------------------------------

    def _part(self, part: AnswerPart) -> list[Event]:
        kind = {"content": "message", "reasoning": "reasoning"}.get(part.kind, "function_call")
        events: list[Event] = []
        if part.kind == "call" or self._item is None or self._item["type"] != kind:
            events = [*self._close("completed"), *self._open(kind, part)]
        assert self._item is not None
        match part.kind:
            case "content":
                logprobs = self._take_logprobs()
                content = self._item["content"][0]
                content["text"] += part.text
                content["logprobs"] += logprobs
                events.append(self._of_item("output_text.delta", content_index=0, delta=part.text, logprobs=logprobs))
            case "reasoning":
                self._item["content"][0]["text"] += part.text
                events.append(self._of_item("reasoning_text.delta", content_index=0, delta=part.text))
            case "arguments":
                self._item["arguments"] += part.text
                events.append(self._of_item("function_call_arguments.delta", delta=part.text))
        return events

    def _take_logprobs(self) -> list[dict[str, Any]]:
        """Return the logprobs of the tokens since the last call. The text of some tokens may have been held back."""
        pending, self._pending = self._pending, []
        if not self._body.has_logprobs:
            return []
        return chat_logprobs(self._tokenizer, pending, self._body.top_logprobs or 0, namer(self._tokenizer, self._body))

    def _of_item(self, kind: str, **fields: Any) -> Event:
        assert self._item is not None
        place = len(self.response["output"]) - 1
        return self._event(f"response.{kind}", item_id=self._item["id"], output_index=place, **fields)

    def _open(self, kind: str, part: AnswerPart) -> list[Event]:
        """Begin an item of the output. `part` is the first part of the answer that belongs to the item."""
        output, response_id = self.response["output"], self.response["id"]
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        digest = hashlib.sha256(f"{response_id}.{len(output)}".encode()).hexdigest()
        item: dict[str, Any] = {"id": f"{prefix}_{digest[:32]}", "type": kind, "status": "in_progress"}
        match kind:
            case "message":
                item |= {"role": "assistant", "content": []}
            case "reasoning":
                item |= {"summary": [], "content": [], "encrypted_content": None}
            case _:
                identity = call_id(self._tokenizer.syntax.id_form, response_id, 0, part.number, part.text)
                item |= self._names.get(part.text, {"name": part.text}) | {"arguments": "", "call_id": identity}
        output.append(item)
        self._item = item
        added = self._event("response.output_item.added", output_index=len(output) - 1, item=_copy(item))
        if kind == "function_call":
            return [added]
        item["content"].append(
            {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            if kind == "message"
            else {"type": "reasoning_text", "text": ""}
        )
        return [added, self._of_item("content_part.added", content_index=0, part=_copy(item["content"][0]))]

    def _close(self, status: str) -> list[Event]:
        """End the current item, if there is one."""
        item = self._item
        if item is None:
            return []
        events: list[Event] = []
        item["status"] = status
        if item["type"] == "message":
            item["content"][0]["logprobs"] += self._take_logprobs()
        if item["type"] == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._of_item("function_call_arguments.done", **fields))
        else:
            part = _copy(item["content"][0])
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            kind = "output_text.done" if item["type"] == "message" else "reasoning_text.done"
            events.append(self._of_item(kind, content_index=0, text=part["text"], **more))
            events.append(self._of_item("content_part.done", content_index=0, part=part))
        place = len(self.response["output"]) - 1
        events.append(self._event("response.output_item.done", output_index=place, item=_copy(item)))
        self._item = None
        return events


def _format(body: ResponsesBody) -> dict[str, Any]:
    if body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(exclude_none=True, by_alias=True)


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an item. The copy does not change when the item changes."""
    return {key: [*value] if isinstance(value, list) else value for key, value in item.items()}


def items_with_ids(items: Sequence[dict[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """Return the input items, each with an id, as /input_items lists them. Texts become lists of parts."""
    prefixes = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
    digests = [hashlib.sha256(f"{response_id}.in.{number}".encode()).hexdigest() for number in range(len(items))]
    return [
        {"id": f"{prefixes[item['type']]}_{digest[:32]}"} | _with_parts(item)
        for item, digest in zip(items, digests, strict=True)
    ]


def _with_parts(item: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(text := item.get("content"), str):
        return item
    if item["role"] == "assistant":
        return item | {"content": [{"type": "output_text", "text": text, "annotations": []}]}
    return item | {"content": [{"type": "input_text", "text": text}]}

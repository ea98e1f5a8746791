"""What `/v1/responses` answers: a response object, or the events by which it comes about."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from expediter.gateway.api.chat import logprob_entries
from expediter.gateway.api.chunks import Counted
from expediter.gateway.api.responses_body import FunctionTool, PlainTextConfig, ResponsesBody
from expediter.gateway.errors import RESPONSES_PATH, ApiError
from expediter.gateway.generation import Delta
from expediter.gateway.rendering import Vocabulary, event
from expediter.gateway.tools.base import CallDelta

_Object = dict[str, Any]


class ResponsesRendering:
    """A `Rendering`. A response in one piece is what the events of a stream would have made of it.

    Items come one after the other: the text that is open ends where a call begins, a call where the next one does.
    """

    def __init__(self, body: ResponsesBody, model: str, counted: Counted, vocabulary: Vocabulary) -> None:
        self._body = body
        self._model = model
        self._counted = counted
        self._vocabulary = vocabulary
        self._key = uuid.uuid4().hex
        self._created_at = int(time.time())
        self._num_events = 0
        self._items: list[_Object] = []
        self._is_open = False
        self._finish_reason: str | None = None

    @property
    def response_id(self) -> str:
        return f"resp_{self._key}"

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        for _ in (*self.opening(), *(part for delta in deltas for part in self.progress(delta)), *self.closing()):
            pass
        return msgspec.json.encode(self._response(self._status()))

    def opening(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def progress(self, delta: Delta) -> Iterator[bytes]:
        if delta.text:
            yield from self._add_text(delta)
        for call in delta.calls:
            yield from self._add_call(call)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason

    def closing(self) -> Iterator[bytes]:
        status = self._status()
        if not self._items:  # an empty answer is an empty text
            yield from self._open_text()
        yield from self._close_item(status)
        yield self._event(f"response.{status}", response=self._response(status))

    def failure(self, error: ApiError) -> bytes:
        """Return the error, and the event that ends every stream of this API: clients look for either."""
        told = error.event_at(RESPONSES_PATH, self._num_events)
        self._num_events += 1
        code = "server_error" if error.status >= 500 else "invalid_prompt"  # the list of codes is OpenAI's
        failed = {**self._response("failed"), "error": {"code": code, "message": error.message}}
        return told + self._event("response.failed", response=failed)

    # ---- items

    def _add_text(self, delta: Delta) -> Iterator[bytes]:
        if not self._is_open or self._items[-1]["type"] != "message":
            yield from self._close_item("completed")
            yield from self._open_text()
        item = self._items[-1]
        part = item["content"][0]
        part["text"] += delta.text
        logprobs = []
        num_alternatives = self._body.num_alternatives
        if num_alternatives is not None and delta.logprobs:
            logprobs = logprob_entries(self._vocabulary, delta, num_alternatives)
            part["logprobs"] += logprobs
        yield self._event("response.output_text.delta", **self._place(), delta=delta.text, logprobs=logprobs)

    def _open_text(self) -> Iterator[bytes]:
        item = {"type": "message", "id": f"msg_{self._key}{len(self._items)}", "role": "assistant"}
        added: _Object = {**item, "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._begin({**added, "content": [{**part, "annotations": [], "logprobs": []}]})
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=added)
        yield self._event("response.content_part.added", **self._place(), part=part)

    def _add_call(self, call: CallDelta) -> Iterator[bytes]:
        if call.name is not None:
            yield from self._close_item("completed")
            item = {"type": "function_call", "id": f"fc_{call.key}", "call_id": f"call_{call.key}", "name": call.name}
            self._begin({**item, "status": "in_progress", "arguments": ""})
            yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])
        if call.arguments:
            item = self._items[-1]
            item["arguments"] += call.arguments
            place = {"item_id": item["id"], "output_index": len(self._items) - 1}
            yield self._event("response.function_call_arguments.delta", **place, delta=call.arguments)

    def _begin(self, item: _Object) -> None:
        self._items.append(item)
        self._is_open = True

    def _close_item(self, status: str) -> Iterator[bytes]:
        """End the item that is open, if one is."""
        if not self._is_open:
            return
        self._is_open = False
        item, index = self._items[-1], len(self._items) - 1
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            told = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("response.output_text.done", **self._place(), **told)
            yield self._event("response.content_part.done", **self._place(), part=part)
        else:
            told = {"item_id": item["id"], "output_index": index, "arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **told)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _place(self) -> _Object:
        """Return where the text that is open stands."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    # ---- the whole

    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _event(self, kind: str, **fields: Any) -> bytes:  # noqa: ANN401 - whatever the event has
        number, self._num_events = self._num_events, self._num_events + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _response(self, status: str) -> _Object:
        body = self._body
        is_over = status != "in_progress"
        text = body.text.format if body.text is not None else None
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": self._items if is_over else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": text or PlainTextConfig(), "verbosity": "medium"},
            "tool_choice": body.tool_choice or "auto",
            "tools": [_told(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": _usage(self._counted) if is_over else None,
            "user": body.user,
        }


def _told(tool: FunctionTool) -> _Object:
    return {**msgspec.structs.asdict(tool), "strict": bool(tool.strict)}


def _usage(counted: Counted) -> _Object:
    num_input, num_output = counted.num_prompt_tokens, counted.num_output_tokens
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": counted.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_input + num_output,
    }

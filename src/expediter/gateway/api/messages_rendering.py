"""What `/v1/messages` answers: a message, or the events by which it comes about."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from expediter.gateway.api.chunks import Counted
from expediter.gateway.errors import MESSAGES_PATH, ApiError
from expediter.gateway.generation import Delta
from expediter.gateway.rendering import event
from expediter.gateway.tools.base import CallDelta

_Object = dict[str, Any]
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesRendering:
    """A `Rendering`. Blocks come one after the other: text ends where a call begins, a call where the next one does."""

    def __init__(self, model: str, counted: Counted) -> None:
        self.response_id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._counted = counted
        self._num_blocks = 0
        self._open_type = ""
        self._stop: tuple[str, str | None] = ("end_turn", None)

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        (delta,) = deltas
        self._take_end(delta)
        text: list[_Object] = [{"type": "text", "text": delta.text}] if delta.text or not delta.calls else []
        content = [*text, *({**_tool_use(call), "input": _input(call.arguments)} for call in delta.calls)]
        reason, sequence = self._stop
        message = {**self._message(), "content": content, "stop_reason": reason, "stop_sequence": sequence}
        return msgspec.json.encode({**message, "usage": self._usage()})

    def opening(self) -> Iterator[bytes]:
        usage = {**self._usage(), "output_tokens": 0}
        yield _event("message_start", message={**self._message(), "stop_reason": None, "usage": usage})
        yield _event("ping")

    def progress(self, delta: Delta) -> Iterator[bytes]:
        if delta.text:
            if self._open_type != "text":
                yield from self._begin({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta.text})
        for call in delta.calls:
            if call.name is not None:
                yield from self._begin({**_tool_use(call), "input": {}})
            if call.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        self._take_end(delta)

    def closing(self) -> Iterator[bytes]:
        yield from self._end_block()
        reason, sequence = self._stop
        told = {"stop_reason": reason, "stop_sequence": sequence}
        yield _event("message_delta", delta=told, usage=self._usage())
        yield _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return error.event_at(MESSAGES_PATH, 0)

    def _begin(self, block: _Object) -> Iterator[bytes]:
        yield from self._end_block()
        self._open_type = block["type"]
        self._num_blocks += 1
        yield _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: _Object) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _end_block(self) -> Iterator[bytes]:
        if self._open_type:
            self._open_type = ""
            yield _event("content_block_stop", index=self._num_blocks - 1)

    def _take_end(self, delta: Delta) -> None:
        if delta.stop is not None and delta.finish_reason == "stop":
            self._stop = ("stop_sequence", delta.stop)
        elif delta.finish_reason is not None:
            self._stop = (_STOP_REASONS[delta.finish_reason], None)

    def _message(self) -> _Object:
        return {
            "id": self.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_sequence": None,
        }

    def _usage(self) -> _Object:
        """Return the tokens so far; here, those from the cache are not among the input's."""
        num_cached = self._counted.num_cached_tokens
        return {
            "input_tokens": self._counted.num_prompt_tokens - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._counted.num_output_tokens,
        }


def _event(kind: str, **fields: object) -> bytes:
    return event({"type": kind, **fields}, kind)


def _tool_use(call: CallDelta) -> _Object:
    return {"type": "tool_use", "id": f"toolu_{call.key}", "name": call.name}


def _input(arguments: str) -> object:
    """Return a call's arguments as an object; what max_tokens cut off is told as it is."""
    try:
        value: object = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {"text": arguments}
    return value if isinstance(value, dict) else {"value": value}

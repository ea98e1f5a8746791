"""What completions and chat completions of OpenAI's API have in common: choices in an envelope, chunks with usage."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from expediter.gateway.bodies import GenerationBody
from expediter.gateway.errors import CHAT_PATH, ApiError
from expediter.gateway.generation import Delta
from expediter.gateway.rendering import event


class Counted(Protocol):
    """Tokens of a generation as of now."""

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_cached_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...


class ChoiceFormat(Protocol):
    """Shapes of one of the two."""

    id_prefix: str
    full_object: str
    chunk_object: str

    def opening(self) -> list[dict[str, Any]]:
        """Return what each choice's stream starts with, before any token."""
        ...

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Return a choice of a streamed chunk."""
        ...

    def full(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        """Return the choices of a response in one piece; each delta holds all of one."""
        ...


class ChunkRendering:
    """A `Rendering`. Streams end with `[DONE]`.

    Args:
        form: of the endpoint.
        model: name that the client asked for.
        body: says whether a last chunk without choices carries the usage, and whether every chunk does.
    """

    def __init__(self, form: ChoiceFormat, model: str, counted: Counted, body: GenerationBody) -> None:
        options = body.stream_options
        self._form = form
        self._counted = counted
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.continuous_usage_stats)
        self.response_id = form.id_prefix + uuid.uuid4().hex
        self._fields = {"id": self.response_id, "created": int(time.time()), "model": model}

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        choices = self._form.full(deltas)
        fields = {**self._fields, "object": self._form.full_object, "choices": choices, "usage": usage(self._counted)}
        return msgspec.json.encode(fields)

    def opening(self) -> Iterator[bytes]:
        for choice in self._form.opening():
            yield self._chunk([choice], self._chunk_usage())

    def progress(self, delta: Delta) -> Iterator[bytes]:
        yield self._chunk([self._form.chunk(delta)], self._chunk_usage())

    def closing(self) -> Iterator[bytes]:
        if self._include_usage:
            yield self._chunk([], {"usage": usage(self._counted)})
        yield b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        return error.event_at(CHAT_PATH, 0)

    def _chunk(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        return event({**self._fields, "object": self._form.chunk_object, "choices": choices, **extra})

    def _chunk_usage(self) -> dict[str, Any]:
        if self._continuous_usage:
            return {"usage": usage(self._counted)}
        return {"usage": None} if self._include_usage else {}


def usage(counted: Counted) -> dict[str, Any]:
    """Return OpenAI's usage of a generation as of now, in tokens."""
    num_prompt, num_output = counted.num_prompt_tokens, counted.num_output_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": counted.num_cached_tokens},
    }

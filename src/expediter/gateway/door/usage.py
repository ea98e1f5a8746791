"""What a response says of its tokens, read from its last bytes; nothing else of it is looked at.

Where it says nothing, its size has to do.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from expediter.gateway.backends.backend import Usage
from expediter.gateway.errors import MESSAGES_PATH, RESPONSES_PATH

TAIL_BYTES: Final = 4096
"""Of a response's end; usage stands there in all formats."""
_FIRST_ERROR: Final = 400
_ENVELOPE_BYTES: Final = 320
"""Of an answer in one piece, beside its text."""
_BYTES_PER_TOKEN: Final = 4
_KEY: Final = b'"usage":'
_MAX_USAGE_BYTES: Final = 2048


class Answered(NamedTuple):
    """A response, or what has come of one.

    Attributes:
        usage: as the backend said, None if it did not.
        num_bytes, num_events: of the body.
    """

    status: int
    usage: Usage | None
    num_bytes: int
    num_events: int

    def num_output_tokens(self, *, is_stream: bool) -> int:
        """Return how many tokens were computed, as the backend said or as well as can be told: one per event."""
        if self.usage is not None:
            return self.usage.num_output_tokens
        if self.status >= _FIRST_ERROR:
            return 0
        if is_stream:
            return self.num_events
        return max(1, (self.num_bytes - _ENVELOPE_BYTES) // _BYTES_PER_TOKEN)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """The names of chat completions and completions; of responses and messages."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


_DECODER: Final = msgspec.json.Decoder(_Usage)


def ends_stream(path: str, tail: bytes) -> bool:
    """Return whether a stream's last bytes are the end of a whole one, by the last event of the API at a path."""
    if path.startswith(RESPONSES_PATH):
        return usage_of(tail) is not None  # its last event is the whole response, of whose end this is the beginning
    return (b"message_stop" if path.startswith(MESSAGES_PATH) else b"[DONE]") in tail


def usage_of(tail: bytes) -> Usage | None:
    """Return the last usage that stands in the end of a response; None if there is none, or it cannot be read."""
    found = tail.rfind(_KEY)
    while found >= 0:
        raw = _object_at(tail, found + len(_KEY))
        if raw is not None:
            return _read(raw)
        found = tail.rfind(_KEY, 0, found)
    return None


def _object_at(tail: bytes, position: int) -> bytes | None:
    """Return the JSON object that begins here, white space aside; None if there is none."""
    part = tail[position : position + _MAX_USAGE_BYTES].lstrip()
    if not part.startswith(b"{"):
        return None
    end = part.find(b"}") + 1
    if part.count(b"{", 0, end) == 1:
        return part[:end]  # nothing in it has parts of its own
    depth = end = 0
    while True:
        close = part.find(b"}", end)
        if close < 0:
            return None
        depth += part.count(b"{", end, close) - 1
        end = close + 1
        if depth == 0:
            return part[:end]


def _read(raw: bytes) -> Usage | None:
    try:
        said = _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    num_prompt = said.prompt_tokens if said.prompt_tokens is not None else said.input_tokens
    num_output = said.completion_tokens if said.completion_tokens is not None else said.output_tokens
    if num_prompt is None and num_output is None:
        return None
    details = said.prompt_tokens_details or said.input_tokens_details
    num_cached = None if details is None else details.cached_tokens
    if details is None and said.cache_read_input_tokens is not None:
        # Messages: what was cached, or is from now on, is not among the input tokens, unlike everywhere else.
        num_cached = said.cache_read_input_tokens
        num_prompt = (num_prompt or 0) + num_cached + (said.cache_creation_input_tokens or 0)
    return Usage(max(num_prompt or 0, 0), max(num_output or 0, 0), num_cached)

"""What the door reads of a request's body: as little as routing and limits need; everything else passes unseen."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from expediter.core.request import TokenArray
from expediter.gateway.backends.backend import Backend
from expediter.gateway.bodies import decode_body
from expediter.gateway.http.wire import HttpRequest
from expediter.gateway.salts import CacheSalts

_BYTES_PER_TOKEN: Final = 4
_SALTED_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
"""Where vLLM takes a `cache_salt`."""
_NO_TOKENS: Final[TokenArray] = np.zeros(1, np.int32)


class DoorBody(msgspec.Struct, kw_only=True, gc=False):
    """Fields of an OpenAI-like request that decide where it goes. Values of the wrong kind are the backend's to refuse,
    but for these."""

    model: str | None = None
    stream: bool | None = None
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None
    priority: int | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    slo_class: str | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    deadline_ms: float | None = None
    refuse_late: bool | None = None

    def prompt_tokens(self) -> TokenArray:
        """Return the prompt as an array that stands for its tokens: four bytes of its JSON count as one.

        That is about right for English, and conversations with a common beginning have arrays with a common beginning.
        The array is a view; nothing is copied or decoded.
        """
        for raw in (self.messages, self.prompt, self.input):
            view = memoryview(raw)
            if len(view) >= _BYTES_PER_TOKEN:
                return np.frombuffer(view[: len(view) // _BYTES_PER_TOKEN * _BYTES_PER_TOKEN], np.int32)
        return _NO_TOKENS

    @property
    def output_tokens(self) -> int | None:
        """How many tokens the client wants at most, None if it does not say."""
        for asked in (self.max_completion_tokens, self.max_tokens, self.max_output_tokens):
            if asked is not None:
                return asked
        return None


_DECODER: Final = msgspec.json.Decoder(DoorBody)


def decode_door_body(raw: bytes) -> DoorBody:
    """Return what the door needs to know.

    Raises:
        ApiError: 400, it is no JSON object, or one of these fields is of the wrong kind.
    """
    try:
        return _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return decode_body(raw, _DECODER)  # raises, and takes its time to say which field it is


def with_field(raw: bytes, name: str, value: str) -> bytes:
    """Return a body with another field at its end; all else in it stays as it was written.

    Of two fields of one name the last one counts for the parsers of Python, vLLM's and ours among them.

    Args:
        raw: a JSON object.
    """
    inside = raw.strip()[:-1].rstrip()
    comma = b"" if inside == b"{" else b","
    return b"%b%b%b:%b}" % (inside, comma, msgspec.json.encode(name), msgspec.json.encode(value))


def body_for(backend: Backend, request: HttpRequest, salt: str, salts: CacheSalts) -> bytes:
    """Return what a backend is sent: the body, with the root of the tenant's prefix cache if it takes that.

    Args:
        salt: of the request as the door knows it. `salts`: make of it what backends may see.
    """
    if not (salt and backend.config.send_cache_salt and request.path in _SALTED_PATHS):
        return request.body
    return with_field(request.body, "cache_salt", salts.of(salt))
